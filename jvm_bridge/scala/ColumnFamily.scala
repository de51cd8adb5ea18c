package io.quire.spark

import java.util.concurrent.ConcurrentLinkedQueue
import java.util.zip.CRC32C

import scala.collection.mutable

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.types.StructType
import org.apache.spark.unsafe.Platform

/** Spark's encoders of one column family. They reuse their rows, so one user at a time. */
private[spark] final class Encoders(
    val keys: RocksDBKeyStateEncoder, val values: RocksDBValueStateEncoder)

/**
 * How the rows of one column family become bytes. Made once by the provider; each store opens
 * [[ColumnFamily]]s on it.
 *
 * Rows whose order does not matter are stored as they are (`UnsafeRow`'s bytes) and read in place.
 * Keys that must sort, and everything in Avro, go through Spark's own encoders.
 */
private[spark] class FamilyFormat(
    val name: String,
    val keySchema: StructType,
    val valueSchema: StructType,
    val spec: KeyStateEncoderSpec,
    val multipleValues: Boolean,
    val isInternal: Boolean,
    makeEncoders: () => Encoders,
    encoding: String,
    val rowChecksum: RowChecksum) {

  private val plainRows = encoding == StateStoreEncoding.UnsafeRow.toString

  /** Keys are the row's own bytes. */
  val plainKeys: Boolean = plainRows && spec.isInstanceOf[NoPrefixKeyStateEncoderSpec]
  val plainValues: Boolean = plainRows
  /** Whether the core keeps the keys sorted. */
  val ordered: Boolean = !spec.isInstanceOf[NoPrefixKeyStateEncoderSpec]

  val keyFields: Int = keySchema.length
  val valueFields: Int = valueSchema.length

  private val idle = new ConcurrentLinkedQueue[Encoders]()

  /** Encoders for one store. Making them takes milliseconds, so they are used again. */
  def borrow(): Encoders = {
    val found = idle.poll()
    if (found != null) found else makeEncoders()
  }

  def giveBack(encoders: Encoders): Unit = idle.add(encoders)
}

/** Checksums of rows: four bytes behind each value, over the key and the value. */
private[spark] class RowChecksum(enabled: Boolean, verifyEvery: Long, storeId: => String) {
  val bytes: Int = if (enabled) 4 else 0
  private var rowsRead = 0L

  def of(key: Long, keyBytes: Int, value: Long, valueBytes: Int): Int = {
    val crc = new CRC32C
    crc.update(OffHeap.toHeap(key, keyBytes))
    crc.update(OffHeap.toHeap(value, valueBytes))
    crc.getValue.toInt
  }

  /** The length of the value without its checksum, which is compared for one row in `verifyEvery`. */
  def strip(key: Long, keyBytes: Int, value: Long, valueBytes: Int): Int = {
    if (!enabled) {
      valueBytes
    } else {
      val count = valueBytes - bytes
      rowsRead += 1
      if (count < 0 || (verifyEvery > 0 && rowsRead % verifyEvery == 0)) verify(key, keyBytes, value, count)
      count
    }
  }

  private def verify(key: Long, keyBytes: Int, value: Long, count: Int): Unit = {
    val expected = if (count < 0) 0 else Platform.getInt(null, value + count)
    val found = if (count < 0) -1 else of(key, keyBytes, value, count)
    if (expected != found) {
      throw StateStoreErrors.rowChecksumVerificationFailed(storeId, expected, found)
    }
  }
}

/**
 * A column family as one store sees it: the live one of the writer, or that of a pinned version.
 *
 * @param live     whether the pages may change under the reader, so that rows must be copied
 * @param open     gives the core's handle, or 0 if the version has no such family
 * @param explain  says what to do about an error of writing
 * @param scratch  memory for one key, one value and an answer, shared by the store's families
 */
