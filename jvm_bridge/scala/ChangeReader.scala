package io.quire.spark

import scala.collection.mutable

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.state.RecordType
import org.apache.spark.sql.execution.streaming.state.quire.ChangeIterator
import org.apache.spark.unsafe.Platform

/** The records of one payload of a delta (delta.h), read one by one while it is there. */
private[spark] final class DeltaRecords(payload: Frame) extends AutoCloseable {
  import DeltaRecords._

  private val words = new OffHeap(72)
  Platform.putLong(null, words.address, payload.address)
  Platform.putLong(null, words.address + 8, payload.address + payload.bytes)

  /** False at the end. */
  def next(): Boolean = Native.deltaNext(words.address)

  def op: Int = words.long(2).toInt
  def key: Array[Byte] = OffHeap.toHeap(words.long(4), words.long(5).toInt)
  def value: Array[Byte] = OffHeap.toHeap(words.long(6), words.long(7).toInt)

  /** The values of a record, one or several. */
  def values: Seq[Array[Byte]] = if (op == Put) Seq(value) else split(value)

  override def close(): Unit = words.close()
}

private[spark] object DeltaRecords {
  val Family = 1
  val Drop = 2
  val Put = 3
  val PutAll = 4
  val Remove = 5
  val Append = 6
  val Patch = 7
  val Check = 9
  val Splice = 10

  /** Several values, each behind its length. */
  def split(all: Array[Byte]): Seq[Array[Byte]] = {
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

/** A commit's file, as a change feed needs it. */
private[spark] case class ChangeFile(version: Version, parent: Version, kind: Int)

/**
 * What changed in one column family from version to version, for the state data source.
 *
 * A key whose values are replaced by several shows as a put of the first and an append of each
 * other one. A patch shows as a put of the whole value, which is in the state of its version: the
 * state of the first version with a patch is loaded, and goes along from there. Files of pages tell
 * of no records: the states before and after them are compared.
 *
 * @param load the state of a version, in an arena that nobody else uses
 * @param replay does to a state what a payload says
 */
private[spark] class ChangeReader(
    files: CheckpointFiles,
    versions: Seq[ChangeFile],
    format: FamilyFormat,
    load: Version => Arena,
    replay: (Arena, Frame) => Unit) extends ChangeIterator {
  import ChangeReader._

  private type Change = (RecordType.Value, UnsafeRow, UnsafeRow, Long)
  private var left = versions
  private var changes: Iterator[Change] = Iterator.empty
  private val encoders = format.borrow()
  /** Of the last version read, once there was a patch. */
  private var state: Option[Arena] = None

  override protected def getNext(): Change = {
    while (!changes.hasNext && left.nonEmpty) {
      changes =
        if (left.head.kind == FileKinds.Pages) differences(left.head) else changesOf(left.head.version)
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
    files.read(files.deltaPath(version), Set(FrameKinds.Records)) { payload =>
      val records = new DeltaRecords(payload)
      try {
        var ours = false
        while (records.next()) {
          records.op match {
            case DeltaRecords.Family => ours = new String(records.key, "UTF-8") == format.name
            case DeltaRecords.Drop => ours = false
            case DeltaRecords.Check => // written again, as it was
            case DeltaRecords.Remove if ours =>
              found += ((RecordType.DELETE_RECORD, key(records), null, version.number - 1))
            case DeltaRecords.Patch if ours =>
              patched += ((found.size, records.key))
              found += ((RecordType.PUT_RECORD, key(records), null, version.number - 1))
            case DeltaRecords.Splice if ours =>
              throw new QuireCheckpointException(
                s"${files.deltaPath(version)}: ${format.name} is a list or deque that Python wrote," +
                  " which has no keys: quire dump --since shows what changed in it")
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

  /** What differs between the states before and after a version. */
  private def differences(file: ChangeFile): Iterator[Change] = {
    dropState()
    val found = new mutable.ArrayBuffer[Change]()
    val states = new mutable.ArrayBuffer[Arena]()
    val families = new mutable.ArrayBuffer[Long]()
    val span = new OffHeap(16)
    def values(family: Long, key: Long, bytes: Int): Option[Seq[Array[Byte]]] =
      if (Native.getAll(family, key, bytes, span.address)) {
        Some(DeltaRecords.split(OffHeap.toHeap(span.long(0), span.long(1).toInt)))
      } else {
        None
      }
    try {
      Seq(file.parent, file.version).foreach(version => states += load(version))
      states.foreach(state => families += Native.familyOpen(state.handle, format.name, format.ordered))
      val Seq(older, newer) = families.toSeq
      eachKey(newer) { (key, bytes) =>
        val before = values(older, key, bytes).getOrElse(Nil)
        val after = values(newer, key, bytes).get
        val same = (a: Seq[Array[Byte]], b: Seq[Array[Byte]]) =>
          a.size == b.size && a.zip(b).forall { case (x, y) => java.util.Arrays.equals(x, y) }
        if (!same(before, after)) {
          val grown = format.multipleValues && before.nonEmpty && same(before, after.take(before.size))
          (if (grown) after.drop(before.size) else after).zipWithIndex.foreach { case (value, i) =>
            val kind = if (i == 0 && !grown) RecordType.PUT_RECORD else RecordType.MERGE_RECORD
            found += ((kind, keyRow(OffHeap.toHeap(key, bytes)), valueRow(value), file.version.number - 1))
          }
        }
      }
      eachKey(older) { (key, bytes) =>
        if (!Native.contains(newer, key, bytes)) {
          val row = keyRow(OffHeap.toHeap(key, bytes))
          found += ((RecordType.DELETE_RECORD, row, null, file.version.number - 1))
        }
      }
    } finally {
      span.close()
      families.foreach(Native.familyClose)
      states.foreach(_.condemn())
    }
    found.iterator
  }

  private def eachKey(family: Long)(visit: (Long, Int) => Unit): Unit = {
    val scan = Native.scanOpen(family, 0, 0, 0, 0, false)
    val rows = new OffHeap(32 * ScanRows)
    try {
      var count = Native.scanNext(scan, rows.address, ScanRows)
      while (count > 0) {
        (0 until count).foreach(i => visit(rows.long(4 * i), rows.long(4 * i + 1).toInt))
        count = Native.scanNext(scan, rows.address, ScanRows)
      }
    } finally {
      rows.close()
      Native.scanClose(scan)
    }
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

  private def key(records: DeltaRecords): UnsafeRow = keyRow(records.key)

  private def keyRow(bytes: Array[Byte]): UnsafeRow = {
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

private object ChangeReader {
  private val ScanRows = 256
}
