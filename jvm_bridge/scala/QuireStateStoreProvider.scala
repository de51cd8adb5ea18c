package io.quire.spark

import java.io.EOFException
import java.util.UUID
import java.util.concurrent.ConcurrentHashMap

import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.util.Try
import scala.util.control.NonFatal

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path

import org.apache.spark.TaskContext
import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.execution.streaming.state.quire.{ChangeIterator, SparkInternals}
import org.apache.spark.sql.types.StructType

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
  extends JarFitsSpark with StateStoreProvider with ProviderShim with SupportsFineGrainedReplay with Logging {
  import QuireStateStoreProvider._

  @volatile private var storeId: StateStoreId = _
  private var keySchema: StructType = _
  private var valueSchema: StructType = _
  private var storeConf: StateStoreConf = _
  private var hadoopConf: Configuration = _
  private var stateSchemaProvider: Option[StateSchemaProvider] = None
  private var conf: QuireConf = _
  private var files: CheckpointFiles = _
  private var bases: BaseFiles = _
  private[spark] var useColumnFamilies = false

  private val formats = new ConcurrentHashMap[String, FamilyFormat]()

  private var arena: Arena = _
  private var current: Version = _
  /** Older versions that are kept in memory, the oldest first. */
  private val retained = new mutable.ArrayBuffer[PinnedVersion]()
  /** The versions that led to the current one, as far as they are known, the oldest first. */
  private var line: Vector[Version] = Vector.empty
  /** The versions of that line that have a base, the oldest first. */
  private var basesOfLine: Vector[Version] = Vector.empty
  /** The base that was loaded: the coordinator forgot what an earlier run of the query had told it. */
  private var unreportedBase: Option[Version] = None
  /** Those that loading had to pass over, and which of them are beyond doubt no good to anybody. */
  private var damagedBases: Set[Version] = Set.empty
  private var lostBases: Set[Version] = Set.empty
  /** The version that the arena was loaded with; those after it were committed here. */
  private var loadedNumber = 0L
  /** The versions of that line whose very pages the checkpoint can give back, and their epochs here. */
  private var pagePoints: Map[Version, Long] = Map.empty
  /** What a commit in pages that is under way starts from. */
  private var startOfCommit = Long.MaxValue
  /** What the commits' files of that line say, as far as somebody asked. */
  private val infos = new ConcurrentHashMap[Version, CommitInfo]()
  private var basesWritten = 0L
  private var baseBytes = 0L
  private var writer: AnyRef = _
  private var writerThread: Thread = _
  @volatile private var closed = false
  @volatile private var rowsFromFiles = false
  /** The number of the last writer. */
  private var stamp = 0L
  /** Of a load that no writer has reported yet. */
  private var readReport: Option[LoadReport] = None
  /** Committed stores that are being read by no task, which would end it. */
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
    this.bases = new BaseFiles(files)
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
    def encoders(): Encoders = {
      val data =
        if (encoding == StateStoreEncoding.Avro.toString) {
          new AvroStateEncoder(spec, valueSchema, stateSchemaProvider, name)
        } else {
          new UnsafeRowDataEncoder(spec, valueSchema)
        }
      new Encoders(
        RocksDBStateEncoder.getKeyEncoder(data, spec, useColumnFamilies),
        // Lists are the core's own, so every value is encoded by itself.
        RocksDBStateEncoder.getValueEncoder(data, valueSchema, useMultipleValuesPerKey = false))
    }
    // Registered again for every batch; what it was made with does not change.
    formats.computeIfAbsent(name, _ => {
      val made = new FamilyFormat(
        name, keySchema, valueSchema, spec, multipleValues, isInternal, encoders _, encoding,
        new RowChecksum(
          storeConf.rowChecksumEnabled, storeConf.rowChecksumReadVerificationRatio,
          storeId.toString))
      // What cannot be encoded is to be said now, not in the middle of a task.
      if (!made.plainKeys || !made.plainValues) made.giveBack(encoders())
      made
    })
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

  /** The families whose keys have several values. */
  private def lists: Array[String] =
    formats.values().asScala.filter(_.multipleValues).map(_.name).toArray

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
    val wanted = wantedVersion(version, stateStoreCkptId)
    if (loadEmpty) {
      writeStore(durable)(None, empty(wanted))
    } else {
      writeStore(durable)(bringFromMemory(wanted), load(wanted))
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
    readStore match {
      case reader: QuireReadStore => reader.makeWay(weakly)
      case _ =>
    }
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
      pinnedStore(adopt = false)(loadOnto(from, to))
    } else {
      writeStore(Delta)(None, loadOnto(from, to))
    }
  }

  override def getStateStoreChangeDataReader(
      startVersion: Long,
      endVersion: Long,
      colFamilyNameOpt: Option[String],
      endVersionStateStoreCkptId: Option[String]): ChangeIterator = loading {
    val folder = look()
    val end = folder.committed(wantedVersion(endVersion, endVersionStateStoreCkptId))
    val versions = lineTo(end, folder, _.number <= startVersion).filter(_.number >= startVersion)
    versions.find(v => !folder.deltas(v)).foreach(gone => throw missing(files.deltaPath(gone)))
    val name = colFamilyNameOpt.getOrElse(StateStore.DEFAULT_COL_FAMILY_NAME)
    new ChangeReader(
      files, versions.map(v => ChangeFile(v, folder.parent(v), folder.info(v).kind)), format(name),
      version => loading(load(version).arena), apply)
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
          s"(${conf.memoryLimit} bytes for all stores of this process that have this limit) allows: raise it, or use " +
          s"more executors. ${native.getMessage}. The last committed version is intact", native)
      more
    case other => other
  }

  /** A writer on a version that is in memory, else on one that is loaded. */
  private def writeStore(files: CommitFiles)(
      fromMemory: => Option[LoadReport], load: => Loaded): StateStore = {
    val token = new Object
    claimWriter(token)
    var store: QuireWriteStore = null
    try {
      // Loading takes long, and nobody else may load or write meanwhile: no need for the monitor.
      val report = synchronized(fromMemory.map(orRead)).getOrElse(adopting(load))
      // It may wait for the coordinator, and be interrupted: what was loaded is the provider's by now.
      synchronized {
        val base = unreportedBase
        unreportedBase = None
        base
      }.foreach(reportBase)
      val (mine, from) = synchronized {
        val from = current
        // A state that did not grow out of the version is not that version.
        if (files == BaseAlone) current = NoVersion
        // The version being made counts as one of those in memory.
        trimRetained(storeConf.maxVersionsToRetainInMemory - 2)
        arena.acquire()
        (arena, from)
      }
      store = closingOnFailure(() => mine.release()) {
        new QuireWriteStore(this, from, mine, files, report.metrics)
      }
      synchronized { if (store.isUpdating) writer = store else finished(token) }
      store
    } finally {
      if (store == null) finished(token)
    }
  }

  /** How the version came to be in memory, if a reader loaded it for the writer that follows. */
  private def orRead(fromMemory: LoadReport): LoadReport = {
    val report = readReport.getOrElse(fromMemory)
    readReport = None
    report
  }

  private def adopting(loaded: Loaded): LoadReport = synchronized {
    closingOnFailure(() => loaded.arena.condemn())(adoptLoaded(loaded))
  }

  /** A weak pin on a version in place of a firm one, if it is the current one. */
  private def weakly(firm: PinnedVersion): Option[PinnedVersion] = synchronized {
    if ((firm.arena eq arena) && current == firm.version) Some(pinWeakly(arena, current)) else None
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
        pinnedStore(adopt)(load(version))
    }
  }

  /**
   * A pin on the version if it is in memory; under the monitor. Whoever reads the version before
   * the current one runs its batch again, and will write: so that is gone back to.
   */
  private def pinnedInMemory(version: Version): Option[PinnedVersion] = {
    if (isCurrent(version) ||
        (writer == null && retained.find(_.version.answers(version)).flatMap(restore).isDefined)) {
      Some(pinCurrent())
    } else {
      None
    }
  }

  private def isCurrent(version: Version): Boolean = arena != null && current.answers(version)

  /** A reader of a version that was just loaded, whose arena the provider keeps or not. */
  private def pinnedStore(adopt: Boolean)(load: => Loaded): QuireReadStore = {
    val loaded = load
    rowsFromFiles = loaded.report.fromFiles
    val pinned = closingOnFailure(() => loaded.arena.condemn()) {
      pinFirmly(loaded.arena, loaded.version)
    }
    synchronized {
      // A writer may have come and gone meanwhile.
      if (adopt && writer == null && !closed && (arena == null || loaded.version.number > current.number)) {
        readReport = Some(adoptLoaded(loaded))
      } else {
        loaded.arena.condemn()
      }
      letGoIfClosed()
    }
    val pages = new PinnedPages(pinned)
    closingOnFailure(() => pages.close())(new QuireReadStore(this, loaded.version, pages))
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
    val deadline = System.nanoTime() + WriterWaitNanos
    while (writer != null) {
      val left = (deadline - System.nanoTime()) / 1000000
      if (left <= 0) {
        throw new IllegalStateException(
          s"$storeId is still being written by thread ${writerThread.getName}, after " +
            s"${WriterWaitNanos / 1000000000} seconds")
      }
      wait(left)
    }
    writer = token
    writerThread = Thread.currentThread()
    stamp += 1
  }

  private[spark] def currentStamp: Long = synchronized(stamp)

  /** Ends a writer, if it is the one at work. */
  private[spark] def finished(token: AnyRef): Unit = synchronized {
    if (writer eq token) {
      stamp += 1
      writer = null
      writerThread = null
      notifyAll()
      letGoIfClosed()
    }
  }

  // ---------------------------------------------------------------------------- versions in memory

  /** Makes a version that is in memory the arena's state; under the monitor, by the writer. */
  private def bringFromMemory(version: Version): Option[LoadReport] = {
    if (isCurrent(version)) {
      Some(LoadReport(fromMemory = true))
    } else {
      retained.find(_.version.answers(version)).flatMap(restore)
    }
  }

  /** Goes back to an older version; None if that fails, with nothing left in memory. */
  private def restore(pinned: PinnedVersion): Option[LoadReport] =
    try {
      // The pages become what they were then, so nobody may have newer ones pinned.
      val (newer, older) = retained.partition(_.version.number > pinned.version.number)
      retained.clear()
      retained ++= older
      newer.foreach(_.release())
      Native.arenaRestore(arena.handle, pinned.snap)
      if (arena.log != 0) Native.logRestored(arena.log, pinned.version.number)
      current = pinned.version
      line = line.takeWhile(_ != current) :+ current
      basesOfLine = basesOfLine.filter(_.number <= current.number)
      pagePoints = pagePoints.filter(_._1.number <= current.number)
      retained -= pinned
      pinned.release()
      Some(LoadReport(fromMemory = true))
    } catch {
      case e: QuireNativeException =>
        logWarning(s"$storeId could not go back to version ${pinned.version} in memory, and " +
          "loads it from its checkpoint", e)
        dropArena()
        None
    }

  private def empty(version: Version): Loaded =
    Loaded(newArena(0), Vector(version), None, Map(version -> 0L), LoadReport())

  /** Takes a loaded arena for the provider's own; under the monitor. */
  private def adoptLoaded(loaded: Loaded): LoadReport = {
    dropArena()
    rowsFromFiles = loaded.report.fromFiles
    arena = loaded.arena
    loadedNumber = loaded.version.number
    current = loaded.version
    line = loaded.line
    basesOfLine = loaded.base.toVector
    unreportedBase = loaded.base
    damagedBases = loaded.damaged
    lostBases = loaded.lost
    pagePoints = loaded.pagePoints
    infos.clear()
    loaded.info.foreach { case (version, info) => infos.put(version, info) }
    loaded.report
  }

  /** Tells Spark's coordinator of the newest base, so that it knows which stores lag. */
  private def reportBase(base: Version): Unit =
    if (storeConf.reportSnapshotUploadLag) {
      SparkInternals.reportSnapshot(storeId, hadoopConf, base.number)
    }

  private def lastBase: Long = basesOfLine.lastOption.fold(0L)(_.number)

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
  private def pinCurrent(): PinnedVersion = pinFirmly(arena, current)

  private def pinFirmly(mine: Arena, version: Version): PinnedVersion =
    pinBy(mine, version)(Native.snapAcquire)

  /** A weak pin on the last commit of an arena. */
  private def pinWeakly(mine: Arena, version: Version): PinnedVersion =
    pinBy(mine, version)(Native.snapAcquireWeak)

  private def pinBy(mine: Arena, version: Version)(acquire: Long => Long): PinnedVersion = {
    mine.acquire()
    closingOnFailure(() => mine.release()) {
      new PinnedVersion(version, mine, acquire(mine.handle))
    }
  }

  private def newArena(pageSize: Int): Arena =
    new Arena(Native.arenaOpen(if (pageSize != 0) pageSize else conf.pageSize, budget))

  private def budget: Long = QuireMemory.budget(conf.memoryLimit)

  // ---------------------------------------------------------------------------- commit and abort

  private[spark] def commit(store: QuireWriteStore, loaded: Version): Commit = {
    val next = Version(loaded.number + 1, Some(UUID.randomUUID().toString))
    Fault.point("commit.start")
    if (store.files == BaseAlone) commitWhole(store, next) else commitChanges(store, loaded, next)
  }

  private def commitChanges(store: QuireWriteStore, loaded: Version, next: Version): Commit = {
    val mine = store.arena
    val older = pinWeakly(mine, loaded)
    var retaining = false
    try {
      val keys = countKeys(mine)
      val started = System.nanoTime()
      val changes = IoService.committing(writeChanges(mine, older, loaded, next, keys.users))
      val durable = System.nanoTime()
      Fault.point("commit.durable")
      val dirty = mine.stats().dirty
      synchronized {
        Native.arenaCommit(mine.handle)
        // From here on the arena is not what `current` says until that is changed, too.
        closingOnFailure(() => dropArena()) {
          if (changes.log.isDefined) Native.logCommitted(mine.log)
          current = next
          line = (line :+ next).takeRight(LineLength)
          infos.put(next, changes.info)
          if (changes.info.kind == FileKinds.Pages) {
            pagePoints += next -> Native.arenaEpoch(mine.handle)
          }
          retained += older
          retaining = true
          trimRetained(storeConf.maxVersionsToRetainInMemory - 1)
        }
      }
      val end = System.nanoTime()
      Fault.point("commit.done")
      // The version is durable: a base that cannot be written now is written by maintenance.
      if (store.files == DeltaAndBase) {
        maintaining("writing a base that was asked for")(writeBase(urgent = true))
      }
      committed(store, next, loaded.id, keys, changes.written, Map(
        QuireMetrics.LogExtent -> changes.log.fold(0L)(_.extent),
        QuireMetrics.LogChecks -> changes.log.fold(0L)(_.checks),
        QuireMetrics.CommitWriteTime -> (durable - started) / 1000000,
        QuireMetrics.CommitPublishTime -> (end - durable) / 1000000,
        QuireMetrics.PagesDirty -> dirty))
    } finally {
      synchronized { startOfCommit = Long.MaxValue }
      if (!retaining) older.release()
    }
  }

  /** Writes what changed, as the mode has it. */
  private def writeChanges(
      mine: Arena, older: PinnedVersion, loaded: Version, next: Version, keys: Long): Changes = {
    def delta(write: FrameWriter => Unit): Changes =
      Changes(files.writeCommit(FileKinds.Delta, next, loaded, 0) { file =>
        write(file)
        Ending(keys)
      }, CommitInfo(FileKinds.Delta, loaded, 0, keys, 0))
    def allRecords(file: FrameWriter): Unit = Native.deltaWrite(
      mine.handle, older.snap, lists, (address, count) => file.frame(FrameKinds.Records, address, count))
    def pages(start: Version, epoch: Long): Changes = {
      val pageSize = mine.stats().pageBytes.toInt
      val written = files.writeCommit(FileKinds.Pages, next, loaded, pageSize) { file =>
        Native.pagesWrite(mine.handle, epoch, (address, count) => file.frame(FrameKinds.Pages, address, count))
        Ending(keys, start.number)
      }
      Changes(written, CommitInfo(FileKinds.Pages, loaded, pageSize, keys, start.number))
    }
    val start = synchronized {
      val start = startOfPages
      if (conf.writesPages) start.foreach { case (version, _) => startOfCommit = version.number }
      start
    }
    (conf.mode, start) match {
      // A log that starts on a base must not follow logs that it does not know: who reads these would
      // take it for one of them.
      case (CheckpointMode.Cec, _) if mine.log != 0 || !isLog(loaded) => writeLog(mine, older, loaded, next)
      case (CheckpointMode.Pages, Some((version, epoch))) => pages(version, epoch)
      case (CheckpointMode.Auto, Some((version, epoch))) =>
        smallDelta(mine, older, Native.pagesBytes(mine.handle, epoch)) match {
          case Some(payloads) => delta(file => payloads.foreach(file.frame(FrameKinds.Records, _)))
          case None => pages(version, epoch)
        }
      case _ => delta(allRecords)
    }
  }

  /**
   * The newest version whose very pages the checkpoint can give back, and its epoch here; under the monitor.
   * A line that is longer than what is remembered of it may have none; all began with nothing once.
   */
  private def startOfPages: Option[(Version, Long)] =
    (line.reverseIterator ++ Iterator(Nothing)).flatMap(v => pagePoints.get(v).map(v -> _)).nextOption()

  private def writeLog(mine: Arena, older: PinnedVersion, loaded: Version, next: Version): Changes = {
    if (mine.log == 0) {
      mine.log = newLog(mine)
      // Whatever is there was written in another mode.
      if (loaded.number > 0) Native.logForeign(mine.log, loaded.number)
    }
    val words = new OffHeap(72)
    try {
      var summary: LogSummary = null
      val written = files.writeCommit(FileKinds.Log, next, loaded, 0) { file =>
        Native.logWrite(mine.log, older.snap, next.number,
          (address, count) => file.frame(FrameKinds.Records, address, count), words.address)
        summary = LogSummary(
          checks = words.long(3), keys = words.long(4), records = words.long(5), extent = words.long(6),
          since = words.long(7))
        Ending(summary.keys, summary.since)
      }
      Changes(written, CommitInfo(FileKinds.Log, loaded, 0, summary.keys, summary.since), Some(summary))
    } finally {
      words.close()
    }
  }

  private def isLog(version: Version): Boolean =
    Option(infos.get(version)).exists(_.kind == FileKinds.Log)

  private def newLog(of: Arena): Long =
    Native.logCreate(of.handle, conf.cec.extentTarget, conf.cec.maxBytes, conf.cec.maxNanos)

  /** What changed as records, unless that takes more than so many bytes. */
  private def smallDelta(mine: Arena, older: PinnedVersion, most: Long): Option[Seq[Array[Byte]]] = {
    val payloads = Seq.newBuilder[Array[Byte]]
    var bytes = 0L
    try {
      Native.deltaWrite(mine.handle, older.snap, lists, { (address, count) =>
        bytes += count
        if (bytes > most) throw TooLong
        payloads += OffHeap.toHeap(address, count.toInt)
      })
      Some(payloads.result())
    } catch {
      case TooLong => None
    }
  }

  /**
   * Commits a version that did not grow out of the one before: it is written whole, and there is
   * no delta that leads to it.
   */
  private def commitWhole(store: QuireWriteStore, next: Version): Commit = {
    val mine = store.arena
    val keys = countKeys(mine)
    val started = System.nanoTime()
    val dirty = mine.stats().dirty
    var done = false
    try {
      Native.arenaCommit(mine.handle)
      val pinned = pinFirmly(mine, next)
      val written =
        try writeBase(pinned, keys.users, urgent = true) finally pinned.release()
      Fault.point("commit.done")
      synchronized {
        current = next
        line = Vector(next)
        infos.remove(next)
        pagePoints = Map(next -> Native.arenaEpoch(mine.handle))
        baseIsThere(next)
      }
      done = true
      committed(store, next, None, keys, written, Map(
        QuireMetrics.CommitWriteTime -> (System.nanoTime() - started) / 1000000,
        QuireMetrics.CommitPublishTime -> 0L,
        QuireMetrics.PagesDirty -> dirty))
    } finally {
      // In memory there is no way back any more.
      if (!done) synchronized(dropArena())
    }
  }

  private def baseIsThere(version: Version): Unit = if (line.contains(version)) {
    basesOfLine = (basesOfLine :+ version).sortBy(_.number)
    damagedBases -= version
    lostBases -= version
  }

  private def committed(
      store: QuireWriteStore,
      next: Version,
      parent: Option[String],
      keys: Keys,
      written: Written,
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
    def told(id: Option[String]) = id.filter(_ => storeConf.enableStateStoreCheckpointIds)
    Commit(
      next,
      storeMetrics(store.arena, next, keys.users, timing ++ sizes ++ store.loadMetrics),
      StateStoreCheckpointInfo(storeId.partitionId, next.number, told(next.id), told(parent)))
  }

  /** Keys of the families that users have, and of Spark's own. */
  private def countKeys(mine: Arena): Keys = {
    val pages = new LivePages(mine)
    countKeys(pages.names, pages.open)
  }

  private def countKeys(names: Set[String], open: (String, Boolean) => Long): Keys = {
    var user, internal = 0L
    names.foreach { name =>
      val format = formats.get(name)
      if (format != null) {
        val family = open(name, format.ordered)
        try {
          val count = Native.familyCount(family)
          if (format.isInternal) internal += count else user += count
        } finally {
          Native.familyClose(family)
        }
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
      if (!isCurrent(version)) {
        throw StateStoreErrors.stateStoreOperationOutOfOrder(
          s"Cannot read version $version after it was committed and " +
            (if (closed) s"$storeId has been unloaded from this executor" else "another came"))
      }
      val pinned = pinCurrent()
      if (TaskContext.get() == null) readingCommitted += store
      new PinnedPages(pinned)
    }

  private[spark] def stoppedReading(store: QuireWriteStore): Unit =
    synchronized(readingCommitted -= store)

  /** Drops what a writer has changed. */
  private[spark] def rollBack(store: QuireWriteStore): Unit = synchronized {
    if ((store.arena eq arena) && (writer eq store)) {
      try {
        if (store.files == BaseAlone) dropArena() else Native.arenaAbort(arena.handle)
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
      // A log needs no base. Whoever only loaded a version leaves its base to the one that committed it: that
      // one's pages are what its next commit goes on from, and the base has but one name.
      !closed && arena != null && current.number > loadedNumber && conf.mode != CheckpointMode.Cec &&
        current.number - lastBase >= storeConf.minDeltasForSnapshot
    }
    if (due) writeBase(urgent = false)
  }

  private def writeBase(pinned: PinnedVersion, keys: Long, urgent: Boolean): Written = {
    val written = bases.write(
      pinned.snap, pinned.version, pinned.arena.stats(), keys,
      mapped = conf.mode == CheckpointMode.Pages, urgent, isCancelled = () => closed && !urgent)
    Fault.point("base.done")
    written
  }

  /** Writes the current version whole, from a pin, beside whatever the writer does. */
  private def writeBase(urgent: Boolean): Unit = {
    val pinned = synchronized {
      if (!urgent && arena != null && !BaseFiles.isSmall(arena.stats())) awaitPause()
      if ((closed && !urgent) || arena == null) None else Some(pinCurrent()).filter { pinned =>
        // The pages of a version that was gone back to have another name by now than those that its
        // file gives, and the next commit may start from these.
        val isAsWritten = pagePoints.get(pinned.version).forall(_ == Native.snapEpoch(pinned.snap))
        if (!isAsWritten) pinned.release()
        isAsWritten
      }
    }
    pinned.foreach { pinned =>
      try {
        val started = System.nanoTime()
        val pages = new PinnedPages(pinned)
        val keys = countKeys(pages.names, pages.open)
        val written = writeBase(pinned, keys.users, urgent)
        synchronized {
          baseIsThere(pinned.version)
          if ((pinned.arena eq arena) && line.contains(pinned.version)) {
            pagePoints += pinned.version -> Native.snapEpoch(pinned.snap)
          }
          basesWritten += 1
          baseBytes += written.bytes
        }
        reportBase(pinned.version)
        logInfo(s"Wrote the base of version ${pinned.version} of $storeId: ${written.bytes} " +
          s"bytes in ${(System.nanoTime() - started) / 1000000} ms")
      } finally {
        pinned.release()
      }
    }
  }

  /**
   * Waits a while until nobody writes; under the monitor. Between two batches a pin costs nothing;
   * within one it copies what was changed in place, and no batch can be run again from memory.
   */
  private def awaitPause(): Unit = {
    val deadline = System.nanoTime() + PauseWaitNanos
    var left = PauseWaitNanos / 1000000
    while (writer != null && (writerThread ne Thread.currentThread()) && !closed && left > 0) {
      try {
        wait(left)
        left = (deadline - System.nanoTime()) / 1000000
      } catch {
        case _: InterruptedException =>
          Thread.currentThread().interrupt()
          left = 0
      }
    }
  }

  override protected def cleanUp(): Unit = maintaining("removing old files") {
    val (latest, known, damaged, lost) = synchronized { (current, line, damagedBases, lostBases) }
    // Whoever cleans later and does not know might rely on them.
    lost.foreach { version =>
      logWarning(s"The base of version $version of $storeId is damaged, and is removed")
      files.deleteBase(version)
    }
    synchronized { lostBases --= lost }
    if (latest != null && latest.number > storeConf.minVersionsToRetain) {
      cleanBefore(latest.number - storeConf.minVersionsToRetain, known, damaged)
    }
  }

  /**
   * Removes what no version from `earliest` on needs.
   *
   * @param known   the versions that led to the current one, as far as they are known
   * @param damaged those whose bases nobody can rely on
   */
  private def cleanBefore(earliest: Long, known: Vector[Version], damaged: Set[Version]): Unit = {
    val folder = look()
    def hasBase(version: Version): Boolean = folder.bases(version) && !damaged(version)
    def runOfLogs(version: Version): Option[Vector[Step]] =
      if (folder.deltas(version)) logRun(version, folder) else None
    // A provider that was loaded lately knows little of what was before.
    val line = withThoseBefore(known, folder, version =>
      version.number <= earliest && hasBase(version) ||
        version.number == earliest && runOfLogs(version).isDefined)
    val mine = line.toSet
    // Behind a base nothing is needed, unless what came after it reaches back beyond it.
    val bases = line.filter(version => version.number <= earliest && hasBase(version)).filterNot { base =>
      folder.commits.exists { version =>
        version.number > base.number && (version.id.isEmpty || mine(version)) && {
          val info = folder.info(version)
          info.kind == FileKinds.Pages && info.since > 0 && info.since < base.number
        }
      }
    }.map(_.number)
    // Nor is anything needed behind the extent of a log.
    val logs = line.find(_.number == earliest).flatMap(runOfLogs).map(_.head.version.number)
    // What is forgotten before it is removed, no commit starts from.
    val found = synchronized {
      val start = if (conf.writesPages) startOfPages.fold(0L)(_._1.number) else Long.MaxValue
      val first = (bases ++ logs).filter(_ <= math.min(start, startOfCommit)).maxOption
      first.foreach(forgetBefore)
      first
    }
    found.foreach { first =>
      val removed = files.clean(first)
      Fault.point("clean.done")
      if (removed > 0) logInfo(s"Removed $removed old files of $storeId")
    }
  }

  /** Of versions whose files go nothing needs to be remembered; under the monitor. */
  private def forgetBefore(first: Long): Unit = {
    infos.keySet().removeIf(_.number < first)
    line = line.dropWhile(_.number < first)
    basesOfLine = basesOfLine.dropWhile(_.number < first)
    damagedBases = damagedBases.filter(_.number >= first)
    pagePoints = pagePoints.filter { case (version, _) => version.number >= first }
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
    synchronized {
      closed = true
      notifyAll()
      letGoIfClosed()
    }
  }

  /**
   * Lets go of memory and files once nobody writes any more; under the monitor. Maintenance may unload
   * a provider that a task has just got hold of: as with Spark's own store in the heap, the task is
   * served to its end, and nothing is kept for the next.
   */
  private def letGoIfClosed(): Unit = if (closed && writer == null) {
    dropArena()
    if (files != null) files.close()
  }

  override def supportedCustomMetrics: Seq[StateStoreCustomMetric] = QuireMetrics.All

  override def supportedInstanceMetrics: Seq[StateStoreInstanceMetric] = Seq(QuireMetrics.LastBase)

  override def toString: String = s"QuireStateStoreProvider[$storeId]"

  // ---------------------------------------------------------------------------- loading from files

  /**
   * Reads a version from the checkpoint into an arena of its own: the newest base that is not
   * newer, and the deltas after it. A base that cannot be read is passed over for an older one.
   */
  private def load(wanted: Version): Loaded = {
    if (wanted.number == 0) return empty(wanted)
    val started = System.nanoTime()
    val folder = look()
    val version = folder.committed(wanted)
    var damaged, lost = Set.empty[Version]
    var failure: Throwable = null
    while (true) {
      val plan = planFor(version, folder, v => folder.bases(v) && !damaged.contains(v))
      val base = plan.start
      if (failure != null && !(plan.isWhole && mayRepair(base, version))) throw failure
      if (!plan.isWhole) throw missing(files.deltaPath(base))
      try {
        val loaded = loadFrom(plan, folder)
        Fault.point("load.done")
        val nanos = System.nanoTime() - started
        logInfo(s"Loaded version $version of $storeId from base $base in ${nanos / 1000000} ms")
        return loaded.copy(
          damaged = damaged,
          lost = lost,
          report = loaded.report.copy(basesRepaired = damaged.size, nanos = nanos))
      } catch {
        case DamagedBase(e) =>
          logWarning(s"The base of version $base of $storeId cannot be used", e)
          if (failure == null) failure = e
          // Without a base there is nothing else to begin with.
          if (base.number == 0 || plan.isRun) throw failure
          damaged += base
          if (isBeyondDoubt(e)) lost += base
      }
    }
    throw new IllegalStateException("not reached")
  }

  /** Whether it is the bytes of a file that are wrong, and not the way to them. */
  private def isBeyondDoubt(damage: Throwable): Boolean = damage match {
    case null => false
    case native: QuireNativeException => native.code == QuireNativeException.Corrupt
    case _: EOFException => files.local(files.folder).isDefined
    case other => isBeyondDoubt(other.getCause)
  }

  /** A version, replayed from the base of an older one that was chosen. */
  private def loadOnto(base: Version, wanted: Version): Loaded = {
    val folder = look()
    if (!folder.bases.exists(_.answers(base))) {
      throw StateStoreErrors.stateStoreSnapshotFileNotFound(
        files.basePath(if (base.id.isEmpty) base.copy(id = Some("*")) else base).toString, toString)
    }
    val plan = planFor(folder.committed(wanted), folder, v => v.answers(base) && folder.bases(v))
    if (!plan.start.answers(base)) throw missing(files.deltaPath(plan.start))
    try loadFrom(plan, folder) catch { case DamagedBase(e) => throw e }
  }

  private def mayRepair(base: Version, version: Version): Boolean =
    storeConf.autoSnapshotRepairEnabled &&
      version.number - base.number <= storeConf.autoSnapshotRepairMaxChangeFileReplay

  private def missing(path: Path): Throwable =
    SparkInternals.cannotReadFile(path, new java.io.FileNotFoundException(path.toString))

  private def look(): Folder = {
    val found = files.list()
    val (bases, deltas) = found.partition(_.isBase)
    new Folder(files, deltas, bases, infos)
  }

  /**
   * The versions that lead to this one, the oldest first: back to the first that will do, or to the
   * last whose delta is there (0 is the empty state).
   */
  private def lineTo(
      version: Version, folder: Folder, willDo: Version => Boolean): Vector[Version] = {
    if (!folder.deltas(version) && !folder.bases(version)) {
      files.otherProvider().foreach { other =>
        throw new QuireCheckpointException(
          s"${files.folder} was written by $other: Quire cannot read it. Restart the query with " +
            s"that provider, or with a new checkpoint location")
      }
      throw missing(files.deltaPath(if (version.id.isEmpty) version.copy(id = Some("*")) else version))
    }
    var line = Vector(version)
    while (line.head.number > 0 && !willDo(line.head) && folder.deltas(line.head)) {
      val at = line.head
      line = folder.parent(at) +: line
    }
    line
  }

  /** A line with the versions that led to its first, back to one that will do, as far as there are files of them. */
  private def withThoseBefore(
      line: Vector[Version], folder: Folder, willDo: Version => Boolean): Vector[Version] =
    line.headOption.filter(first => folder.deltas(first) && !line.exists(willDo)).fold(line) { first =>
      lineTo(first, folder, willDo).init ++ line
    }

  /**
   * What a version is loaded from: back from its file to what that needs, and so on, to a base that
   * will do or to the empty state.
   */
  private def planFor(version: Version, folder: Folder, willDo: Version => Boolean): Plan = {
    lineTo(version, folder, _ => true) // says what is wrong if there is nothing of it at all
    var line = Vector(version)
    var steps = Vector.empty[Step]
    /** Whether no log was looked at yet that a run could begin with. */
    var isNewest = true
    while (line.head.number > 0 && !willDo(line.head)) {
      val at = line.head
      if (!folder.deltas(at)) return Plan(line, steps, isWhole = false)
      val info = folder.info(at)
      val run = if (info.kind == FileKinds.Log && isNewest) logRun(at, folder) else None
      isNewest = info.kind != FileKinds.Log
      if (run.isDefined && !run.get.exists(step => willDo(step.version))) {
        // Versions before the first of the run are not needed, nor known.
        return Plan(run.get.map(_.version) ++ line.tail, run.get ++ steps, isWhole = true, isRun = true)
      }
      steps = Step(at, info) +: steps
      // Pages hold what the files between them and their start did.
      val until = if (info.kind == FileKinds.Pages) info.since else at.number - 1
      while (line.head.number > until) {
        line =
          if (until == 0) Nothing +: line
          else if (line.head.id.isEmpty || folder.deltas(line.head)) folder.parent(line.head) +: line
          else return Plan(line, steps, isWhole = false)
      }
    }
    Plan(line, steps, isWhole = true)
  }

  /** The logs that hold a version's state by themselves, if it has them all. */
  private def logRun(version: Version, folder: Folder): Option[Vector[Step]] = {
    val since = folder.info(version).since
    var run = Vector.empty[Step]
    var at = version
    while (at.number >= since && at.number > 0) {
      if (!folder.deltas(at) || folder.info(at).kind != FileKinds.Log) return None
      run = Step(at, folder.info(at)) +: run
      at = folder.parent(at)
    }
    if (run.isEmpty) None else Some(run)
  }

  /** The state that the files of a plan lead to. */
  private def loadFrom(plan: Plan, folder: Folder): Loaded = {
    val commits = new ReadAhead(files, plan.steps.map { step =>
      val frames = if (step.info.kind == FileKinds.Pages) FrameKinds.Pages else FrameKinds.Records
      (files.deltaPath(step.version), Set(frames))
    })
    try loadFrom(plan, folder, commits) finally commits.close()
  }

  private def loadFrom(plan: Plan, folder: Folder, commits: ReadAhead): Loaded = {
    def isLogFile(version: Version): Boolean =
      folder.deltas(version) && folder.info(version).kind == FileKinds.Log
    val base = if (plan.isRun) Nothing else plan.start
    val made =
      if (base.number == 0) {
        newArena(plan.steps.headOption.fold(0)(_.info.pageSize))
      } else {
        commits.begin()
        try bases.load(base, budget) catch { case e: QuireCheckpointException => throw DamagedBase(e) }
      }
    closingOnFailure(() => made.condemn()) {
      var points = Map(base -> Native.arenaOrigin(made.handle))
      var before = base
      plan.steps.foreach { step =>
        Option(TaskContext.get()).foreach(SparkInternals.checkTask) // or a killed task kept others waiting
        // A log that is not the first of those that are applied goes on with it; one behind a base of a
        // version that has a log of its own may need what was before the base.
        if (step.info.kind == FileKinds.Log && (made.log != 0 || !isLogFile(before))) {
          if (made.log == 0) {
            made.log = newLog(made)
            Native.arenaCommit(made.handle)
            if (before.number > 0) Native.logForeign(made.log, before.number)
          }
          commits.next(frame => Native.logApply(made.log, frame.address, frame.bytes))
          Native.arenaCommit(made.handle)
          Native.logLoaded(made.log, step.version.number)
        } else if (step.info.kind == FileKinds.Pages) {
          made.dropLog()
          commits.next { frame =>
            try Native.pagesApply(made.handle, frame.address, frame.bytes)
            catch {
              case e: QuireNativeException if e.code == QuireNativeException.Mismatch =>
                // The base is of another run of its version, or the file is.
                throw DamagedBase(new QuireCheckpointException(
                  s"${files.deltaPath(step.version)} does not fit version $base: ${e.getMessage}", e))
            }
          }
          Native.arenaCommit(made.handle)
          points = Map(step.version -> Native.arenaOrigin(made.handle))
        } else {
          made.dropLog()
          commits.next(apply(made, _))
        }
        before = step.version
      }
      Native.arenaCommit(made.handle)
      plan.steps.lastOption.filter(_ => made.log != 0).foreach { last =>
        try Native.logComplete(made.log, last.info.keys)
        catch {
          case e: QuireNativeException if e.code == QuireNativeException.Corrupt =>
            throw new QuireCheckpointException(
              s"${files.deltaPath(last.version)} cannot be loaded with those before it: ${e.getMessage}", e)
        }
      }
      if (conf.mode != CheckpointMode.Cec) made.dropLog()
      Loaded(
        made, plan.line, if (base == Nothing) None else Some(base), points,
        LoadReport(fromFiles = true, deltasReplayed = plan.steps.size),
        plan.line.lastOption.filter(folder.deltas).map(v => v -> folder.info(v)))
    }
  }

  private def apply(to: Arena, records: Frame): Unit =
    Native.deltaApply(to.handle, records.address, records.bytes)
}

private[spark] object QuireStateStoreProvider {
  private val OneFamily = "multiple column families is disabled in QuireStateStoreProvider"
  private val WriterWaitNanos = 60L * 1000000000L
  private val PauseWaitNanos = 5L * 1000000000L
  /** How many versions of its line a provider remembers; bases in it are safe to clean behind. */
  private val LineLength = 10000

  /** What every store began with. */
  private val Nothing = Version(0, None)

  /** Of a state that was not committed yet and grew out of nothing. */
  private val NoVersion = Version(-1, None)

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
      basesRepaired: Int = 0,
      nanos: Long = 0) {

    def metrics: Map[StateStoreCustomMetric, Long] = Map(
      QuireMetrics.LoadTime -> nanos / 1000000,
      QuireMetrics.LoadedFromMemory -> (if (fromMemory) 1L else 0L),
      QuireMetrics.LoadedFromFiles -> (if (fromFiles) 1L else 0L),
      QuireMetrics.DeltasReplayed -> deltasReplayed.toLong,
      QuireMetrics.BasesRepaired -> basesRepaired.toLong)
  }

  /** A version read from its checkpoint, in an arena that nobody else uses yet. */
  case class Loaded(
      arena: Arena,
      line: Vector[Version],
      base: Option[Version],
      pagePoints: Map[Version, Long],
      report: LoadReport,
      info: Option[(Version, CommitInfo)] = None,
      damaged: Set[Version] = Set.empty,
      lost: Set[Version] = Set.empty) {
    def version: Version = line.last
  }

  /** A commit's file that has to be read. */
  case class Step(version: Version, info: CommitInfo)

  /**
   * The versions that lead to one, the oldest first, and the files to read; not whole if one lacks.
   * A run of logs starts with nothing.
   */
  case class Plan(
      line: Vector[Version], steps: Vector[Step], isWhole: Boolean, isRun: Boolean = false) {
    def start: Version = line.head
  }

  /** What a commit wrote. */
  case class Changes(written: Written, info: CommitInfo, log: Option[LogSummary] = None)

  /** What a store's folder has, at one moment. */
  class Folder(
      files: CheckpointFiles,
      commitFiles: Seq[CheckpointFile],
      baseFiles: Seq[CheckpointFile],
      known: ConcurrentHashMap[Version, CommitInfo]) {
    private val infos = mutable.Map.empty[Version, CommitInfo]
    private val byVersion = commitFiles.map(file => file.version -> file).toMap
    def commits: Iterable[Version] = byVersion.keys
    val bases: Set[Version] = baseFiles.map(_.version).toSet
    def deltas(version: Version): Boolean = byVersion.contains(version)
    /** A commit with an id is never another; what is known of it is kept for those who look later. */
    def info(version: Version): CommitInfo = infos.getOrElseUpdate(version, {
      val found = if (version.id.isDefined) known.get(version) else null
      if (found != null) {
        found
      } else {
        val read = files.readInfo(byVersion(version))
        if (version.id.isDefined) known.put(version, read)
        read
      }
    })
    /** Without ids (as Python may write it) it is the version before. */
    def parent(version: Version): Version =
      if (version.id.isEmpty) Version(version.number - 1, None) else info(version).parent

    /**
     * The version that was asked for by its number. If that was committed more than once, it is the
     * one that the last commit of all grew out of, or else the last of them. Any is a right outcome
     * of its batch, as long as all that read it agree.
     */
    def committed(wanted: Version): Version = {
      val found = inOrder.filter(_.answers(wanted))
      if (found.size < 2) {
        found.headOption.getOrElse(wanted)
      } else {
        // What is too damaged to tell what it grew out of is nobody's choice.
        val line = Try(Iterator.iterate(inOrder.last)(parent).find(v => v.number <= wanted.number || !deltas(v)))
        line.toOption.flatten.filter(found.contains).getOrElse(found.last)
      }
    }

    /** All versions, as they were committed; a base is written later. */
    private lazy val inOrder: Seq[Version] =
      (commitFiles ++ baseFiles).groupBy(_.version).toSeq.sortBy { case (version, files) =>
        (files.map(_.modified).min, version.number, version.name)
      }.map(_._1)
  }

  /** That what changed takes more bytes as records than it may. */
  private object TooLong extends scala.util.control.ControlThrowable

  /** That the base itself is to blame, so that an older one may do. */
  case class DamagedBase(cause: QuireCheckpointException) extends Exception(cause)
}