private[spark] final class ColumnFamily(
    val format: FamilyFormat,
    live: Boolean,
    open: () => Long,
    scratch: Scratch,
    explain: Throwable => Throwable,
    onScan: NativeScan => Unit,
    onScanClosed: NativeScan => Unit) {

  private var handle = open()
  private var closed = false
  private var borrowed: Encoders = _
  private val checksum = format.rowChecksum
  private val pending = new PendingPuts
  private val asked = new AskedKeys
  /** Why puts that had been taken could not be made: from then on nothing can be trusted. */
  private var failure: Throwable = _

  /** False if the version has no such family. */
  def exists: Boolean = {
    if (closed) throw new IllegalStateException(s"${format.name} is used after its store has ended")
    handle != 0
  }

  /** Most families never need any. */
  private def encoders: Encoders = {
    if (borrowed == null) borrowed = format.borrow()
    borrowed
  }

  def supportsPrefixScan: Boolean = encoders.keys.supportPrefixKeyScan
  def supportsRangeScan: Boolean = encoders.keys.supportsRangeScan
  def supportsDeleteRange: Boolean = encoders.keys.supportsDeleteRange

  /** What was put and not flushed is dropped. */
  def close(): Unit = if (!closed) {
    closed = true
    pending.close()
    asked.close()
    if (handle != 0) Native.familyClose(handle)
    handle = 0
    if (borrowed != null) format.giveBack(borrowed)
  }

  /** Gives the core what was put so far; calls that could see or change it begin with this. */
  def flush(): Unit = {
    if (failure != null) throw failure
    if (pending.count != 0) flushPending()
  }

  private def flushPending(): Unit =
    try {
      pending.flushTo(handle)
    } catch {
      case e: QuireNativeException =>
        failure = explain(e)
        throw failure
    }

  // ---------------------------------------------------------------------------- bytes in and out

  private var keyAddress = 0L
  private var keyBytes = 0

  /** Puts the key where the core can read it. */
  private def setKey(row: UnsafeRow): Unit = {
    if (format.plainKeys) {
      if (row.getBaseObject == null) {
        keyAddress = row.getBaseOffset
        keyBytes = row.getSizeInBytes
      } else {
        keyBytes = row.getSizeInBytes
        keyAddress = scratch.key(keyBytes)
        OffHeap.copyRow(row, keyAddress)
      }
    } else {
      setKeyBytes(encoders.keys.encodeKey(row))
    }
  }

  private def setKeyBytes(bytes: Array[Byte]): Unit = {
    keyBytes = bytes.length
    keyAddress = scratch.key(keyBytes)
    Platform.copyMemory(bytes, Platform.BYTE_ARRAY_OFFSET, null, keyAddress, keyBytes)
  }

  private var valueAddress = 0L
  private var valueBytes = 0

  private def setValue(row: UnsafeRow): Unit = {
    if (format.plainValues && checksum.bytes == 0 && row.getBaseObject == null) {
      valueAddress = row.getBaseOffset
      valueBytes = row.getSizeInBytes
    } else {
      if (format.plainValues) {
        valueBytes = row.getSizeInBytes
        valueAddress = scratch.value(valueBytes + checksum.bytes)
        OffHeap.copyRow(row, valueAddress)
      } else {
        val bytes = encoders.values.encodeValue(row)
        valueBytes = bytes.length
        valueAddress = scratch.value(valueBytes + checksum.bytes)
        Platform.copyMemory(bytes, Platform.BYTE_ARRAY_OFFSET, null, valueAddress, valueBytes)
      }
      if (checksum.bytes != 0) {
        val crc = checksum.of(keyAddress, keyBytes, valueAddress, valueBytes)
        Platform.putInt(null, valueAddress + valueBytes, crc)
        valueBytes += checksum.bytes
      }
    }
  }

  /** The last rows that were given out in place. */
  private var lastRow: UnsafeRow = _
  private var rowBefore: UnsafeRow = _

  /** A row over bytes in a page: in place where they cannot change, else a copy. */
  private def plainRow(address: Long, count: Long, fields: Int, bytes: Int): UnsafeRow = {
    val row = new UnsafeRow(fields)
    if (live || (count & ColumnFamily.Own) != 0) {
      row.pointTo(OffHeap.toHeap(address, bytes), bytes)
    } else {
      row.pointTo(null, address, bytes)
      rowBefore = lastRow
      lastRow = row
    }
    row
  }

  /**
   * Moves the last key and value that were given out off the pages. Older ones stay where they are,
   * as those that were looked up together do, until their key is written.
   */
  def moveLastRows(): Unit = Seq(lastRow, rowBefore).foreach { row =>
    if (row != null && row.getBaseObject == null) {
      val bytes = row.getSizeInBytes
      row.pointTo(OffHeap.toHeap(row.getBaseOffset, bytes), bytes)
    }
  }

  private def valueRow(key: Long, keyCount: Int, address: Long, count: Long): UnsafeRow = {
    val bytes = checksum.strip(key, keyCount, address, (count & ColumnFamily.Bytes).toInt)
    if (format.plainValues) {
      plainRow(address, count, format.valueFields, bytes)
    } else {
      encoders.values.decodeValue(OffHeap.toHeap(address, bytes)).copy()
    }
  }

  private def keyRow(address: Long, count: Long): UnsafeRow = {
    val bytes = (count & ColumnFamily.Bytes).toInt
    if (format.plainKeys) {
      plainRow(address, count, format.keyFields, bytes)
    } else {
      // Spark's encoders use one row again and again; those given out here stay as they are.
      encoders.keys.decodeKey(OffHeap.toHeap(address, bytes)).copy()
    }
  }

  // ---------------------------------------------------------------------------- one key

  def get(key: UnsafeRow): UnsafeRow = {
    if (!exists) return null
    if (pending.mayHold(key)) flush()
    setKey(key)
    val span = scratch.span
    if (Native.get(handle, keyAddress, keyBytes, span)) {
      valueRow(keyAddress, keyBytes, Platform.getLong(null, span), Platform.getLong(null, span + 8))
    } else {
      null
    }
  }

  /**
   * The values of the keys from number `from` on, null for one that is not there. The core asks for the
   * memory of many at once. At least one is answered, and no more once so many bytes of values had to
   * be copied to the heap: those too large for a page are, wherever they are read.
   */
  def getSome(keys: Array[UnsafeRow], from: Int): Array[UnsafeRow] = {
    val values = new mutable.ArrayBuffer[UnsafeRow](keys.length - from)
    var copied = 0L
    def add(value: UnsafeRow): Unit = {
      values += value
      if (value != null && value.getBaseObject != null) copied += value.getSizeInBytes
    }
    def going: Boolean = from + values.size < keys.length && copied < ColumnFamily.CopiedBytesMax
    if (!format.plainKeys || !exists) {
      while (going) add(get(keys(from + values.size)))
    } else {
      flush()
      asked.clear()
      (from until keys.length).foreach(row => asked.add(keys(row)))
      while (going) {
        val first = values.size
        val done = Native.getMany(
          handle, asked.keys, asked.offsets, first, asked.count, asked.spans)
        (0 until done).foreach { i =>
          val span = asked.spans + 16L * i
          val address = Platform.getLong(null, span)
          add(if (address == 0) null else valueRow(
            asked.key(first + i), keys(from + first + i).getSizeInBytes,
            address, Platform.getLong(null, span + 8)))
        }
      }
    }
    values.toArray
  }

  def getAll(key: UnsafeRow): Iterator[UnsafeRow] = {
    if (!exists) return Iterator.empty
    flush()
    setKey(key)
    val span = scratch.span
    if (Native.getAll(handle, keyAddress, keyBytes, span)) {
      // All of them are copied now: the answer lies where the next one will.
      val count = (Platform.getLong(null, span + 8) & ColumnFamily.Bytes).toInt
      split(keyAddress, keyBytes, OffHeap.toHeap(Platform.getLong(null, span), count), count)
    } else {
      Iterator.empty
    }
  }

  /** The rows of several values that lie back to back, each behind its length. */
  private def split(
      key: Long, keyCount: Int, values: Array[Byte], end: Int): Iterator[UnsafeRow] = {
    val keyCopy = if (checksum.bytes != 0) OffHeap.toHeap(key, keyCount) else null
    new Iterator[UnsafeRow] {
      private var at = 0
      override def hasNext: Boolean = at < end
      override def next(): UnsafeRow = {
        val start = at + 4
        val stored = Platform.getInt(values, Platform.BYTE_ARRAY_OFFSET + at)
        at = start + stored
        val bytes = if (keyCopy == null) stored else checkedLength(keyCopy, values, start, stored)
        if (format.plainValues) {
          val row = new UnsafeRow(format.valueFields)
          row.pointTo(values, Platform.BYTE_ARRAY_OFFSET + start, bytes)
          row
        } else {
          encoders.values.decodeValue(java.util.Arrays.copyOfRange(values, start, start + bytes))
            .copy()
        }
      }
    }
  }

  private def checkedLength(
      key: Array[Byte], values: Array[Byte], start: Int, stored: Int): Int = {
    val keyAt = scratch.key(key.length)
    Platform.copyMemory(key, Platform.BYTE_ARRAY_OFFSET, null, keyAt, key.length)
    val valueAt = scratch.value(stored)
    Platform.copyMemory(values, Platform.BYTE_ARRAY_OFFSET + start, null, valueAt, stored)
    checksum.strip(keyAt, key.length, valueAt, stored)
  }

  def contains(key: UnsafeRow): Boolean = exists && {
    if (pending.mayHold(key)) flush()
    setKey(key)
    Native.contains(handle, keyAddress, keyBytes)
  }

  def put(key: UnsafeRow, value: UnsafeRow): Unit = {
    // After a failure nothing more waits: there is room for so many rows only.
    if (failure != null) throw failure
    if (format.plainKeys && format.plainValues && checksum.bytes == 0 &&
        pending.fits(key, value)) {
      if (pending.add(key, value)) flush()
    } else {
      flush()
      setKey(key)
      setValue(value)
      try {
        Native.put(handle, keyAddress, keyBytes, valueAddress, valueBytes)
      } catch {
        case e: QuireNativeException => throw explain(e)
      }
    }
  }

  /** Adds the values to those of the key, or puts them in their place. */
  def putAll(key: UnsafeRow, values: Array[UnsafeRow], replace: Boolean): Unit = {
    flush()
    setKey(key)
    if (replace) Native.remove(handle, keyAddress, keyBytes)
    var i = 0
    while (i < values.length) {
      appendToKey(values(i))
      i += 1
    }
  }

  private def appendToKey(value: UnsafeRow): Unit = {
    setValue(value)
    try {
      Native.append(handle, keyAddress, keyBytes, valueAddress, valueBytes)
    } catch {
      case e: QuireNativeException => throw explain(e)
    }
  }

  def append(key: UnsafeRow, value: UnsafeRow): Unit = {
    flush()
    setKey(key)
    appendToKey(value)
  }

  def remove(key: UnsafeRow): Unit = {
    flush()
    setKey(key)
    try {
      Native.remove(handle, keyAddress, keyBytes)
    } catch {
      case e: QuireNativeException => throw explain(e)
    }
  }

  def removeRange(begin: UnsafeRow, end: UnsafeRow): Unit = {
    flush()
    setKeyBytes(encoders.keys.encodeKey(begin))
    val hi = encoders.keys.encodeKey(end)
    val hiAddress = scratch.value(hi.length)
    Platform.copyMemory(hi, Platform.BYTE_ARRAY_OFFSET, null, hiAddress, hi.length)
    Native.removeRange(handle, keyAddress, keyBytes, hiAddress, hi.length)
  }

  // ---------------------------------------------------------------------------- scans

  def iterator(all: Boolean): StateStoreIterator[UnsafeRowPair] = scan(null, null, all)

  def prefixScan(prefix: UnsafeRow, all: Boolean): StateStoreIterator[UnsafeRowPair] = {
    val lo = encoders.keys.encodePrefixKey(prefix)
    scan(lo, ColumnFamily.afterPrefix(lo), all)
  }

  def rangeScan(
      start: Option[UnsafeRow],
      end: Option[UnsafeRow],
      all: Boolean): StateStoreIterator[UnsafeRowPair] =
    scan(start.map(encoders.keys.encodeKey).orNull, end.map(encoders.keys.encodeKey).orNull, all)

  private def scan(
      lo: Array[Byte], hi: Array[Byte], all: Boolean): StateStoreIterator[UnsafeRowPair] = {
    if (!exists) return new StateStoreIterator(Iterator.empty)
    flush()
    val loAddress = if (lo == null) 0L else scratch.key(lo.length)
    if (lo != null) {
      Platform.copyMemory(lo, Platform.BYTE_ARRAY_OFFSET, null, loAddress, lo.length)
    }
    val hiAddress = if (hi == null) 0L else scratch.value(hi.length)
    if (hi != null) {
      Platform.copyMemory(hi, Platform.BYTE_ARRAY_OFFSET, null, hiAddress, hi.length)
    }
    val native = new NativeScan(
      Native.scanOpen(
        handle, loAddress, if (lo == null) 0 else lo.length,
        hiAddress, if (hi == null) 0 else hi.length, all),
      onScanClosed)
    onScan(native)
    val rows = if (all) new MultiValueRows(native) else new Rows(native)
    new StateStoreIterator(rows, () => native.close())
  }

  private class Rows(native: NativeScan) extends Iterator[UnsafeRowPair] {
    private val pair = new UnsafeRowPair()
    override def hasNext: Boolean = native.hasNext
    override def next(): UnsafeRowPair = {
      if (!native.hasNext) throw new NoSuchElementException("the scan has ended")
      native.step()
      val key = native.keyAddress
      pair.withRows(
        keyRow(key, native.keyCount),
        valueRow(
          key, (native.keyCount & ColumnFamily.Bytes).toInt,
          native.valueAddress, native.valueCount))
    }
  }

  private class MultiValueRows(native: NativeScan) extends Iterator[UnsafeRowPair] {
    private val pair = new UnsafeRowPair()
    private var key: UnsafeRow = _
    private var values: Iterator[UnsafeRow] = Iterator.empty
    override def hasNext: Boolean = values.hasNext || native.hasNext
    override def next(): UnsafeRowPair = {
      if (!hasNext) throw new NoSuchElementException("the scan has ended")
      if (!values.hasNext) {
        native.step()
        key = keyRow(native.keyAddress, native.keyCount)
        val count = (native.valueCount & ColumnFamily.Bytes).toInt
        values = split(
          native.keyAddress, (native.keyCount & ColumnFamily.Bytes).toInt,
          OffHeap.toHeap(native.valueAddress, count), count)
      }
      pair.withRows(key, values.next())
    }
  }
}

