package org.apache.spark.sql.execution.streaming.state.quire

import java.io.{ByteArrayInputStream, EOFException, IOException, OutputStream}
import java.nio.{BufferUnderflowException, ByteBuffer, ByteOrder}
import java.util.UUID

import scala.util.control.NonFatal

import io.quire.spark.OffHeapBuffer
import net.jpountz.lz4.{LZ4Exception, LZ4Factory}
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path

import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import org.apache.spark.io.CompressionCodec
import org.apache.spark.memory.{MemoryMode, UnifiedMemoryManager, UnmanagedMemoryConsumer, UnmanagedMemoryConsumerId}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.classic.SparkSession
import org.apache.spark.sql.errors.QueryExecutionErrors
import org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOperatorStateInfo
import org.apache.spark.sql.execution.streaming.runtime.StreamExecution
import org.apache.spark.sql.execution.streaming.state.{NoPrefixKeyStateEncoderSpec, ReadStateStore, RecordType, StateStore, StateStoreErrors, StateStoreId, StateStoreOps, StateStoreProvider, StateStoreProviderId}
import org.apache.spark.sql.types.StructType
import org.apache.spark.unsafe.Platform
import org.apache.spark.util.NextIterator

/** What Spark keeps to its own packages and a state store needs; nothing but passing on. */
object SparkInternals {

  def unexpectedVersion(version: Long): Throwable =
    QueryExecutionErrors.unexpectedStateStoreVersion(version)

  def cannotReadFile(file: Path, cause: Throwable): Throwable =
    QueryExecutionErrors.failedToReadStreamingStateFileError(file, cause)

  def cannotCommit(store: String, cause: Throwable): Throwable =
    QueryExecutionErrors.failedToCommitStateFileError(store, cause)

  def cannotLoad(cause: Throwable): Throwable = StateStoreErrors.cannotLoadStore(cause)

  /** Throws what the task has failed with already, if it has, or that it is to end. */
  def checkTask(context: TaskContext): Unit = {
    context.getTaskFailure.foreach(e => throw e)
    context.killTaskIfInterrupted()
  }

  def codecName(name: String): String = CompressionCodec.getShortName(name)

  /** By the name that a file has it under; Python may leave its files as they are, under none. */
  def codec(name: String): Codec = {
    lazy val conf = Option(SparkEnv.get).map(_.conf).getOrElse(new SparkConf)
    if (name.isEmpty) NoCodec
    else if (name == CompressionCodec.LZ4) new Lz4Codec(CompressionCodec.createCodec(conf, name))
    else new StreamCodec(CompressionCodec.createCodec(conf, name))
  }

  /** Rows made of others with the version of the state that a batch begins with. */
  def withReadStore(
      rows: RDD[InternalRow],
      session: SparkSession,
      state: StatefulOperatorStateInfo,
      keySchema: StructType,
      valueSchema: StructType)(
      body: (ReadStateStore, Iterator[InternalRow]) => Iterator[InternalRow]): RDD[InternalRow] =
    rows.mapPartitionsWithReadStateStore(
      state, keySchema, valueSchema, NoPrefixKeyStateEncoderSpec(keySchema), session.sessionState,
      Some(session.streams.stateStoreCoordinator))(body)

  /** The checkpoint of the query that this thread runs a batch of, as Python's storage takes it. */
  def checkpointOfQuery(session: SparkSession): Option[String] = {
    val id = Option(session.sparkContext.getLocalProperty(StreamExecution.QUERY_ID_KEY))
    id.flatMap(each => Option(session.sharedState.activeStreamingQueries.get(UUID.fromString(each))))
      .map(query => withRest(query.resolvedCheckpointRoot, session.sessionState.newHadoopConf()))
  }

  /** HDFS is reached over REST from Python, at the port that the configuration names. */
  private def withRest(location: String, conf: Configuration): String = {
    val uri = new Path(location).toUri
    val rest = conf.get("dfs.namenode.http-address", "")
    if (uri.getScheme != "hdfs" || uri.getHost == null || !rest.contains(":")) location
    else s"webhdfs://${uri.getHost}:${rest.split(":").last}${uri.getPath}"
  }

  def reportCommit(version: Long, storeId: StateStoreId, hadoopConf: Configuration): Unit =
    StateStore.reportCommitToCoordinator(version, storeId, hadoopConf)

  def reportSnapshot(storeId: StateStoreId, hadoopConf: Configuration, version: Long): Unit =
    try {
      val id = StateStoreProviderId(storeId, UUID.fromString(hadoopConf.get(StreamExecution.RUN_ID_KEY)))
      StateStoreProvider.coordinatorRef.foreach(
        _.snapshotUploaded(id, version, System.currentTimeMillis()))
    } catch {
      case NonFatal(_) => // the report is for the log of a lag only
    }

