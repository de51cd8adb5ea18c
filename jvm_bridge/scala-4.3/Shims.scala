package io.quire.spark

import org.apache.spark.sql.execution.streaming.state.{KeyStateEncoderSpec, StateStore, StateStoreProvider}
import org.apache.spark.sql.types.StructType

/** What Spark 4.3 asks of a store beyond 4.2. */
private[spark] trait StoreShim extends StateStore {
  protected def registerFamily(
      name: String,
      keySchema: StructType,
      valueSchema: StructType,
      spec: KeyStateEncoderSpec,
      multipleValues: Boolean,
      isInternal: Boolean): Unit

  override def registerColFamily(
      colFamilyName: String,
      keySchema: StructType,
      valueSchema: StructType,
      keyStateEncoderSpec: KeyStateEncoderSpec,
      useMultipleValuesPerKey: Boolean,
      isInternal: Boolean): Unit =
    registerFamily(colFamilyName, keySchema, valueSchema, keyStateEncoderSpec,
      useMultipleValuesPerKey, isInternal)
}

/** What Spark 4.3 asks of a provider beyond 4.2: maintenance in two parts, each run by itself. */
private[spark] trait ProviderShim extends StateStoreProvider {
  protected def writeBaseIfDue(): Unit
  protected def cleanUp(): Unit

  override def doSnapshotMaintenance(): Unit = writeBaseIfDue()
  override def doCleanupMaintenance(): Unit = cleanUp()
  override def doMaintenance(): Unit = {
    doSnapshotMaintenance()
    doCleanupMaintenance()
  }
}