private[spark] object ColumnFamily {
  /** Set in the length of an answer that does not lie in a page (family.h). */
  val Own: Long = 1L << 62
  val Bytes: Long = Own - 1
  /** Of values that are looked up together. */
  val CopiedBytesMax: Long = 256 << 10

  /** The first key after all those that begin with the prefix; null if there is none. */
  def afterPrefix(prefix: Array[Byte]): Array[Byte] = {
    var end = prefix.length
    while (end > 0 && prefix(end - 1) == -1) end -= 1
    if (end == 0) {
      null
    } else {
      val after = java.util.Arrays.copyOf(prefix, end)
      after(end - 1) = (after(end - 1) + 1).toByte
      after
    }
  }
}

/**
 * Puts that wait to be made together, in the layout of Arrow: for a random key most of the time goes
 * into waiting for memory, and the core asks for that of many keys at once.
 */
private[spark] final class PendingPuts extends AutoCloseable {
  import PendingPuts._

  private val keys = new OffHeap(0)
  private val values = new OffHeap(0)
  /** The ends of keys, then those of values; each list begins with a 0. */
  private val offsets = new OffHeap(0)
  private var keyBytes = 0
  private var valueBytes = 0
  /** Which hashes the keys have, in so many classes. */
  private val hashes = new Array[Byte](Classes)
  var count = 0

  private def classOf(key: UnsafeRow): Int = key.hashCode & (Classes - 1)

  /** Whether the key might be among those that wait; seldom true if it is not. */
  def mayHold(key: UnsafeRow): Boolean = count != 0 && hashes(classOf(key)) != 0

  /** Whether a row is small enough to wait with others. */
  def fits(key: UnsafeRow, value: UnsafeRow): Boolean =
    key.getSizeInBytes <= BytesMax && value.getSizeInBytes <= BytesMax

  /** True if it is time to flush. */
  def add(key: UnsafeRow, value: UnsafeRow): Boolean = {
    OffHeap.copyRow(key, keys.reserve(keyBytes + key.getSizeInBytes) + keyBytes)
    OffHeap.copyRow(value, values.reserve(valueBytes + value.getSizeInBytes) + valueBytes)
    keyBytes += key.getSizeInBytes
    valueBytes += value.getSizeInBytes
    hashes(classOf(key)) = 1
    val at = offsets.reserve(8L * (RowsMax + 1))
    if (count == 0) {
      Platform.putInt(null, at, 0)
      Platform.putInt(null, at + ValueOffsets, 0)
    }
    count += 1
    Platform.putInt(null, at + 4L * count, keyBytes)
    Platform.putInt(null, at + ValueOffsets + 4L * count, valueBytes)
    count == RowsMax || keyBytes + valueBytes > BytesMax
  }

  def flushTo(family: Long): Unit = {
    val rows = count
    count = 0
    keyBytes = 0
    valueBytes = 0
    java.util.Arrays.fill(hashes, 0.toByte)
    val at = offsets.address
    Native.putMany(family, keys.address, at, values.address, at + ValueOffsets, rows)
  }

  override def close(): Unit = {
    count = 0
    keys.close()
    values.close()
    offsets.close()
  }
}

