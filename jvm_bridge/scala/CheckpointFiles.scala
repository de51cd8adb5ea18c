package io.quire.spark

import java.io.{ByteArrayOutputStream, EOFException, FileNotFoundException, IOException, OutputStream}
import java.nio.charset.StandardCharsets.UTF_8

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.{FileStatus, FSDataInputStream, Path}

import org.apache.spark.internal.Logging
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager
import org.apache.spark.sql.execution.streaming.state.{StateStoreConf, StateStoreId}
import org.apache.spark.sql.execution.streaming.state.quire.{Codec, SparkInternals}
import org.apache.spark.unsafe.Platform

/**
 * A version of a store: its number and the id of the commit, which Spark knows of in checkpoint
 * format 2 alone. A batch may be committed more than once, by a task that is tried again or by a
 * copy of a slow one; by its id each has files of its own, and names the very one it grew out of.
 */
private[spark] case class Version(number: Long, id: Option[String]) {
  def name: String = id.fold(number.toString)(id => s"${number}_$id")

  /** Whether this is what was asked for; who gives no id takes any. */
  def answers(wanted: Version): Boolean =
    number == wanted.number && (wanted.id.isEmpty || wanted.id == id)

  override def toString: String = id.fold(number.toString)(id => s"$number ($id)")
}

/** A file of a store's checkpoint: what a commit wrote, or a base. */
private[spark] case class CheckpointFile(
    path: Path, version: Version, isBase: Boolean, bytes: Long = 0, modified: Long = 0)

/** Kinds of files (container.h). */
private[spark] object FileKinds {
  val Delta = 1
  val Base = 2
  val Pages = 3
  val Log = 4
  val Part = 5
}

/** Kinds of frames (container.h). */
private[spark] object FrameKinds {
  val Records = 1
  val Image = 2
  val End = 3
  val Pages = 4
  val Parts = 5
}

/**
 * What a commit's file says of itself.
 *
 * @param since the version that pages start from, or in which the extent of a log begins; else 0
 */
private[spark] case class CommitInfo(
    kind: Int, parent: Version, pageSize: Int, keys: Long, since: Long)

/** How a file ends: keys in the state it leads to, and the version that it needs (see [[CommitInfo]]). */
private[spark] case class Ending(keys: Long, since: Long = 0)

/** The bytes of files as they were written, and before they were packed. */
private[spark] case class Written(bytes: Long, rawBytes: Long) {
  def +(other: Written): Written = Written(bytes + other.bytes, rawBytes + other.rawBytes)
}

/** What the header of a checkpoint file says (container.h). */
private[spark] case class FileHeader(
    kind: Int,
    version: Version,
    parent: Version,
    storeId: String,
    pageSize: Int,
    rowChecksums: Boolean,
    codec: String)

/** A checkpoint file that cannot be read, with its name and why. */
class QuireCheckpointException(message: String, cause: Throwable = null)
  extends IOException(message, cause)

/**
 * The files that one store keeps in its checkpoint directory: a delta for each version, and bases.
 *
 * Storage is Spark's `CheckpointFileManager`, compression Spark's codec; the bytes in between are
 * the core's (docs/format.md). A file appears under its name only when it is complete.
 */
