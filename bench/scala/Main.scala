package io.quire.bench

import java.io.File
import java.lang.management.ManagementFactory
import java.util.{Arrays, UUID}

import scala.io.Source
import scala.jdk.CollectionConverters._
import scala.util.Using

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path
import org.json4s.JsonDSL._
import org.json4s.jackson.JsonMethods.{compact, render}

import org.apache.spark.sql.SparkSession
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType

/** A store gave back something else than was put in. */
class WrongResult(message: String) extends Exception(message)

/** The arguments of one case, all `name=value`; those that start with "spark." are Spark's. */
class Arguments(arguments: Seq[String]) {
  private val all = arguments.map { argument =>
    val Array(name, value) = argument.split("=", 2)
    name -> value
  }.toMap

  /** The same for one of several kinds of work in this JVM. */
  def within(folder: String): Arguments = new Arguments(arguments :+ s"folder=${text("folder")}/$folder")

  val spark: Map[String, String] = all.filter(_._1.startsWith("spark."))
  def text(name: String): String = all(name)
  def int(name: String): Int = all(name).toInt
  def flag(name: String): Boolean = all(name).toBoolean
}

/**
 * Runs one case in this JVM: `Main operations|few_changes|... name=value ...`, or the name of a query.
 * Each number is one line of JSON on standard output; so is the reason if it fails. Of several,
 * divided by commas, each has a folder of its own below the given one.
 */
object Main {
  /** What stands before the name of each number. */
  private var prefix = ""

  def main(arguments: Array[String]): Unit = {
    endWithParent()
    val options = new Arguments(arguments.tail.toSeq)
    val builder = SparkSession.builder().master("local[2]").appName("quire-bench")
    options.spark.foreach { case (name, value) => builder.config(name, value) }
    val code = try {
      val session = builder.getOrCreate()
      session.sparkContext.setLogLevel("ERROR")
      arguments.head.split(",") match {
        case Array(name) => run(name, options, session)
        case names => names.foreach { name =>
          prefix = s"$name: "
          run(name, options.within(name), session)
        }
      }
      0
    } catch {
      case error: Throwable =>
        error.printStackTrace()
        println(compact(render("reason" -> s"$prefix$error")))
        1
    }
    System.out.flush()
    Runtime.getRuntime.halt(code) // there is nothing to save, and 800 stores take long to close
  }

  private def run(name: String, options: Arguments, session: SparkSession): Unit = name match {
    case "operations" => Operations.run(options)
    case "few_changes" => Stores.fewChanges(options)
    case "commits" => Commits.run(options)
    case "restart_fill" => Stores.restartFill(options)
    case "restart_load" => Stores.restartLoad(options)
    case "many_stores" => Stores.manyStores(options)
    case query => Queries.run(options, session, Queries.named(query, options))
  }

  /** Standard input is a pipe that the parent holds: where it ends, the parent is gone. */
  private def endWithParent(): Unit = {
    val watch = new Thread(() => {
      while (System.in.read() >= 0) {}
      Runtime.getRuntime.halt(1)
    })
    watch.setDaemon(true)
    watch.start()
  }

  def emit(measure: String, value: Double, unit: String, operations: Long, call: String): Unit =
    println(compact(render(("measure" -> s"$prefix$measure") ~ ("value" -> value) ~ ("unit" -> unit) ~
      ("operations" -> operations) ~ ("call" -> call))))

  def check(right: Boolean, message: => String): Unit = if (!right) throw new WrongResult(message)

  def median(values: Seq[Double]): Double = {
    val sorted = values.sorted
    (sorted((sorted.size - 1) / 2) + sorted(sorted.size / 2)) / 2
  }

  /** The least value that such a share of all does not exceed. */
  def percentile(values: Seq[Double], share: Double): Double =
    values.sorted.apply(Math.ceil(values.size * share).toInt - 1)

  def seconds(work: => Unit): Double = {
    val started = System.nanoTime()
    work
    (System.nanoTime() - started) / 1e9
  }

