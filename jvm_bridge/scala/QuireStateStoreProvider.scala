package io.quire.spark

import java.util.UUID
import java.util.concurrent.ConcurrentHashMap

import scala.collection.mutable
import scala.util.control.NonFatal

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path

import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.execution.streaming.state.quire.{ChangeIterator, SparkInternals}
import org.apache.spark.sql.types.StructType
import org.apache.spark.unsafe.Platform

/**
 * A state store whose state lies in flat pages outside the heap.
 *
 * The provider owns one arena: the pages of the newest version and, by copy-on-write, of the
 * versions before it that are still pinned. A commit writes what changed as a delta file and then
 * publishes the pages; maintenance writes whole bases in the background from a pinned version.
 * docs/provider.md tells the whole story.
 *
 * Threads: one writer at a time, which others wait for; any number of readers; maintenance beside
 * both. Fields are guarded by this object's monitor, which is not held while files are written or a
 * task works on its rows.
 */
class QuireStateStoreProvider
  extends StateStoreProvider with ProviderShim with SupportsFineGrainedReplay with Logging {
  import QuireStateStoreProvider._

  @volatile private var storeId: StateStoreId = _
  private var keySchema: StructType = _
  private var valueSchema: StructType = _
  private var storeConf: StateStoreConf = _
  private var hadoopConf: Configuration = _
  private var stateSchemaProvider: Option[StateSchemaProvider] = None
  private var conf: QuireConf = _
  private var files: CheckpointFiles = _
  private[spark] var useColumnFamilies = false

  private val formats = new ConcurrentHashMap[String, FamilyFormat]()

  private var arena: Arena = _
  private var current: Version = _
  /** Older versions that are kept in memory, the oldest first. */
  private val retained = new mutable.ArrayBuffer[PinnedVersion]()
  /** The versions that led to the current one, as far as they are known, the oldest first. */
  private var line: Vector[Version] = Vector.empty
  /** The newest version of that line that has a base; 0 for the empty state. */
  private var lastBase = 0L
  private var basesWritten = 0L
  private var baseBytes = 0L
  private var writer: AnyRef = _
  private var writerThread: Thread = _
  private var closed = false
  @volatile private var rowsFromFiles = false
  /** The number of the last writer. */
  private var stamp = 0L
  /** Committed stores that are being read. */
  private val readingCommitted = new mutable.HashSet[QuireWriteStore]()

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
    NativeLibrary.load()
    this.storeId = stateStoreId
    this.keySchema = keySchema
    this.valueSchema = valueSchema
    this.storeConf = storeConfs
    this.hadoopConf = hadoopConf
    this.useColumnFamilies = useColumnFamilies
    this.stateSchemaProvider = stateSchemaProvider
    this.conf = QuireConf(storeConfs)
    this.files = new CheckpointFiles(stateStoreId, storeConfs, hadoopConf)
    if (useMultipleValuesPerKey) {
      require(useColumnFamilies,
        "Multiple values per key support requires column families to be enabled")
    }
    addFormat(StateStore.DEFAULT_COL_FAMILY_NAME, keySchema, valueSchema, keyStateEncoderSpec,
      useMultipleValuesPerKey, isInternal = false)
  }

  override def stateStoreId: StateStoreId = storeId

  // ---------------------------------------------------------------------------- column families

  private[spark] def format(name: String): FamilyFormat = formats.get(name)

  private def addFormat(
      name: String,
      keySchema: StructType,
      valueSchema: StructType,
      spec: KeyStateEncoderSpec,
      multipleValues: Boolean,
      isInternal: Boolean): Unit = {
    stateSchemaProvider match {
      case Some(test: TestStateSchemaProvider) => test.captureSchema(name, keySchema, valueSchema)
      case _ =>
    }
    val encoding = storeConf.stateStoreEncodingFormat
    lazy val encoder = RocksDBStateStoreProvider.getDataEncoder(
      encoding,
      StateRowEncoderCacheKey(
        SparkInternals.runId(hadoopConf), storeId.operatorId, storeId.partitionId,
        storeId.storeName, name),
      spec, valueSchema, stateSchemaProvider, Some(name))
    formats.putIfAbsent(name, new FamilyFormat(
      name, keySchema, valueSchema, spec, multipleValues, isInternal,
      RocksDBStateEncoder.getKeyEncoder(encoder, spec, useColumnFamilies),
      // Lists are the core's own, so every value is encoded by itself.
      RocksDBStateEncoder.getValueEncoder(encoder, valueSchema, useMultipleValuesPerKey = false),
      encoding,
      new RowChecksum(
        storeConf.rowChecksumEnabled, storeConf.rowChecksumReadVerificationRatio,
        storeId.toString)))
  }

  private[spark] def register(
      name: String,
      keySchema: StructType,
      valueSchema: StructType,
      spec: KeyStateEncoderSpec,
      multipleValues: Boolean,
      isInternal: Boolean): Unit = {
    checkFamilyName("create_col_family", name, isInternal)
    addFormat(name, keySchema, valueSchema, spec, multipleValues, isInternal)
  }

  private[spark] def unregister(name: String): Unit = formats.remove(name)

  /** That an operation may use a family other than the default one. */
  private[spark] def checkFamily(operation: String, name: String): Unit = {
    if (!useColumnFamilies) {
      throw StateStoreErrors.unsupportedOperationException(operation, OneFamily)
    }
    if (name.isEmpty || name.trim != name) {
      throw StateStoreErrors.cannotUseColumnFamilyWithInvalidName(operation, name)
    }
    if (!formats.containsKey(name)) {
      throw StateStoreErrors.unsupportedOperationOnMissingColumnFamily(operation, name)
    }
  }

  /** That a family of this name may be made or removed. */
  private[spark] def checkFamilyName(
      operation: String, name: String, isInternal: Boolean): Unit = {
    if (!useColumnFamilies) {
      throw StateStoreErrors.unsupportedOperationException(operation, OneFamily)
    }
    if (name.isEmpty || name.trim != name ||
        (name == StateStore.DEFAULT_COL_FAMILY_NAME && !isInternal)) {
      throw StateStoreErrors.cannotUseColumnFamilyWithInvalidName(operation, name)
    }
    if (!isInternal && name.charAt(0) == '$') {
      throw StateStoreErrors.cannotCreateColumnFamilyWithReservedChars(name)
    }
  }

  /** Whether rows were loaded from files and none of them looked at yet. */
  private[spark] def validating: Boolean = rowsFromFiles && !useColumnFamilies

  private[spark] def validateRow(key: UnsafeRow, value: UnsafeRow): Unit = {
    StateStoreProvider.validateStateRowFormat(
      key, keySchema, value, valueSchema, storeId, storeConf)
    rowsFromFiles = false
  }

  // ---------------------------------------------------------------------------- giving out stores

  override def getStore(
      version: Long,
      stateStoreCkptId: Option[String],
      forceSnapshotOnCommit: Boolean,
      loadEmpty: Boolean): StateStore = loading {
    val durable = if (loadEmpty) BaseAlone else if (forceSnapshotOnCommit) DeltaAndBase else Delta
    writeStore(wantedVersion(version, stateStoreCkptId), durable) { wanted =>
      if (loadEmpty) bringEmpty(wanted) else bring(wanted)
    }
  }

  override def getReadStore(version: Long, uniqueId: Option[String]): ReadStateStore = loading {
    readStore(wantedVersion(version, uniqueId))
  }

  override def upgradeReadStoreToWriteStore(
      readStore: ReadStateStore,
      version: Long,
      uniqueId: Option[String],
      forceSnapshotOnCommit: Boolean): StateStore = {
    assert(version == readStore.version,
      "Can only upgrade readStore to writeStore with the same version, " +
        s"readStoreVersion: ${readStore.version}, writeStoreVersion: $version")
    assert(storeId == readStore.id, "Can only upgrade readStore to writeStore with the same stateStoreId")
    // The reader keeps its pin: what it has given out stays valid. It is released with its task.
    getStore(version, uniqueId, forceSnapshotOnCommit, loadEmpty = false)
  }

  override def replayStateFromSnapshot(
      snapshotVersion: Long,
      endVersion: Long,
      readOnly: Boolean,
      snapshotVersionStateStoreCkptId: Option[String],
      endVersionStateStoreCkptId: Option[String]): StateStore = loading {
    if (snapshotVersion < 1) throw SparkInternals.unexpectedVersion(snapshotVersion)
    if (endVersion < snapshotVersion) throw SparkInternals.unexpectedVersion(endVersion)
    val from = wantedVersion(snapshotVersion, snapshotVersionStateStoreCkptId)
    val to = wantedVersion(endVersion, endVersionStateStoreCkptId)
    if (readOnly) {
      pinnedStore(to, adopt = false)(load(to, Some(from)))
    } else {
      writeStore(to, Delta)(wanted => adoptLoaded(wanted, load(wanted, Some(from))))
    }
  }

  override def getStateStoreChangeDataReader(
      startVersion: Long,
      endVersion: Long,
      colFamilyNameOpt: Option[String],
      endVersionStateStoreCkptId: Option[String]): ChangeIterator = {
    val end = wantedVersion(endVersion, endVersionStateStoreCkptId)
    val versions = lineTo(end, startVersion).filter(_.number >= startVersion)
    val name = colFamilyNameOpt.getOrElse(StateStore.DEFAULT_COL_FAMILY_NAME)
    new ChangeReader(files, versions, format(name))
  }

  private def wantedVersion(number: Long, id: Option[String]): Version = {
    if (number < 0) throw SparkInternals.unexpectedVersion(number)
    Version(number, if (storeConf.enableStateStoreCheckpointIds && number > 0) id else None)
  }

  /** Errors of loading as Spark reports them. */
  private def loading[T](body: => T): T =
    try {
      body
    } catch {
      case e: StateStoreInvalidStateMachineTransition => throw e
      case e: QuireCheckpointException => throw SparkInternals.cannotLoad(e)
      case e: Throwable => throw SparkInternals.cannotLoad(explained(e))
    }

  /** Says what to do where the core cannot know it. */
  private[spark] def explained(e: Throwable): Throwable = e match {
    case native: QuireNativeException if native.code == QuireNativeException.Limit =>
      val more = new IllegalStateException(
        s"$storeId needs more memory than spark.sql.streaming.stateStore.quire.memoryLimit " +
          s"(${conf.memoryLimit} bytes for all stores of this process) allows: raise it, or use " +
          s"more executors. ${native.getMessage}. The last committed version is intact", native)
      more
    case other => other
  }

  private def writeStore(version: Version, files: CommitFiles)(
      bringIt: Version => LoadReport): StateStore = {
    val token = new Object
    claimWriter(token)
    var store: QuireWriteStore = null
    try {
      val started = System.nanoTime()
      val (mine, from, report) = synchronized {
        val report = bringIt(version)
        // The version being made counts as one of those in memory.
        trimRetained(storeConf.maxVersionsToRetainInMemory - 2)
        arena.acquire()
        (arena, current, report)
      }
      store = closingOnFailure(() => mine.release()) {
        new QuireWriteStore(this, from, mine, files, report.metrics(started))
      }
      synchronized { writer = store }
      store
    } finally {
      if (store == null) finished(token)
    }
  }

  private def readStore(version: Version): ReadStateStore = {
    synchronized(pinnedInMemory(version)) match {
      case Some(pinned) =>
        val pages = new PinnedPages(pinned)
        closingOnFailure(() => pages.close())(new QuireReadStore(this, version, pages))
      case None =>
        // A version to go on from becomes the provider's own; an old one stays the reader's.
        val adopt = synchronized {
          writer == null && (arena == null || version.number > current.number)
        }
        pinnedStore(version, adopt)(load(version, None))
    }
  }

  /** A pin on the version if it is in memory; under the monitor. */
  private def pinnedInMemory(version: Version): Option[PinnedVersion] = {
    checkOpen()
    if (arena != null && current.answers(version)) {
      Some(pinCurrent())
    } else {
      retained.find(_.version.answers(version)).map(_.retain())
    }
  }

  /** A reader of a version that was just loaded, whose arena the provider keeps or not. */
  private def pinnedStore(version: Version, adopt: Boolean)(load: => Loaded): QuireReadStore = {
    val loaded = load
    rowsFromFiles = loaded.report.fromFiles
    val snap = Native.snapAcquire(loaded.arena.handle)
    loaded.arena.acquire()
    val pinned = new PinnedVersion(version, loaded.arena, snap)
    synchronized {
      if (adopt && writer == null && !closed) adoptLoaded(version, loaded) else loaded.arena.condemn()
    }
    val pages = new PinnedPages(pinned)
    closingOnFailure(() => pages.close())(new QuireReadStore(this, version, pages))
  }

  private def closingOnFailure[T](close: () => Unit)(make: => T): T = {
    var made = false
    try {
      val result = make
      made = true
      result
    } finally {
      if (!made) close()
    }
  }

  /** Waits until no other writer is at work. */
  private def claimWriter(token: AnyRef): Unit = synchronized {
    checkOpen()
    val deadline = System.nanoTime() + WriterWaitNanos
    while (writer != null) {
      val left = (deadline - System.nanoTime()) / 1000000
      if (left <= 0) {
        throw new IllegalStateException(
          s"$storeId is still being written by thread ${writerThread.getName}, after " +
            s"${WriterWaitNanos / 1000000000} seconds")
      }
      wait(left)
      checkOpen()
    }
    writer = token
    writerThread = Thread.currentThread()
    stamp += 1
  }

  private[spark] def currentStamp: Long = synchronized(stamp)

  private[spark] def finished(token: AnyRef): Unit = synchronized {
    stamp += 1
    writer = null
    writerThread = null
    notifyAll()
  }

  private def checkOpen(): Unit =
    if (closed) throw new IllegalStateException(s"$storeId has been unloaded from this executor")

  // ---------------------------------------------------------------------------- versions in memory

  /** Makes the version the arena's committed state; under the monitor, with the writer's token. */
  private def bring(version: Version): LoadReport = {
    if (arena != null && current.answers(version)) {
      LoadReport(fromMemory = true)
    } else {
      retained.find(_.version.answers(version)) match {
        case Some(pinned) =>
          Native.arenaRestore(arena.handle, pinned.snap)
          current = pinned.version
          line = line.takeWhile(_ != current) :+ current
          lastBase = math.min(lastBase, version.number)
          val (stale, kept) = retained.partition(_.version.number >= version.number)
          retained.clear()
          retained ++= kept
          stale.foreach(_.release())
          LoadReport(fromMemory = true)
        case None =>
          adoptLoaded(version, load(version, None))
      }
    }
  }

  private def bringEmpty(version: Version): LoadReport =
    adoptLoaded(version, Loaded(newArena(0), Vector(version), version.number, LoadReport()))

  /** Takes a loaded arena for the provider's own; under the monitor. */
  private def adoptLoaded(version: Version, loaded: Loaded): LoadReport = {
    dropArena()
    rowsFromFiles = loaded.report.fromFiles
    arena = loaded.arena
    current = version
    line = loaded.line
    lastBase = loaded.base
    loaded.report
  }

  private def dropArena(): Unit = {
    trimRetained(0)
    if (arena != null) arena.condemn()
    arena = null
    current = null
  }

  private def trimRetained(most: Int): Unit = {
    while (retained.size > math.max(most, 0)) retained.remove(0).release()
  }

  /** A pin on the current version, which whoever gets it releases; under the monitor. */
  private def pinCurrent(): PinnedVersion = {
    arena.acquire()
    closingOnFailure(() => arena.release())(pinAcquired(arena, current))
  }

  /** The same on the arena of a writer, which keeps it open. */
  private def pin(mine: Arena, version: Version): PinnedVersion = {
    mine.retain()
    closingOnFailure(() => mine.release())(pinAcquired(mine, version))
  }

  private def pinAcquired(of: Arena, version: Version): PinnedVersion =
    new PinnedVersion(version, of, Native.snapAcquire(of.handle))

  private def newArena(pageSize: Int): Arena =
    new Arena(if (pageSize != 0) pageSize else conf.pageSize, QuireMemory.budget(conf.memoryLimit))

  // ---------------------------------------------------------------------------- commit and abort

  private[spark] def commit(store: QuireWriteStore, loaded: Version): Commit = {
    val next = Version(
      loaded.number + 1,
      if (storeConf.enableStateStoreCheckpointIds) Some(UUID.randomUUID().toString) else None)
    if (store.files == BaseAlone) commitWhole(store, next) else commitChanges(store, loaded, next)
  }

  private def commitChanges(store: QuireWriteStore, loaded: Version, next: Version): Commit = {
    val mine = store.arena
    val older = pin(mine, loaded)
    var retaining = false
    try {
      val keys = countKeys(mine)
      val started = System.nanoTime()
      val written = files.writeDelta(mine.handle, older.snap, next, loaded, keys.users)
      val durable = System.nanoTime()
      val dirty = mine.stats().dirty
      synchronized {
        Native.arenaCommit(mine.handle)
        // The provider may have been unloaded meanwhile; the version is as durable as any.
        if (mine eq arena) {
          current = next
          line = (line :+ next).takeRight(LineLength)
          retained += older
          retaining = true
          trimRetained(storeConf.maxVersionsToRetainInMemory - 1)
        }
      }
      val end = System.nanoTime()
      if (store.files == DeltaAndBase) writeBase()
      committed(store, next, loaded.id, keys, written, Map(
        QuireMetrics.CommitWriteTime -> (durable - started) / 1000000,
        QuireMetrics.CommitPublishTime -> (end - durable) / 1000000,
        QuireMetrics.PagesDirty -> dirty))
    } finally {
      if (!retaining) older.release()
    }
  }

  /**
   * Commits a version that did not grow out of the one before: it is written whole, and there is
   * no delta that could lead to it from what other state the folder has.
   */
  private def commitWhole(store: QuireWriteStore, next: Version): Commit = {
    val mine = store.arena
    val keys = countKeys(mine)
    val started = System.nanoTime()
    val dirty = mine.stats().dirty
    Native.arenaCommit(mine.handle)
    var done = false
    try {
      val pinned = pin(mine, next)
      val written =
        try files.writeBase(pinned.snap, next, mine.stats().pageBytes.toInt, keys.users)
        finally pinned.release()
      files.remove(files.deltaPath(next))
      synchronized {
        if (mine eq arena) {
          current = next
          line = Vector(next)
          lastBase = next.number
        }
      }
      done = true
      committed(store, next, None, keys, written, Map(
        QuireMetrics.CommitWriteTime -> (System.nanoTime() - started) / 1000000,
        QuireMetrics.CommitPublishTime -> 0L,
        QuireMetrics.PagesDirty -> dirty))
    } finally {
      // In memory there is no way back any more.
      if (!done) synchronized { if (mine eq arena) dropArena() }
    }
  }

  private def committed(
      store: QuireWriteStore,
      next: Version,
      parent: Option[String],
      keys: Keys,
      written: CheckpointFiles#Written,
      timing: Map[StateStoreCustomMetric, Long]): Commit = {
    if (storeConf.commitValidationEnabled) {
      SparkInternals.reportCommit(next.number, storeId, hadoopConf)
    }
    logInfo(s"Committed version $next of $storeId: ${written.bytes} bytes")
    val sizes = Map[StateStoreCustomMetric, Long](
      QuireMetrics.CommitBytes -> written.bytes,
      QuireMetrics.CommitRawBytes -> written.rawBytes,
      QuireMetrics.ForcedBases -> (if (store.files == Delta) 0L else 1L),
      QuireMetrics.InternalKeys -> keys.internal)
    Commit(
      next,
      storeMetrics(store.arena, next, keys.users, timing ++ sizes ++ store.loadMetrics),
      StateStoreCheckpointInfo(storeId.partitionId, next.number, next.id, parent))
  }

  /** Keys of the families that users have, and of Spark's own. */
  private def countKeys(mine: Arena): Keys = {
    var user, internal = 0L
    formats.values().forEach { format =>
      val family = Native.familyOpen(mine.handle, format.name, format.ordered)
      try {
        val count = Native.familyCount(family)
        if (format.isInternal) internal += count else user += count
      } finally {
        Native.familyClose(family)
      }
    }
    Keys(user, internal)
  }

  private[spark] def metricsBeforeCommit(store: QuireWriteStore): StateStoreMetrics = {
    val keys = countKeys(store.arena)
    storeMetrics(store.arena, Version(store.version, None), keys.users,
      store.loadMetrics + (QuireMetrics.InternalKeys -> keys.internal))
  }

  private def storeMetrics(
      mine: Arena,
      version: Version,
      keys: Long,
      more: Map[StateStoreCustomMetric, Long]): StateStoreMetrics = synchronized {
    val stats = mine.stats()
    val custom = Map[StateStoreCustomMetric, Long](
      QuireMetrics.PagesUsed -> stats.used,
      QuireMetrics.PagesPinned -> stats.retired,
      QuireMetrics.PagesFree -> stats.free,
      QuireMetrics.Snapshots -> stats.snapshots,
      QuireMetrics.BytesReserved -> stats.bytesReserved,
      QuireMetrics.BasesWritten -> basesWritten,
      QuireMetrics.BaseBytes -> baseBytes,
      QuireMetrics.SnapshotLag -> (version.number - lastBase),
      QuireMetrics.Families -> formats.size().toLong) ++ more
    basesWritten = 0
    baseBytes = 0
    StateStoreMetrics(
      keys, stats.bytesHeld, custom,
      Map(QuireMetrics.LastBase.withNewId(storeId.partitionId, storeId.storeName) ->
        (if (lastBase == 0) -1L else lastBase)))
  }

  /** The error of using a store that is no longer the one to use. */
  private[spark] def outOfDate(store: QuireStore, operation: String, state: String): Throwable = {
    logWarning(s"$store was asked to $operation, and is $state")
    StateStoreErrors.invalidStamp(store.stamp, currentStamp)
  }

  /** The pages of what a store has committed, for as long as it reads them. */
  private[spark] def committedPages(store: QuireWriteStore, version: Version): Pages =
    synchronized {
      val pinned = pinnedInMemory(version).getOrElse(
        throw StateStoreErrors.stateStoreOperationOutOfOrder(
          s"Cannot read version $version after it was committed and left memory"))
      readingCommitted += store
      new PinnedPages(pinned)
    }

  private[spark] def stoppedReading(store: QuireWriteStore): Unit =
    synchronized(readingCommitted -= store)

  /** Drops what a writer has changed. */
  private[spark] def rollBack(store: QuireWriteStore): Unit = synchronized {
    if (store.arena eq arena) {
      try {
        Native.arenaAbort(arena.handle)
      } catch {
        case NonFatal(e) =>
          logWarning(s"$storeId could not go back to version $current in memory, " +
            "and will load it from its checkpoint", e)
          dropArena()
      }
    }
  }

  // ---------------------------------------------------------------------------- maintenance

  override protected def writeBaseIfDue(): Unit = maintaining("writing a base") {
    val due = synchronized {
      !closed && arena != null && current.number > 0 &&
        current.number - lastBase >= storeConf.minDeltasForSnapshot
    }
    if (due) writeBase()
  }

  /** Writes the current version whole, from a pin, beside whatever the writer does. */
  private def writeBase(): Unit = {
    val pinned = synchronized { if (closed || arena == null) None else Some(pinCurrent()) }
    pinned.foreach { pinned =>
      try {
        val pageSize = synchronized { arena.stats().pageBytes.toInt }
        val started = System.nanoTime()
        val written = files.writeBase(pinned.snap, pinned.version, pageSize, 0)
        synchronized {
          if (line.contains(pinned.version)) lastBase = math.max(lastBase, pinned.version.number)
          basesWritten += 1
          baseBytes += written.bytes
        }
        if (storeConf.reportSnapshotUploadLag) {
          SparkInternals.reportSnapshot(
            SparkInternals.providerId(storeId, hadoopConf), pinned.version.number)
        }
        logInfo(s"Wrote the base of version ${pinned.version} of $storeId: ${written.bytes} " +
          s"bytes in ${(System.nanoTime() - started) / 1000000} ms")
      } finally {
        pinned.release()
      }
    }
  }

  override protected def cleanUp(): Unit = maintaining("removing old files") {
    val (latest, known) = synchronized { (current, line.toSet) }
    if (latest != null) {
      val earliest = latest.number - storeConf.minVersionsToRetain
      if (earliest > 0) {
        val removed = files.clean(earliest, v => v.id.isEmpty || known.contains(v))
        if (removed > 0) logInfo(s"Removed $removed old files of $storeId")
      }
    }
  }

  /** Maintenance that fails is tried again the next time and never stops a query. */
  private def maintaining(what: String)(body: => Unit): Unit =
    try {
      body
    } catch {
      case NonFatal(e) => logWarning(s"Error while $what for $storeId", e)
    }

  override def close(): Unit = {
    synchronized(readingCommitted.toSeq).foreach(_.stopReading())
    closeArena()
  }

  private def closeArena(): Unit = synchronized {
    if (!closed) {
      closed = true
      dropArena()
      notifyAll()
      if (files != null) files.close()
    }
  }

  override def supportedCustomMetrics: Seq[StateStoreCustomMetric] = QuireMetrics.All

  override def supportedInstanceMetrics: Seq[StateStoreInstanceMetric] = Seq(QuireMetrics.LastBase)

  override def toString: String = s"QuireStateStoreProvider[$storeId]"

  // ---------------------------------------------------------------------------- loading from files

  /**
   * Reads a version from the checkpoint into an arena of its own: the newest base that is not
   * newer, and the deltas after it. A base that cannot be read is passed over for an older one.
   *
   * @param from the base to begin with, instead of the newest one
   */
  private def load(version: Version, from: Option[Version]): Loaded = {
    val started = System.nanoTime()
    if (version.number == 0) {
      return Loaded(newArena(0), Vector(version), 0, LoadReport())
    }
    val chain = lineTo(version, from.fold(0L)(_.number))
    val bases = from match {
      case Some(base) =>
        if (!files.exists(files.basePath(base))) {
          throw StateStoreErrors.stateStoreSnapshotFileNotFound(
            files.basePath(base).toString, toString)
        }
        Seq(base)
      case None =>
        chain.reverse.filter(v => v.number == 0 || files.exists(files.basePath(v)))
    }
    loadFromFirst(version, chain, bases, started)
  }

  private def loadFromFirst(
      version: Version, chain: Vector[Version], bases: Seq[Version], started: Long): Loaded = {
    var failure: Throwable = null
    var repaired = 0
    bases.foreach { base =>
      if (failure == null || mayRepair(base, version)) {
        try {
          val loaded = loadFrom(version, chain, base)
          logInfo(s"Loaded version $version of $storeId from base $base in " +
            s"${(System.nanoTime() - started) / 1000000} ms")
          return loaded.copy(report = loaded.report.copy(basesRepaired = repaired))
        } catch {
          case e: QuireCheckpointException if base.number > 0 =>
            logWarning(s"The base of version $base of $storeId cannot be used", e)
            if (failure == null) failure = e
            repaired += 1
        }
      }
    }
    throw (if (failure != null) failure else missing(files.deltaPath(version)))
  }

  private def mayRepair(base: Version, version: Version): Boolean =
    storeConf.autoSnapshotRepairEnabled &&
      version.number - base.number <= storeConf.autoSnapshotRepairMaxChangeFileReplay

  private def missing(path: Path): Throwable =
    SparkInternals.cannotReadFile(path, new java.io.FileNotFoundException(path.toString))

  /**
   * The versions that lead to this one, the oldest first, from the oldest whose state can be had
   * (0 is the empty one). In checkpoint format 2 every delta names its parent.
   */
  private def lineTo(version: Version, atLeast: Long): Vector[Version] = {
    val present = files.list()
    val deltas = present.filterNot(_.isBase).map(_.version).toSet
    val bases = present.filter(_.isBase).map(_.version).toSet
    if (!deltas.contains(version) && !bases.contains(version)) {
      files.otherProvider().foreach { other =>
        throw new QuireCheckpointException(
          s"${files.folder} was written by $other: Quire cannot read it. Restart the query with " +
            s"that provider, or with a new checkpoint location")
      }
      throw missing(files.deltaPath(version))
    }
    var line = Vector(version)
    var at = version
    var ended = false
    while (!ended && at.number > atLeast) {
      if (deltas.contains(at)) {
        // Without ids the parent is the version before.
        at = if (at.id.isEmpty) Version(at.number - 1, None)
          else files.readHeader(files.deltaPath(at)).parent
        line = at +: line
      } else {
        ended = true
      }
    }
    line
  }

  private def loadFrom(version: Version, chain: Vector[Version], base: Version): Loaded = {
    val deltas = chain.dropWhile(_ != base).drop(1)
    val made =
      if (base.number == 0) newArena(0) else loadBase(base)
    var done = false
    try {
      deltas.foreach { delta =>
        files.read(files.deltaPath(delta)) { (_, payload) => apply(made, payload) }
      }
      Native.arenaCommit(made.handle)
      done = true
      Loaded(
        made, chain.dropWhile(_ != base), base.number,
        LoadReport(fromFiles = true, deltasReplayed = deltas.size))
    } finally {
      if (!done) made.condemn()
    }
  }

  private def apply(to: Arena, payload: Array[Byte]): Unit = {
    val memory = new OffHeap(math.max(payload.length, 8))
    try {
      Platform.copyMemory(
        payload, Platform.BYTE_ARRAY_OFFSET, null, memory.address, payload.length)
      Native.deltaApply(to.handle, memory.address, payload.length)
    } finally {
      memory.close()
    }
  }

  private def loadBase(base: Version): Arena = {
    val path = files.basePath(base)
    val image = new OffHeap(1 << 20)
    try {
      var count = 0L
      val header = files.read(path) { (_, frame) =>
        val to = image.reserve(count + frame.length) + count
        Platform.copyMemory(frame, Platform.BYTE_ARRAY_OFFSET, null, to, frame.length)
        count += frame.length
      }
      val made = newArena(header.pageSize)
      var done = false
      try {
        Native.imageLoad(made.handle, image.address, count, path.toString)
        done = true
        made
      } catch {
        case e: QuireNativeException if e.code == QuireNativeException.Corrupt =>
          throw new QuireCheckpointException(e.getMessage, e)
      } finally {
        if (!done) made.condemn()
      }
    } finally {
      image.close()
    }
  }
}

