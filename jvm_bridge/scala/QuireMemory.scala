package io.quire.spark

import java.util.concurrent.ConcurrentHashMap

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.execution.streaming.state.quire.SparkInternals

/** The memory that all stores of this process draw on, and what Spark is told of it. */
private[spark] object QuireMemory {

  /** One budget for each limit in use; Spark runs with one, tests with several. */
  private val budgets = new ConcurrentHashMap[Long, java.lang.Long]()

  def budget(limit: Long): Long = {
    SparkInternals.reportMemory("Quire", () => bytesUsed)
    budgets.computeIfAbsent(
      limit, bytes => Native.budgetCreate(if (bytes == 0) Long.MaxValue else bytes))
  }

  /** Bytes that the pages of all stores hold. */
  def bytesUsed: Long = budgets.values().asScala.map(Native.budgetUsed(_)).sum
}

/** What an arena says of itself. */
private[spark] case class ArenaStats(
    pageBytes: Long,
    used: Long,
    dirty: Long,
    retired: Long,
    free: Long,
    bytesHeld: Long,
    bytesReserved: Long,
    snapshots: Long)

/**
 * An arena with a count of its users. Whoever drops it from use condemns it; the memory goes when
 * the last reader has let go.
 */
private[spark] final class Arena(val handle: Long) {
  /** The log that commits write in mode `cec`; 0 if there is none. It goes with the arena. */
  var log: Long = 0
  private var users = 0
  private var condemned = false
  private var closed = false

  /** One more use, by somebody who knows that it is open. */
  def acquire(): Unit = synchronized(users += 1)

  def release(): Unit = synchronized {
    users -= 1
    closeIfUnused()
  }

  def condemn(): Unit = synchronized {
    condemned = true
    closeIfUnused()
  }

  private def closeIfUnused(): Unit = {
    if (condemned && users == 0 && !closed) {
      closed = true
      dropLog()
      Native.arenaClose(handle)
    }
  }

  def dropLog(): Unit = {
    if (log != 0) Native.logDestroy(log)
    log = 0
  }

  def stats(): ArenaStats = {
    val words = new OffHeap(64)
    try {
      Native.arenaStats(handle, words.address)
      ArenaStats(
        words.long(0), words.long(1), words.long(2), words.long(3),
        words.long(4), words.long(5), words.long(6), words.long(7))
    } finally {
      words.close()
    }
  }
}

/** What a version of a log holds, in records, and how far back it reaches. */
private[spark] case class LogSummary(checks: Long, keys: Long, records: Long, extent: Long, since: Long)
