package io.quire.bench

import scala.collection.mutable.ArrayBuffer
import scala.util.Random

import io.quire.bench.Main.{check, emit, hadoopConf, median, provider, seconds, stateFolder}
import org.apache.hadoop.fs.{FileStatus, Path}

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.state.{StateStore, StateStoreProvider}
import org.apache.spark.sql.types.{LongType, StructType}

/** Benchmarks of providers without a query: few changes, restart, many stores. */
object Stores {
  private val keySchema = new StructType().add("key", LongType)
  private val valueSchema =
    new StructType().add("a", LongType).add("b", LongType).add("c", LongType)
  private val fillRows = 1000000
  private val deltas = 5
  private val loads = 3

  private def open(options: Arguments, partition: Int = 0): StateStoreProvider =
    provider(options, keySchema, valueSchema, partition)

  /** What a store holds: each key has the number of the last version that changed it. */
  private class Model(val keys: Int) {
    private val keyProjection = UnsafeProjection.create(keySchema)
    private val valueProjection = UnsafeProjection.create(valueSchema)
    private val changes = new Array[Int](keys)
    var version = 0

    // Both rows are overwritten by the next call.
    def key(i: Int): UnsafeRow = keyProjection(InternalRow(i * 0x9E3779B97F4A7C15L))
    def value(i: Int): UnsafeRow =
      valueProjection(InternalRow(i.toLong, changes(i).toLong, (i ^ changes(i)).toLong))

    /** The next version: all that follows is work on a store. */
    def change(numbers: Iterable[Int]): Iterable[Int] = {
      version += 1
      numbers.foreach(changes(_) = version)
      numbers
    }

    /** All keys, so many a version, then if asked some versions that change 2 % each. */
    def history(changesToo: Boolean): Iterator[Iterable[Int]] = {
      val all = (0 until keys).grouped(fillRows)
      all ++ (if (changesToo) (0 until deltas).iterator.map(_ until keys by 50) else Nil)
    }

    def verify(store: StateStore): Unit = {
      var count = 0
      store.iterator().foreach { pair =>
        val i = pair.value.getLong(0).toInt
        check(i >= 0 && i < keys && pair.key == key(i) && pair.value == value(i),
          s"record $i has another key or value than was put")
        count += 1
      }
      check(count == keys, s"there are $count keys instead of $keys")
    }
  }

  /** A store and its model. */
  private class Bench(options: Arguments, val keys: Int, partition: Int = 0) {
    private val stores = open(options, partition)
    private val model = new Model(keys)

    /** Puts records and commits; gives the seconds that this took, opening included. */
    def put(numbers: Iterable[Int], snapshot: Boolean = false): Double = {
      val before = model.version
      model.change(numbers)
      seconds {
        val store = stores.getStore(before, None, snapshot, false)
        numbers.foreach(i => store.put(model.key(i), model.value(i)))
        store.commit()
      }
    }

    /** All keys, with a full copy of them in the checkpoint; then changes, if asked. */
    def fill(changesToo: Boolean): Unit = {
      val versions = (keys + fillRows - 1) / fillRows
      model.history(changesToo).foreach { numbers =>
        put(numbers, snapshot = model.version == versions - 1)
        if (model.version == versions) stores.doMaintenance()
      }
    }

    def close(): Unit = {
      val store = stores.getStore(model.version)
      model.verify(store)
      store.abort()
      stores.close()
    }
  }

  /** Batches of few changes on a small and on a large state, in turn. */
  def fewChanges(options: Arguments): Unit = {
    val (size, changed) = (options.int("size"), options.int("changed"))
    val random = new Random(options.int("seed"))
    val states = Seq(options.int("small"), size).zipWithIndex.map { case (keys, i) =>
      new Bench(options, keys, i)
    }
    states.foreach(_.fill(changesToo = false))
    val times = states.map(_ => ArrayBuffer[Double]())
    val end = System.nanoTime() + (options.text("seconds").toDouble * 1e9).toLong
    def batches = times.head.size
    while (batches < 4 || (batches < options.int("batches") && System.nanoTime() < end)) {
      states.zip(times).foreach { case (state, mine) =>
        mine += state.put(Seq.fill(changed)(random.nextInt(state.keys)).distinct)
      }
    }
    // The first half warms up.
    val Seq(small, large) = times.map(mine => median(mine.drop(mine.size / 2).toSeq))
    val call = s"getStore, $changed puts, commit"
    emit("a batch on the small state", small * 1e3, "ms", changed, call)
    emit("a batch on the large state", large * 1e3, "ms", changed, call)
    emit("large over small", large / small, "ratio", changed, call)
    states.foreach(_.close())
  }