private[spark] class CheckpointFiles(
    storeId: StateStoreId, conf: StateStoreConf, hadoopConf: Configuration) extends Logging {
  import CheckpointFiles._

  val folder: Path = storeId.storeCheckpointLocation()
  private var opened: CheckpointFileManager = _
  private val codecName = SparkInternals.codecName(conf.compressionCodec)

  def deltaPath(version: Version): Path = new Path(folder, s"${version.name}.$DeltaSuffix")
  def basePath(version: Version): Path = new Path(folder, s"${version.name}.$BaseSuffix")

  private def manager: CheckpointFileManager = synchronized {
    if (opened == null) opened = LocalFileManager.create(folder, hadoopConf)
    opened
  }

  /** Lets go of what files are reached through; whoever needs one afterwards opens it again. */
  def close(): Unit = synchronized {
    if (opened != null) opened.close()
    opened = null
  }

  // ---------------------------------------------------------------------------- listing

  /** All files of this store, the oldest version first. */
  def list(): Seq[CheckpointFile] = listing().flatMap { status =>
    parse(status.getPath).map(_.copy(bytes = status.getLen, modified = status.getModificationTime))
  }.sortBy(file => (file.version.number, !file.isBase))

  private def listing(): Seq[FileStatus] =
    try {
      manager.list(folder).toSeq
    } catch {
      case _: FileNotFoundException => Nil
    }

  /** A file of the system's own, if that is what the path is. */
  def local(path: Path): Option[java.nio.file.Path] = manager match {
    case local: LocalFileManager => Some(local.file(path))
    case _ => None
  }

  /** Whose files are in the folder, if not ours. */
  def otherProvider(): Option[String] = {
    val suffixes = listing().map(_.getPath.getName.split('.').last).toSet
    if (suffixes.contains("zip") || suffixes.contains("changelog")) {
      Some("RocksDBStateStoreProvider")
    } else if (suffixes.contains("delta") || suffixes.contains("snapshot")) {
      Some("HDFSBackedStateStoreProvider")
    } else {
      None
    }
  }

  /** Removes a base; its parts go with those that killed writers left. */
  def deleteBase(version: Version): Unit = manager.delete(basePath(version))

  /** Removes the files of versions before `first`, and what killed writers left of them. */
  def clean(first: Long): Int = {
    val old = list().filter(_.version.number < first)
    val versions = old.map(_.version.number).distinct.sorted
    if (versions.isEmpty || versions.size < conf.minVersionsToDelete) {
      0
    } else {
      val most = conf.maxVersionsToDeletePerMaintenance
      val last = if (most > 0 && versions.size > most) versions(most - 1) else versions.last
      // A base goes before its parts, so that none is ever left without them.
      val gone = old.filter(_.version.number <= last).map(_.path) ++ leftovers(last)
      gone.foreach { path =>
        Fault.point("clean.delete")
        manager.delete(path)
      }
      gone.size
    }
  }

  /** Temporary files of versions up to this one, and parts of their bases. */
  private def leftovers(last: Long): Seq[Path] = listing().map(_.getPath).filter { path =>
    path.getName match {
      case Leftover(number) => number.toLong <= last
      case Part(number) => number.toLong <= last
      case _ => false
    }
  }

  // ---------------------------------------------------------------------------- writing

  private lazy val makeFolder: Unit = if (!manager.exists(folder)) manager.mkdirs(folder)

  def codec(): Codec = SparkInternals.codec(codecName)

  /** Writes what a commit leaves. Durable when it returns. */
  def writeCommit(kind: Int, version: Version, parent: Version, pageSize: Int)(
      content: FrameWriter => Ending): Written =
    writeFile(deltaPath(version), header(kind, version, parent, pageSize))(content)

  /** Writes a file of frames. */
  def writeFile(path: Path, header: Array[Byte])(content: FrameWriter => Ending): Written = {
    var written: Written = null
    writing(path) { out =>
      val file = new FrameWriter(out, codec())
      file.raw(header)
      file.end(content(file))
      written = Written(file.bytes, file.rawBytes)
    }
    written
  }

  def create(path: Path): CheckpointFileManager.CancellableFSDataOutputStream = {
    makeFolder
    val out = manager.createAtomic(path, overwriteIfPossible = true)
    Fault.point("write.start")
    out
  }

  /** Writes a file that appears under its name when it is whole. */
  def writing(path: Path)(content: OutputStream => Unit): Unit = {
    val out = create(path)
    var done = false
    try {
      content(out)
      CheckpointFiles.publish(out)
      done = true
    } finally {
      if (!done) out.cancel()
    }
  }

  def header(kind: Int, version: Version, parent: Version, pageSize: Int): Array[Byte] = {
    val numbers = new OffHeap(56)
    try {
      val fields = Seq[Long](kind.toLong, version.number, parent.number,
        storeId.operatorId, storeId.partitionId.toLong, pageSize.toLong,
        if (conf.rowChecksumEnabled) 1 else 0)
      fields.zipWithIndex.foreach { case (value, i) =>
        Platform.putLong(null, numbers.address + 8L * i, value)
      }
      Native.headerEncode(
        numbers.address,
        Array(storeId.storeName, version.id.getOrElse(""), parent.id.getOrElse(""), codecName)
          .map(_.getBytes(UTF_8)))
    } finally {
      numbers.close()
    }
  }

  // ---------------------------------------------------------------------------- reading

  /** Reads a file to its end, verifies every byte, and hands each frame on, which is gone afterwards. */
  def read(path: Path, kinds: Set[Int])(frame: Frame => Unit): FileHeader = {
    val memory = new OffHeap(0)
    try readTo(path, kinds)((_, count) => memory.reserve(math.max(count, 8)))(frame) finally memory.close()
  }

  /** The same; each frame is unpacked to where the caller says, given its kind and its raw bytes. */
  def readTo(path: Path, kinds: Set[Int])(place: (Int, Int) => Long)(frame: Frame => Unit): FileHeader = {
    val file = frames(path, kinds)
    try {
      naming(path)(file.foreach(place)(frame))
      file.header
    } finally {
      file.close()
    }
  }

  /** The frames of a file, for who closes it. */
  def frames(path: Path, kinds: Set[Int]): FrameReader = {
    Fault.point("load.file")
    val in = open(path)
    var opened = false
    try {
      val file = naming(path)(new FrameReader(in, readHeader(path, in), kinds))
      opened = true
      file
    } finally {
      if (!opened) in.close()
    }
  }

  /** What a commit's file says of itself, from its two ends. */
  def readInfo(file: CheckpointFile): CommitInfo = {
    val in = open(file.path)
    try {
      naming(file.path) {
        val header = readHeader(file.path, in)
        val ending =
          if (header.kind == FileKinds.Pages || header.kind == FileKinds.Log) readEnding(in, file.bytes)
          else Ending(0)
        CommitInfo(header.kind, header.parent, header.pageSize, ending.keys, ending.since)
      }
    } finally {
      in.close()
    }
  }

  private def readEnding(in: FSDataInputStream, fileBytes: Long): Ending = {
    val end = new Array[Byte](EndBytes)
    val words = new OffHeap(32)
    try {
      if (fileBytes < end.length) throw new EOFException
      in.seek(fileBytes - end.length)
      in.readFully(end)
      val (head, stored) = end.splitAt(FrameHeaderBytes)
      Native.frameDecode(head, words.address)
      if (words.long(0) != FrameKinds.End) throw new IOException("it does not end with an end frame")
      Native.frameVerify(words.address, stored)
      Native.endDecode(stored, words.address)
      Ending(words.long(2), words.long(3))
    } finally {
      words.close()
    }
  }

  /** The first bytes of a file that has a format of its own, to memory outside the heap. */
  def readTo(path: Path, address: Long, bytes: Long): Unit = naming(path) {
    val in = open(path)
    try {
      val some = new Array[Byte](math.min(bytes, 256 << 10).toInt)
      var done = 0L
      while (done < bytes) {
        val count = math.min(bytes - done, some.length).toInt
        in.readFully(some, 0, count)
        Platform.copyMemory(some, Platform.BYTE_ARRAY_OFFSET, null, address + done, count)
        done += count
      }
    } finally {
      in.close()
    }
  }

  private def open(path: Path): FSDataInputStream =
    try {
      manager.open(path)
    } catch {
      case e: FileNotFoundException => throw SparkInternals.cannotReadFile(path, e)
    }

  private def readHeader(path: Path, in: FSDataInputStream): FileHeader = {
    val head = new Array[Byte](HeaderBytesMin)
    in.readFully(head)
    val whole = java.util.Arrays.copyOf(head, Native.headerPeek(head))
    in.readFully(whole, head.length, whole.length - head.length)
    val header = decode(whole)
    checkIdentity(path, header)
    checkRows(path, header)
    header
  }

  /** Does something with the bytes of a file; damage that shows meanwhile is the file's. */
  def naming[T](path: Path)(body: => T): T =
    try {
      body
    } catch {
      case e: EOFException => throw damaged(path, "it is truncated", e)
      case e: QuireNativeException
          if e.code == QuireNativeException.Corrupt || e.code == QuireNativeException.Version =>
        throw damaged(path, e.getMessage, e)
      case e: QuireCheckpointException => throw e
      case e: IOException => throw damaged(path, e.getMessage, e)
    }

  private def damaged(path: Path, why: String, cause: Throwable): QuireCheckpointException =
    new QuireCheckpointException(s"$path cannot be read: $why", cause)

  private def decode(bytes: Array[Byte]): FileHeader = {
    val numbers = new OffHeap(56)
    try {
      val texts = Native.headerDecode(bytes, numbers.address).map(new String(_, UTF_8))
      def optional(text: String): Option[String] = Option(text).filter(_.nonEmpty)
      FileHeader(
        kind = numbers.long(0).toInt,
        version = Version(numbers.long(1), optional(texts(1))),
        parent = Version(numbers.long(2), optional(texts(2))),
        storeId = identity(numbers.long(3), numbers.long(4), texts(0)),
        pageSize = numbers.long(5).toInt,
        rowChecksums = numbers.long(6) != 0,
        codec = texts(3))
    } finally {
      numbers.close()
    }
  }

  private def checkRows(path: Path, header: FileHeader): Unit = {
    if (header.rowChecksums != conf.rowChecksumEnabled) {
      throw new QuireCheckpointException(
        s"$path was written with spark.sql.streaming.stateStore.rowChecksum.enabled=" +
          s"${header.rowChecksums}, which cannot change from one run of a query to the next: " +
          "set it back, or use a new checkpoint location")
    }
  }

  private def identity(operator: Long, partition: Long, store: String): String =
    s"operator $operator, partition $partition, store $store"

  private def checkIdentity(path: Path, header: FileHeader): Unit = {
    val expected = identity(storeId.operatorId, storeId.partitionId, storeId.storeName)
    val fits = path.getName match {
      case PartOf(name) => header.kind == FileKinds.Part && parseVersion(name) == header.version
      case _ => parse(path).exists { named =>
        named.version == header.version && header.kind != FileKinds.Part &&
          named.isBase == (header.kind == FileKinds.Base)
      }
    }
    if (header.storeId != expected || !fits) {
      throw new QuireCheckpointException(
        s"$path holds version ${header.version} of ${header.storeId}, which is not what its name " +
          s"and place ($expected) say: the file was moved or renamed")
    }
  }
}

