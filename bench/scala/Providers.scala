package io.quire.bench

import java.util.HashMap
import java.util.concurrent.ConcurrentHashMap

import scala.jdk.CollectionConverters._

import org.apache.hadoop.conf.Configuration

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.types.StructType

/** What the providers for scale have in common: one column family, nothing durable. */
abstract class ScaleProvider extends StateStoreProvider {
  private var id: StateStoreId = _
  private var onCommit: Long => Unit = _

  override def init(
      stateStoreId: StateStoreId,
      keySchema: StructType,
      valueSchema: StructType,
      keyStateEncoderSpec: KeyStateEncoderSpec,
      useColumnFamilies: Boolean,
      storeConfs: StateStoreConf,
      hadoopConf: Configuration,
      useMultipleValuesPerKey: Boolean,
      stateSchemaProvider: Option[StateSchemaProvider]): Unit = {
    id = stateStoreId
    onCommit = version =>
      if (storeConfs.commitValidationEnabled) {
        StateStore.reportCommitToCoordinator(version, id, hadoopConf)
      }
  }

  override def stateStoreId: StateStoreId = id
  override def close(): Unit = {}

  /** Tells Spark of a commit, as its own providers do. */
  def report(version: Long): Unit = onCommit(version)
}

abstract class ScaleStore(provider: ScaleProvider, override val version: Long) extends StateStore {
  private var committed = false

  def keyCount: Long

  override def id: StateStoreId = provider.stateStoreId
  override def commit(): Long = {
    committed = true
    provider.report(version + 1)
    version + 1
  }
  override def hasCommitted: Boolean = committed
  override def metrics: StateStoreMetrics = StateStoreMetrics(keyCount, 0L, Map.empty)
  override def getStateStoreCheckpointInfo(): StateStoreCheckpointInfo =
    StateStoreCheckpointInfo(id.partitionId, version + 1, None, None)
  override def allColumnFamilyNames: Set[String] = Set(StateStore.DEFAULT_COL_FAMILY_NAME)

  private def no(what: String) =
    throw new UnsupportedOperationException(s"$what: this provider serves benchmarks only")

  override def valuesIterator(key: UnsafeRow, family: String): Iterator[UnsafeRow] =
    no("valuesIterator")
  override def prefixScan(
      key: UnsafeRow, family: String): StateStoreIterator[UnsafeRowPair] = no("prefixScan")
  override def prefixScanWithMultiValues(
      key: UnsafeRow, family: String): StateStoreIterator[UnsafeRowPair] =
    no("prefixScanWithMultiValues")
  override def iteratorWithMultiValues(family: String): StateStoreIterator[UnsafeRowPair] =
    no("iteratorWithMultiValues")
  override def removeColFamilyIfExists(family: String): Boolean = no("removeColFamilyIfExists")
  override def createColFamilyIfAbsent(
      family: String,
      keySchema: StructType,
      valueSchema: StructType,
      keyStateEncoderSpec: KeyStateEncoderSpec,
      useMultipleValuesPerKey: Boolean,
      isInternal: Boolean): Unit = no("createColFamilyIfAbsent")
  override def putList(key: UnsafeRow, values: Array[UnsafeRow], family: String): Unit =
    no("putList")
  override def merge(key: UnsafeRow, value: UnsafeRow, family: String): Unit = no("merge")
  override def mergeList(key: UnsafeRow, values: Array[UnsafeRow], family: String): Unit =
    no("mergeList")
}

/** Keeps nothing: what a query costs with it is Spark's own work, the limit for every store. */
class LimitProvider extends ScaleProvider {
  /** What every key is said to have. */
  protected def answer: UnsafeRow = null
  protected def note(value: UnsafeRow): Unit = {}

  override def getStore(
      version: Long, ckptId: Option[String], force: Boolean, loadEmpty: Boolean): StateStore =
    new ScaleStore(this, version) {
      override def keyCount: Long = 0L
      override def get(key: UnsafeRow, family: String): UnsafeRow = answer
      override def put(key: UnsafeRow, value: UnsafeRow, family: String): Unit = note(value)
      override def remove(key: UnsafeRow, family: String): Unit = {}
      override def iterator(family: String): StateStoreIterator[UnsafeRowPair] =
        new StateStoreIterator(Iterator.empty)
      override def abort(): Unit = {}
    }
}

/**
 * Keeps the first value it is given and has it for every key. To a provider that has nothing Spark
 * gives no old row to merge; with this one Spark does all that it does with a real store.
 */
class AnsweringLimitProvider extends LimitProvider {
  @volatile private var kept: UnsafeRow = _
  override protected def answer: UnsafeRow = kept
  override protected def note(value: UnsafeRow): Unit = if (kept == null) kept = value.copy()
}

/**
 * One hash map of copied rows in the heap, changed in place: no versions, no files, no way back.
 * The map lives as long as the JVM, so a query that starts again finds what it left.
 */
class HeapMapProvider extends ScaleProvider {
  override def getStore(
      version: Long, ckptId: Option[String], force: Boolean, loadEmpty: Boolean): StateStore = {
    val map = HeapMapProvider.maps.computeIfAbsent(stateStoreId, _ => new HashMap)
    new ScaleStore(this, version) {
      override def keyCount: Long = map.size
      override def get(key: UnsafeRow, family: String): UnsafeRow = map.get(key)
      override def put(key: UnsafeRow, value: UnsafeRow, family: String): Unit =
        map.put(key.copy(), value.copy())
      override def remove(key: UnsafeRow, family: String): Unit = map.remove(key)
      override def iterator(family: String): StateStoreIterator[UnsafeRowPair] =
        new StateStoreIterator(map.entrySet.iterator.asScala.map { entry =>
          new UnsafeRowPair(entry.getKey, entry.getValue)
        })
      override def abort(): Unit =
        throw new UnsupportedOperationException("a bare map cannot take back what was put")
    }
  }
}

object HeapMapProvider {
  private val maps = new ConcurrentHashMap[StateStoreId, HashMap[UnsafeRow, UnsafeRow]]
}
