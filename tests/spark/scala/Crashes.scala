package io.quire.spark

import java.nio.file.Paths
import java.util.UUID

import scala.io.StdIn
import scala.util.Random

import org.apache.hadoop.conf.Configuration

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{BoundReference, InterpretedUnsafeProjection, UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.{LongType, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String

/**
 * What test_crashes.py kills: a store without a query. What a version holds is a function of the seed
 * and of the generation that made each version up to it, so that whoever knows these can check it.
 *
 *   work FOLDER MODE SEED HISTORY GENERATION VERSIONS     makes versions, and says so
 *   recover FOLDER MODE SEED HISTORY GENERATION HIGHEST   loads what is there, compares, and goes on
 *   load FOLDER MODE SEED HISTORY                         loads the last version and compares: right, or refused WHY
 *
 * Each is a line on standard input, answered by lines and at last by `end` or `failed WHY`. A history is
 * `generation/id,generation/id,...`, one for each version, or `-`; the ids are empty without ids.
 */
object Crashes {
  private val keySchema = new StructType().add("key", LongType)
  private val valueSchema = new StructType().add("value", StringType)
  private val Lists = "lists"
  private val Retain = 4

  def main(arguments: Array[String]): Unit = {
    // Small ones, so that a few kilobytes have all there is: parts, and several pieces in each.
    BaseFiles.partsFromBytes = 48 << 10
    BaseFiles.pieceBytes = 8 << 10
    Iterator.continually(StdIn.readLine()).takeWhile(_ != null).foreach { line =>
      try {
        line.split(' ') match {
          case Array("work", folder, mode, seed, history, generation, versions) =>
            new Run(folder, mode, seed.toInt, generation.toInt, Made.parse(history)).work(versions.toInt)
          case Array("recover", folder, mode, seed, history, generation, highest) =>
            new Run(folder, mode, seed.toInt, generation.toInt, Made.parse(history)).recover(highest.toInt)
          case Array("load", folder, mode, seed, history) =>
            new Run(folder, mode, seed.toInt, 0, Made.parse(history)).load()
        }
        tell("end")
      } catch {
        case e: Throwable =>
          e.printStackTrace()
          tell("failed", e.toString.linesIterator.mkString(" "))
      }
    }
    System.exit(0)
  }

  /** Spark's usual one is compiled at first, for half a second in each JVM. */
  private def projection(schema: StructType): UnsafeProjection = InterpretedUnsafeProjection.createProjection(
    schema.zipWithIndex.map { case (field, i) => BoundReference(i, field.dataType, field.nullable) })

  private def tell(words: Any*): Unit = synchronized {
    println(words.mkString(" "))
    System.out.flush()
  }

  /** A version that was made: by which generation, and the id it got. */
  private case class Made(generation: Int, id: Option[String])

  private object Made {
    def parse(history: String): Vector[Made] =
      if (history == "-") Vector.empty
      else history.split(',').toVector.map { each =>
        val Array(generation, id) = each.split("/", 2)
        Made(generation.toInt, Option(id).filter(_.nonEmpty))
      }
  }

  /** What a version holds. */
  private case class State(records: Map[Long, String], lists: Map[Long, Vector[String]])

  private val Empty = State(Map.empty, Map.empty)

  /** The changes that make a version out of the one before. */
  private case class Batch(seed: Int, generation: Int, number: Int) {
    private val random = new Random(seed * 1000003L + generation * 1009L + number)

    /** Whether it starts from nothing, as Spark asks for when it rewrites a state. */
    val isWhole: Boolean = random.nextInt(12) == 0
    val wantsBase: Boolean = random.nextInt(8) == 0

    private def text(): String =
      random.alphanumeric.take(Seq(0, 8, 60, 400, 400, 9000)(random.nextInt(6))).mkString

    /** Keys with their values; none: removed. */
    val records: Seq[(Long, Option[String])] = Seq.fill(2 + random.nextInt(30)) {
      (random.nextInt(120).toLong, if (random.nextInt(5) == 0) None else Some(text()))
    } :+ (1000L -> Some(number.toString))
    /** Keys with what comes to their values; nothing: removed. */
    val lists: Seq[(Long, Seq[String])] = Seq.fill(random.nextInt(6)) {
      (random.nextInt(10).toLong, Seq.fill(random.nextInt(3))(text()))
    }

    def advance(state: State): State = {
      val from = if (isWhole) Empty else state
      State(
        records.foldLeft(from.records) {
          case (all, (key, Some(value))) => all + (key -> value)
          case (all, (key, None)) => all - key
        },
        lists.foldLeft(from.lists) {
          case (all, (key, Seq())) => all - key
          case (all, (key, more)) => all + (key -> (all.getOrElse(key, Vector.empty) ++ more))
        })
    }
  }

  private class Run(folder: String, mode: String, seed: Int, firstGeneration: Int, known: Vector[Made]) {
    private val keyRow = projection(keySchema)
    private val valueRow = projection(valueSchema)
    private val withIds = seed % 2 == 0
    private val hadoopConf = new Configuration
    private var provider = open()
    private var history = known
    private var generation = firstGeneration

    private def open(): StateStoreProvider = {
      val conf = new SQLConf
      def set(key: String, value: String): Unit = conf.setConfString("spark.sql.streaming." + key, value)
      set("stateStore.providerClass", classOf[QuireStateStoreProvider].getName)
      set("stateStore.quire.checkpointMode", mode)
      set("stateStore.quire.cec.extentTarget", "1.2")
      set("stateStore.minDeltasForSnapshot", "3")
      set("stateStore.compression.codec", Seq("lz4", "zstd", "snappy")(seed % 3))
      set("minBatchesToRetain", Retain.toString)
      set("ratioExtraSpaceAllowedInCheckpoint", "0")
      if (withIds) set("stateStore.checkpointFormatVersion", "2")
      val provider = StateStoreProvider.createAndInit(
        StateStoreProviderId(StateStoreId(Paths.get(folder, "state").toUri.toString, 0, 0), UUID.randomUUID()),
        keySchema, valueSchema, NoPrefixKeyStateEncoderSpec(keySchema), useColumnFamilies = true,
        new StateStoreConf(conf), hadoopConf, useMultipleValuesPerKey = false, None)
      provider
    }

    private def restart(): Unit = {
      provider.close()
      provider = open()
    }

    private def id(number: Int): Option[String] = if (number == 0) None else history(number - 1).id

    private def stateOf(number: Int): State = stateOf(history.take(number))

    private def stateOf(made: Vector[Made]): State = made.zipWithIndex.foldLeft(Empty) {
      case (state, (Made(generation, _), index)) => Batch(seed, generation, index + 1).advance(state)
    }

    private def key(number: Long): UnsafeRow = keyRow(InternalRow(number))
    private def value(text: String): UnsafeRow = valueRow(InternalRow(UTF8String.fromString(text)))

    private def withLists(store: StateStore): Unit = store.createColFamilyIfAbsent(
      Lists, keySchema, valueSchema, NoPrefixKeyStateEncoderSpec(keySchema), useMultipleValuesPerKey = true)

    private def write(store: StateStore, batch: Batch): Unit = {
      withLists(store)
      batch.records.foreach {
        case (number, Some(text)) => store.put(key(number), value(text))
        case (number, None) => store.remove(key(number))
      }
      batch.lists.foreach {
        case (number, Seq()) => store.remove(key(number), Lists)
        case (number, more) => store.mergeList(key(number), more.map(value(_).copy()).toArray, Lists)
      }
    }

    /** The next version; durable and known here when this returns. */
    private def commit(): Unit = {
      val number = history.size + 1
      val batch = Batch(seed, generation, number)
      tell("try", number)
      val store = provider.getStore(number - 1, id(number - 1), batch.wantsBase, batch.isWhole)
      write(store, batch)
      store.commit()
      history :+= Made(generation, store.getStateStoreCheckpointInfo().stateStoreCkptId)
      tell("done", number, generation, history.last.id.getOrElse(""))
    }

    private def goBackTo(number: Int): Unit = {
      history = history.take(number)
      generation += 1
      tell("back", number)
    }

    /** Makes so many versions, with maintenance after them and beside them, and goes back twice. */
    def work(versions: Int): Unit = {
      var maintenance: Thread = null
      (0 until versions).foreach { step =>
        // In memory, or as a query that starts again.
        if (step == versions / 3 && history.size > 3) goBackTo(history.size - 1)
        if (step == versions * 2 / 3 && history.size > 3) {
          if (maintenance != null) maintenance.join()
          restart()
          goBackTo(history.size - 2)
        }
        commit()
        if (maintenance != null) maintenance.join()
        maintenance = new Thread(() => provider.doMaintenance())
        maintenance.start()
        if (step % 2 == 0) maintenance.join()
      }
      maintenance.join()
      provider.close()
    }

    private def check(store: ReadStateStore, expected: State, number: Int): Unit = {
      def same(what: String, found: Any, wanted: Any): Unit =
        if (found != wanted) throw new AssertionError(s"$what of version $number are $found, not $wanted")
      def pairs(rows: StateStoreIterator[UnsafeRowPair]): Seq[(Long, String)] =
        try rows.map(pair => (pair.key.getLong(0), pair.value.getString(0))).toVector finally rows.close()
      same("records", pairs(store.iterator()).toMap, expected.records)
      val lists = if (store.allColumnFamilyNames(Lists)) pairs(store.iteratorWithMultiValues(Lists)) else Nil
      same("lists", lists.groupMap(_._1)(_._2).map { case (key, values) => key -> values.toVector }, expected.lists)
      expected.records.foreach { case (number, text) => same("a record", store.get(key(number)).getString(0), text) }
    }

    private def checkVersion(number: Int, id: Option[String], expected: State): Unit = {
      val store = provider.getReadStore(number, id)
      try check(store, expected, number) finally store.release()
    }

    private def checkOlder(highest: Int): Unit =
      (math.max(1, highest - Retain) to history.size).foreach(number => checkVersion(number, id(number), stateOf(number)))

    /** Whatever is wrong with the files: the right state, or an error; another state is a failure. */
    def load(): Unit = {
      try {
        val store = provider.getStore(history.size, id(history.size))
        try {
          withLists(store)
          check(store, stateOf(history.size), history.size)
        } finally {
          store.abort()
        }
        tell("right")
      } catch {
        case e: Exception =>
          val why = Iterator.iterate[Throwable](e)(_.getCause).takeWhile(_ != null).map(_.toString)
          tell("refused", why.mkString(" ").linesIterator.mkString(" "))
      } finally {
        provider.close()
      }
    }

    def recover(highest: Int): Unit = {
      // A reader of another family than the default one has to know it.
      val store = provider.getStore(history.size, id(history.size))
      withLists(store)
      check(store, stateOf(history.size), history.size)
      store.abort()
      // One that was made and not told of: Spark makes it again, but it must be whole.
      val next = history.size + 1
      val files = Paths.get(folder, "state", "0", "0")
      if (!withIds && next > highest && files.toFile.list().exists(_.matches(s"${next}_.*\\.qdelta"))) {
        checkVersion(next, None, stateOf(history :+ Made(generation, None)))
        tell("whole", next)
      }
      checkOlder(highest)
      restart()
      val start = provider.getStore(history.size, id(history.size))
      withLists(start)
      start.abort()
      (0 until Retain).foreach { _ =>
        generation += 1
        commit()
        provider.doMaintenance()
        checkOlder(math.max(highest, history.size))
      }
      restart()
      val last = provider.getStore(history.size, id(history.size))
      withLists(last)
      check(last, stateOf(history.size), history.size)
      last.abort()
      checkOlder(math.max(highest, history.size))
      provider.close()
    }
  }
}