private[spark] object CheckpointFiles {
  val DeltaSuffix = "qdelta"
  val BaseSuffix = "qbase"
  val FrameHeaderBytes = 24
  val HeaderBytesMin = 72
  private val EndBytes = FrameHeaderBytes + 32

  /** Gives a whole file its name. */
  def publish(out: OutputStream): Unit = {
    // A disk that is full should say so here: after a close that failed nothing can be taken back.
    out.flush()
    Fault.point("write.written")
    out.close()
    Fault.point("write.published")
  }

  // Longer numbers are nobody's version.
  private val Name = s"""(\\d{1,18})(?:_([^.]+))?\\.($DeltaSuffix|$BaseSuffix)""".r
  private val Leftover = """\.(\d{1,18})[_.].*tmp(?:\.crc)?""".r
  private val Part = s"""(\\d{1,18})(?:_[^.]+)?\\..*(?:${BaseFiles.PartSuffix}|${BaseFiles.ImageSuffix})""".r
  private val PartOf = s"""([^.]+)\\.[^.]+(?:\\.\\d+)?\\.(?:${BaseFiles.PartSuffix}|${BaseFiles.ImageSuffix})""".r

  def parse(path: Path): Option[CheckpointFile] = path.getName match {
    case Name(number, id, suffix) =>
      Some(CheckpointFile(path, Version(number.toLong, Option(id)), suffix == BaseSuffix))
    case _ => None
  }

  /** The version of a name that begins a file's. */
  private def parseVersion(name: String): Version = {
    val Array(number, id) = (name + "_").split("_", 2)
    Version(number.toLong, Option(id.stripSuffix("_")).filter(_.nonEmpty))
  }

}

