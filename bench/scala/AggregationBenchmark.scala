package io.quire.bench

import java.io.File
import java.util.{Collections, Map => JavaMap, Set => JavaSet}
import java.util.concurrent.atomic.AtomicReference

import scala.collection.mutable.ArrayBuffer
import scala.jdk.CollectionConverters._

import io.quire.bench.Main.{bytesIn, check, emit, median}

import org.apache.spark.sql.{DataFrame, Row, SparkSession}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow
import org.apache.spark.sql.connector.catalog.{SupportsRead, Table, TableCapability, TableProvider}
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming._
import org.apache.spark.sql.execution.streaming.runtime.LongOffset
import org.apache.spark.sql.functions.{col, count, lit, max, min, sum}
import org.apache.spark.sql.streaming.{DataStreamWriter, StreamingQueryListener}
import org.apache.spark.sql.types.{LongType, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * Count, least and greatest value for each key, update mode, two partitions, all output dropped.
 * Batches are as large as the source says and follow each other at once; a batch's time is the
 * whole of it, from planning to the commit of the query. Then the query is started again for one
 * more batch, whose output is compared with what it must be after all rows so far.
 */
object Aggregation {
  def run(options: Arguments, session: SparkSession): Unit = {
    val (keys, rows, batches) = (options.int("size"), options.int("rows"), options.int("batches"))
    val folder = new File(options.text("folder"), "query")
    val written = new Written(new File(folder, "state"))

    def counted(rows: Int, batches: Int): DataFrame =
      session.readStream.format(classOf[DrawSource].getName)
        .option("keys", keys).option("rows", rows).option("total", batches.toLong * rows).load()
        .groupBy("key").agg(count(lit(1)).as("n"), min("value").as("low"), max("value").as("high"))

    def process(writer: DataStreamWriter[Row], folder: File): Unit = {
      val query = writer.outputMode("update").option("checkpointLocation", folder.toString).start()
      query.processAllAvailable()
      query.stop()
    }

    // Classes and compiled code of Spark are not what the state takes.
    val warmUp = new File(options.text("folder"), "warm-up")
    process(counted(rows = 1000, batches = 2).writeStream.format("noop"), warmUp)
    session.streams.addListener(written)
    val before = Held.now()
    process(counted(rows, batches).writeStream.format("noop"), folder)
    // The stores stay open until the next maintenance finds that their query has ended.
    val held = Held.now() - before
    val peak = Held.status("VmHWM")

    written.await(batches)
    val last = written.batches.takeRight(options.int("measured")).toSeq
    def reported(measure: String, unit: String)(value: Batch => Double): Unit =
      emit(measure, median(last.map(value)), unit, rows, "one batch, the median of the last")
    reported("time of a batch", "s")(_.millis / 1e3)
    reported("collection of garbage in a batch", "s")(_.collectionMillis / 1e3)
    reported("files of a commit", "MB")(_.bytes / 1e6)
    def memory(measure: String, bytes: Long): Unit =
      emit(measure, bytes / 1e6, "MB", rows.toLong * batches, "after the last batch")
    memory("heap held", held.heap)
    memory("memory held outside the heap", held.outside)
    memory("peak of resident memory", peak)

    if (options.flag("checked")) {
      val found = new AtomicReference[Row]
      val writer = counted(rows, batches + 1).writeStream.foreachBatch {
        (output: DataFrame, _: Long) =>
          found.set(output.agg(count(lit(1)), sum("n"), sum(col("key") * col("n")),
            sum(col("key") * col("low")), sum(col("key") * col("high"))).head())
      }
      process(writer, folder)
      val expected = model(keys, rows, batches + 1)
      check(found.get == expected, s"the last batch gave ${found.get} instead of $expected")
    }
  }

  /** What the batch after all others must give, in sums over its keys. */
  private def model(keys: Int, rows: Int, batches: Int): Row = {
    val (n, high) = (new Array[Long](keys), new Array[Long](keys))
    val low = Array.fill(keys)(Long.MaxValue)
    for (i <- 0L until rows.toLong * batches) {
      val (key, value) = (Draw.key(i, keys).toInt, Draw.value(i))
      n(key) += 1
      low(key) = low(key).min(value)
      high(key) = high(key).max(value)
    }
    val touched = new java.util.BitSet(keys)
    for (i <- rows.toLong * (batches - 1) until rows.toLong * batches) {
      touched.set(Draw.key(i, keys).toInt)
    }
    val shown = touched.stream().toArray
    Row(shown.length.toLong, shown.map(n(_)).sum, shown.map(key => key * n(key)).sum,
      shown.map(key => key * low(key)).sum, shown.map(key => key * high(key)).sum)
  }
}

/** What one batch took. */
case class Batch(millis: Long, collectionMillis: Long, bytes: Long)

/** Notes each batch as it ends. */
class Written(state: File) extends StreamingQueryListener {
  val batches: ArrayBuffer[Batch] = ArrayBuffer[Batch]()
  private var (collected, held) = (0L, 0L)

  override def onQueryStarted(event: StreamingQueryListener.QueryStartedEvent): Unit = {}
  override def onQueryTerminated(event: StreamingQueryListener.QueryTerminatedEvent): Unit = {}
  override def onQueryProgress(event: StreamingQueryListener.QueryProgressEvent): Unit =
    if (event.progress.numInputRows > 0) synchronized {
      val (collectedNow, heldNow) = (Held.collectionMillis(), bytesIn(state))
      val millis = event.progress.durationMs.get("triggerExecution")
      batches += Batch(millis, collectedNow - collected, heldNow - held)
      collected = collectedNow
      held = heldNow
      notifyAll()
    }

  /** Events come after the fact. */
  def await(count: Int): Unit = synchronized { while (batches.size < count) wait() }
}

/** Row number i: a key drawn from so many, and a value below 1024. */
object Draw {
  private def mix(i: Long): Long = {
    var x = (i + 1) * 0x9E3779B97F4A7C15L
    x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L
    x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL
    x ^ (x >>> 31)
  }

  def key(i: Long, keys: Int): Long = (mix(i) >>> 1) % keys
  def value(i: Long): Long = mix(~i) & 1023
}

/** A source that makes its rows as they are read: `rows` a batch, `total` in all. */
class DrawSource extends TableProvider {
  override def inferSchema(options: CaseInsensitiveStringMap): StructType = DrawSource.schema
  override def getTable(
      schema: StructType, partitioning: Array[Transform], options: JavaMap[String, String]): Table =
    new Table with SupportsRead {
      override def name(): String = "draw"
      override def schema(): StructType = DrawSource.schema
      override def capabilities(): JavaSet[TableCapability] =
        Collections.singleton(TableCapability.MICRO_BATCH_READ)
      override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder = () => new Scan {
        override def readSchema(): StructType = DrawSource.schema
        override def toMicroBatchStream(checkpoint: String): MicroBatchStream = new DrawStream(
          options.getInt("keys", 0), options.getLong("rows", 0), options.getLong("total", 0))
      }
    }
}

object DrawSource {
  val schema: StructType =
    new StructType().add("key", LongType, false).add("value", LongType, false)
  val partitions = 2
}

class DrawStream(keys: Int, rows: Long, total: Long)
  extends MicroBatchStream with SupportsAdmissionControl {
  override def initialOffset(): Offset = LongOffset(0)
  override def deserializeOffset(json: String): Offset = LongOffset(json.toLong)
  override def latestOffset(): Offset = LongOffset(total)
  override def latestOffset(start: Offset, limit: ReadLimit): Offset =
    LongOffset(start.asInstanceOf[LongOffset].offset + rows min total)
  override def commit(end: Offset): Unit = {}
  override def stop(): Unit = {}

  override def planInputPartitions(start: Offset, end: Offset): Array[InputPartition] = {
    val (from, to) = (start.json().toLong, end.json().toLong)
    val count = DrawSource.partitions
    val bounds = (0 to count).map(i => from + (to - from) * i / count)
    bounds.zip(bounds.tail).map { case (low, high) => DrawPartition(keys, low, high) }.toArray
  }

  override def createReaderFactory(): PartitionReaderFactory = DrawReaderFactory
}

case class DrawPartition(keys: Int, from: Long, to: Long) extends InputPartition

object DrawReaderFactory extends PartitionReaderFactory {
  override def createReader(partition: InputPartition): PartitionReader[InternalRow] = {
    val part = partition.asInstanceOf[DrawPartition]
    new PartitionReader[InternalRow] {
      private var at = part.from - 1
      private val row = new GenericInternalRow(2)
      override def next(): Boolean = {
        at += 1
        at < part.to
      }
      override def get(): InternalRow = {
        row.setLong(0, Draw.key(at, part.keys))
        row.setLong(1, Draw.value(at))
        row
      }
      override def close(): Unit = {}
    }
  }
}
