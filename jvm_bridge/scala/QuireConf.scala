package io.quire.spark

import java.util.Locale

import org.apache.spark.network.util.JavaUtils
import org.apache.spark.sql.execution.streaming.state.StateStoreConf

/** What a commit writes (docs/checkpoint.md). */
private[spark] object CheckpointMode extends Enumeration {
  val Delta: Value = Value("delta")
  val Pages: Value = Value("pages")
  val Auto: Value = Value("auto")
}

/**
 * Quire's own settings, from the properties under `spark.sql.streaming.stateStore.quire.`.
 *
 * @param memoryLimit bytes for all stores of this process together; 0 for none
 * @param pageSize    bytes of a page; 0 for the core's default
 */
private[spark] case class QuireConf(mode: CheckpointMode.Value, memoryLimit: Long, pageSize: Int)

private[spark] object QuireConf {
  private val Prefix = "spark.sql.streaming.stateStore.quire."
  private val Allowed = Map(
    "checkpointMode" -> CheckpointMode.values.mkString(", "),
    "memoryLimit" -> "bytes, with k, m or g: 512m",
    "pageSize" -> "a power of two from 1024 to 65536")

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
      ours.get("memoryLimit").map(memoryLimit).getOrElse(0L),
      ours.get("pageSize").map(pageSize).getOrElse(0))
  }

  private def mode(value: String): CheckpointMode.Value =
    CheckpointMode.values.find(_.toString == value).getOrElse(refuse("checkpointMode", value, "unknown"))

  private def memoryLimit(value: String): Long = {
    val bytes =
      try JavaUtils.byteStringAsBytes(value)
      catch { case _: NumberFormatException => refuse("memoryLimit", value, "not a size") }
    if (bytes < (1L << 20)) refuse("memoryLimit", value, "at least 1m is needed")
    bytes
  }

  private def pageSize(value: String): Int = {
    val bytes =
      try JavaUtils.byteStringAsBytes(value)
      catch { case _: NumberFormatException => refuse("pageSize", value, "not a size") }
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
