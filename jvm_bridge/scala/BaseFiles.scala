package io.quire.spark

import java.io.IOException
import java.nio.{ByteBuffer, ByteOrder}
import java.nio.charset.StandardCharsets.UTF_8
import java.util.UUID
import java.util.concurrent.ConcurrentLinkedQueue

import scala.util.control.NonFatal

import org.apache.hadoop.fs.Path

import org.apache.spark.unsafe.Platform

/** A part of a base: a file of its own, named in the base. */
private[spark] case class BasePart(name: String, bytes: Long)

/** What a base says of its parts. The image's pieces go to them by turns, `pieceBytes` each. */
private[spark] case class BaseParts(imageBytes: Long, pieceBytes: Int, parts: Seq[BasePart]) {

  /** Whether the one part is the image as it is, to be mapped. */
  def isMapped: Boolean = parts.size == 1 && parts.head.name.endsWith("." + BaseFiles.ImageSuffix)

  def encode(): Array[Byte] = {
    val names = parts.map(_.name.getBytes(UTF_8))
    val out = ByteBuffer.allocate(16 + names.map(_.length + 10).sum).order(ByteOrder.LITTLE_ENDIAN)
    out.putInt(parts.size).putLong(imageBytes).putInt(pieceBytes)
    parts.zip(names).foreach { case (part, name) =>
      out.putShort(name.length.toShort).put(name).putLong(part.bytes)
    }
    out.array()
  }
}

private[spark] object BaseParts {
  def decode(bytes: Array[Byte]): BaseParts = {
    val in = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
    try {
      val (count, imageBytes, pieceBytes) = (in.getInt(), in.getLong(), in.getInt())
      if (count < 1 || imageBytes < 1 || pieceBytes < 1) throw new IOException("its parts make no sense")
      val parts = Seq.fill(count) {
        val name = new Array[Byte](in.getShort() & 0xffff)
        in.get(name)
        val text = new String(name, UTF_8)
        if (text.contains('/')) throw new IOException(s"a part named $text")
        BasePart(text, in.getLong())
      }
      BaseParts(imageBytes, pieceBytes, parts)
    } catch {
      case _: java.nio.BufferUnderflowException => throw new IOException("its list of parts is too short")
    }
  }
}

/**
 * Whole states as files: in one, in several that are written and read in parallel, or as an image
 * that is mapped (docs/checkpoint.md, "Bases").
 */
