package io.quire.spark

import java.io.{ByteArrayInputStream, ByteArrayOutputStream, DataInputStream, EOFException, FileNotFoundException, IOException}
import java.nio.charset.StandardCharsets.UTF_8

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path

import org.apache.spark.internal.Logging
import org.apache.spark.sql.execution.streaming.state.{StateStoreConf, StateStoreId}
import org.apache.spark.sql.execution.streaming.state.quire.{Codec, SparkInternals}
import org.apache.spark.unsafe.Platform

/** A version of a store: its number and, in checkpoint format 2, the id of the commit. */
private[spark] case class Version(number: Long, id: Option[String]) {
  def name: String = id.fold(number.toString)(id => s"${number}_$id")

  /** Whether this is what was asked for; who gives no id takes any. */
  def answers(wanted: Version): Boolean =
    number == wanted.number && (wanted.id.isEmpty || wanted.id == id)

  override def toString: String = id.fold(number.toString)(id => s"$number ($id)")
}

/** A file of a store's checkpoint. */
private[spark] case class CheckpointFile(path: Path, version: Version, isBase: Boolean)

/** What the header of a checkpoint file says (container.h). */
private[spark] case class FileHeader(
    isBase: Boolean,
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
  private lazy val manager = LocalFileManager.create(folder, hadoopConf)
  private val codecName = SparkInternals.codecName(conf.compressionCodec)

  def deltaPath(version: Version): Path = new Path(folder, s"${version.name}.$DeltaSuffix")
  def basePath(version: Version): Path = new Path(folder, s"${version.name}.$BaseSuffix")

  def close(): Unit = manager.close()

  // ---------------------------------------------------------------------------- listing

  /** All files of this store, the oldest version first. */
  def list(): Seq[CheckpointFile] = listing().collect {
    case path if parse(path).isDefined => parse(path).get
  }.sortBy(file => (file.version.number, !file.isBase))

  private def listing(): Seq[Path] =
    try {
      manager.list(folder).map(_.getPath).toSeq
    } catch {
      case _: FileNotFoundException => Nil
    }

  /** Whose files are in the folder, if not ours. */
  def otherProvider(): Option[String] = {
    val suffixes = listing().map(_.getName.split('.').last).toSet
    if (suffixes.contains("zip") || suffixes.contains("changelog")) {
      Some("RocksDBStateStoreProvider")
    } else if (suffixes.contains("delta") || suffixes.contains("snapshot")) {
      Some("HDFSBackedStateStoreProvider")
    } else {
      None
    }
  }

  def exists(path: Path): Boolean = manager.exists(path)
  def remove(path: Path): Unit = manager.delete(path)

  /**
   * Removes what no version from `earliest` on needs: everything older than the newest base that
   * is not newer than `earliest`. Files left by writers that were killed go with it.
   *
   * @param isOurs whether a base is of the line of versions that this store has
   */
  def clean(earliest: Long, isOurs: Version => Boolean): Int = {
    val files = list()
    val base = files.filter(f => f.isBase && f.version.number <= earliest && isOurs(f.version))
      .lastOption
    base.fold(0) { base =>
      val old = files.filter(_.version.number < base.version.number)
      val versions = old.map(_.version.number).distinct.sorted
      if (versions.isEmpty || versions.size < conf.minVersionsToDelete) {
        0
      } else {
        val most = conf.maxVersionsToDeletePerMaintenance
        val last = if (most > 0 && versions.size > most) versions(most - 1) else versions.last
        val gone = old.filter(_.version.number <= last).map(_.path) ++ leftovers(last)
        gone.foreach(manager.delete)
        gone.size
      }
    }
  }

  /** Temporary files of versions up to this one. */
  private def leftovers(last: Long): Seq[Path] = listing().filter { path =>
    path.getName match {
      case Leftover(number) => number.toLong <= last
      case _ => false
    }
  }

  // ---------------------------------------------------------------------------- writing

  private lazy val makeFolder: Unit = if (!manager.exists(folder)) manager.mkdirs(folder)

  /** The bytes and frames of a file as they were written. */
  case class Written(bytes: Long, rawBytes: Long)

  /** Writes what changed since the snapshot as the delta of a version. Durable when it returns. */
  def writeDelta(
      arena: Long,
      older: Long,
      lists: Array[String],
      version: Version,
      parent: Version,
      keys: Long): Written =
    write(deltaPath(version), header(isBase = false, version, parent, 0), keys) { file =>
      Native.deltaWrite(
        arena, older, lists, (address, count) => file.frame(RecordsFrame, address, count))
    }

  /** Writes a snapshot as the base of a version. */
  def writeBase(snap: Long, version: Version, pageSize: Int, keys: Long): Written =
    write(basePath(version), header(isBase = true, version, version, pageSize), keys) { file =>
      val image = new FrameBuffer(file)
      try {
        Native.imageWrite(snap, image)
        image.flush()
      } finally {
        image.close()
      }
    }

  private def write(path: Path, header: Array[Byte], keys: Long)(
      content: FileWriter => Unit): Written = {
    makeFolder
    val out = manager.createAtomic(path, overwriteIfPossible = true)
    var done = false
    try {
      val file = new FileWriter(out, SparkInternals.codec(codecName))
      file.raw(header)
      content(file)
      file.end(keys)
      // A disk that is full should say so here: after a close that failed nothing can be taken back.
      out.flush()
      out.close()
      done = true
      Written(file.bytes, file.rawBytes)
    } finally {
      if (!done) out.cancel()
    }
  }

  private def header(
      isBase: Boolean, version: Version, parent: Version, pageSize: Int): Array[Byte] = {
    val numbers = new OffHeap(56)
    try {
      val fields = Seq[Long](if (isBase) 2 else 1, version.number, parent.number,
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

  /** Reads a file to its end, verifies every byte, and hands each frame's raw bytes on. */
  def read(path: Path)(frame: (Int, Array[Byte]) => Unit): FileHeader =
    reading(path) { (in, header) =>
      val codec = SparkInternals.codec(header.codec)
      val head = new Array[Byte](FrameHeaderBytes)
      val words = new OffHeap(32)
      try {
        var ended = false
        var frames = 0L
        var rawBytes = 0L
        while (!ended) {
          in.readFully(head)
          Native.frameDecode(head, words.address)
          val kind = words.long(0).toInt
          val raw = words.long(1).toInt
          val stored = new Array[Byte](words.long(2).toInt)
          in.readFully(stored)
          Native.frameVerify(words.address, stored)
          if (kind == EndFrame) {
            Native.endDecode(stored, words.address)
            if (words.long(0) != frames || words.long(1) != rawBytes || in.read() != -1) {
              throw new IOException(s"its end says ${words.long(0)} frames of ${words.long(1)} " +
                s"bytes, $frames of $rawBytes were found, or more follows")
            }
            ended = true
          } else {
            frame(kind, decompress(codec, stored, raw))
            frames += 1
            rawBytes += raw
          }
        }
      } finally {
        words.close()
      }
    }

  def readHeader(path: Path): FileHeader = reading(path)((_, _) => ())

  private def decompress(codec: Codec, stored: Array[Byte], count: Int): Array[Byte] = {
    val in = new DataInputStream(codec.decompress(new ByteArrayInputStream(stored)))
    try {
      val raw = new Array[Byte](count)
      in.readFully(raw)
      raw
    } finally {
      in.close()
    }
  }

  private def reading(path: Path)(body: (DataInputStream, FileHeader) => Unit): FileHeader = {
    val in =
      try {
        new DataInputStream(manager.open(path))
      } catch {
        case e: FileNotFoundException => throw SparkInternals.cannotReadFile(path, e)
      }
    try {
      val head = new Array[Byte](HeaderBytesMin)
      in.readFully(head)
      val whole = java.util.Arrays.copyOf(head, Native.headerPeek(head))
      in.readFully(whole, head.length, whole.length - head.length)
      val header = decode(whole)
      checkIdentity(path, header)
      checkRows(path, header)
      body(in, header)
      header
    } catch {
      case e: EOFException => throw damaged(path, "it is truncated", e)
      case e: QuireNativeException
          if e.code == QuireNativeException.Corrupt || e.code == QuireNativeException.Version =>
        throw damaged(path, e.getMessage, e)
      case e: QuireCheckpointException => throw e
      case e: IOException => throw damaged(path, e.getMessage, e)
    } finally {
      in.close()
    }
  }

  private def damaged(path: Path, why: String, cause: Throwable): QuireCheckpointException =
    new QuireCheckpointException(s"$path cannot be read: $why", cause)

  private def decode(bytes: Array[Byte]): FileHeader = {
    val numbers = new OffHeap(56)
    try {
      val texts = Native.headerDecode(bytes, numbers.address).map(new String(_, UTF_8))
      def optional(text: String): Option[String] = Option(text).filter(_.nonEmpty)
      FileHeader(
        isBase = numbers.long(0) == 2,
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
    val named = parse(path)
    if (header.storeId != expected || named.forall(_.version != header.version) ||
        named.forall(_.isBase != header.isBase)) {
      throw new QuireCheckpointException(
        s"$path holds version ${header.version} of ${header.storeId}, which is not what its name " +
          s"and place ($expected) say: the file was moved or renamed")
    }
  }
}

private[spark] object CheckpointFiles {
  val DeltaSuffix = "qdelta"
  val BaseSuffix = "qbase"
  val RecordsFrame = 1
  val ImageFrame = 2
  val EndFrame = 3
  val FrameHeaderBytes = 24
  val HeaderBytesMin = 72
  /** A base is cut into frames of this size. */
  private val ImageFrameBytes = 1 << 20

  // Longer numbers are nobody's version.
  private val Name = s"""(\\d{1,18})(?:_([^.]+))?\\.($DeltaSuffix|$BaseSuffix)""".r
  private val Leftover = s"""\\.(\\d{1,18})(?:_[^.]+)?\\.(?:$DeltaSuffix|$BaseSuffix)\\..*tmp(?:\\.crc)?""".r

  def parse(path: Path): Option[CheckpointFile] = path.getName match {
    case Name(number, id, suffix) =>
      Some(CheckpointFile(path, Version(number.toLong, Option(id)), suffix == BaseSuffix))
    case _ => None
  }

  /** Writes frames to a stream, each compressed by itself. */
  class FileWriter(out: java.io.OutputStream, codec: Codec) {
    var bytes = 0L
    var rawBytes = 0L
    private var frames = 0L
    private val frameHeader = new Array[Byte](FrameHeaderBytes)
    private val packed = new Packed

    def raw(content: Array[Byte]): Unit = {
      out.write(content)
      bytes += content.length
    }

    def frame(kind: Int, address: Long, count: Long): Unit = {
      if (count > Int.MaxValue) {
        throw new IOException(s"a record of $count bytes is too long for a checkpoint file")
      }
      val content = OffHeap.toHeap(address, count.toInt)
      packed.reset()
      val compressed = codec.compress(packed)
      compressed.write(content)
      compressed.close()
      frame(kind, content.length, packed.array, packed.size)
      frames += 1
      rawBytes += count
    }

    def end(keys: Long): Unit = {
      val content = Native.endEncode(frames, rawBytes, keys)
      frame(EndFrame, content.length, content, content.length)
    }

    private def frame(kind: Int, rawCount: Int, stored: Array[Byte], storedCount: Int): Unit = {
      Native.frameEncode(kind, rawCount, stored, storedCount, frameHeader)
      out.write(frameHeader)
      out.write(stored, 0, storedCount)
      bytes += frameHeader.length + storedCount
    }
  }

  /** Gathers the small writes of an image into frames. */
  private class FrameBuffer(file: FileWriter) extends ByteSink with AutoCloseable {
    private val buffer = new OffHeap(ImageFrameBytes)
    private var count = 0L

    override def write(address: Long, bytes: Long): Unit = {
      Platform.copyMemory(null, address, null, buffer.reserve(count + bytes) + count, bytes)
      count += bytes
      if (count >= ImageFrameBytes) flush()
    }

    def flush(): Unit = {
      if (count > 0) file.frame(ImageFrame, buffer.address, count)
      count = 0
    }

    override def close(): Unit = buffer.close()
  }

  /** A byte array stream that shows its array. */
  private class Packed extends ByteArrayOutputStream(1 << 16) {
    def array: Array[Byte] = buf
  }
}
