package io.quire.bench

import java.util.{Map => JavaMap, Set => JavaSet}
import java.util.EnumSet

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow
import org.apache.spark.sql.connector.catalog.{SupportsRead, Table, TableCapability, TableProvider}
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming._
import org.apache.spark.sql.execution.streaming.runtime.LongOffset
import org.apache.spark.sql.types.{DataType, LongType, StructType, TimestampType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** What a column has in row number i, in the form that Spark keeps inside. */
trait Column extends Serializable {
  def apply(i: Long): Any
}

/**
 * A kind of rows, each made from its number alone: whoever reads them, in whatever parts, streamed
 * or at once, finds the same. Rows from number `last` on are there to close all that is open in a
 * query: they come ten days after the others and have nothing to do with them.
 */
abstract class Generated(last: Long) extends Serializable {
  def columns: Seq[(String, DataType, Column)]
  /** Whether there is a row of this number. */
  def has(i: Long): Boolean = true

  protected def closes(i: Long): Boolean = i >= last

  /** The time of row i, which came so many microseconds after the first. */
  protected def time(i: Long, micros: Long): Long =
    Generated.startMicros + micros + (if (closes(i)) Generated.tenDaysMicros else 0L)

  protected def long(name: String)(value: Long => Long): (String, DataType, Column) =
    (name, LongType, (i: Long) => value(i))
  protected def timestamp(name: String)(value: Long => Long): (String, DataType, Column) =
    (name, TimestampType, (i: Long) => value(i))
}

object Generated {
  private val startMicros = 1700000000L * 1000000
  private val tenDaysMicros = 10L * 24 * 3600 * 1000000

  /** The rows that a source's options ask for. */
  def apply(options: CaseInsensitiveStringMap): Generated = {
    val random = new Mixed(options.getLong("seed", 0))
    val (keys, last) = (options.getLong("keys", 1), options.getLong("last", Long.MaxValue))
    options.get("rows") match {
      case "draw" => new Draw(random, keys, last)
      case "ids" => new Ids(random, keys, last)
      case "impressions" => new Impressions(last)
      case "clicks" => new Clicks(random, keys, last)
      case "visits" => new Visits(random, keys, last)
      case kind => new Events(random, kind, options.getLong("rate", 1), last)
    }
  }
}

/** Numbers that look random: the same for the same seed, row and purpose. */
class Mixed(seed: Long) extends Serializable {
  private def mix(value: Long): Long = {
    var x = value * 0x9E3779B97F4A7C15L
    x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L
    x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL
    x ^ (x >>> 31)
  }
  private val start = mix(seed + 1)

  /** A number from 0 until `bound`. */
  def below(bound: Long, i: Long, purpose: Int = 0): Long =
    (mix(mix(i + start) + purpose) >>> 1) % bound
}

/** A key drawn from so many, and a value below 1024. */
class Draw(random: Mixed, keys: Long, last: Long) extends Generated(last) {
  override def columns: Seq[(String, DataType, Column)] = Seq(
    long("number")(i => i),
    long("key")(i => random.below(keys, i)),
    long("value")(i => random.below(1024, i, 1)))
}

/**
 * Ids, one a millisecond, three in four of them new; the others were the number of one of the
 * `keys / 4` rows before, so that all that have the same id come within that time.
 */
class Ids(random: Mixed, keys: Long, last: Long) extends Generated(last) {
  private val span = Math.max(keys / 4, 1)
  override def columns: Seq[(String, DataType, Column)] = Seq(
    long("id")(i =>
      if (random.below(4, i) > 0) i else Math.max(0, i - 1 - random.below(span, i, 1))),
    timestamp("time")(i => time(i, i * 1000)))
}

/** One a millisecond, each with an id of its own. */
class Impressions(last: Long) extends Generated(last) {
  override def columns: Seq[(String, DataType, Column)] = Seq(
    long("id")(i => if (closes(i)) -1 - i else i),
    timestamp("shown")(i => time(i, i * 1000)))
}

/** One a millisecond; three in four are of one of the `keys / 2` impressions before, others of none. */
class Clicks(random: Mixed, keys: Long, last: Long) extends Generated(last) {
  private val span = Math.max(keys / 2, 1)
  override def columns: Seq[(String, DataType, Column)] = Seq(
    long("of")(i =>
      if (closes(i) || random.below(4, i) == 0) Long.MinValue + i
      else Math.max(0, i - random.below(span, i, 1))),
    timestamp("clicked")(i => time(i, i * 1000)))
}

/** One a millisecond by one of `keys` users; after every fourth the longest-known user leaves for a new one. */
class Visits(random: Mixed, keys: Long, last: Long) extends Generated(last) {
  override def columns: Seq[(String, DataType, Column)] = Seq(
    long("user")(i => if (closes(i)) -1 - i else i / 4 + random.below(keys, i)),
    timestamp("time")(i => time(i, i * 1000)))
}

/**
 * A source that makes its rows as they are read. `rows` says which, `columns` which columns of
 * them, `ends` where the batches of a stream end; read at once, it has all rows up to `last`.
 */
class GeneratedSource extends TableProvider {
  override def inferSchema(options: CaseInsensitiveStringMap): StructType =
    GeneratedSource.columns(options).foldLeft(new StructType) { case (schema, (name, kind, _)) =>
      schema.add(name, kind, false)
    }

  override def getTable(
      schema: StructType, partitioning: Array[Transform], options: JavaMap[String, String]): Table =
    new Table with SupportsRead {
      override def name(): String = "generated"
      override def schema(): StructType =
        inferSchema(new CaseInsensitiveStringMap(options))
      override def capabilities(): JavaSet[TableCapability] =
        EnumSet.of(TableCapability.MICRO_BATCH_READ, TableCapability.BATCH_READ)
      override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder =
        () => new GeneratedScan(schema(), options)
    }
}

object GeneratedSource {
  private val partitions = 2

  def columns(options: CaseInsensitiveStringMap): Seq[(String, DataType, Column)] = {
    val all = Generated(options).columns
    Option(options.get("columns")).fold(all)(_.split(",").toSeq.map(name => all.find(_._1 == name).get))
  }

  def split(options: CaseInsensitiveStringMap, from: Long, to: Long): Array[InputPartition] = {
    val bounds = (0 to partitions).map(i => from + (to - from) * i / partitions)
    bounds.zip(bounds.tail).map { case (low, high) =>
      GeneratedPartition(options.asCaseSensitiveMap(), low, high): InputPartition
    }.toArray
  }
}

class GeneratedScan(schema: StructType, options: CaseInsensitiveStringMap) extends Scan {
  override def readSchema(): StructType = schema

  override def toBatch(): Batch = new Batch {
    override def planInputPartitions(): Array[InputPartition] =
      GeneratedSource.split(options, 0, options.getLong("last", 0))
    override def createReaderFactory(): PartitionReaderFactory = GeneratedReaderFactory
  }

  override def toMicroBatchStream(checkpoint: String): MicroBatchStream =
    new MicroBatchStream with SupportsAdmissionControl {
      private val ends = options.get("ends").split(",").map(_.toLong)
      override def initialOffset(): Offset = LongOffset(0)
      override def deserializeOffset(json: String): Offset = LongOffset(json.toLong)
      override def latestOffset(): Offset = LongOffset(ends.last)
      override def latestOffset(start: Offset, limit: ReadLimit): Offset = {
        val from = start.asInstanceOf[LongOffset].offset
        LongOffset(ends.find(_ > from).getOrElse(from))
      }
      override def commit(end: Offset): Unit = {}
      override def stop(): Unit = {}
      override def planInputPartitions(start: Offset, end: Offset): Array[InputPartition] =
        GeneratedSource.split(options, start.json().toLong, end.json().toLong)
      override def createReaderFactory(): PartitionReaderFactory = GeneratedReaderFactory
    }
}

case class GeneratedPartition(options: JavaMap[String, String], from: Long, to: Long)
  extends InputPartition

object GeneratedReaderFactory extends PartitionReaderFactory {
  override def createReader(partition: InputPartition): PartitionReader[InternalRow] = {
    val part = partition.asInstanceOf[GeneratedPartition]
    val options = new CaseInsensitiveStringMap(part.options)
    new PartitionReader[InternalRow] {
      private val rows = Generated(options)
      private val columns = GeneratedSource.columns(options).map(_._3).toArray
      private val row = new GenericInternalRow(columns.length)
      private var at = part.from - 1

      override def next(): Boolean = {
        at += 1
        while (at < part.to && !rows.has(at)) at += 1
        at < part.to
      }
      override def get(): InternalRow = {
        var i = 0
        while (i < columns.length) {
          row.update(i, columns(i)(at))
          i += 1
        }
        row
      }
      override def close(): Unit = {}
    }
  }
}
