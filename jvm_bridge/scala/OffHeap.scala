package io.quire.spark

import sun.misc.Unsafe

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.unsafe.Platform

/**
 * A growing piece of memory outside the heap, owned by one thread and closed by its owner. After a
 * close, and with 0 bytes to begin with, it has none until the next `reserve`.
 */
private[spark] final class OffHeap(initialBytes: Long) extends AutoCloseable {
  private var memory = if (initialBytes == 0) 0L else Platform.allocateMemory(initialBytes)
  private var capacity = initialBytes

  def address: Long = memory

  /** Room for `count` bytes from the start; what is there stays, the address may change. */
  def reserve(count: Long): Long = {
    if (count > capacity) {
      val grown = math.max(math.max(count, 64), capacity + capacity / 2)
      // Spark's own copies; the system's moves the pages of a large piece, and copies nothing.
      memory = OffHeap.unsafe.reallocateMemory(memory, grown)
      capacity = grown
    }
    memory
  }

  def long(index: Int): Long = Platform.getLong(null, memory + 8L * index)

  override def close(): Unit = {
    if (memory != 0) Platform.freeMemory(memory)
    memory = 0
    capacity = 0
  }
}

/** Memory outside the heap as a buffer, for libraries that know no addresses; frees nothing. */
object OffHeapBuffer {
  def apply(address: Long, count: Int): java.nio.ByteBuffer = Native.buffer(address, count)
}

private[spark] object OffHeap {

  private val unsafe: Unsafe = {
    val field = classOf[Unsafe].getDeclaredField("theUnsafe")
    field.setAccessible(true)
    field.get(null).asInstanceOf[Unsafe]
  }

  /** Below this, a loop over words is faster than a call of `copyMemory`. */
  private val LoopBytes = 128

  def copyRow(row: UnsafeRow, to: Long): Unit =
    copy(row.getBaseObject, row.getBaseOffset, to, row.getSizeInBytes)

  def copy(from: AnyRef, fromOffset: Long, to: Long, count: Int): Unit = {
    if (count <= LoopBytes && (count & 7) == 0) {
      var i = 0
      while (i < count) {
        Platform.putLong(null, to + i, Platform.getLong(from, fromOffset + i))
        i += 8
      }
    } else {
      Platform.copyMemory(from, fromOffset, null, to, count)
    }
  }

  /** A copy on the heap, which outlives whatever happens to the pages. */
  def toHeap(address: Long, count: Int): Array[Byte] = {
    val bytes = new Array[Byte](count)
    if (count <= LoopBytes && (count & 7) == 0) {
      var i = 0
      while (i < count) {
        Platform.putLong(
          bytes, Platform.BYTE_ARRAY_OFFSET + i, Platform.getLong(null, address + i))
        i += 8
      }
    } else {
      Platform.copyMemory(null, address, bytes, Platform.BYTE_ARRAY_OFFSET, count)
    }
    bytes
  }
}