/** The raw bytes of a frame, outside the heap. */
private[spark] case class Frame(kind: Int, address: Long, bytes: Int)

/** Reads the frames of a file, after its header, and verifies every byte. One thread at a time. */
private[spark] final class FrameReader(in: FSDataInputStream, val header: FileHeader, kinds: Set[Int])
  extends AutoCloseable {
  private val codec =
    try SparkInternals.codec(header.codec)
    catch { case e: IllegalArgumentException => throw new IOException(s"it is packed by ${header.codec}: ${e.getMessage}", e) }
  private val head = new Array[Byte](CheckpointFiles.FrameHeaderBytes)
  private var frames = 0L
  private var rawBytes = 0L
  private val words = new OffHeap(32)
  private var stored = new Array[Byte](0)

  /**
   * The next frame, unpacked to the place that is given for its kind and its raw bytes; none once the end was
   * found to be right, too.
   */
  def next(place: (Int, Int) => Long): Option[Frame] = {
    in.readFully(head)
    Native.frameDecode(head, words.address)
    val kind = words.long(0).toInt
    val raw = words.long(1).toInt
    val count = words.long(2).toInt
    if (count > stored.length) stored = new Array[Byte](count)
    in.readFully(stored, 0, count)
    Native.frameVerify(words.address, stored)
    if (kind == FrameKinds.End) {
      Native.endDecode(java.util.Arrays.copyOf(stored, count), words.address)
      if (words.long(0) != frames || words.long(1) != rawBytes || in.read() != -1) {
        throw new IOException(s"its end says ${words.long(0)} frames of ${words.long(1)} " +
          s"bytes, $frames of $rawBytes were found, or more follows")
      }
      None
    } else if (!kinds(kind)) {
      throw new IOException(s"it has a frame of kind $kind")
    } else {
      frames += 1
      rawBytes += raw
      val to = place(kind, raw)
      codec.unpack(stored, count, to, raw)
      Some(Frame(kind, to, raw))
    }
  }

  /** Hands the frames on that were not read yet. */
  def foreach(place: (Int, Int) => Long)(frame: Frame => Unit): Unit =
    Iterator.continually(next(place)).takeWhile(_.isDefined).flatten.foreach(frame)

  override def close(): Unit = {
    words.close()
    in.close()
  }
}

