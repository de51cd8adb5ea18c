package org.apache.spark.sql.execution.streaming.state

import java.io.File
import java.nio.file.Files
import java.util.UUID
import java.util.concurrent.{Callable, CountDownLatch, Executors, TimeUnit}

import scala.util.Random

import io.quire.spark.{LookUps, QuireStateStoreProvider}
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path
import org.scalatest.BeforeAndAfter
import org.scalatest.time.SpanSugar._

import org.apache.spark.TaskContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager.CancellableFSDataOutputStream
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager
import org.apache.spark.sql.execution.streaming.runtime.StreamExecution
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.test.SharedSparkSession
import org.apache.spark.sql.types.{IntegerType, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String
import org.apache.spark.util.Utils

/** What Quire's provider promises beyond the contract, and what once went wrong in it. */
class QuireProviderSuite extends SharedSparkSession with BeforeAndAfter {
  import StateStoreTestsHelper._

  private val keySchema = new StructType().add("key1", StringType, true).add("key2", IntegerType, true)
  private val valueSchema = new StructType().add("value", IntegerType, true)
  private val prefix = PrefixKeyScanStateEncoderSpec(keySchema, 1)

  before {
    spark.streams.stateStoreCoordinator
  }

  private def provider(
      folder: String,
      spec: KeyStateEncoderSpec,
      settings: Map[String, String],
      manager: Option[Class[_]] = None,
      values: StructType = valueSchema): QuireStateStoreProvider = {
    val conf = spark.sessionState.conf.clone()
    settings.foreach { case (name, value) => conf.setConfString(name, value) }
    val hadoopConf = new Configuration
    hadoopConf.set(StreamExecution.RUN_ID_KEY, UUID.randomUUID().toString)
    manager.foreach(made => hadoopConf.set(SQLConf.STREAMING_CHECKPOINT_FILE_MANAGER_CLASS.parent.key, made.getName))
    val made = new QuireStateStoreProvider
    made.init(
      StateStoreId(folder, 0, 0), keySchema, values, spec, false, new StateStoreConf(conf),
      hadoopConf, false, None)
    made
  }

  private def withProvider[T](
      folder: String,
      spec: KeyStateEncoderSpec = NoPrefixKeyStateEncoderSpec(keySchema),
      settings: Map[String, String] = Map.empty,
      manager: Option[Class[_]] = None,
      values: StructType = valueSchema)(body: QuireStateStoreProvider => T): T = {
    val made = provider(folder, spec, settings, manager, values)
    try body(made) finally made.close()
  }

  private def commit(
      from: QuireStateStoreProvider, version: Long, force: Boolean = false)(
      rows: ((String, Int), Int)*): Unit = {
    val store = from.getStore(version, None, force)
    rows.foreach { case ((a, b), value) => put(store, a, b, value) }
    store.commit()
  }

  private def rowsOf(from: QuireStateStoreProvider, version: Long): Set[((String, Int), Int)] = {
    val store = from.getReadStore(version, None)
    try rowPairsToDataSet(store.iterator()) finally store.release()
  }

  private def files(folder: String): File = new File(folder, "0/0")

  /** The file of a version of which there is one. */
  private def file(folder: String, version: Int, suffix: String): File = {
    val found = files(folder).listFiles().filter(_.getName.matches(s"${version}_[^.]+\\.$suffix"))
    assert(found.length == 1)
    found.head
  }

  private def metric(store: StateStore, name: String): Long =
    store.metrics.customMetrics.find(_._1.name == name).map(_._2).get

  /** Bytes that the pages of all stores hold; the compiler lets nobody else ask. */
  private def bytesUsed: Long = {
    val memory = Class.forName("io.quire.spark.QuireMemory$")
    memory.getMethod("bytesUsed").invoke(memory.getField("MODULE$").get(null)).asInstanceOf[Long]
  }

  test("scans read to their end need no close") {
    withTempDir { dir =>
      withProvider(dir.toString, prefix) { provider =>
        val store = provider.getStore(0)
        // More rows than are copied at once, so that each scan pins a version of its own; there is
        // room for fewer pins than this.
        (0 until 100).foreach(put(store, "a", _, 0))
        (0 until 1000).foreach { round =>
          val rows = store.prefixScan(dataToPrefixKeyRow("a"))
          assert(rows.size == 100)
          put(store, "a", round % 100, round)
        }
        store.commit()
        assert(metric(store, "quireSnapshots") <= 2)
      }
    }
  }

  test("puts that wait are seen by whoever asks for their key") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        val store = provider.getStore(0)
        val random = new Random(1)
        val model = scala.collection.mutable.Map[(String, Int), Int]()
        (0 until 20000).foreach { round =>
          val key = (random.nextInt(20).toString, random.nextInt(20))
          random.nextInt(4) match {
            case 0 => assert(get(store, key._1, key._2) == model.get(key))
            case 1 =>
              assert(store.keyExists(dataToKeyRow(key._1, key._2)) == model.contains(key))
            case 2 if round % 7 == 0 =>
              remove(store, _ == key)
              model -= key
            case _ =>
              put(store, key._1, key._2, round)
              model(key) = round
          }
        }
        store.commit()
        assert(rowsOf(provider, 1) == model.toSet)
      }
    }
  }

  test("many keys are looked up at once, as one after the other") {
    val random = new Random(2)
    val ordered = RangeKeyScanStateEncoderSpec(keySchema, Seq(1))
    for (spec <- Seq(NoPrefixKeyStateEncoderSpec(keySchema), prefix, ordered)) withTempDir { dir =>
      withProvider(dir.toString, spec) { provider =>
        def compare(store: ReadStateStore, model: collection.Map[(String, Int), Int]): Unit = {
          val asked = Seq.fill(random.nextInt(200))((random.nextInt(20).toString, random.nextInt(20)))
          val keys = asked.map { case (a, b) => dataToKeyRow(a, b).copy() }.toArray
          // All are looked at when the last is there.
          val found = store.multiGet(keys, StateStore.DEFAULT_COL_FAMILY_NAME).toArray
          assert(found.toSeq.map(row => Option(row).map(valueRowToData)) == asked.map(model.get))
        }
        val model = scala.collection.mutable.Map[(String, Int), Int]()
        (0 until 5).foreach { version =>
          val store = provider.getStore(version)
          (0 until 100).foreach { round =>
            val key = (random.nextInt(20).toString, random.nextInt(20))
            put(store, key._1, key._2, round)
            model(key) = round
            if (round % 10 == 0) compare(store, model)
          }
          store.commit()
          val reader = provider.getReadStore(version + 1, None)
          compare(reader, model)
          reader.release()
        }
      }
    }
  }

  private val texts = new StructType().add("value", StringType, true)
  private val textRow = UnsafeProjection.create(texts)
  private def textOf(n: Int, bytes: Int): UnsafeRow =
    textRow(InternalRow(UTF8String.fromString((n.toString + " ") * (bytes / 5 + 1)))).copy()

  test("rows that were looked up together stay as they are while others are written") {
    // Values that fit into a page, that grow out of their places, and that take several pages.
    for (sizes <- Seq((40, 40), (40, 700), (700, 40), (700, 9000), (9000, 9000))) withTempDir { dir =>
      withProvider(dir.toString, values = texts) { provider =>
        val keys = (0 until 500).map(n => dataToKeyRow(n.toString, n).copy()).toArray
        val first = provider.getStore(0)
        keys.indices.foreach(n => first.put(keys(n), textOf(n, sizes._1)))
        first.commit()
        val reader = provider.getReadStore(1, None)
        // Some before the store is written, which is when the pages are held for good.
        var early = LookUps.some(reader, keys.take(100), 0)
        var from = 0
        val store = provider.upgradeReadStoreToWriteStore(reader, 1)
        keys.indices.foreach { n =>
          // The row of a key is read before the key is written, as aggregations do.
          if (n == from + early.length) {
            from = n
            early = LookUps.some(reader, keys.slice(n, n + 64), 0)
          }
          assert(early(n - from) == textOf(n, sizes._1), s"row $n of $sizes")
          store.put(keys(n), textOf(-n, sizes._2))
        }
        store.commit()
        val after = provider.getReadStore(2, None)
        val found = after.multiGet(keys, StateStore.DEFAULT_COL_FAMILY_NAME).toArray
        keys.indices.foreach(n => assert(found(n) == textOf(-n, sizes._2), s"row $n of $sizes"))
        after.release()
      }
    }
  }

  test("large values that are looked up together do not all lie in the heap") {
    withTempDir { dir =>
      withProvider(dir.toString, values = texts) { provider =>
        val keys = (0 until 64).map(n => dataToKeyRow(n.toString, n).copy()).toArray
        val store = provider.getStore(0)
        keys.indices.foreach(n => store.put(keys(n), textOf(n, if (n % 2 == 0) 100000 else 100)))
        store.commit()
        val reader = provider.getReadStore(1, None)
        var from = 0
        var calls = 0
        while (from < keys.length) {
          val some = LookUps.some(reader, keys, from)
          assert(some.filter(_.getBaseObject != null).map(_.getSizeInBytes).sum < 500000)
          some.indices.foreach(i =>
            assert(some(i) == textOf(from + i, if ((from + i) % 2 == 0) 100000 else 100)))
          from += some.length
          calls += 1
        }
        assert(calls > 5 && calls < 16)
        reader.release()
      }
    }
  }

  test("puts that could not be made stop the commit, also if the caller goes on") {
    withTempDir { dir =>
      val limit = Map("spark.sql.streaming.stateStore.quire.memoryLimit" -> "3m")
      withProvider(dir.toString, settings = limit) { provider =>
        commit(provider, 0)(("before", 0) -> 1)
        val store = provider.getStore(1)
        var failures = 0
        (0 until 200000).foreach { i =>
          if (failures < 3) {
            try put(store, "a" * 50, i, i) catch { case _: IllegalStateException => failures += 1 }
          }
        }
        assert(failures == 3)
        intercept[Exception](store.commit())
        store.abort()
        assert(rowsOf(provider, 1) == Set(("before", 0) -> 1))
        commit(provider, 1)(("after", 0) -> 2)
        assert(rowsOf(provider, 2) == Set(("before", 0) -> 1, ("after", 0) -> 2))
      }
    }
  }

  test("a commit that failed is not tried again") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        commit(provider, 0)(("a", 0) -> 1)
        val folder = files(dir.toString)
        val store = provider.getStore(1)
        put(store, "b", 0, 2)
        Utils.deleteRecursively(folder)
        Files.write(folder.toPath, Array[Byte](1)) // a file where the folder must be
        intercept[Exception](store.commit())
        intercept[StateStoreOperationOutOfOrder](store.commit())
        store.abort()
        assert(rowsOf(provider, 1) == Set(("a", 0) -> 1))
      }
    }
  }

  test("a replay does not leap over a version that is missing") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        (0 until 6).foreach(v => commit(provider, v, force = v == 1)(("a", v) -> v))
      }
      val gone = file(dir.toString, 4, "qdelta")
      assert(gone.delete())
      withProvider(dir.toString) { provider =>
        val error = intercept[Exception](provider.replayStateFromSnapshot(2, 6, readOnly = true))
        assert(messages(error).contains(gone.getName))
        assert(messages(intercept[Exception](provider.getStore(6))).contains(gone.getName))
        val store = provider.replayStateFromSnapshot(2, 3, readOnly = true)
        assert(rowPairsToDataSet(store.iterator()).size == 3)
        store.abort()
      }
    }
  }

  private def messages(error: Throwable): String =
    Iterator.iterate(error)(_.getCause).takeWhile(_ != null).map(_.getMessage).mkString("\n")

  test("a load needs nothing that is older than the newest base") {
    withTempDir { dir =>
      val settings = Map("spark.sql.streaming.stateStore.checkpointFormatVersion" -> "2")
      var id: Option[String] = None
      withProvider(dir.toString, settings = settings) { provider =>
        (0 until 6).foreach { v =>
          val store = provider.getStore(v, id, forceSnapshotOnCommit = v == 3)
          put(store, "a", v, v)
          store.commit()
          id = store.getStateStoreCheckpointInfo().stateStoreCkptId
        }
      }
      val old = files(dir.toString).listFiles().filter(_.getName.matches("[123]_.*qdelta"))
      assert(old.length == 3)
      old.foreach(f => Files.write(f.toPath, Array[Byte](1, 2, 3)))
      withProvider(dir.toString, settings = settings) { provider =>
        val store = provider.getStore(6, id)
        assert(rowPairsToDataSet(store.iterator()).size == 6)
        store.abort()
      }
    }
  }

  test("a batch that is run again does not go on from the base of its first run") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        commit(provider, 0)(("a", 0) -> 1)
        commit(provider, 1, force = true)(("first", 0) -> 1)
        assert(file(dir.toString, 2, "qbase").exists())
      }
      withProvider(dir.toString) { provider =>
        commit(provider, 1)(("second", 0) -> 1)
        commit(provider, 2)(("b", 0) -> 1)
      }
      withProvider(dir.toString) { provider =>
        assert(rowsOf(provider, 3) ==
          Set(("a", 0) -> 1, ("second", 0) -> 1, ("b", 0) -> 1))
      }
    }
  }

  test("a store that was loaded empty is its version only once it is committed") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        commit(provider, 0)(("a", 0) -> 1)
        commit(provider, 1)(("b", 0) -> 2)
        val dropped = provider.getStore(2, None, loadEmpty = true)
        put(dropped, "c", 0, 3)
        assert(rowsOf(provider, 2) == Set(("a", 0) -> 1, ("b", 0) -> 2))
        dropped.abort()
        assert(rowsOf(provider, 2) == Set(("a", 0) -> 1, ("b", 0) -> 2))
        val whole = provider.getStore(2, None, loadEmpty = true)
        put(whole, "d", 0, 4)
        whole.commit()
        assert(rowsOf(provider, 3) == Set(("d", 0) -> 4))
        assert(!files(dir.toString).list().exists(_.matches("3_.*qdelta")))
        commit(provider, 3)(("e", 0) -> 5)
      }
      withProvider(dir.toString) { provider =>
        assert(rowsOf(provider, 4) == Set(("d", 0) -> 4, ("e", 0) -> 5))
        assert(rowsOf(provider, 2) == Set(("a", 0) -> 1, ("b", 0) -> 2))
      }
    }
  }

  test("a task that has failed already gets no store and disturbs none") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        commit(provider, 0)(("a", 0) -> 1)
        val task = TaskContext.empty()
        task.markTaskFailed(new RuntimeException("on purpose"))
        TaskContext.setTaskContext(task)
        try {
          intercept[Exception](provider.getReadStore(1, None))
          intercept[Exception](provider.getStore(1))
        } finally {
          TaskContext.unset()
        }
        val next = provider.getStore(1)
        put(next, "b", 0, 2)
        task.markTaskCompleted(None)
        next.commit()
        assert(rowsOf(provider, 2) == Set(("a", 0) -> 1, ("b", 0) -> 2))
      }
    }
  }

  test("a store may end while another thread is reading it") {
    withTempDir { dir =>
      withProvider(dir.toString, prefix) { provider =>
        val fill = provider.getStore(0)
        (0 until 2000).foreach(i => put(fill, (i % 20).toString, i, i))
        fill.commit()
        val pool = Executors.newSingleThreadExecutor()
        try {
          (0 until 50).foreach { round =>
            val store = provider.getStore(1)
            val begun = new CountDownLatch(1)
            val ended = pool.submit(new Runnable {
              override def run(): Unit =
                try {
                  while (true) {
                    store.prefixScan(dataToPrefixKeyRow((round % 20).toString)).foreach { row =>
                      assert(row.value.getInt(0) % 20 == round % 20)
                    }
                    put(store, "x", round, round)
                    get(store, "x", round)
                    begun.countDown()
                  }
                } catch {
                  case _: StateStoreInvalidStamp | _: IllegalStateException => // it has ended
                }
            })
            begun.await()
            store.abort()
            ended.get(60, TimeUnit.SECONDS)
          }
        } finally {
          pool.shutdownNow()
        }
      }
    }
  }

  /** Versions up to `last`, each of which changes a key of all and has one of its own. */
  private def commitMany(folder: String, last: Int, settings: Map[String, String]): Unit =
    withProvider(folder, settings = settings) { provider =>
      (0 until last).foreach { i => commit(provider, i)(("all", 0) -> (i + 1), ("own", i + 1) -> i) }
    }

  private def stateOf(version: Int): Set[((String, Int), Int)] =
    Set(("all", 0) -> version) ++ (1 to version).map(i => ("own", i) -> (i - 1))

  private def damage(file: File): Unit = {
    new File(file.getParent, s".${file.getName}.crc").delete()
    val bytes = Files.readAllBytes(file.toPath)
    bytes(bytes.length / 2) = (bytes(bytes.length / 2) ^ 1).toByte
    Files.write(file.toPath, bytes)
  }

  /** Streams of this process on files below a folder. */
  private def openFiles(folder: File): Seq[String] =
    new File("/proc/self/fd").listFiles().toSeq.flatMap { link =>
      scala.util.Try(Files.readSymbolicLink(link.toPath).toString).toOption
    }.filter(_.startsWith(folder.getCanonicalPath))

  Seq("delta", "pages", "cec", "auto").foreach { mode =>
    val settings = Map("spark.sql.streaming.stateStore.quire.checkpointMode" -> mode)

    test(s"files that are read ahead are applied in their order: $mode") {
      withTempDir { dir =>
        commitMany(dir.toString, 40, settings)
        Seq(40, 1, 2, 17, 39).foreach { version =>
          withProvider(dir.toString, settings = settings) { provider =>
            assert(rowsOf(provider, version) == stateOf(version))
          }
        }
      }
    }

    test(s"of several damaged files that are read ahead the first is named: $mode") {
      withTempDir { dir =>
        commitMany(dir.toString, 20, settings)
        Seq(19, 7, 2).foreach { version =>
          val damaged = file(dir.toString, version, "qdelta")
          damage(damaged)
          (0 until 10).foreach { _ =>
            withProvider(dir.toString, settings = settings) { provider =>
              val text = Utils.exceptionString(intercept[Exception](rowsOf(provider, 20)))
              assert(text.contains(s"/${damaged.getName} cannot be read"))
              if (version > 2) assert(rowsOf(provider, version - 1) == stateOf(version - 1))
            }
          }
        }
        eventually(timeout(60.seconds))(assert(openFiles(dir).isEmpty))
      }
    }
  }

  private val mode = "spark.sql.streaming.stateStore.quire.checkpointMode"

  Seq("delta", "pages", "cec", "auto").foreach { name =>
    test(s"two that commit the same versions, by turns: $name") {
      withTempDir { dir =>
        val settings = Map(mode -> name, "spark.sql.streaming.stateStore.quire.cec.extentTarget" -> "1.5")
        val random = new Random(7)
        val keys = (0 until 300).map(i => ("k" * 40, i))
        var expected = Map.empty[(String, Int), Int]
        withProvider(dir.toString, settings = settings) { one =>
          withProvider(dir.toString, settings = settings) { other =>
            (0 until 40).foreach { version =>
              // The same rows in another order, as of a task that is tried again or a copy of a slow one; either of
              // the two may be the one that goes on.
              val rows = (if (version == 0) keys else random.shuffle(keys).take(20)).map(_ -> random.nextInt())
              expected ++= rows
              val (first, second) = if (random.nextBoolean()) (one, other) else (other, one)
              commit(first, version, force = version == 1)(rows: _*)
              if (random.nextInt(3) > 0) commit(second, version)(random.shuffle(rows): _*)
              if (random.nextInt(8) == 0) first.doMaintenance()
              withProvider(dir.toString, settings = settings) { third =>
                assert(rowsOf(third, version + 1) == expected.toSet)
              }
            }
          }
        }
      }
    }
  }

  test("pages that lost the base they start from end in an error, with logs behind them, too") {
    withTempDir { dir =>
      val repair = Map(
        "spark.sql.streaming.stateStore.autoSnapshotRepair.enabled" -> "true",
        "spark.sql.streaming.stateStore.autoSnapshotRepair.maxChangeFileReplay" -> "100")
      commitMany(dir.toString, 5, Map(mode -> "cec"))
      withProvider(dir.toString, settings = Map(mode -> "cec")) { provider =>
        commit(provider, 5, force = true)(("all", 0) -> 6, ("own", 6) -> 5)
      }
      withProvider(dir.toString, settings = Map(mode -> "pages")) { provider =>
        commit(provider, 6)(("all", 0) -> 7, ("own", 7) -> 6)
      }
      withProvider(dir.toString, settings = repair)(provider => assert(rowsOf(provider, 7) == stateOf(7)))
      damage(file(dir.toString, 6, "qbase"))
      withProvider(dir.toString, settings = repair) { provider =>
        assert(messages(intercept[Exception](rowsOf(provider, 7))).contains("6_"))
        assert(rowsOf(provider, 6) == stateOf(6))
      }
    }
  }

  test("a log that began on a base stands by itself in the end, restarts or not") {
    withTempDir { dir =>
      commitMany(dir.toString, 1, Map.empty)
      withProvider(dir.toString)(provider => commit(provider, 1, force = true)(("own", 2) -> 1))
      (2 until 60).foreach { version =>
        withProvider(dir.toString, settings = Map(mode -> "cec")) { provider =>
          commit(provider, version)(("all", 0) -> version)
        }
      }
      val (base, first) = (file(dir.toString, 2, "qbase"), file(dir.toString, 1, "qdelta"))
      assert(base.delete() && first.delete() && file(dir.toString, 2, "qdelta").delete())
      withProvider(dir.toString, settings = Map(mode -> "cec")) { provider =>
        assert(rowsOf(provider, 60) == Set(("all", 0) -> 59, ("own", 1) -> 0, ("own", 2) -> 1))
      }
    }
  }

  test("a change feed leaves out what a log wrote again") {
    withTempDir { dir =>
      withProvider(dir.toString, settings = Map(mode -> "cec")) { provider =>
        commit(provider, 0)((0 until 50).map(i => ("cold", i) -> i): _*)
        (1 until 30).foreach(version => commit(provider, version)(("hot", version % 5) -> version))
        val feed = provider.getStateStoreChangeDataReader(2, 30, None, None)
        val found = try feed.map(change => keyRowToData(change._2)._1 -> change._4).toList finally feed.closeIfNeeded()
        assert(found == (1 until 30).map("hot" -> _.toLong))
      }
    }
  }

  private val often = Map("spark.sql.streaming.stateStore.minDeltasForSnapshot" -> "1")

  private def bases(folder: String): Set[String] = files(folder).list().filter(_.endsWith(".qbase")).toSet

  test("a version's base is written by the one that committed it") {
    withTempDir { dir =>
      val settings = often + (mode -> "pages")
      withProvider(dir.toString, settings = settings) { one =>
        withProvider(dir.toString, settings = settings) { other =>
          commit(one, 0)(("a", 0) -> 1)
          commit(one, 1)(("b", 0) -> 2)
          // As of an attempt that was given up: it holds the version, in other pages.
          assert(rowsOf(other, 2) == Set(("a", 0) -> 1, ("b", 0) -> 2))
          other.doMaintenance()
          assert(bases(dir.toString).isEmpty)
          one.doMaintenance()
          val written = bases(dir.toString)
          assert(written.size == 1)
          other.doMaintenance()
          commit(one, 2)(("c", 0) -> 3)
          assert(bases(dir.toString) == written)
        }
      }
      withProvider(dir.toString, settings = settings) { third =>
        assert(rowsOf(third, 3) == Set(("a", 0) -> 1, ("b", 0) -> 2, ("c", 0) -> 3))
      }
    }
  }

  test("cleaning keeps to the bases of its own line, and what is gone is forgotten") {
    withTempDir { dir =>
      val settings = Map("spark.sql.streaming.minBatchesToRetain" -> "2")
      withProvider(dir.toString, settings = settings) { provider =>
        (0 until 6).foreach(version => commit(provider, version)(("all", 0) -> version, ("own", version) -> version))
        // As of a run that was given up, and wrote no ids.
        Files.write(new File(files(dir.toString), "3.qbase").toPath, Array[Byte](1, 2, 3))
        provider.doMaintenance()
      }
      withProvider(dir.toString, settings = settings ++ often) { provider =>
        assert(rowsOf(provider, 6).size == 7)
        (6 until 60).foreach { version =>
          commit(provider, version)(("all", 0) -> version)
          provider.doMaintenance()
        }
        Seq("line", "basesOfLine").foreach { name =>
          val field = classOf[QuireStateStoreProvider].getDeclaredField(name)
          field.setAccessible(true)
          assert(field.get(provider).asInstanceOf[Vector[_]].size < 10)
        }
        assert(files(dir.toString).list().length < 40)
        assert(rowsOf(provider, 60).size == 7)
      }
    }
  }

  Seq("delta", "pages", "cec", "auto").foreach { name =>
    test(s"old files are removed, too, where no provider lives for long: $name") {
      withTempDir { dir =>
        val settings = Map(mode -> name, "spark.sql.streaming.minBatchesToRetain" -> "4",
          "spark.sql.streaming.stateStore.minDeltasForSnapshot" -> "2")
        (0 until 60).foreach { version =>
          withProvider(dir.toString, settings = settings) { provider =>
            commit(provider, version)(("all", 0) -> version, ("own", version % 3) -> version)
            provider.doMaintenance()
          }
        }
        assert(files(dir.toString).list().length < 40)
        (56 to 60).foreach { version =>
          withProvider(dir.toString, settings = settings) { provider =>
            val own = (version - 3 until version).map(v => ("own", v % 3) -> v)
            assert(rowsOf(provider, version) == own.toSet + (("all", 0) -> (version - 1)))
          }
        }
      }
    }
  }

  test("what lies behind a damaged base is kept") {
    withTempDir { dir =>
      val settings = Map(
        "spark.sql.streaming.minBatchesToRetain" -> "2",
        "spark.sql.streaming.stateStore.minDeltasForSnapshot" -> "1",
        "spark.sql.streaming.stateStore.autoSnapshotRepair.enabled" -> "true",
        "spark.sql.streaming.stateStore.autoSnapshotRepair.maxChangeFileReplay" -> "100")
      withProvider(dir.toString, settings = settings) { provider =>
        (0 until 8).foreach { version =>
          commit(provider, version, force = version == 2 || version == 5)(("own", version) -> version)
        }
      }
      damage(file(dir.toString, 6, "qbase"))
      def own(version: Int): Set[((String, Int), Int)] = (0 until version).map(v => ("own", v) -> v).toSet
      withProvider(dir.toString, settings = settings) { provider =>
        commit(provider, 8)(("own", 8) -> 8)
        provider.doMaintenance()
        assert(bases(dir.toString).exists(_.startsWith("9_")))
        // Whoever cleans next does not know.
        assert(!bases(dir.toString).exists(_.startsWith("6_")))
      }
      (7 to 9).foreach { version =>
        withProvider(dir.toString, settings = settings)(provider => assert(rowsOf(provider, version) == own(version)))
      }
    }
  }

  test("no base is written of a version that was gone back to, whose pages have a file of their own") {
    withTempDir { dir =>
      val settings = often + (mode -> "pages")
      withProvider(dir.toString, settings = settings) { provider =>
        commit(provider, 0)(("a", 0) -> 1)
        commit(provider, 1)(("b", 0) -> 2)
        val again = provider.getStore(1)
        // The commit below may have chosen its start already when such a base appears.
        provider.doMaintenance()
        assert(bases(dir.toString).isEmpty)
        put(again, "c", 0, 3)
        again.commit()
        provider.doMaintenance()
        assert(bases(dir.toString).size == 1)
      }
      withProvider(dir.toString, settings = settings) { provider =>
        assert(rowsOf(provider, 2) == Set(("a", 0) -> 1, ("c", 0) -> 3))
      }
    }
  }

  test("cleaning leaves what a commit in pages that is under way starts from") {
    withTempDir { dir =>
      val settings = Map(
        mode -> "auto",
        "spark.sql.streaming.minBatchesToRetain" -> "1",
        "spark.sql.streaming.stateStore.minDeltasForSnapshot" -> "2")
      val base = new PausingFileManager.Pause("3_", ".qbase")
      val pages = new PausingFileManager.Pause("5_", ".qdelta")
      PausingFileManager.pauses = Seq(base, pages)
      val threads = Executors.newFixedThreadPool(2)
      try {
        withProvider(dir.toString, settings = settings, manager = Some(classOf[PausingFileManager])) { provider =>
          commit(provider, 0, force = true)((0 until 5000).map(i => ("a", i) -> i): _*)
          (1 to 2).foreach(v => commit(provider, v)(("b", v) -> v))
          val maintained = threads.submit((() => provider.doMaintenance()): Runnable)
          base.reached.await()
          commit(provider, 3)(("b", 3) -> 3)
          val committed = threads.submit((() => {
            // Pages that are empty are not written, so that these are fewer bytes than the keys.
            val store = provider.getStore(4)
            (0 until 5000).foreach(i => store.remove(dataToKeyRow("a", i)))
            store.commit()
          }): Runnable)
          pages.reached.await()
          base.goOn.countDown()
          maintained.get(60, TimeUnit.SECONDS)
          pages.goOn.countDown()
          committed.get(60, TimeUnit.SECONDS)
        }
        assert(bases(dir.toString).exists(_.startsWith("3_")))
      } finally {
        PausingFileManager.pauses = Nil
        Seq(base, pages).foreach(_.goOn.countDown())
        threads.shutdown()
      }
      withProvider(dir.toString, settings = settings) { provider =>
        assert(rowsOf(provider, 5) == (1 to 3).map(v => ("b", v) -> v).toSet)
      }
    }
  }

  test("a base that was written to be mapped is read where nothing can be") {
    withTempDir { dir =>
      val rows = (0 until 5000).map(i => ("a", i) -> i)
      withProvider(dir.toString, settings = Map(mode -> "pages"))(commit(_, 0, force = true)(rows: _*))
      assert(files(dir.toString).list().exists(_.endsWith(".qimage")))
      Files.delete(file(dir.toString, 1, "qdelta").toPath)
      withProvider(dir.toString, manager = Some(classOf[PausingFileManager])) { provider =>
        assert(rowsOf(provider, 1) == rows.toSet)
      }
    }
  }

  test("who got hold of a provider before it was unloaded is served, and leaves nothing behind") {
    withTempDir { dir =>
      val before = bytesUsed
      val unloaded = provider(dir.toString, NoPrefixKeyStateEncoderSpec(keySchema), Map.empty)
      unloaded.close()
      commit(unloaded, 0, force = true)(("a", 1) -> 1)
      assert(bases(dir.toString).size == 1)
      assert(rowsOf(unloaded, 1) == Set(("a", 1) -> 1))
      assert(bytesUsed == before)

      val atWork = unloaded.getStore(1)
      put(atWork, "b", 2, 2)
      val waiting = Executors.newSingleThreadExecutor()
      try {
        val next = waiting.submit((() => commit(unloaded, 2)(("c", 3) -> 3)): Runnable)
        unloaded.close()
        put(atWork, "b", 3, 3)
        atWork.commit()
        next.get(60, TimeUnit.SECONDS)
      } finally {
        waiting.shutdown()
      }
      assert(bytesUsed == before)
      withProvider(dir.toString) { fresh =>
        assert(rowsOf(fresh, 3) == Set(("a", 1) -> 1, ("b", 2) -> 2, ("b", 3) -> 3, ("c", 3) -> 3))
      }
    }
  }

  test("a change feed names the file that it lacks") {
    withTempDir { dir =>
      withProvider(dir.toString) { provider =>
        (0 until 4).foreach(version => commit(provider, version)(("a", version) -> version))
        val gone = file(dir.toString, 2, "qdelta")
        assert(gone.delete())
        val error = intercept[Exception](provider.getStateStoreChangeDataReader(1, 4, None, None))
        assert(messages(error).contains(gone.getName))
      }
    }
  }

  test("more stores load at once than there are threads to read ahead") {
    withTempDir { dir =>
      commitMany(dir.toString, 20, Map.empty)
      val pool = Executors.newFixedThreadPool(100)
      try {
        val loads = (0 until 400).map { i =>
          pool.submit(new Callable[Boolean] {
            override def call(): Boolean =
              withProvider(dir.toString)(rowsOf(_, 1 + i % 20) == stateOf(1 + i % 20))
          })
        }
        assert(loads.forall(_.get(300, TimeUnit.SECONDS)))
      } finally {
        pool.shutdownNow()
      }
      eventually(timeout(60.seconds))(assert(openFiles(dir).isEmpty))
    }
  }
}

/** Waits before it creates some files, until a test lets it go on. */
class PausingFileManager(path: Path, conf: Configuration)
  extends FileSystemBasedCheckpointFileManager(path, conf) {

  override def createAtomic(path: Path, overwriteIfPossible: Boolean): CancellableFSDataOutputStream = {
    PausingFileManager.pauses.find(_.concerns(path.getName)).foreach { pause =>
      pause.reached.countDown()
      pause.goOn.await()
    }
    super.createAtomic(path, overwriteIfPossible)
  }
}

object PausingFileManager {
  class Pause(prefix: String, suffix: String) {
    val reached = new CountDownLatch(1)
    val goOn = new CountDownLatch(1)
    def concerns(name: String): Boolean = name.startsWith(prefix) && name.endsWith(suffix)
  }

  @volatile var pauses: Seq[Pause] = Nil
}
