package io.quire.bench

import scala.collection.mutable.ArrayBuffer
import scala.util.Random

import io.quire.bench.Main.{bytesIn, check, emit, hadoopConf, median, provider, seconds, stateFolder}

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.state.StateStore
import org.apache.spark.sql.types.{LongType, StructType}

/** What a commit costs and writes, by the share of a state of wide rows that it updates. */
object Commits {
  private val columns = 40
  private val keySchema = new StructType().add("key", LongType)
  private val valueSchema =
    (0 until columns).foldLeft(new StructType)((schema, i) => schema.add(s"c$i", LongType))
  private val fillRows = 250000

  def run(options: Arguments): Unit = {
    val keys = options.int("size")
    val repeats = options.int("repeats")
    val random = new Random(options.int("seed"))
    val folder = stateFolder(options)
    folder.getFileSystem(hadoopConf).mkdirs(folder)
    val stores = provider(options, keySchema, valueSchema)
    val keyProjection = UnsafeProjection.create(keySchema)
    val valueProjection = UnsafeProjection.create(valueSchema)
    val changes = new Array[Int](keys)
    var version = 0

    def key(i: Int): UnsafeRow = keyProjection(InternalRow(i * 0x9E3779B97F4A7C15L))
    // An update changes two columns of forty: a count and a sum, say.
    def value(i: Int): UnsafeRow = valueProjection(InternalRow.fromSeq((0 until columns).map { c =>
      if (c == 3) changes(i).toLong else if (c == 17) changes(i) * 31L + i else i.toLong * c
    }))

    /**
     * The seconds of a batch and of its commit alone, and the bytes that it left in the checkpoint.
     * Spark's own stores write while rows are put, so that their commits have little left to do.
     */
    def update(numbers: Iterable[Int]): (Double, Double, Long) = {
      val before = bytesIn(folder)
      var commit = 0.0
      val rows = numbers.map { i =>
        changes(i) += 1
        (key(i).copy(), value(i).copy())
      }.toVector
      val batch = seconds {
        val store = stores.getStore(version)
        rows.foreach { case (key, value) => store.put(key, value) }
        commit = seconds(store.commit())
      }
      version += 1
      (batch, commit, bytesIn(folder) - before)
    }

    (0 until keys).grouped(fillRows).foreach(update)
    def share(rate: Double): Iterable[Int] =
      if (rate >= 1) 0 until keys else random.shuffle((0 until keys).toVector).take((keys * rate).toInt)
    Seq(0.001, 0.01, 0.1, 1.0).foreach { rate =>
      val found = ArrayBuffer[(Double, Double, Long)]()
      (0 to repeats).foreach(_ => found += update(share(rate)))
      val (batches, commits, bytes) = found.tail.unzip3 // the first warms up
      val count = (keys * rate).toLong
      val call = s"getStore, ${rate * 100} % of the keys updated, commit"
      emit(s"${rate * 100} %: batch", median(batches.toSeq) * 1e3, "ms", count, call)
      emit(s"${rate * 100} %: commit alone", median(commits.toSeq) * 1e3, "ms", count, call)
      emit(s"${rate * 100} %: written", median(bytes.map(_.toDouble).toSeq) / 1e6, "MB", count, call)
    }
    verify(stores.getStore(version), keys, value)
  }

  private def verify(store: StateStore, keys: Int, value: Int => UnsafeRow): Unit = {
    var count = 0
    store.iterator().foreach { pair =>
      val i = pair.value.getLong(1).toInt
      if (count % 1000 == 0) check(pair.value == value(i), s"record $i has another value than was put")
      count += 1
    }
    check(count == keys, s"there are $count keys instead of $keys")
    store.abort()
  }
}
