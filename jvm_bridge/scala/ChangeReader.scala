package io.quire.spark

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state.RecordType
import org.apache.spark.sql.execution.streaming.state.quire.ChangeIterator
import org.apache.spark.unsafe.Platform

/** The records of one payload of a delta (delta.h), read one by one. */
private[spark] final class DeltaRecords(payload: Array[Byte]) extends AutoCloseable {
  import DeltaRecords._

  private val bytes = new OffHeap(math.max(payload.length, 8))
  private val words = new OffHeap(72)
  Platform.copyMemory(
    payload, Platform.BYTE_ARRAY_OFFSET, null, bytes.address, payload.length)
  Platform.putLong(null, words.address, bytes.address)
  Platform.putLong(null, words.address + 8, bytes.address + payload.length)

  /** False at the end. */
  def next(): Boolean = Native.deltaNext(words.address)

  def op: Int = words.long(2).toInt
  def key: Array[Byte] = OffHeap.toHeap(words.long(4), words.long(5).toInt)
  def value: Array[Byte] = OffHeap.toHeap(words.long(6), words.long(7).toInt)

  /** The values of a record, one or several. */
  def values: Seq[Array[Byte]] = {
    val all = value
    if (op == Put) {
      Seq(all)
    } else {
      val found = Seq.newBuilder[Array[Byte]]
      var at = 0
      while (at < all.length) {
        val count = Platform.getInt(all, Platform.BYTE_ARRAY_OFFSET + at)
        found += java.util.Arrays.copyOfRange(all, at + 4, at + 4 + count)
        at += 4 + count
      }
      found.result()
    }
  }

  override def close(): Unit = {
    bytes.close()
    words.close()
  }
}

private[spark] object DeltaRecords {
  val Family = 1
  val Drop = 2
  val Put = 3
  val PutAll = 4
  val Remove = 5
  val Append = 6
}

/**
 * What changed in one column family from version to version, for the state data source.
 *
 * A key whose values are replaced by several shows as a put of the first and an append of each
 * other one.
 */
private[spark] class ChangeReader(
    files: CheckpointFiles, versions: Seq[Version], format: FamilyFormat) extends ChangeIterator {

  private type Change = (RecordType.Value, UnsafeRow, UnsafeRow, Long)
  private var left = versions
  private var changes: Iterator[Change] = Iterator.empty
  private val encoders = format.borrow()

  override protected def getNext(): Change = {
    while (!changes.hasNext && left.nonEmpty) {
      changes = changesOf(left.head)
      left = left.tail
    }
    if (changes.hasNext) {
      changes.next()
    } else {
      finished = true
      null
    }
  }

  override protected def close(): Unit = format.giveBack(encoders)

  private def changesOf(version: Version): Iterator[Change] = {
    val found = Iterator.newBuilder[Change]
    files.read(files.deltaPath(version), Set(FrameKinds.Records)) { (_, payload) =>
      val records = new DeltaRecords(payload)
      try {
        var ours = false
        while (records.next()) {
          records.op match {
            case DeltaRecords.Family => ours = new String(records.key, "UTF-8") == format.name
            case DeltaRecords.Drop => ours = false
            case DeltaRecords.Remove if ours =>
              found += ((RecordType.DELETE_RECORD, key(records), null, version.number - 1))
            case _ if ours =>
              val appended = records.op == DeltaRecords.Append
              records.values.zipWithIndex.foreach { case (value, i) =>
                val kind =
                  if (i == 0 && !appended) RecordType.PUT_RECORD else RecordType.MERGE_RECORD
                found += ((kind, key(records), valueRow(value), version.number - 1))
              }
            case _ =>
          }
        }
      } finally {
        records.close()
      }
    }
    found.result()
  }

  private def key(records: DeltaRecords): UnsafeRow = {
    val bytes = records.key
    if (format.plainKeys) plainRow(bytes, bytes.length, format.keyFields)
    else encoders.keys.decodeKey(bytes).copy()
  }

  private def valueRow(stored: Array[Byte]): UnsafeRow = {
    val count = stored.length - format.rowChecksum.bytes
    if (format.plainValues) plainRow(stored, count, format.valueFields)
    else encoders.values.decodeValue(java.util.Arrays.copyOf(stored, count)).copy()
  }

  private def plainRow(bytes: Array[Byte], count: Int, fields: Int): UnsafeRow = {
    val row = new UnsafeRow(fields)
    row.pointTo(bytes, count)
    row
  }
}
