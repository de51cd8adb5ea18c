package io.quire.spark

import org.apache.spark.sql.execution.streaming.state.{KeyStateEncoderSpec, StateStore, StateStoreProvider}
import org.apache.spark.sql.types.StructType

/** What differs between versions of Spark in a store: nothing to add for 4.2. */
private[spark] trait StoreShim extends StateStore {
  protected def registerFamily(
      name: String,
      keySchema: StructType,
      valueSchema: StructType,
      spec: KeyStateEncoderSpec,
      multipleValues: Boolean,
      isInternal: Boolean): Unit
}

/** What differs between versions of Spark in a provider: 4.2 runs maintenance in one call. */
private[spark] trait ProviderShim extends StateStoreProvider {
  protected def writeBaseIfDue(): Unit
  protected def cleanUp(): Unit

  override def doMaintenance(): Unit = {
    writeBaseIfDue()
    cleanUp()
  }
}
