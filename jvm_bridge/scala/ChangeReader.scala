package io.quire.spark

import scala.collection.mutable

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
  val Patch = 7
}

/**
 * What changed in one column family from version to version, for the state data source.
 *
 * A key whose values are replaced by several shows as a put of the first and an append of each
 * other one. A patch shows as a put of the whole value, which is in the state of its version: the
 * state of the first version with a patch is loaded, and goes along from there.
 *
 * @param load the state of a version, in an arena that nobody else uses
 * @param replay does to a state what a payload says
 */
private[spark] class ChangeReader(
    files: CheckpointFiles,
    versions: Seq[Version],
    format: FamilyFormat,
    load: Version => Arena,
    replay: (Arena, Array[Byte]) => Unit) extends ChangeIterator {

  private type Change = (RecordType.Value, UnsafeRow, UnsafeRow, Long)
  private var left = versions
  private var changes: Iterator[Change] = Iterator.empty
  private val encoders = format.borrow()
  /** Of the last version read, once there was a patch. */
  private var state: Option[Arena] = None

  override protected def getNext(): Change = {
    while (!changes.hasNext && left.nonEmpty) {
      changes = changesOf(left.head)
      left = left.tail
      if (left.isEmpty) dropState()
    }
    if (changes.hasNext) {
      changes.next()
    } else {
      finished = true
      null
    }
  }

  override protected def close(): Unit = {
    dropState()
    format.giveBack(encoders)
  }

  private def dropState(): Unit = {
    state.foreach(_.condemn())
    state = None
  }

  private def changesOf(version: Version): Iterator[Change] = {
    val found = new mutable.ArrayBuffer[Change]()
    /** Where in `found` a value is missing, and its key. */
    val patched = new mutable.ArrayBuffer[(Int, Array[Byte])]()
    files.read(files.deltaPath(version)) { (_, payload) =>
      val records = new DeltaRecords(payload)
      try {
        var ours = false
        while (records.next()) {
          records.op match {
            case DeltaRecords.Family => ours = new String(records.key, "UTF-8") == format.name
            case DeltaRecords.Drop => ours = false
            case DeltaRecords.Remove if ours =>
              found += ((RecordType.DELETE_RECORD, key(records), null, version.number - 1))
            case DeltaRecords.Patch if ours =>
              patched += ((found.size, records.key))
              found += ((RecordType.PUT_RECORD, key(records), null, version.number - 1))
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
      state.foreach(replay(_, payload))
    }
    if (patched.nonEmpty) {
      if (state.isEmpty) state = Some(load(version))
      val values = valuesIn(state.get, patched.map(_._2).toSeq)
      patched.zip(values).foreach { case ((at, _), value) =>
        found(at) = found(at).copy(_3 = valueRow(value))
      }
    }
    found.iterator
  }

  /** The values that the family has of these keys, each of which it has. */
  private def valuesIn(arena: Arena, keys: Seq[Array[Byte]]): Seq[Array[Byte]] = {
    val family = Native.familyOpen(arena.handle, format.name, format.ordered)
    val memory = new OffHeap(64)
    val span = new OffHeap(16)
    try {
      keys.map { key =>
        memory.reserve(key.length)
        Platform.copyMemory(key, Platform.BYTE_ARRAY_OFFSET, null, memory.address, key.length)
        if (!Native.get(family, memory.address, key.length, span.address)) {
          throw new IllegalStateException(s"a key that was changed in ${files.folder} has no value")
        }
        OffHeap.toHeap(span.long(0), span.long(1).toInt)
      }
    } finally {
      span.close()
      memory.close()
      Native.familyClose(family)
    }
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
