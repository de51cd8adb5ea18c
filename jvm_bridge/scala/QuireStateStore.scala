package io.quire.spark

import scala.collection.mutable
import scala.util.control.NonFatal

import org.apache.spark.TaskContext
import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.execution.streaming.state.quire.SparkInternals
import org.apache.spark.sql.types.StructType

/**
 * One version of a store, to read or to read and write.
 *
 * A reader has a pinned snapshot, so that its rows can be read in place and nothing that a writer
 * does concerns it. A writer works on the live pages; what it gives out is copied. A reader whose
 * task goes on to write changes to a weak pin, so that pages can be changed in place: it still sees
 * its version, and a row that it gave out stays as it is until its key is written.
 *
 * @param pages    what the store reads from and keeps open
 * @param readOnly whether it only reads
 */
private[spark] abstract class QuireStore(
    provider: QuireStateStoreProvider,
    loaded: Version,
    private var pages: Pages,
    val readOnly: Boolean) extends StateStore with StoreShim with Logging {

  import QuireStore._

  // Before anything is opened.
  Option(TaskContext.get()).foreach(SparkInternals.checkTask)

  @volatile protected var state: State = Updating
  private val owner = Thread.currentThread()
  @volatile private var shared = false
  private var validated = !provider.validating
  private val scratch = new Scratch
  private val families = new mutable.HashMap[String, ColumnFamily]()
  private val scans = new java.util.LinkedHashSet[NativeScan]()
  /** A writer's version has the default family from the start; a reader may never look at it. */
  private var defaultFamily: ColumnFamily =
    if (readOnly) null else family(StateStore.DEFAULT_COL_FAMILY_NAME)

  /** Which writer of the provider's this is; a later one makes it out of date. */
  private[spark] val stamp: Long = provider.currentStamp

  override def id: StateStoreId = provider.stateStoreId
  override def version: Long = loaded.number

  Option(TaskContext.get()).foreach { context =>
    context.addTaskCompletionListener[Unit] { _ =>
      try {
        finish()
      } catch {
        case NonFatal(e) => logWarning(s"$this could not be closed at the end of its task", e)
      }
    }
  }

  // ---------------------------------------------------------------------------- threads

  /**
   * Whether the caller is the thread that the store was made for, and no other has been here.
   * Python's operators reach the store from a thread of their own, which a task that is killed does
   * not wait for: so the calls of such threads, and what ends the store, take its monitor.
   */
  private def alone: Boolean =
    if (Thread.currentThread() eq owner) {
      !shared
    } else {
      shared = true
      false
    }

  private def guarded[T](body: => T): T = if (alone) body else synchronized(body)

  private def guardedRows(
      operation: String)(
      make: => StateStoreIterator[UnsafeRowPair]): StateStoreIterator[UnsafeRowPair] =
    if (alone) {
      make
    } else {
      val rows = synchronized(make)
      def checked[T](body: => T): T = synchronized {
        if (state ne Updating) requireReadable(operation)
        body
      }
      new StateStoreIterator(
        new Iterator[UnsafeRowPair] {
          override def hasNext: Boolean = checked(rows.hasNext)
          override def next(): UnsafeRowPair = checked(rows.next())
        },
        () => synchronized(rows.close()))
    }

  /** What happens to a store that its task left open. */
  protected def finish(): Unit

  /** Closes everything native. The state is no longer [[Updating]] by then. */
  protected def closePages(): Unit = turnTo(NoPages)

  /** Makes the core see everything that was put. */
  protected def flushFamilies(): Unit = families.values.foreach(_.flush())

  /** Closes what is open and goes on with other pages. */
  protected def turnTo(other: Pages): Unit = {
    new java.util.ArrayList(scans).forEach(_.close())
    families.values.foreach(_.close())
    families.clear()
    scratch.close()
    pages.close()
    pages = other
    defaultFamily = null
  }

  /**
   * Goes on with a weak pin in place of a firm one, unless there are scans. As with Spark's own
   * stores, of the rows that were given out the last one stays as it is; those before, as those that
   * were looked up together, do so until their key is written.
   */
  protected def weaken(pin: PinnedVersion => Option[PinnedVersion]): Unit = guarded {
    pages match {
      case firm: PinnedPages if (state eq Updating) && scans.isEmpty =>
        pin(firm.pinned).foreach { weak =>
          families.values.foreach(_.moveLastRows())
          turnTo(new PinnedPages(weak))
        }
      case _ =>
    }
  }

  /** Whether a store that is no longer being updated may still be read. */
  protected def requireReadable(operation: String): Unit = require(operation)

  protected def require(operation: String): Unit = {
    if (state ne Updating) throw provider.outOfDate(this, operation, state.toString)
  }

  private def check(condition: Boolean, message: => String): Unit =
    if (!condition) throw new IllegalStateException(message)

  // ---------------------------------------------------------------------------- families

  /** The family, opened on first use. */
  private def family(name: String): ColumnFamily = families.getOrElseUpdate(name, {
    val format = provider.format(name)
    new ColumnFamily(
      format, live = !readOnly, () => pages.open(name, format.ordered), scratch,
      provider.explained,
      scan => scans.add(scan), scan => scans.remove(scan))
  })

  private def use(operation: String, name: String): ColumnFamily = {
    if (state ne Updating) requireReadable(operation)
    if ((name eq StateStore.DEFAULT_COL_FAMILY_NAME) || name == StateStore.DEFAULT_COL_FAMILY_NAME) {
      if (defaultFamily == null) defaultFamily = family(StateStore.DEFAULT_COL_FAMILY_NAME)
      defaultFamily
    } else {
      // What is open has been checked.
      families.getOrElse(name, existing(operation, name))
    }
  }

  /** A family that the store was not told of must be there in its version. */
  private def existing(operation: String, name: String): ColumnFamily = {
    provider.checkFamily(operation, name)
    if (!pages.names.contains(name)) {
      throw StateStoreErrors.unsupportedOperationOnMissingColumnFamily(operation, name)
    }
    family(name)
  }

  private def useMultiple(operation: String, name: String): ColumnFamily = {
    val found = use(operation, name)
    check(
      found.format.multipleValues,
      s"$operation requires a column family with several values per key, and $name has one")
    found
  }

  override def allColumnFamilyNames: Set[String] = {
    if (state ne Updating) requireReadable("list the column families")
    pages.names
  }

  override def createColFamilyIfAbsent(
      colFamilyName: String,
      keySchema: StructType,
      valueSchema: StructType,
      keyStateEncoderSpec: KeyStateEncoderSpec,
      useMultipleValuesPerKey: Boolean,
      isInternal: Boolean): Unit = {
    registerFamily(colFamilyName, keySchema, valueSchema, keyStateEncoderSpec,
      useMultipleValuesPerKey, isInternal)
  }

  override protected def registerFamily(
      name: String,
      keySchema: StructType,
      valueSchema: StructType,
      spec: KeyStateEncoderSpec,
      multipleValues: Boolean,
      isInternal: Boolean): Unit = {
    require("create a column family")
    provider.register(name, keySchema, valueSchema, spec, multipleValues, isInternal)
    guarded(family(name))
  }

  override def removeColFamilyIfExists(colFamilyName: String): Boolean = guarded {
    require("remove a column family")
    provider.checkFamilyName("remove_col_family", colFamilyName, isInternal = false)
    check(!readOnly, "Cannot remove a column family from a read-only store")
    families.remove(colFamilyName).foreach(_.close())
    provider.unregister(colFamilyName)
    pages.drop(colFamilyName)
  }

  // ---------------------------------------------------------------------------- reading

  private def validate(key: UnsafeRow, value: UnsafeRow): Unit = {
    if (!validated && value != null) {
      provider.validateRow(key, value)
      validated = true
    }
  }

  override def get(key: UnsafeRow, colFamilyName: String): UnsafeRow =
    if (alone) getAlone(key, colFamilyName) else synchronized(getAlone(key, colFamilyName))

  private def getAlone(key: UnsafeRow, colFamilyName: String): UnsafeRow = {
    check(key != null, "Key cannot be null")
    val family = use("get", colFamilyName)
    val value = family.get(key)
    if (!validated) validate(key, value)
    value
  }

  override def multiGet(keys: Array[UnsafeRow], colFamilyName: String): Iterator[UnsafeRow] = {
    check(keys != null && keys.forall(_ != null), "Keys cannot be null")
    val values = new mutable.ArrayBuffer[UnsafeRow](keys.length)
    while (values.size < keys.length) values ++= getSome(keys, values.size, colFamilyName)
    values.iterator
  }

  /**
   * The values of keys from number `from` on, of one at least, and of no more than may be held at a
   * time. Rows that lie in pages stay as they are until their key is written.
   */
  private[spark] def getSome(
      keys: Array[UnsafeRow], from: Int, colFamilyName: String): Array[UnsafeRow] = guarded {
    val values = use("multiGet", colFamilyName).getSome(keys, from)
    if (!validated) values.indices.foreach(i => validate(keys(from + i), values(i)))
    values
  }

  override def keyExists(key: UnsafeRow, colFamilyName: String): Boolean = {
    check(key != null, "Key cannot be null")
    guarded(use("keyExists", colFamilyName).contains(key))
  }

  override def valuesIterator(key: UnsafeRow, colFamilyName: String): Iterator[UnsafeRow] = {
    check(key != null, "Key cannot be null")
    guarded(useMultiple("valuesIterator", colFamilyName).getAll(key))
  }

  private def validating(
      rows: StateStoreIterator[UnsafeRowPair]): StateStoreIterator[UnsafeRowPair] = {
    if (validated) {
      rows
    } else {
      new StateStoreIterator(rows.map { pair =>
        if (!validated) validate(pair.key, pair.value)
        pair
      }, () => rows.close())
    }
  }

  override def iterator(
      colFamilyName: String): StateStoreIterator[UnsafeRowPair] = guardedRows("iterator") {
    val family = use("iterator", colFamilyName)
    validating(family.iterator(all = false))
  }

  override def iteratorWithMultiValues(
      colFamilyName: String): StateStoreIterator[UnsafeRowPair] =
    guardedRows("iteratorWithMultiValues") {
      useMultiple("iteratorWithMultiValues", colFamilyName).iterator(all = true)
    }

  override def prefixScan(
      prefixKey: UnsafeRow,
      colFamilyName: String): StateStoreIterator[UnsafeRowPair] = guardedRows("prefixScan") {
    val family = use("prefixScan", colFamilyName)
    requirePrefix(family)
    validating(family.prefixScan(prefixKey, all = false))
  }

  override def prefixScanWithMultiValues(
      prefixKey: UnsafeRow, colFamilyName: String): StateStoreIterator[UnsafeRowPair] =
    guardedRows("prefixScanWithMultiValues") {
      val family = useMultiple("prefixScanWithMultiValues", colFamilyName)
      requirePrefix(family)
      family.prefixScan(prefixKey, all = true)
    }

  private def requirePrefix(family: ColumnFamily): Unit = Predef.require(
    family.supportsPrefixScan, "Prefix scan requires setting prefix key!")

  override def rangeScan(
      startKey: Option[UnsafeRow],
      endKey: Option[UnsafeRow],
      colFamilyName: String): StateStoreIterator[UnsafeRowPair] = guardedRows("rangeScan") {
    val family = use("rangeScan", colFamilyName)
    requireRange(family)
    validating(family.rangeScan(startKey, endKey, all = false))
  }

  override def rangeScanWithMultiValues(
      startKey: Option[UnsafeRow],
      endKey: Option[UnsafeRow],
      colFamilyName: String): StateStoreIterator[UnsafeRowPair] =
    guardedRows("rangeScanWithMultiValues") {
      val family = useMultiple("rangeScanWithMultiValues", colFamilyName)
      requireRange(family)
      family.rangeScan(startKey, endKey, all = true)
    }

  private def requireRange(family: ColumnFamily): Unit = Predef.require(
    family.supportsRangeScan,
    "Range scan requires an encoder that supports range scanning!")

  // ---------------------------------------------------------------------------- writing

  private def writable(operation: String, name: String): ColumnFamily = {
    requireWritable(operation)
    use(operation, name)
  }

  private def writableMultiple(operation: String, name: String): ColumnFamily = {
    requireWritable(operation)
    useMultiple(operation, name)
  }

  private def requireWritable(operation: String): Unit = {
    require(operation)
    if (readOnly) throw new IllegalStateException(s"Cannot $operation through a read-only store")
  }

  override def put(key: UnsafeRow, value: UnsafeRow, colFamilyName: String): Unit = {
    check(key != null, "Key cannot be null")
    Predef.require(value != null, "Cannot put a null value")
    if (alone) {
      writable("put", colFamilyName).put(key, value)
    } else {
      synchronized(writable("put", colFamilyName).put(key, value))
    }
  }

  override def putList(
      key: UnsafeRow, values: Array[UnsafeRow], colFamilyName: String): Unit = {
    check(key != null, "Key cannot be null")
    requireValues("put", values)
    guarded(writableMultiple("putList", colFamilyName).putAll(key, values, replace = true))
  }

  override def merge(key: UnsafeRow, value: UnsafeRow, colFamilyName: String): Unit = {
    check(key != null, "Key cannot be null")
    Predef.require(value != null, "Cannot merge a null value")
    guarded(writableMultiple("merge", colFamilyName).append(key, value))
  }

  override def mergeList(
      key: UnsafeRow, values: Array[UnsafeRow], colFamilyName: String): Unit = {
    check(key != null, "Key cannot be null")
    requireValues("merge", values)
    guarded(writableMultiple("mergeList", colFamilyName).putAll(key, values, replace = false))
  }

  private def requireValues(operation: String, values: Array[UnsafeRow]): Unit = {
    Predef.require(values != null, s"Cannot $operation a null value")
    values.foreach(v => Predef.require(v != null, s"Cannot $operation a null value in the array"))
  }

  override def remove(key: UnsafeRow, colFamilyName: String): Unit = {
    check(key != null, "Key cannot be null")
    guarded(writable("remove", colFamilyName).remove(key))
  }

  override def deleteRange(
      beginKey: UnsafeRow, endKey: UnsafeRow, colFamilyName: String): Unit = {
    check(beginKey != null, "Begin key cannot be null")
    check(endKey != null, "End key cannot be null")
    guarded {
      val family = writable("deleteRange", colFamilyName)
      check(
        family.supportsDeleteRange,
        "deleteRange requires a RangeKeyScanStateEncoderSpec for ordered key encoding")
      family.removeRange(beginKey, endKey)
    }
  }

  override def hasCommitted: Boolean = state == Committed

  override def toString: String =
    s"QuireStateStore[operatorId=${id.operatorId}, partitionId=${id.partitionId}, " +
      s"storeName=${id.storeName}, version=$version]"
}