  /** A new provider as Spark makes it, of the class and with the settings that were given. */
  def provider(
      options: Arguments,
      keySchema: StructType,
      valueSchema: StructType,
      partition: Int = 0,
      operator: Int = 0,
      multipleValues: Boolean = false): StateStoreProvider = {
    val conf = new SQLConf
    options.spark.foreach { case (name, value) => conf.setConfString(name, value) }
    val root = stateFolder(options).toString
    StateStoreProvider.createAndInit(
      StateStoreProviderId(StateStoreId(root, operator, partition), UUID.randomUUID()),
      keySchema, valueSchema, NoPrefixKeyStateEncoderSpec(keySchema),
      useColumnFamilies = multipleValues, new StateStoreConf(conf), hadoopConf,
      multipleValues, None)
  }

  /** Of a folder with all below it. Files that are renamed or removed meanwhile count as nothing. */
  def bytesIn(file: File): Long = Option(file.listFiles()).fold(file.length())(_.map(bytesIn).sum)

  def bytesIn(path: Path): Long =
    if (path.toUri.getScheme == "file") bytesIn(new File(path.toUri))
    else path.getFileSystem(hadoopConf).getContentSummary(path).getLength

  /** Where the stores' files are: below the case's folder, or below a URL. */
  def stateFolder(options: Arguments): Path = {
    val folder = options.text("folder")
    new Path(new Path(if (folder.contains("://")) folder else new File(folder).toURI.toString), "state")
  }

  /** One for all stores, as a query has it. */
  lazy val hadoopConf: Configuration = SparkSession.active.sessionState.newHadoopConf()
}

/** What this process holds, in bytes and counts. */
case class Held(heap: Long, outside: Long, addresses: Long, threads: Long, files: Long) {
  def -(other: Held): Held = Held(heap - other.heap, outside - other.outside,
    addresses - other.addresses, threads - other.threads, files - other.files)
}

object Held {
  /** One number of the kernel's account of this process, in bytes if it is an amount of memory. */
  def status(name: String): Long = Using.resource(Source.fromFile("/proc/self/status")) { source =>
    val words = source.getLines().find(_.startsWith(name + ":")).get.split("\\s+")
    words(1).toLong * (if (words.length > 2) 1024 else 1)
  }

  /**
   * Resident bytes of the heap, which the JVM puts right below the address of 32 GB. What is
   * committed is more: pages of it that were never touched take no memory.
   */
  private def residentHeap(): Long = {
    val end = 32L << 30
    val start = end - Runtime.getRuntime.maxMemory()
    var inHeap = false
    var kilobytes = 0L
    Using.resource(Source.fromFile("/proc/self/smaps")) { source =>
      source.getLines().foreach { line =>
        val words = line.split("\\s+")
        if (words(0).matches("[0-9a-f]+-[0-9a-f]+")) {
          val Array(from, to) = words(0).split("-").map(java.lang.Long.parseUnsignedLong(_, 16))
          inHeap = from >= start && to <= end && to > 0
        } else if (inHeap && words(0) == "Rss:") {
          kilobytes += words(1).toLong
        }
      }
    }
    if (kilobytes == 0) throw new IllegalStateException("the heap does not lie where it was looked for")
    kilobytes * 1024
  }

  /** After a full collection; `outside` is resident memory that is not the heap's. */
  def now(): Held = {
    (1 to 3).foreach { _ =>
      System.gc()
      Thread.sleep(100) // cleaners run in threads of their own
    }
    val heap = ManagementFactory.getMemoryMXBean.getHeapMemoryUsage
    val files = new File("/proc/self/fd").list().length
    Held(heap.getUsed, status("VmRSS") - residentHeap(), status("VmSize"),
      status("Threads"), files)
  }

  def collectionMillis(): Long =
    ManagementFactory.getGarbageCollectorMXBeans.asScala.map(_.getCollectionTime).sum
}

/** A row by its bytes, for models of what a store should hold. */
class RowBytes(val bytes: Array[Byte]) {
  override def hashCode: Int = Arrays.hashCode(bytes)
  override def equals(other: Any): Boolean = other match {
    case row: RowBytes => Arrays.equals(bytes, row.bytes)
    case _ => false
  }
}

object RowBytes {
  def apply(row: UnsafeRow): RowBytes = new RowBytes(row.getBytes)
}
