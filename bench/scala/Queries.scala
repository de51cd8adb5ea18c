package io.quire.bench

import java.io.File

import scala.collection.mutable.ArrayBuffer

import io.quire.bench.Main.{bytesIn, check, emit, median, percentile}

import org.apache.spark.sql.{DataFrame, Encoders, Row, SparkSession}
import org.apache.spark.sql.functions._
import org.apache.spark.sql.streaming._

/** Opens the rows of a kind (their columns, if not all are wanted), as a stream or at once. */
trait Rows {
  def apply(kind: String, columns: String*): DataFrame
}

/** A query that is measured, and what it must give. */
trait Work {
  def query(rows: Rows): DataFrame

  /**
   * What the query gives in all once everything in it is closed, if it appends; if it updates, what
   * its last batch gives, whose first row has the number `from`. Computed at once and by no store.
   */
  def expected(rows: Rows, from: Long): DataFrame

  def mode: String = "append"
  /** Whether something stays open in the query until rows of a much later time come. */
  def closes: Boolean = true
}

/**
 * A streaming query over rows that are made as they are read: two partitions, output counted and
 * dropped. Batches are as large as the source says and follow each other at once; a batch's time
 * is the whole of it, from planning to the commit of the query. Then the query is started again
 * for a small batch and a last one, and all that it gave is compared with what it must give.
 */
object Queries {
  /** How many rows close a query: enough for one of each kind. */
  private val closing = 50L
  private val eventSecondsOfBatch = 2L

  def run(options: Arguments, session: SparkSession, work: Work): Unit = {
    val (rows, batches) = (options.int("rows").toLong, options.int("batches"))
    val small = Math.max(rows / 100, 50)
    val steady = (1 to batches).map(_ * rows)
    val afterRestart = steady.last + small
    val last = if (work.closes) afterRestart else afterRestart + rows
    val ends = steady ++ Seq(afterRestart, if (work.closes) last + closing else last)
    val folder = new File(options.text("folder"), "query")
    val notes = new Notes(new File(folder, "state"))
    val settings = Map("keys" -> options.text("size"), "seed" -> options.text("seed"),
      "rate" -> Math.max(rows / eventSecondsOfBatch, 1).toString, "last" -> last.toString)

    def reader(stream: Option[Seq[Long]]): Rows = (kind, columns) => {
      val all = settings ++ Map("rows" -> kind) ++
        (if (columns.isEmpty) Map.empty else Map("columns" -> columns.mkString(",")))
      val format = classOf[GeneratedSource].getName
      stream match {
        case Some(ends) => session.readStream.format(format)
          .options(all + ("ends" -> ends.mkString(","))).load()
        case None => session.read.format(format).options(all).load()
      }
    }

    def process(ends: Seq[Long], folder: File): Unit = {
      val output = work.query(reader(Some(ends)))
      val query = output.observe("given", count(lit(1)).as("rows"), sum(checksum(output)).as("sum"))
        .writeStream.format("noop").outputMode(work.mode)
        .option("checkpointLocation", folder.toString).start()
      try query.processAllAvailable() finally query.stop()
    }

    // Classes and compiled code of Spark are not what the state takes.
    process(Seq(small, 2 * small), new File(options.text("folder"), "warm-up"))
    session.streams.addListener(notes)
    val before = Held.now()
    process(steady, folder)
    // The stores stay open until the next maintenance finds that their query has ended.
    val held = Held.now() - before
    val peak = Held.status("VmHWM")
    notes.awaitEnd(1)

    val measured = notes.batches.takeRight(options.int("measured")).toSeq
    def reported(measure: String, unit: String)(value: Noted => Double): Unit =
      emit(measure, median(measured.map(value)), unit, rows, "one batch, the median of the last")
    reported("time of a batch", "s")(_.millis / 1e3)
    emit("time of a batch, 99th percentile", percentile(measured.map(_.millis / 1e3), 0.99), "s", rows,
      "one batch; of fewer than 100 batches the slowest")
    reported("events", "events/s")(rows * 1e3 / _.millis)
    reported("collection of garbage in a batch", "s")(_.collectionMillis / 1e3)
    reported("files of a commit", "MB")(_.bytes / 1e6)
    def memory(measure: String, bytes: Long): Unit =
      emit(measure, bytes / 1e6, "MB", rows * batches, "after the last batch")
    memory("heap held", held.heap)
    memory("memory held outside the heap", held.outside)
    memory("peak of resident memory", peak)

    process(ends, folder)
    notes.awaitEnd(2)
    session.streams.removeListener(notes)
    emit("first batch after a restart", notes.batches(batches).millis / 1e3, "s", small,
      "a hundredth of the rows; the state is loaded from files that were just written")
    if (options.flag("checked")) {
      val expected = work.expected(reader(None), afterRestart)
      val Row(rows: Long, sums) = expected.agg(count(lit(1)), sum(checksum(expected))).head()
      val wanted = (rows, Option(sums).fold(0L)(_.asInstanceOf[Long]))
      val found = if (work.mode == "append") notes.output else notes.batches.last.output
      check(rows > 0, "there is nothing that the query must give")
      check(found == wanted, s"the query gave (rows, checksum) $found instead of $wanted")
    }
  }