private[spark] object QuireStore {
  sealed abstract class State(name: String) {
    override def toString: String = name
  }
  case object Updating extends State("UPDATING")
  case object Committed extends State("COMMITTED")
  case object Aborted extends State("ABORTED")
  case object Released extends State("RELEASED")
}

/** A version that is only read, from a pinned snapshot. */
private[spark] final class QuireReadStore(
    provider: QuireStateStoreProvider, loaded: Version, pages: Pages)
  extends QuireStore(provider, loaded, pages, readOnly = true) {
  import QuireStore._

  override protected def finish(): Unit = release()

  /** Its task will write. */
  private[spark] def makeWay(pin: PinnedVersion => Option[PinnedVersion]): Unit = weaken(pin)

  override def release(): Unit = synchronized {
    if (state == Updating) {
      state = Released
      closePages()
    }
  }

  override def abort(): Unit = release()

  override def commit(): Long = {
    throw new IllegalStateException(s"$this is read-only and cannot commit")
  }

  override def metrics: StateStoreMetrics = StateStoreMetrics(0, 0, Map.empty)

  override def getStateStoreCheckpointInfo(): StateStoreCheckpointInfo =
    throw StateStoreErrors.stateStoreOperationOutOfOrder(
      "Cannot get checkpointInfo without committing the store")
}

