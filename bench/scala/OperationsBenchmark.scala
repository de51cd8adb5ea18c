package io.quire.bench

import scala.collection.mutable
import scala.collection.mutable.ArrayBuffer
import scala.util.Random

import io.quire.bench.Main.{check, emit, median, provider, seconds}

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.state.{StateStore, UnsafeRowPair}
import org.apache.spark.sql.types.{IntegerType, StructType, TimestampType}

/**
 * The shape of Spark's own StateStoreBasicOperationsBenchmark: a committed state of so many rows
 * with keys (int, timestamp) and values (int); each pass opens that version, does one kind of
 * operation once for each row, and aborts. Opening and aborting are not timed. Neither is the first
 * pass of each kind: what it leaves is compared with a model.
 */
object Operations {
  private val keySchema = new StructType().add("key1", IntegerType).add("key2", TimestampType)
  private val valueSchema = new StructType().add("value", IntegerType)
  private val keyProjection = UnsafeProjection.create(keySchema)
  private val valueProjection = UnsafeProjection.create(valueSchema)
  private val rates = Seq(100, 50, 10, 0)
  private val valuesPerKey = 10
  private val passesMax = 1000

  /** A key and its values: one, or for merges several. */
  private type Record = (UnsafeRow, Seq[UnsafeRow])
  private type Model = mutable.HashMap[RowBytes, Seq[RowBytes]]

  def run(options: Arguments): Unit = {
    runSingle(options)
    if (options.flag("merges")) runMerges(options)
  }

  private def runSingle(options: Arguments): Unit = {
    val rows = options.int("size")
    val random = new Random(options.int("seed"))
    val held = records(0, rows, 1, random)
    val bench = new Bench(options, held, multipleValues = false)

    for (rate <- rates) {
      val mixed = mixture(held, rate, 1, random)
      bench.measure(s"put, $rate % known keys", "put", rows) { store =>
        mixed.foreach { case (key, values) => store.put(key, values.head) }
      } { model =>
        mixed.foreach { case (key, values) => model(RowBytes(key)) = values.map(RowBytes(_)) }
      }
    }
    for (rate <- rates) {
      val mixed = mixture(held, rate, 1, random)
      val sum = mixed.collect { case (key, values) if bench.model.contains(RowBytes(key)) =>
        values.head.getInt(0).toLong
      }.sum
      bench.measure(s"get, $rate % known keys", "get", rows) { store =>
        var found = 0L
        mixed.foreach { case (key, _) =>
          val value = store.get(key)
          if (value != null) found += value.getInt(0)
        }
        check(found == sum, s"the values read add up to $found instead of $sum")
      } { _ => () }
    }
    for (rate <- rates) {
      val mixed = mixture(held, rate, 1, random)
      bench.measure(s"delete, $rate % known keys", "remove", rows) { store =>
        mixed.foreach { case (key, _) => store.remove(key) }
      } { model => mixed.foreach { case (key, _) => model.remove(RowBytes(key)) } }
    }
    for (rate <- rates) {
      val end = rows * rate / 100 * 1000L
      bench.measure(s"evict, $rate % of all", "iterator, remove", rows) { store =>
        store.iterator().foreach { pair =>
          if (pair.key.getLong(1) < end) store.remove(pair.key)
        }
      } { model =>
        held.foreach { case (key, _) => if (key.getLong(1) < end) model.remove(RowBytes(key)) }
      }
    }
    bench.close()
  }

  private def runMerges(options: Arguments): Unit = {
    val random = new Random(options.int("seed"))
    val held = records(0, options.int("size"), valuesPerKey, random)
    val bench = new Bench(options, held, multipleValues = true)
    for (rate <- rates) {
      val mixed = mixture(held, rate, valuesPerKey, random)
      bench.measure(s"merge, $rate % known keys", "merge", mixed.size * valuesPerKey) { store =>
        mixed.foreach { case (key, values) => values.foreach(store.merge(key, _)) }
      } { model =>
        mixed.foreach { case (key, values) =>
          model(RowBytes(key)) = model.getOrElse(RowBytes(key), Nil) ++ values.map(RowBytes(_))
        }
      }
    }
    bench.close()
  }

  /** A store with records in it, and the model of what it holds. */
  private class Bench(options: Arguments, held: Seq[Record], multipleValues: Boolean) {
    private val stores = provider(options, keySchema, valueSchema,
      operator = if (multipleValues) 1 else 0, multipleValues = multipleValues)
    private val budget = options.text("seconds").toDouble
    private val version = {
      val store = stores.getStore(0)
      held.foreach { case (key, values) =>
        if (multipleValues) values.foreach(store.merge(key, _)) else store.put(key, values.head)
      }
      store.commit()
    }
    val model: Model = mutable.HashMap.from(
      held.map { case (key, values) => RowBytes(key) -> values.map(RowBytes(_)) })

    /** Times `work`; `expected` does the same to a model. */
    def measure(name: String, call: String, operations: Int)
        (work: StateStore => Unit)(expected: Model => Unit): Unit = {
      val first = stores.getStore(version)
      work(first)
      val copy = model.clone()
      expected(copy)
      compare(name, first, copy)
      first.abort()

      val times = ArrayBuffer[Double]()
      val end = System.nanoTime() + (budget * 1e9).toLong
      while (times.size < 2 || (times.size < passesMax && System.nanoTime() < end)) {
        val store = stores.getStore(version)
        times += seconds(work(store))
        store.abort()
      }
      // The first half warms up.
      val time = median(times.drop(times.size / 2).toSeq)
      emit(name, time / operations * 1e9, "ns", operations, call)
    }

    private def compare(name: String, store: StateStore, expected: Model): Unit = {
      val found: Model = mutable.HashMap.empty
      def all: Iterator[UnsafeRowPair] =
        if (multipleValues) store.iteratorWithMultiValues() else store.iterator()
      all.foreach { pair =>
        val key = RowBytes(pair.key)
        found(key) = found.getOrElse(key, Nil) :+ RowBytes(pair.value)
      }
      check(found == expected,
        s"$name left ${found.size} keys, or their values, other than the ${expected.size} expected")
    }

    /** Ends the store, after a look at whether all that was aborted has left no trace. */
    def close(): Unit = {
      val store = stores.getStore(version)
      compare("abort", store, model)
      store.abort()
      stores.close()
    }
  }

  /** Records from a number on: keys in no order and all different, times one millisecond apart. */
  private def records(from: Int, count: Int, values: Int, random: Random): Seq[Record] =
    (from until from + count).map { i =>
      val key = keyProjection(InternalRow(i * 0x9E3779B1, (i % count) * 1000L)).copy()
      key -> Seq.fill(values)(valueProjection(InternalRow(random.nextInt(Int.MaxValue))).copy())
    }

  /** As many records as there are: `rate` percent of those, new ones for the rest. */
  private def mixture(held: Seq[Record], rate: Int, values: Int, random: Random): Seq[Record] = {
    val known = held.size * rate / 100
    random.shuffle(
      random.shuffle(held).take(known) ++ records(held.size, held.size - known, values, random))
  }
}
