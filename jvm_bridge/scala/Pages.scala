package io.quire.spark

/** Where a store's column families are opened; closed with the store. */
private[spark] trait Pages extends AutoCloseable {
  /** The core's handle of a family, or 0 if there is none. */
  def open(name: String, ordered: Boolean): Long
  /** False if there was no such family. */
  def drop(name: String): Boolean
  def names: Set[String]
}

/** Nothing: what a store has open once it is committed. */
private[spark] object NoPages extends Pages {
  override def open(name: String, ordered: Boolean): Long = 0
  override def drop(name: String): Boolean = false
  override def names: Set[String] = Set.empty
  override def close(): Unit = ()
}

/** The pages that the writer changes. The arena has been acquired for it. */
private[spark] final class LivePages(arena: Arena) extends Pages {
  override def open(name: String, ordered: Boolean): Long =
    Native.familyOpen(arena.handle, name, ordered)

  override def drop(name: String): Boolean = {
    val there = names.contains(name)
    if (there) Native.familyDrop(arena.handle, name)
    there
  }

  override def names: Set[String] = Native.familyNames(arena.handle, 0).toSet

  override def close(): Unit = arena.release()
}

/**
 * A version kept in memory by a pin on its pages. The arena has been acquired for it. If the pin is a
 * weak one, the writer may change the pages: then it is there to tell what changed, to go back to,
 * and for the reader whose task writes.
 */
private[spark] final class PinnedVersion(val version: Version, val arena: Arena, val snap: Long) {
  def release(): Unit = {
    Native.snapRelease(snap)
    arena.release()
  }
}

/** The pages of a pinned version. */
private[spark] final class PinnedPages(val pinned: PinnedVersion) extends Pages {
  override def open(name: String, ordered: Boolean): Long =
    Native.familyOpenSnap(pinned.snap, name, ordered)

  override def drop(name: String): Boolean =
    throw new IllegalStateException("a version that is only read has no families to drop")

  override def names: Set[String] = Native.familyNames(0, pinned.snap).toSet

  override def close(): Unit = pinned.release()
}