  /** Of a row; small enough that the sum over all rows fits a long. */
  private def checksum(frame: DataFrame) =
    xxhash64(frame.columns.toSeq.map(name => frame(name)): _*).bitwiseAND(0xFFFFFFFFL)

  /** The query of a name, for a case's arguments. */
  def named(name: String, options: Arguments): Work = name match {
    case "aggregation" => Aggregation
    case "deduplication" => new Deduplication(options.int("size"))
    case "join" => new Join(options.int("size"))
    case "sessions" => new Sessions(options.int("size"))
    case "transform" => Transform
    case other => Nexmark.works(other)
  }
}

/** What one batch took, and what it gave: rows, and the sum of their checksums. */
case class Noted(millis: Long, collectionMillis: Long, bytes: Long, output: (Long, Long))

/** Notes each batch as it ends. */
class Notes(state: File) extends StreamingQueryListener {
  /** Those that had rows to read. */
  val batches: ArrayBuffer[Noted] = ArrayBuffer[Noted]()
  private var (collected, held) = (Held.collectionMillis(), 0L)
  private var (rows, sums, ended) = (0L, 0L, 0)

  /** What all batches gave, those included that had nothing to read. */
  def output: (Long, Long) = synchronized((rows, sums))

  override def onQueryStarted(event: StreamingQueryListener.QueryStartedEvent): Unit = {}
  override def onQueryProgress(event: StreamingQueryListener.QueryProgressEvent): Unit = synchronized {
    val progress = event.progress
    val output = Option(progress.observedMetrics.get("given")).fold((0L, 0L)) { row =>
      (row.getLong(0), if (row.isNullAt(1)) 0L else row.getLong(1))
    }
    rows += output._1
    sums += output._2
    if (progress.numInputRows > 0) {
      val (collectedNow, heldNow) = (Held.collectionMillis(), bytesIn(state))
      val millis = progress.durationMs.get("triggerExecution")
      batches += Noted(millis, collectedNow - collected, heldNow - held, output)
      collected = collectedNow
      held = heldNow
    }
  }
  override def onQueryTerminated(event: StreamingQueryListener.QueryTerminatedEvent): Unit =
    synchronized {
      ended += 1
      notifyAll()
    }

  /** Events come after the fact, the end of a query after all others of it. */
  def awaitEnd(count: Int): Unit = synchronized { while (ended < count) wait() }
}

/** Count, least and greatest value for each key. */
object Aggregation extends Work {
  override def mode: String = "update"
  override def closes: Boolean = false
  override def query(rows: Rows): DataFrame = summed(rows("draw", "key", "value"))
  override def expected(rows: Rows, from: Long): DataFrame = summed(lastKeysOnly(rows("draw"), from))

  private def summed(rows: DataFrame): DataFrame =
    rows.groupBy("key").agg(count(lit(1)).as("n"), min("value").as("low"), max("value").as("high"))

  /** All rows of the keys that come from a row on. */
  def lastKeysOnly(rows: DataFrame, from: Long): DataFrame =
    rows.join(rows.filter(col("number") >= from).select("key").distinct(), Seq("key"), "leftsemi")
}

