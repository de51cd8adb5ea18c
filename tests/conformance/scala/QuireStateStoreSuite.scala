package org.apache.spark.sql.execution.streaming.state

import java.util.UUID

import scala.util.Random

import io.quire.conformance.LatestVersion
import io.quire.spark.QuireStateStoreProvider
import org.apache.hadoop.conf.Configuration
import org.scalatest.BeforeAndAfter

import org.apache.spark.TaskContext
import org.apache.spark.sql.execution.streaming.runtime.StreamExecution
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.test.SharedSparkSession
import org.apache.spark.sql.types.StructType

/** Spark's tests of the state store contract, on Quire's provider. */
class QuireStateStoreSuite extends StateStoreSuiteBase[QuireStateStoreProvider]
  with SharedSparkSession
  with BeforeAndAfter {
  import StateStoreTestsHelper._

  before {
    StateStore.stop()
    spark.streams.stateStoreCoordinator // made on first use, and the stores report to it
  }

  after {
    StateStore.stop()
  }

  /** The session's, which a thread that is a task does not see. */
  private def sessionConf(): SQLConf = {
    val task = TaskContext.get()
    TaskContext.unset()
    try SQLConf.get finally if (task != null) TaskContext.setTaskContext(task)
  }

  private def freshId(): StateStoreId = StateStoreId(newDir(), Random.nextInt(), 0)

  private def open(
      id: StateStoreId = freshId(),
      keySchema: StructType = keySchema,
      encoder: Option[KeyStateEncoderSpec] = None,
      useColumnFamilies: Boolean = false,
      sqlConf: SQLConf = sessionConf(),
      hadoopConf: Configuration = new Configuration): QuireStateStoreProvider = {
    hadoopConf.set(StreamExecution.RUN_ID_KEY, UUID.randomUUID().toString)
    val provider = newStoreProviderNoInit()
    provider.init(
      id,
      keySchema,
      valueSchema,
      encoder.getOrElse(NoPrefixKeyStateEncoderSpec(keySchema)),
      useColumnFamilies,
      new StateStoreConf(sqlConf),
      hadoopConf,
      false, // several values per key
      Some(new TestStateSchemaProvider))
    provider
  }

  override def newStoreProviderNoInit(): QuireStateStoreProvider = new QuireStateStoreProvider

  override def newStoreProvider(): QuireStateStoreProvider = open()

  override def newStoreProvider(storeId: StateStoreId): QuireStateStoreProvider = open(storeId)

  override def newStoreProvider(
      storeId: StateStoreId,
      useColumnFamilies: Boolean): QuireStateStoreProvider =
    open(storeId, useColumnFamilies = useColumnFamilies)

  override def newStoreProvider(
      storeId: StateStoreId,
      conf: Configuration): QuireStateStoreProvider =
    open(storeId, hadoopConf = conf)

  override def newStoreProvider(
      minDeltasForSnapshot: Int,
      numOfVersToRetainInMemory: Int): QuireStateStoreProvider =
    open(sqlConf = getDefaultSQLConf(minDeltasForSnapshot, numOfVersToRetainInMemory))

  override def newStoreProvider(
      keySchema: StructType,
      keyStateEncoderSpec: KeyStateEncoderSpec,
      useColumnFamilies: Boolean): QuireStateStoreProvider =
    open(
      keySchema = keySchema,
      encoder = Some(keyStateEncoderSpec),
      useColumnFamilies = useColumnFamilies)

  override def newStoreProvider(useColumnFamilies: Boolean): QuireStateStoreProvider =
    open(useColumnFamilies = useColumnFamilies)

  override def newStoreProviderWithClonedConf(storeId: StateStoreId): QuireStateStoreProvider =
    open(storeId, sqlConf = cloneSQLConf())

  override def getDefaultSQLConf(
      minDeltasForSnapshot: Int,
      numOfVersToRetainInMemory: Int): SQLConf = {
    val conf = cloneSQLConf()
    conf.setConf(SQLConf.STATE_STORE_MIN_DELTAS_FOR_SNAPSHOT, minDeltasForSnapshot)
    conf.setConf(SQLConf.MAX_BATCHES_TO_RETAIN_IN_MEMORY, numOfVersToRetainInMemory)
    conf
  }

  override def getLatestData(
      storeProvider: QuireStateStoreProvider,
      useColumnFamilies: Boolean): Set[((String, Int), Int)] =
    getData(storeProvider, -1, useColumnFamilies)

  override def getData(
      storeProvider: QuireStateStoreProvider,
      version: Int,
      useColumnFamilies: Boolean): Set[((String, Int), Int)] = {
    val id = storeProvider.stateStoreId
    tryWithProviderResource(open(id, useColumnFamilies = useColumnFamilies)) { reopened =>
      val store = reopened.getStore(if (version >= 0) version else LatestVersion.of(reopened))
      try rowPairsToDataSet(store.iterator()) finally store.abort()
    }
  }

  /** Within a task of its own, as Spark's operators use a store. */
  override protected def tryWithProviderResource[T](
      provider: QuireStateStoreProvider)(body: QuireStateStoreProvider => T): T = {
    val outer = TaskContext.get()
    val task = TaskContext.empty()
    TaskContext.setTaskContext(task)
    try {
      try body(provider) finally task.markTaskCompleted(None)
    } finally {
      if (outer == null) TaskContext.unset() else TaskContext.setTaskContext(outer)
      provider.close()
    }
  }

  // Both parents have one.
  override protected def testQuietly(name: String)(body: => Unit): Unit =
    super[StateStoreSuiteBase].testQuietly(name)(body)
}

/** The same with a checksum of each row. */
class QuireStateStoreWithRowChecksumSuite
  extends QuireStateStoreSuite with EnableStateStoreRowChecksum {
  override protected def testQuietly(name: String)(body: => Unit): Unit =
    super[QuireStateStoreSuite].testQuietly(name)(body)
}
