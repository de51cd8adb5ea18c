package io.quire.spark

import java.util.Locale
import java.util.concurrent.TimeUnit

import org.apache.spark.network.util.JavaUtils
import org.apache.spark.sql.execution.streaming.state.StateStoreConf

/** What a commit writes (docs/checkpoint.md). */
private[spark] object CheckpointMode extends Enumeration {
  val Delta: Value = Value("delta")
  val Pages: Value = Value("pages")
  val Cec: Value = Value("cec")
  val Auto: Value = Value("auto")
}

/**
 * Quire's own settings, from the properties under `spark.sql.streaming.stateStore.quire.`.
 *
 * @param cec         how mode `cec` keeps its log short
 * @param memoryLimit bytes for all stores of this process together; 0 for none
 * @param pageSize    bytes of a page; 0 for the core's default
 */
private[spark] case class QuireConf(
    mode: CheckpointMode.Value, cec: CecPolicy, memoryLimit: Long, pageSize: Int) {
  def writesPages: Boolean = mode == CheckpointMode.Pages || mode == CheckpointMode.Auto
}

/**
 * @param extentTarget the most that the extent may have, in multiples of the live keys
 * @param maxBytes     of records that a commit writes again, unless the target would be missed
 * @param maxNanos     the same for the time that this takes
 */
private[spark] case class CecPolicy(extentTarget: Double, maxBytes: Long, maxNanos: Long)

private[spark] object QuireConf {
  private val Prefix = "spark.sql.streaming.stateStore.quire."
  private val Allowed = Map(
    "checkpointMode" -> CheckpointMode.values.mkString(", "),
    "cec.extentTarget" -> "a number above 1, 1e9 at most: 2.0",
    "cec.maxBytesPerCommit" -> "bytes, with k, m or g: 64m",
    "cec.maxTimePerCommit" -> "a time: 200ms",
    "memoryLimit" -> "bytes, with k, m or g: 512m",
    "pageSize" -> "a power of two from 1024 to 65536")

  /** As the core has it (cec.c). */
  private val ExtentTargetMax = 1e9

  /** Refuses what is unknown or malformed, with the list of what is allowed. */
  def apply(conf: StateStoreConf): QuireConf = {
    // The keys of Spark's configuration keep their case, but people mistype it: say so.
    val ours = conf.sqlConfs.collect {
      case (key, value) if key.toLowerCase(Locale.ROOT).startsWith(Prefix.toLowerCase(Locale.ROOT)) =>
        key.substring(Prefix.length) -> value.trim
    }
    ours.keys.find(!Allowed.contains(_)).foreach { key =>
      refuse(key, ours(key), "there is no such setting")
    }
    QuireConf(
      ours.get("checkpointMode").map(mode).getOrElse(CheckpointMode.Delta),
      CecPolicy(
        extentTarget(ours.getOrElse("cec.extentTarget", "2.0")),
        bytes("cec.maxBytesPerCommit", ours.getOrElse("cec.maxBytesPerCommit", "64m")),
        nanos("cec.maxTimePerCommit", ours.getOrElse("cec.maxTimePerCommit", "200ms"))),
      ours.get("memoryLimit").map(memoryLimit).getOrElse(0L),
      ours.get("pageSize").map(pageSize).getOrElse(0))
  }

  private def mode(value: String): CheckpointMode.Value =
    CheckpointMode.values.find(_.toString == value).getOrElse(refuse("checkpointMode", value, "unknown"))

  private def extentTarget(value: String): Double = {
    val target = value.toDoubleOption.getOrElse(refuse("cec.extentTarget", value, "not a number"))
    if (target > ExtentTargetMax) refuse("cec.extentTarget", value, "no log is that long")
    if (!(target > 1)) {
      refuse("cec.extentTarget", value,
        "a log that is no longer than there are live keys cannot be held, each must be in it once")
    }
    target
  }

  private def bytes(key: String, value: String): Long =
    try JavaUtils.byteStringAsBytes(value)
    catch {
      case _: NumberFormatException => refuse(key, value, "not a size")
      case _: IllegalArgumentException => refuse(key, value, "more bytes than can be counted")
    }

  private def nanos(key: String, value: String): Long = {
    val millis =
      try JavaUtils.timeStringAs(value, TimeUnit.MILLISECONDS)
      catch { case _: NumberFormatException => refuse(key, value, "not a time") }
    if (millis < 1) refuse(key, value, "at least 1ms is needed")
    TimeUnit.MILLISECONDS.toNanos(millis)
  }

  private def memoryLimit(value: String): Long = {
    val limit = bytes("memoryLimit", value)
    if (limit < (1L << 20)) refuse("memoryLimit", value, "at least 1m is needed")
    limit
  }

  private def pageSize(value: String): Int = {
    val bytes = this.bytes("pageSize", value)
    if (bytes < 1024 || bytes > 65536 || java.lang.Long.bitCount(bytes) != 1) {
      refuse("pageSize", value, "not one of the sizes that pages can have")
    }
    bytes.toInt
  }

  private def refuse(key: String, value: String, why: String): Nothing =
    throw new IllegalArgumentException(
      s"$Prefix$key is '$value': $why. Allowed are: " +
        Allowed.toSeq.sorted.map { case (name, what) => s"$Prefix$name ($what)" }.mkString(", "))
}