private object PendingPuts {
  val RowsMax = 64
  val BytesMax = 256 << 10
  val Classes = 1024
  val ValueOffsets: Long = 4L * (RowsMax + 1)
}

/** Keys that are looked up together, in the layout of Arrow, and room for where their values lie. */
private[spark] final class AskedKeys extends AutoCloseable {
  private val keyMemory = new OffHeap(0)
  private val offsetMemory = new OffHeap(0)
  private val answers = new OffHeap(0)
  private var bytes = 0
  var count = 0

  def clear(): Unit = {
    count = 0
    bytes = 0
    Platform.putInt(null, offsetMemory.reserve(4), 0)
  }

  def add(row: UnsafeRow): Unit = {
    val end = Math.addExact(bytes, row.getSizeInBytes)
    OffHeap.copyRow(row, keyMemory.reserve(end) + bytes)
    bytes = end
    count += 1
    Platform.putInt(null, offsetMemory.reserve(4L * (count + 1)) + 4L * count, bytes)
  }

  def keys: Long = keyMemory.address
  def key(index: Int): Long =
    keyMemory.address + Platform.getInt(null, offsetMemory.address + 4L * index)
  def offsets: Long = offsetMemory.address
  def spans: Long = answers.reserve(16L * count)

  override def close(): Unit = {
    keyMemory.close()
    offsetMemory.close()
    answers.close()
  }
}

