package io.quire.spark

import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, UnsafeRow}
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.types.DataTypeUtils
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.metric.SQLMetric
import org.apache.spark.sql.execution.streaming.operators.stateful.{StatefulOperatorStateInfo, StateStoreRestoreExec, StreamingAggregationStateManager}
import org.apache.spark.sql.execution.streaming.state.{StateStore, WrappedReadStateStore}
import org.apache.spark.sql.execution.streaming.state.quire.SparkInternals
import org.apache.spark.sql.internal.SQLConf

/** Has aggregations whose state is Quire's look up many keys at a time. */
private[spark] object RestoreTogether extends Rule[SparkPlan] {
  override def apply(plan: SparkPlan): SparkPlan =
    if (conf.getConf(SQLConf.STATE_STORE_PROVIDER_CLASS) != AcceptsQuire.Provider) {
      plan
    } else {
      plan.transform {
        case node: QuireStateStoreRestoreExec => node
        // Without keys there is one row, and it is not looked up.
        case node: StateStoreRestoreExec if node.keyExpressions.nonEmpty =>
          new QuireStateStoreRestoreExec(
            node.keyExpressions, node.stateInfo, node.stateFormatVersion, node.child)
      }
    }
}

/**
 * Gives each row of an aggregation behind what the state has for its key, as the node it stands for
 * does, but asks the store for [[RestoredRows.RowsMax]] keys at a time: most of a look-up of a random
 * key is waiting for memory, and the core waits for that of many keys at once.
 */
private[spark] class QuireStateStoreRestoreExec(
    keyExpressions: Seq[Attribute],
    stateInfo: Option[StatefulOperatorStateInfo],
    stateFormatVersion: Int,
    child: SparkPlan)
  extends StateStoreRestoreExec(keyExpressions, stateInfo, stateFormatVersion, child) {

  // Plans look as they do without the extension.
  override def nodeName: String = super.nodeName.stripPrefix("Quire")

  private val manager = StreamingAggregationStateManager.createStateManager(
    keyExpressions, child.output, stateFormatVersion)

  override protected def doExecute(): RDD[InternalRow] = {
    val numOutputRows = longMetric("numOutputRows")
    val keySchema = DataTypeUtils.fromAttributes(keyExpressions)
    SparkInternals.withReadStore(
      child.execute(), session, getStateInfo, keySchema, manager.getStateValueSchema) {
      case (store: QuireStore, rows) => new RestoredRows(rows, store, manager, numOutputRows)
      case (other, _) =>
        throw new IllegalStateException(s"$other is no store of Quire's, though its provider is set")
    }
  }

  override protected def withNewChildInternal(newChild: SparkPlan): StateStoreRestoreExec =
    new QuireStateStoreRestoreExec(keyExpressions, stateInfo, stateFormatVersion, newChild)

  override def canEqual(other: Any): Boolean = other.isInstanceOf[QuireStateStoreRestoreExec]

  override def equals(other: Any): Boolean = canEqual(other) && super.equals(other)
}

/**
 * The rows, each behind what the store has for its key. As is usual among Spark's iterators, a row
 * is valid until the next is asked for.
 *
 * Keys are looked up before the rows in front of theirs have gone on to whoever writes. That is as
 * good as later: below is an aggregation, so no key comes twice.
 */
private[spark] final class RestoredRows(
    rows: Iterator[InternalRow],
    store: QuireStore,
    manager: StreamingAggregationStateManager,
    numOutputRows: SQLMetric) extends Iterator[InternalRow] {

  import RestoredRows._

  private val taken = new Array[UnsafeRow](RowsMax)
  private val keys = new Array[UnsafeRow](RowsMax)
  private var asked: Array[UnsafeRow] = Array.empty
  /** What the state has for the keys from number `foundFrom` on, as far as it was looked up. */
  private var found: Array[UnsafeRow] = Array.empty
  private var foundFrom = 0
  private var at = 0
  /** Whether what the state has for row `at` has been given. */
  private var restored = false
  private val answer = new Answer(store)

  override def hasNext: Boolean = at < asked.length || rows.hasNext

  override def next(): InternalRow = {
    if (at == asked.length) take()
    numOutputRows += 1
    if (!restored) {
      restored = true
      answer.value = lookUp()
      if (answer.value != null) return manager.get(answer, keys(at))
    }
    restored = false
    at += 1
    taken(at - 1)
  }

  private def take(): Unit = {
    if (!rows.hasNext) throw new NoSuchElementException("no more rows")
    var count = 0
    var bytes = 0L
    while (count < RowsMax && bytes < BytesMax && rows.hasNext) {
      val row = rows.next().asInstanceOf[UnsafeRow]
      taken(count) = copied(row, taken(count))
      keys(count) = copied(manager.getKey(row), keys(count))
      bytes += row.getSizeInBytes
      count += 1
    }
    asked = if (count == RowsMax) keys else keys.take(count)
    at = 0
    found = Array.empty
    foundFrom = 0
  }

  private def lookUp(): UnsafeRow = {
    if (at == foundFrom + found.length) {
      foundFrom = at
      found = Array.empty // what was looked up before is not held meanwhile
      found = store.getSome(asked, at, StateStore.DEFAULT_COL_FAMILY_NAME)
    }
    found(at - foundFrom)
  }

  /** The row, in the memory of another that is no longer needed; that of large ones is not kept. */
  private def copied(row: UnsafeRow, into: UnsafeRow): UnsafeRow =
    if (into == null || row.getSizeInBytes > KeptBytes || into.getSizeInBytes > KeptBytes) {
      row.copy()
    } else {
      into.copyFrom(row)
      into
    }
}

private object RestoredRows {
  /** Rows, and bytes of them, that are held at a time. */
  val RowsMax = 64
  val BytesMax: Long = 256 << 10
  /** Of a row, in memory that is used again. */
  private val KeptBytes = 4 << 10

  /** A store whose answer is there already. */
  private final class Answer(store: StateStore) extends WrappedReadStateStore(store) {
    var value: UnsafeRow = _
    override def get(key: UnsafeRow, colFamilyName: String): UnsafeRow = value
  }
}