  /** Tells Spark's memory manager of a consumer outside its reach, as often as one likes. */
  def reportMemory(name: String, bytesUsed: () => Long): Unit = {
    if (SparkEnv.get != null) {
      UnifiedMemoryManager.registerUnmanagedMemoryConsumer(new UnmanagedMemoryConsumer {
        override val unmanagedMemoryConsumerId: UnmanagedMemoryConsumerId =
          UnmanagedMemoryConsumerId(name, s"$name-pages")
        override def memoryMode: MemoryMode = MemoryMode.OFF_HEAP
        override def getMemBytesUsed: Long = bytesUsed()
      })
    }
  }
}

/** A way to pack frames. */
trait Codec {
  def compress(out: OutputStream): OutputStream

  /**
   * Unpacks the first bytes of an array to memory outside the heap, which is then filled to its last
   * byte; an `IOException` if they do not fit.
   */
  def unpack(stored: Array[Byte], storedBytes: Int, to: Long, rawBytes: Int): Unit
}

private object NoCodec extends Codec {
  override def compress(out: OutputStream): OutputStream = out

  override def unpack(stored: Array[Byte], storedBytes: Int, to: Long, rawBytes: Int): Unit = {
    if (storedBytes != rawBytes) throw new IOException(s"a frame of $rawBytes bytes has $storedBytes, and is not packed")
    Platform.copyMemory(stored, Platform.BYTE_ARRAY_OFFSET, null, to, rawBytes)
  }
}

/** One of Spark's codecs, through its streams. */
private class StreamCodec(codec: CompressionCodec) extends Codec {
  override def compress(out: OutputStream): OutputStream = codec.compressedOutputStream(out)

  override def unpack(stored: Array[Byte], storedBytes: Int, to: Long, rawBytes: Int): Unit = {
    val in = codec.compressedInputStream(new ByteArrayInputStream(stored, 0, storedBytes))
    try {
      val some = new Array[Byte](math.min(rawBytes, StreamCodec.CopyBytes))
      var done = 0
      while (done < rawBytes) {
        val count = in.read(some, 0, math.min(some.length, rawBytes - done))
        if (count < 0) throw new EOFException(s"a frame of $rawBytes bytes ends after $done")
        Platform.copyMemory(some, Platform.BYTE_ARRAY_OFFSET, null, to + done, count)
        done += count
      }
    } finally {
      in.close()
    }
  }
}

private object StreamCodec {
  private val CopyBytes = 1 << 16
}

/**
 * Spark's default, whose blocks are unpacked straight to where they belong. Through a stream each byte is
 * copied three times on the way. The blocks' own checksums are not looked at: the frame's covers them.
 */
private class Lz4Codec(codec: CompressionCodec) extends StreamCodec(codec) {
  import Lz4Codec._

  override def unpack(stored: Array[Byte], storedBytes: Int, to: Long, rawBytes: Int): Unit = {
    val in = ByteBuffer.wrap(stored, 0, storedBytes).order(ByteOrder.LITTLE_ENDIAN)
    val out = OffHeapBuffer(to, rawBytes)
    var done = 0
    var ended = false
    try {
      while (!ended) {
        if (in.getLong() != Magic) throw new IOException("a block of its lz4 stream has another beginning")
        val (method, packed, raw) = (in.get() & 0xf0, in.getInt(), in.getInt())
        in.getInt()
        if (raw < 0 || packed < 0 || packed > in.remaining || raw > rawBytes - done) {
          throw new IOException(s"a block of its lz4 stream says $packed bytes packed and $raw not")
        }
        ended = raw == 0
        val fits = method match {
          case Plain if packed == raw =>
            Platform.copyMemory(stored, Platform.BYTE_ARRAY_OFFSET + in.position(), null, to + done, raw)
            true
          case Packed if !ended => unpacker.decompress(in, in.position(), packed, out, done, raw) == raw
          case _ => false
        }
        if (!fits) throw new IOException(s"a block of its lz4 stream does not unpack to $raw bytes")
        in.position(in.position() + packed)
        done += raw
      }
    } catch {
      case e: LZ4Exception => throw new IOException(s"a block of its lz4 stream cannot be unpacked: ${e.getMessage}", e)
      case _: BufferUnderflowException => throw new EOFException("its lz4 stream has no end")
    }
    if (done != rawBytes || in.hasRemaining) {
      throw new IOException(s"its lz4 stream has $done bytes instead of $rawBytes, or more follows")
    }
  }
}

private object Lz4Codec {
  private val Magic = ByteBuffer.wrap("LZ4Block".getBytes("US-ASCII")).order(ByteOrder.LITTLE_ENDIAN).getLong()
  private final val Plain = 0x10
  private final val Packed = 0x20
  private lazy val unpacker = LZ4Factory.fastestInstance().safeDecompressor()
}

/** Changes as the state data source reads them: kind, key, value (null if removed), batch. */
abstract class ChangeIterator extends NextIterator[(RecordType.Value, UnsafeRow, UnsafeRow, Long)]