  /** The checkpoint that `restartLoad` reads in another process. */
  def restartFill(options: Arguments): Unit = {
    val state = new Bench(options, options.int("size"))
    state.fill(changesToo = true)
    state.close()
  }

  /** New providers load the last version, the first of them in a JVM that has loaded none yet. */
  def restartLoad(options: Arguments): Unit = {
    val model = new Model(options.int("size"))
    model.history(changesToo = true).foreach(model.change)
    val times = (0 until loads).map { load =>
      var stores: StateStoreProvider = null
      var store: StateStore = null
      val time = seconds {
        stores = open(options)
        store = stores.getStore(model.version)
        check(store.get(model.key(0)) == model.value(0), "the first record has another value")
      }
      if (load == loads - 1) model.verify(store)
      store.abort()
      stores.close()
      time
    }
    val call = "createAndInit, getStore, one get"
    emit("first load of a JVM", times.head, "s", model.keys, call)
    emit("later loads", median(times.tail), "s", model.keys, call)
    // On a local disk there is nothing but the page cache to read from.
    val files = if (options.text("folder").contains("://")) filesOfLastVersion(options) else Nil
    if (files.nonEmpty) {
      val reads = (0 until loads).map(_ => seconds(files.foreach(read)))
      emit("plain read", median(reads), "s", model.keys, "the bytes of the base and of what follows it, one by one")
      emit("bytes read", files.map(_.getLen).sum / 1e6, "MB", model.keys, "base and commits")
    }
  }

  /** Quire's newest base and the commits after it; none of other providers. */
  private def filesOfLastVersion(options: Arguments): Seq[FileStatus] = {
    val folder = new Path(stateFolder(options), "0/0")
    val files = folder.getFileSystem(hadoopConf).listStatus(folder).toSeq
    def version(file: FileStatus): Long = file.getPath.getName.takeWhile(_.isDigit).toLong
    val ours = files.filter(_.getPath.getName.matches("\\d+.*\\.q[a-z]+"))
    val bases = ours.filter(_.getPath.getName.endsWith(".qbase")).map(version)
    if (bases.isEmpty) Nil
    else ours.filter(file => version(file) > bases.max ||
      version(file) == bases.max && !file.getPath.getName.endsWith(".qdelta"))
  }

  private def read(file: FileStatus): Unit = {
    val buffer = new Array[Byte](1 << 20)
    val in = file.getPath.getFileSystem(hadoopConf).open(file.getPath)
    try while (in.read(buffer) >= 0) {} finally in.close()
  }

  /** Many stores with nothing in them, all open at once. */
  def manyStores(options: Arguments): Unit = {
    val count = options.int("size")
    open(options, count).getStore(0).abort() // what is loaded but once for all stores
    val before = Held.now()
    val stores = ArrayBuffer[(StateStoreProvider, StateStore)]()
    val opening = seconds {
      (0 until count).foreach { partition =>
        val opened = open(options, partition)
        stores += opened -> opened.getStore(0)
      }
    }
    val held = Held.now() - before
    val committing = seconds(stores.foreach(_._2.commit()))
    val again = seconds(stores.foreach(_._1.getStore(1).commit()))
    def each(measure: String, value: Double, unit: String, call: String): Unit =
      emit(measure, value / count, unit, count, call)
    each("time to open one", opening * 1e3, "ms", "createAndInit, getStore")
    each("first commit of one", committing * 1e3, "ms", "commit of nothing")
    each("next commit of one", again * 1e3, "ms", "getStore, commit of nothing")
    each("memory of one", (held.heap + held.outside) / 1e3, "KB", "heap and resident besides")
    each("address space of one", held.addresses / 1e3, "KB", "VmSize")
    each("threads of one", held.threads.toDouble, "threads", "/proc/self/status")
    each("file handles of one", held.files.toDouble, "files", "/proc/self/fd")
  }
}