/** Rows whose id has not come before, each id remembered for as long as `keys` new ones take. */
class Deduplication(keys: Int) extends Work {
  override def closes: Boolean = false
  override def query(rows: Rows): DataFrame =
    rows("ids").withWatermark("time", s"${keys / 3L * 4} milliseconds")
      .dropDuplicatesWithinWatermark("id").select("id")
  override def expected(rows: Rows, from: Long): DataFrame = rows("ids", "id").distinct()
}

/** Impressions with their clicks or without any, each held for as long as `keys` of them take. */
class Join(keys: Int) extends Work {
  private def joined(impressions: DataFrame, clicks: DataFrame): DataFrame =
    impressions.join(clicks, expr(
      s"id = of AND clicked >= shown AND clicked <= shown + INTERVAL $keys MILLISECONDS"), "leftouter")
  override def query(rows: Rows): DataFrame = joined(
    rows("impressions").withWatermark("shown", "0 seconds"),
    rows("clicks").withWatermark("clicked", "0 seconds"))
  override def expected(rows: Rows, from: Long): DataFrame = joined(rows("impressions"), rows("clicks"))
}

/** Visits by user and session; a session ends where a user stays away for as long as `keys` visits take. */
class Sessions(keys: Int) extends Work {
  private def sessions(visits: DataFrame): DataFrame =
    visits.groupBy(col("user"), session_window(col("time"), s"$keys milliseconds"))
      .agg(count(lit(1)).as("n"))
      .select("user", "session_window.start", "session_window.end", "n")
  override def query(rows: Rows): DataFrame =
    sessions(rows("visits").withWatermark("time", "0 seconds"))
  override def expected(rows: Rows, from: Long): DataFrame = sessions(rows("visits"))
}

/** What the aggregation does and a list of the last values, by transformWithState. */
object Transform extends Work {
  override def mode: String = "update"
  override def closes: Boolean = false
  override def query(rows: Rows): DataFrame =
    rows("draw", "key", "value").as[Valued](Encoders.product)
      .groupByKey(_.key)(Encoders.scalaLong)
      .transformWithState(new Summing, TimeMode.None(), OutputMode.Update())(Encoders.product[Summed])
      .toDF()
  override def expected(rows: Rows, from: Long): DataFrame =
    Aggregation.lastKeysOnly(rows("draw"), from).groupBy("key").agg(
      count(lit(1)).as("n"), min("value").as("low"), max("value").as("high"),
      (count(lit(1)) % Summing.kept).as("recent"))
}

case class Valued(key: Long, value: Long)
case class Summary(n: Long, low: Long, high: Long)
case class Summed(key: Long, n: Long, low: Long, high: Long, recent: Long)

/**
 * Keeps a summary of each key and a list of its values, which is cleared when it has eight. So a
 * key's batch is a value read and written, and a list appended to or put anew, and counted.
 */
class Summing extends StatefulProcessor[Long, Valued, Summed] {
  @transient private var summary: ValueState[Summary] = _
  @transient private var recent: ListState[Long] = _

  override def init(outputMode: OutputMode, timeMode: TimeMode): Unit = {
    summary = getHandle.getValueState("summary", Encoders.product[Summary], TTLConfig.NONE)
    recent = getHandle.getListState("recent", Encoders.scalaLong, TTLConfig.NONE)
  }

  override def handleInputRows(
      key: Long, rows: Iterator[Valued], timers: TimerValues): Iterator[Summed] = {
    val values = rows.map(_.value).toArray
    val old = if (summary.exists()) summary.get() else Summary(0, Long.MaxValue, Long.MinValue)
    val now = Summary(old.n + values.length, Math.min(old.low, values.min), Math.max(old.high, values.max))
    summary.update(now)
    val left = (now.n % Summing.kept).toInt
    if (now.n / Summing.kept == old.n / Summing.kept) recent.appendList(values)
    else if (left > 0) recent.put(values.takeRight(left))
    else recent.clear()
    Iterator(Summed(key, now.n, now.low, now.high, recent.get().size.toLong))
  }
}

object Summing {
  val kept = 8L
}
