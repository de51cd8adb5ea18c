package io.quire.spark

/**
 * The core's functions, as quire_jni.c carries them over.
 *
 * Handles and addresses are `Long`; 0 is none. Keys, values and answers lie outside the heap. A
 * failing call throws [[QuireNativeException]]. The class loads the native library with itself.
 */
private[spark] object Native {
  NativeLibrary.load()

  @native def libraryVersion(): String
  /** From now on this thread gives way to others. There is no way back. */
  @native def lowerPriority(): Unit
  /** Memory as a buffer; it stays whoever's it is. */
  @native def buffer(address: Long, count: Long): java.nio.ByteBuffer

  @native def budgetCreate(bytesMax: Long): Long
  @native def budgetUsed(budget: Long): Long

  @native def arenaOpen(pageBytes: Int, budget: Long): Long
  @native def arenaClose(arena: Long): Unit
  @native def arenaCommit(arena: Long): Unit
  @native def arenaAbort(arena: Long): Unit
  @native def arenaRestore(arena: Long, snap: Long): Unit
  /** Of the last commit. */
  @native def arenaEpoch(arena: Long): Long
  /** The epoch at which the arena was what it was loaded from; 0 if it began empty. */
  @native def arenaOrigin(arena: Long): Long
  /** Writes 8 words: see [[ArenaStats]]. */
  @native def arenaStats(arena: Long, words: Long): Unit
  @native def snapAcquire(arena: Long): Long
  /** Keeps no page from being changed: to tell what changed since, and to restore. */
  @native def snapAcquireWeak(arena: Long): Long
  @native def snapRelease(snap: Long): Unit
  @native def snapEpoch(snap: Long): Long

  @native def familyOpen(arena: Long, name: String, ordered: Boolean): Long
  /** 0 if the snapshot has no such family. */
  @native def familyOpenSnap(snap: Long, name: String, ordered: Boolean): Long
  @native def familyClose(family: Long): Unit
  @native def familyDrop(arena: Long, name: String): Unit
  /** Of the snapshot, or if it is 0 of the state being written. */
  @native def familyNames(arena: Long, snap: Long): Array[String]
  @native def familyCount(family: Long): Long

  /** Writes the value's address and length to `span`; false if the key is not there. */
  @native def get(family: Long, key: Long, keyBytes: Int, span: Long): Boolean
  /**
   * Writes the values of the keys from number `first` on to `spans`, address 0 for a key that is not
   * there, and gives how many: the bytes of the last one may have to be read before the next call.
   */
  @native def getMany(
      family: Long, keys: Long, keyOffsets: Long, first: Int, count: Int, spans: Long): Int
  @native def getAll(family: Long, key: Long, keyBytes: Int, span: Long): Boolean
  @native def contains(family: Long, key: Long, keyBytes: Int): Boolean
  @native def put(family: Long, key: Long, keyBytes: Int, value: Long, valueBytes: Int): Unit
  @native def putMany(
      family: Long,
      keys: Long, keyOffsets: Long, values: Long, valueOffsets: Long, count: Int): Unit
  @native def append(family: Long, key: Long, keyBytes: Int, value: Long, valueBytes: Int): Unit
  @native def remove(family: Long, key: Long, keyBytes: Int): Unit
  @native def removeRange(family: Long, lo: Long, loBytes: Int, hi: Long, hiBytes: Int): Unit
  @native def scanOpen(
      family: Long, lo: Long, loBytes: Int, hi: Long, hiBytes: Int, all: Boolean): Long
  /** Writes up to `max` rows of 4 words: key address, length, value address, length. */
  @native def scanNext(scan: Long, rows: Long, max: Int): Int
  @native def scanClose(scan: Long): Unit

  @native def deltaWrite(arena: Long, older: Long, lists: Array[String], sink: ByteSink): Unit
  @native def deltaApply(arena: Long, payload: Long, count: Long): Unit
  /** See [[DeltaRecords]] for the 9 words. */
  @native def deltaNext(words: Long): Boolean
  @native def imageWrite(snap: Long, sink: ByteSink): Unit
  /** Room for an image, which ends as an arena or is cancelled. */
  @native def imageBegin(budget: Long, count: Long, name: String): Long
  @native def imageRoom(image: Long): Long
  /** Says that a stretch of the room is as it will be: its checksums are computed now, by this thread. */
  @native def imageFilled(image: Long, start: Long, count: Long): Unit
  @native def imageEnd(image: Long): Long
  @native def imageCancel(image: Long): Unit
  @native def imageMap(budget: Long, path: String): Long

  @native def pagesWrite(arena: Long, since: Long, sink: ByteSink): Unit
  @native def pagesBytes(arena: Long, since: Long): Long
  @native def pagesApply(arena: Long, payload: Long, count: Long): Unit

  @native def logCreate(arena: Long, extentTarget: Double, bytesMax: Long, nanosMax: Long): Long
  @native def logDestroy(log: Long): Unit
  /** See [[LogSummary]] for the 9 words. */
  @native def logWrite(log: Long, older: Long, version: Long, sink: ByteSink, words: Long): Unit
  @native def logCommitted(log: Long): Unit
  @native def logApply(log: Long, payload: Long, count: Long): Unit
  @native def logLoaded(log: Long, version: Long): Unit
  @native def logComplete(log: Long, keys: Long): Unit
  @native def logForeign(log: Long, version: Long): Unit
  @native def logRestored(log: Long, version: Long): Unit

  @native def headerEncode(numbers: Long, texts: Array[Array[Byte]]): Array[Byte]
  @native def headerPeek(bytes: Array[Byte]): Int
  @native def headerDecode(bytes: Array[Byte], numbers: Long): Array[Array[Byte]]
  @native def frameEncode(
      kind: Int, rawBytes: Int, stored: Array[Byte], storedBytes: Int, frame: Array[Byte]): Unit
  @native def frameDecode(frame: Array[Byte], words: Long): Unit
  /** The frame's bytes are the first of the array. */
  @native def frameVerify(words: Long, stored: Array[Byte]): Unit
  @native def endEncode(frames: Long, rawBytes: Long, keys: Long, since: Long): Array[Byte]
  @native def endDecode(bytes: Array[Byte], words: Long): Unit
}

/** Takes bytes that the core writes; they are valid until `write` returns. */
private[spark] trait ByteSink {
  def write(address: Long, count: Long): Unit
}

/** An error of the core: its code (error.h) and a message that says what to do. */
class QuireNativeException(val code: Int, message: String) extends RuntimeException(message)

private[spark] object QuireNativeException {
  val NotFound: Int = -1
  val Limit: Int = -5
  val Corrupt: Int = -8
  val Version: Int = -9
  val Mismatch: Int = -14
}