private[spark] class BaseFiles(files: CheckpointFiles) {
  import BaseFiles._

  /**
   * Writes a snapshot as the base of a version. The file that names the others comes last.
   *
   * @param stats      of its arena, which tell about how long the image will be
   * @param mapped     whether it is to be mapped by whoever loads it, if the disk is a local one
   * @param urgent     whether somebody waits for it
   */
  def write(
      snap: Long,
      version: Version,
      stats: ArenaStats,
      keys: Long,
      mapped: Boolean,
      urgent: Boolean,
      isCancelled: () => Boolean): Written = {
    def check(): Unit = if (isCancelled()) throw new IOException("the store was unloaded meanwhile")
    Fault.point("base.start")
    val pageSize = stats.pageBytes.toInt
    val token = UUID.randomUUID().toString.substring(0, 8)
    if (mapped && files.local(files.folder).isDefined) {
      val part = BasePart(s"${version.name}.$token.$ImageSuffix", 0)
      writeImage(snap, part, urgent, check _) match {
        case (bytes, written) =>
          withParts(version, pageSize, keys, BaseParts(bytes, pieceBytes, Seq(part.copy(bytes = bytes))), written)
      }
    } else if (stateBytes(stats) < partsFromBytes) {
      files.writeFile(files.basePath(version), files.header(FileKinds.Base, version, version, pageSize)) { file =>
        // What takes no time need not give way: threads that wait their turn would keep it for longer.
        val atOnce = urgent || isSmall(stats)
        inLine(snap, atOnce, check _)(piece => file.frame(FrameKinds.Image, piece))
        check()
        Ending(keys)
      }
    } else {
      val names = (0 until PartCount).map(n => s"${version.name}.$token.$n.$PartSuffix")
      val (imageBytes, written) = writeParts(snap, version, pageSize, names, urgent, check _)
      withParts(version, pageSize, keys,
        BaseParts(imageBytes, pieceBytes, names.zip(written).map { case (name, w) => BasePart(name, w.bytes) }),
        written.reduce(_ + _))
    }
  }

  private def withParts(
      version: Version, pageSize: Int, keys: Long, parts: BaseParts, written: Written): Written = {
    Fault.point("base.parts")
    written + files.writeFile(
      files.basePath(version), files.header(FileKinds.Base, version, version, pageSize)) { file =>
      file.frame(FrameKinds.Parts, parts.encode())
      Ending(keys)
    }
  }

  private def writeImage(
      snap: Long, part: BasePart, urgent: Boolean, check: () => Unit): (Long, Written) = {
    var bytes = 0L
    files.writing(new Path(files.folder, part.name)) { out =>
      inLine(snap, urgent, check) { piece =>
        Fault.point("part.piece")
        out.write(piece)
        bytes += piece.length
      }
    }
    (bytes, Written(bytes, bytes))
  }

  /** Has the service's threads write an image piece by piece, to a stream that this one has opened. */
  private def inLine(snap: Long, urgent: Boolean, check: () => Unit)(write: Array[Byte] => Unit): Unit = {
    val line = new IoService.Line(urgent)
    try {
      new Pieces({ (piece, done) =>
        check()
        line.add(piece.length) {
          write(piece)
          done()
        }
      }).cut(snap, urgent)
    } finally {
      line.settle() // before the stream is closed
    }
    line.check()
  }

  private def writeParts(
      snap: Long,
      version: Version,
      pageSize: Int,
      names: Seq[String],
      urgent: Boolean,
      check: () => Unit): (Long, Seq[Written]) = {
    val header = files.header(FileKinds.Part, version, version, pageSize)
    val open = new scala.collection.mutable.ArrayBuffer[PartWriter]()
    var done = false
    try {
      names.foreach { name =>
        open += new PartWriter(files, new Path(files.folder, name), urgent)
        open.last.begin(header)
      }
      var count = 0
      var bytes = 0L
      new Pieces({ (piece, done) =>
        check()
        open(count % open.size).add(piece, done)
        count += 1
        bytes += piece.length
      }).cut(snap, urgent)
      open.foreach(_.await())
      // Not at a low priority: file systems start threads of their own here, which would inherit it and serve commits.
      IoService.all(open.toSeq.map(part => () => part.end()))
      check()
      done = true
      (bytes, open.toSeq.map(_.written))
    } finally {
      if (!done) open.foreach(_.cancel())
    }
  }

  /** The arena of a base. */
  def load(base: Version, budget: Long): Arena = {
    val path = files.basePath(base)
    val inline = new OffHeap(1 << 20)
    try {
      var count = 0L
      var parts: Option[BaseParts] = None
      files.readTo(path, Set(FrameKinds.Image, FrameKinds.Parts)) {
        (_, bytes) => inline.reserve(count + bytes) + count
      } { frame =>
        if (frame.kind == FrameKinds.Parts) {
          parts = Some(BaseParts.decode(OffHeap.toHeap(frame.address, frame.bytes)))
        } else {
          count += frame.bytes
        }
      }
      parts match {
        case None => image(budget, path, count) { to =>
          Platform.copyMemory(null, inline.address, null, to.address, count)
        }
        case Some(named) if named.isMapped =>
          mapped(budget, new Path(files.folder, named.parts.head.name), named.imageBytes)
        case Some(named) => image(budget, path, named.imageBytes)(readParts(base, named, _))
      }
    } finally {
      inline.close()
    }
  }

  private def mapped(budget: Long, path: Path, bytes: Long): Arena = files.local(path) match {
    case Some(file) => corrupt(path)(new Arena(Native.imageMap(budget, file.toString)))
    case None =>
      // Written on a local disk and copied to another: read it like any other.
      image(budget, path, bytes)(to => files.readTo(path, to.address, bytes))
  }

  private def image(budget: Long, path: Path, bytes: Long)(fill: Room => Unit): Arena = corrupt(path) {
    val begun = Native.imageBegin(budget, bytes, path.toString)
    var filled = false
    try {
      fill(Room(begun, Native.imageRoom(begun)))
      filled = true
    } finally {
      if (!filled) Native.imageCancel(begun)
    }
    new Arena(Native.imageEnd(begun))
  }

  private def corrupt[T](path: Path)(body: => T): T =
    try {
      body
    } catch {
      case e: QuireNativeException
          if e.code == QuireNativeException.Corrupt || e.code == QuireNativeException.NotFound =>
        throw new QuireCheckpointException(s"$path cannot be read: ${e.getMessage}", e)
    }

  private def readParts(base: Version, named: BaseParts, room: Room): Unit = {
    val count = named.parts.size
    IoService.all(named.parts.zipWithIndex.map { case (part, n) =>
      () => {
        val path = new Path(files.folder, part.name)
        var piece = n.toLong
        def place(bytes: Int): Long = {
          val at = piece * named.pieceBytes
          val wanted = math.max(math.min(named.pieceBytes.toLong, named.imageBytes - at), 0L)
          if (bytes != wanted) throw new IOException(s"piece $piece has $bytes bytes, not $wanted")
          room.address + at
        }
        val header =
          try {
            files.readTo(path, Set(FrameKinds.Image))((_, bytes) => place(bytes)) { frame =>
              Native.imageFilled(room.image, frame.address - room.address, frame.bytes)
              piece += count
            }
          } catch {
            case e: QuireCheckpointException => throw e
            case NonFatal(e) =>
              throw new QuireCheckpointException(
                s"${files.basePath(base)} cannot be read: its part $path cannot: ${e.getMessage}", e)
          }
        if (header.version != base) {
          throw new QuireCheckpointException(s"$path is a part of version ${header.version}, not of $base")
        }
        if (piece * named.pieceBytes < named.imageBytes) {
          throw new QuireCheckpointException(s"$path cannot be read: it ends before piece $piece")
        }
      }
    })
  }
}

