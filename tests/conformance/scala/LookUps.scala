package io.quire.spark

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state.{ReadStateStore, StateStore}

/** What the node of aggregations asks of a store; for tests. */
object LookUps {
  def some(store: ReadStateStore, keys: Array[UnsafeRow], from: Int): Array[UnsafeRow] =
    store.asInstanceOf[QuireStore].getSome(keys, from, StateStore.DEFAULT_COL_FAMILY_NAME)
}