/** Writes frames to a stream, each compressed by itself. */
private[spark] final class FrameWriter(out: OutputStream, codec: Codec) {
  var bytes = 0L
  var rawBytes = 0L
  private var frames = 0L
  private val frameHeader = new Array[Byte](CheckpointFiles.FrameHeaderBytes)
  private val packed = new FrameWriter.Packed

  def raw(content: Array[Byte]): Unit = {
    out.write(content)
    bytes += content.length
  }

  /** Writes what lies at an address. */
  def frame(kind: Int, address: Long, count: Long): Unit = {
    if (count > Int.MaxValue) {
      throw new IOException(s"a record of $count bytes is too long for a checkpoint file")
    }
    frame(kind, OffHeap.toHeap(address, count.toInt))
  }

  def frame(kind: Int, content: Array[Byte]): Unit = {
    packed.reset(content.length)
    val compressed = codec.compress(packed)
    compressed.write(content)
    compressed.close()
    frame(kind, content.length, packed.array, packed.size)
    frames += 1
    rawBytes += content.length
  }

  def end(ending: Ending): Unit = {
    val content = Native.endEncode(frames, rawBytes, ending.keys, ending.since)
    frame(FrameKinds.End, content.length, content, content.length)
  }

  private def frame(kind: Int, rawCount: Int, stored: Array[Byte], storedCount: Int): Unit = {
    Native.frameEncode(kind, rawCount, stored, storedCount, frameHeader)
    out.write(frameHeader)
    Fault.point("write.frame")
    out.write(stored, 0, storedCount)
    bytes += frameHeader.length + storedCount
  }
}

private object FrameWriter {
  /** A byte array stream that shows its array. */
  private class Packed extends ByteArrayOutputStream(1 << 16) {
    def array: Array[Byte] = buf

    /** Begins again, with room for what seldom becomes longer by being packed: growing would copy it. */
    def reset(count: Int): Unit = {
      if (buf.length < count) buf = new Array[Byte](count + (count >> 6) + 1024)
      reset()
    }
  }
}