private[spark] object BaseFiles {
  val PartSuffix = "qpart"
  val ImageSuffix = "qimage"
  /**
   * An image is cut into pieces of this size: less than what the smallest of G1's regions holds as an
   * ordinary array, since others have it mark the whole heap. Tests make it small, to have several in little.
   */
  private[spark] var pieceBytes: Int = 256 << 10
  private val SmallBytes = 1L << 20
  /** Images from this size on are written in parts. */
  private[spark] var partsFromBytes: Long = 32L << 20
  private val PartCount = 4

  private def stateBytes(stats: ArenaStats): Long = stats.used * stats.pageBytes

  /** Whether a base is written in no time. */
  def isSmall(stats: ArenaStats): Boolean = stateBytes(stats) < SmallBytes

  /** Where the bytes of an image go. */
  private case class Room(image: Long, address: Long)

  /**
   * Cuts an image into pieces. Whoever takes one says when it is done with it, so that arrays are
   * used again.
   */
  private final class Pieces(take: (Array[Byte], () => Unit) => Unit) extends ByteSink {
    private val bytesOfOne = pieceBytes
    private val spare = new ConcurrentLinkedQueue[Array[Byte]]()
    private var piece = new Array[Byte](bytesOfOne)
    private var count = 0

    def cut(snap: Long, urgent: Boolean): Unit = IoService.apart(urgent) {
      Native.imageWrite(snap, this)
      if (count > 0) take(java.util.Arrays.copyOf(piece, count), () => ())
    }

    override def write(address: Long, bytes: Long): Unit = {
      var done = 0L
      while (done < bytes) {
        val some = math.min(bytes - done, bytesOfOne - count).toInt
        Platform.copyMemory(null, address + done, piece, Platform.BYTE_ARRAY_OFFSET + count, some)
        count += some
        done += some
        if (count == bytesOfOne) {
          val full = piece
          take(full, () => spare.add(full))
          piece = Option(spare.poll()).getOrElse(new Array[Byte](bytesOfOne))
          count = 0
        }
      }
    }
  }

  /** One part: packed and written by the service's threads. */
  private final class PartWriter(files: CheckpointFiles, path: Path, urgent: Boolean) {
    private val out = files.create(path)
    private val file = new FrameWriter(out, files.codec())
    private val line = new IoService.Line(urgent)

    def begin(header: Array[Byte]): Unit = line.add(header.length)(file.raw(header))

    def add(piece: Array[Byte], done: () => Unit): Unit = line.add(piece.length) {
      Fault.point("part.piece")
      file.frame(FrameKinds.Image, piece)
      done()
    }
    def await(): Unit = line.await()

    def end(): Unit = {
      file.end(Ending(0))
      CheckpointFiles.publish(out)
    }

    def written: Written = Written(file.bytes, file.rawBytes)

    def cancel(): Unit = {
      line.settle()
      out.cancel()
    }
  }
}