private[spark] object QuireStateStoreProvider {
  private val OneFamily = "multiple column families is disabled in QuireStateStoreProvider"
  private val WriterWaitNanos = 60L * 1000000000L
  /** How many versions of its line a provider remembers; bases in it are safe to clean behind. */
  private val LineLength = 10000

  /** What a commit leaves in the checkpoint. */
  sealed trait CommitFiles
  case object Delta extends CommitFiles
  case object DeltaAndBase extends CommitFiles
  case object BaseAlone extends CommitFiles

  /** Keys of the users' families and of Spark's own. */
  case class Keys(users: Long, internal: Long)

  /** The outcome of a commit. */
  case class Commit(version: Version, metrics: StateStoreMetrics, info: StateStoreCheckpointInfo)

  /** How a version came to be in memory. */
  case class LoadReport(
      fromMemory: Boolean = false,
      fromFiles: Boolean = false,
      deltasReplayed: Int = 0,
      basesRepaired: Int = 0) {

    def metrics(started: Long): Map[StateStoreCustomMetric, Long] = Map(
      QuireMetrics.LoadTime -> (System.nanoTime() - started) / 1000000,
      QuireMetrics.LoadedFromMemory -> (if (fromMemory) 1L else 0L),
      QuireMetrics.LoadedFromFiles -> (if (fromFiles) 1L else 0L),
      QuireMetrics.DeltasReplayed -> deltasReplayed.toLong,
      QuireMetrics.BasesRepaired -> basesRepaired.toLong)
  }

  /** A version read from its checkpoint, in an arena that nobody else uses yet. */
  case class Loaded(arena: Arena, line: Vector[Version], base: Long, report: LoadReport)
}
