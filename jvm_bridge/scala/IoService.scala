package io.quire.spark

import java.util.concurrent.{ConcurrentLinkedQueue, CountDownLatch, Executors, Semaphore, ThreadFactory, TimeUnit}
import java.util.concurrent.atomic.{AtomicInteger, AtomicReference}
import java.util.concurrent.locks.LockSupport

/**
 * The threads that write bases and read files ahead, for all stores of this process.
 *
 * A base is the background's work and gives way: it rests while a commit of any store writes, and
 * after each piece for some time, so that batches hardly feel it. What waits to be written is bounded.
 */
private[spark] object IoService {
  private val Threads = 4
  /** Bytes that may wait to be written, of all bases together. */
  private val WindowBytes = 64 << 20
  /** How long to rest for each nanosecond of work, and the longest rest. */
  private val RestRatio = 3
  private val RestNanosMax = 50L * 1000000
  /** A piece is not held back longer than this, however many commits there are. */
  private val GiveWayNanosMax = 200L * 1000000

  private lazy val pool = Executors.newFixedThreadPool(Threads, new ThreadFactory {
    private val count = new AtomicInteger
    override def newThread(work: Runnable): Thread = {
      val thread = new Thread(work, s"quire-io-${count.incrementAndGet()}")
      thread.setDaemon(true)
      thread
    }
  })
  private val window = new Semaphore(WindowBytes)
  private val commits = new AtomicInteger

  /** A commit, which bases give way to. */
  def committing[T](body: => T): T = {
    commits.incrementAndGet()
    try body finally commits.decrementAndGet()
  }

  /** Does a piece of a base's work, gently unless somebody waits for it. */
  def gently[T](urgent: Boolean)(work: => T): T = {
    if (urgent) {
      work
    } else {
      val asked = System.nanoTime()
      while (commits.get() > 0 && System.nanoTime() - asked < GiveWayNanosMax) {
        LockSupport.parkNanos(1000000)
      }
      val started = System.nanoTime()
      val result = work
      val rest = math.min((System.nanoTime() - started) * RestRatio, RestNanosMax)
      LockSupport.parkNanos(rest)
      result
    }
  }

  /** Runs some time, when a thread is free; must not wait for other work of these threads, nor fail. */
  def sometime(work: () => Unit): Unit = pool.execute(() => work())

  /** Runs all at once and waits for them; the first failure is thrown when they have ended. */
  def all(works: Seq[() => Unit]): Unit = {
    val failure = new AtomicReference[Throwable]
    val left = new CountDownLatch(works.size)
    works.foreach { work =>
      pool.execute { () =>
        try work() catch { case e: Throwable => failure.compareAndSet(null, e) } finally left.countDown()
      }
    }
    left.await()
    if (failure.get() != null) throw failure.get()
  }

  /**
   * Work that is done piece by piece, in the order in which it came, by one thread at a time. A
   * piece that fails is the last; whoever adds the next hears of it.
   */
  final class Line(urgent: Boolean) {
    private val pieces = new ConcurrentLinkedQueue[(Int, () => Unit)]()
    private val waiting = new AtomicInteger
    private val failure = new AtomicReference[Throwable]

    /** Adds a piece that keeps so many bytes in memory; waits while too many do. */
    def add(bytes: Int)(piece: => Unit): Unit = {
      val counted = math.min(bytes, WindowBytes)
      while (!window.tryAcquire(counted, 100, TimeUnit.MILLISECONDS)) check()
      pieces.add((counted, () => piece))
      if (waiting.getAndIncrement() == 0) pool.execute(() => run())
    }

    private def run(): Unit = {
      do {
        val (counted, piece) = pieces.poll()
        try {
          if (failure.get() == null) gently(urgent)(piece())
        } catch {
          case e: Throwable => failure.compareAndSet(null, e)
        } finally {
          window.release(counted)
        }
      } while (waiting.decrementAndGet() > 0)
    }

    def check(): Unit = if (failure.get() != null) throw failure.get()

    /** Waits until everything that was added is done. */
    def await(): Unit = {
      while (waiting.get() > 0) LockSupport.parkNanos(200000)
      check()
    }
  }
}
