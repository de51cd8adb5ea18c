package org.apache.spark.sql.execution.streaming.state.quire

import java.io.{InputStream, OutputStream}
import java.util.UUID

import scala.util.control.NonFatal

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path

import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import org.apache.spark.io.CompressionCodec
import org.apache.spark.memory.{MemoryMode, UnifiedMemoryManager, UnmanagedMemoryConsumer, UnmanagedMemoryConsumerId}
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.classic.SparkSession
import org.apache.spark.sql.errors.QueryExecutionErrors
import org.apache.spark.sql.execution.streaming.runtime.StreamExecution
import org.apache.spark.sql.execution.streaming.state.{RecordType, StateStore, StateStoreErrors, StateStoreId, StateStoreProvider, StateStoreProviderId}
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

  /** Throws what the task has failed with already, if it has. */
  def checkTask(context: TaskContext): Unit = context.getTaskFailure.foreach(e => throw e)

  def codecName(name: String): String = CompressionCodec.getShortName(name)

  def codec(name: String): Codec = new Codec(
    CompressionCodec.createCodec(
      Option(SparkEnv.get).map(_.conf).getOrElse(new SparkConf), name))

  def providerId(storeId: StateStoreId, hadoopConf: Configuration): StateStoreProviderId =
    StateStoreProviderId(storeId, UUID.fromString(hadoopConf.get(StreamExecution.RUN_ID_KEY)))

  def runId(hadoopConf: Configuration): String = hadoopConf.get(StreamExecution.RUN_ID_KEY)

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

  def reportSnapshot(providerId: StateStoreProviderId, version: Long): Unit =
    Coordinator.snapshotUploaded(providerId, version)

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

  private object Coordinator {
    def snapshotUploaded(providerId: StateStoreProviderId, version: Long): Unit = {
      try {
        StateStoreProvider.coordinatorRef.foreach(
          _.snapshotUploaded(providerId, version, System.currentTimeMillis()))
      } catch {
        case NonFatal(_) => // the report is for the log of a lag only
      }
    }
  }
}

/** One of Spark's compression codecs. */
class Codec(codec: CompressionCodec) {
  def compress(out: OutputStream): OutputStream = codec.compressedOutputStream(out)
  def decompress(in: InputStream): InputStream = codec.compressedInputStream(in)
}

/** Changes as the state data source reads them: kind, key, value (null if removed), batch. */
abstract class ChangeIterator extends NextIterator[(RecordType.Value, UnsafeRow, UnsafeRow, Long)]
