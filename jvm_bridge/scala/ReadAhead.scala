package io.quire.spark

import java.util.concurrent.atomic.AtomicLong

import scala.collection.mutable

import org.apache.hadoop.fs.Path

/**
 * Files that are used one after the other. While one is in use, the service's threads fetch those
 * that come next: read, verified and unpacked, as far as there is room.
 *
 * A file that no thread has come to is read where it is used, and what was fetched in part is read on
 * there; so nobody waits for a free thread or for room, however many stores load at once. A file that
 * cannot be fetched is read again where it is used, and fails there.
 */
private[spark] final class ReadAhead(files: CheckpointFiles, wanted: Seq[(Path, Set[Int])])
  extends AutoCloseable {
  import ReadAhead._

  private val all = wanted.map { case (path, kinds) => new FetchedFile(files, path, kinds) }.toIndexedSeq
  private var used = 0
  private var asked = 0

  /** Begins with the first ones; a single file is not worth it. */
  def begin(): Unit = if (all.size > 1) fetch()

  /** Hands on the frames of the next file, each of which is gone afterwards. */
  def next(frame: Frame => Unit): Unit = {
    val file = all(used)
    used += 1
    fetch()
    file.read(frame)
  }

  private def fetch(): Unit = {
    val until = math.min(used + FilesAhead, all.size)
    (math.max(asked, used) until until).map(all).foreach(file => IoService.sometime(() => file.fetch()))
    asked = math.max(asked, until)
  }

  /** Frees what was fetched and not used; what is being fetched is freed when that notices. */
  override def close(): Unit = all.foreach(_.close())
}

private[spark] object ReadAhead {
  private val FilesAhead = 8
  /** Bytes that may wait to be used, of all stores together; a frame for each thread may come on top. */
  private val BytesAhead = 64L << 20
  private val held = new AtomicLong

  /** A frame that waits to be used, and the memory that it lies in. */
  private case class Held(frame: Frame, memory: OffHeap) extends AutoCloseable {
    override def close(): Unit = {
      held.addAndGet(-frame.bytes)
      memory.close()
    }
  }

  /** A file that is read by one thread, and may be fetched by another before. */
  private final class FetchedFile(files: CheckpointFiles, path: Path, kinds: Set[Int])
    extends AutoCloseable {
    // The one that fetches, or else the one that reads.
    private val frames = new mutable.Queue[Held]
    private var reader: FrameReader = _
    private var hasEnded = false
    // Under the monitor.
    private var isFetching = false
    private var isClosed = false
    /** That a fetch must not begin, nor go on. */
    @volatile private var isWanted = false

    def fetch(): Unit = {
      if (synchronized { isFetching = !isWanted; isFetching }) {
        try {
          reader = files.frames(path, kinds)
          while (!hasEnded && !isWanted && held.get() < BytesAhead) {
            hasEnded = !fetchFrame()
          }
          if (hasEnded) reader.close()
        } catch {
          case _: Throwable => forget()
        } finally {
          synchronized {
            isFetching = false
            notifyAll()
            if (isClosed) forget()
          }
        }
      }
    }

    /** False at the end. */
    private def fetchFrame(): Boolean = {
      var memory: OffHeap = null
      var fetched = false
      try {
        val frame = reader.next { (_, count) =>
          memory = new OffHeap(math.max(count, 8))
          memory.address
        }
        frame.foreach { frame =>
          held.addAndGet(frame.bytes)
          frames.enqueue(Held(frame, memory))
          fetched = true
        }
      } finally {
        if (!fetched && memory != null) memory.close()
      }
      fetched
    }

    def read(frame: Frame => Unit): Unit = {
      synchronized {
        isWanted = true
        while (isFetching) wait()
      }
      try {
        if (reader == null) reader = files.frames(path, kinds)
        files.naming(path) {
          while (frames.nonEmpty) {
            val next = frames.dequeue()
            try frame(next.frame) finally next.close()
          }
          if (!hasEnded) {
            val memory = new OffHeap(0)
            try reader.foreach((_, count) => memory.reserve(math.max(count, 8)))(frame) finally memory.close()
          }
        }
      } finally {
        close()
      }
    }

    override def close(): Unit = synchronized {
      isWanted = true
      isClosed = true
      if (!isFetching) forget()
    }

    /** As if nothing had been fetched. */
    private def forget(): Unit = {
      frames.foreach(_.close())
      frames.clear()
      hasEnded = false
      val opened = reader
      reader = null // a close that fails must not leave it to be read from
      if (opened != null) opened.close()
    }
  }
}