/**
 * A version that is being changed into the next one. There is one at a time.
 *
 * @param arena the pages it changes, acquired for it; the provider may let go of them meanwhile
 */
private[spark] final class QuireWriteStore(
    provider: QuireStateStoreProvider,
    loaded: Version,
    val arena: Arena,
    val files: QuireStateStoreProvider.CommitFiles,
    val loadMetrics: Map[StateStoreCustomMetric, Long])
  extends QuireStore(provider, loaded, new LivePages(arena), readOnly = false) {
  import QuireStore._

  private var commitTried = false
  private var committed: Option[QuireStateStoreProvider.Commit] = None
  /** What was committed, once somebody reads it; until then the store has nothing open. */
  private var reading = false

  override protected def finish(): Unit = {
    if (state == Updating) abort() else if (state == Committed) stopReading()
  }

  override protected def requireReadable(operation: String): Unit = {
    if (state ne Committed) require(operation) else synchronized(readCommitted())
  }

  private def readCommitted(): Unit = {
    if (!reading) {
      turnTo(provider.committedPages(this, committed.get.version))
      reading = true
    }
  }

  /** Ends reading what was committed: with the task, or when the provider lets go of it. */
  private[spark] def stopReading(): Unit = synchronized {
    if (reading) {
      reading = false
      closePages()
      provider.stoppedReading(this)
    }
  }

  override def commit(): Long = synchronized {
    requireState(Updating)
    if (commitTried) {
      throw StateStoreErrors.stateStoreOperationOutOfOrder(
        "A commit that has failed cannot be tried again: abort the store")
    }
    commitTried = true
    try {
      flushFamilies()
      val commit = provider.commit(this, loaded)
      committed = Some(commit)
      state = Committed
      try closePages() finally provider.finished(this)
      commit.version.number
    } catch {
      case e: Throwable =>
        throw SparkInternals.cannotCommit(toString, provider.explained(e))
    }
  }

  override def abort(): Unit = synchronized {
    if (state == Updating) {
      state = Aborted
      try {
        closePages()
        provider.rollBack(this)
      } finally {
        provider.finished(this)
      }
    } else {
      requireState(Updating, Aborted)
    }
  }

  private def requireState(possible: State*): Unit = {
    if (!possible.contains(state)) {
      throw StateStoreErrors.stateStoreOperationOutOfOrder(
        s"Expected possible states ${possible.mkString("(", ", ", ")")} but found $state")
    }
  }


  /** Whether it may still be written. */
  private[spark] def isUpdating: Boolean = state == Updating

  override def metrics: StateStoreMetrics = {
    if (state == Updating) {
      flushFamilies()
      return provider.metricsBeforeCommit(this)
    }
    committed.map(_.metrics).getOrElse(StateStoreMetrics(0, 0, Map.empty))
  }

  override def getStateStoreCheckpointInfo(): StateStoreCheckpointInfo = {
    if (state == Updating) {
      throw StateStoreErrors.stateStoreOperationOutOfOrder(s"Cannot get metrics in $state state")
    }
    committed.map(_.info).getOrElse(throw StateStoreErrors.stateStoreOperationOutOfOrder(
      "Cannot get checkpointInfo without committing the store"))
  }
}