/** Memory that the families of one store share: an answer, a key and a value. */
private[spark] final class Scratch extends AutoCloseable {
  private val answer = new OffHeap(0)
  private val keyMemory = new OffHeap(0)
  private val valueMemory = new OffHeap(0)

  def span: Long = answer.reserve(16)
  def key(count: Int): Long = keyMemory.reserve(count)
  def value(count: Int): Long = valueMemory.reserve(count)

  override def close(): Unit = {
    answer.close()
    keyMemory.close()
    valueMemory.close()
  }
}

/** A scan of the core, read in batches that grow, since most scans are short. */
private[spark] final class NativeScan(
    private var handle: Long, onClose: NativeScan => Unit) extends AutoCloseable {
  private var batchRows = 8
  private var rows = new OffHeap(32L * batchRows)
  private var row = 0
  private var count = 0
  private var at = 0L

  def hasNext: Boolean = row < count || fill()

  private def fill(): Boolean = {
    if (handle == 0) return false
    if (count == batchRows && batchRows < 256) {
      batchRows *= 2
      rows.reserve(32L * batchRows)
    }
    row = 0
    count = Native.scanNext(handle, rows.address, batchRows)
    // Few of Spark's operators close what they have read to its end. Rows given out do not need
    // the scan: those of a writer are copies, those of a reader hang on its store's pin.
    if (count == 0) close()
    count > 0
  }

  def step(): Unit = {
    at = rows.address + 32L * row
    row += 1
  }

  def keyAddress: Long = Platform.getLong(null, at)
  def keyCount: Long = Platform.getLong(null, at + 8)
  def valueAddress: Long = Platform.getLong(null, at + 16)
  def valueCount: Long = Platform.getLong(null, at + 24)

  override def close(): Unit = {
    if (handle != 0) {
      Native.scanClose(handle)
      handle = 0
      count = 0
      row = 0
      rows.close()
      onClose(this)
    }
  }
}
