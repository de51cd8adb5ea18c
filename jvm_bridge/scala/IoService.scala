package io.quire.spark

import java.util.concurrent.{ConcurrentLinkedQueue, CountDownLatch, Executor, Executors, Semaphore, ThreadFactory, TimeUnit}
import java.util.concurrent.atomic.{AtomicInteger, AtomicReference}
import java.util.concurrent.locks.LockSupport

import scala.util.control.NonFatal

/**
 * The threads that write bases and read files ahead, for all stores of this process.
 *
 * A base is the background's work and gives way: its threads have a low priority, so that they take
 * what the tasks leave, and they rest while a commit of any store writes. What waits to be
 * written is bounded.
 */
private[spark] object IoService {
  private val Threads = 4
  private val BackgroundThreads = 2
  /** Bytes that may wait to be written: of all bases that somebody waits for, and of all others. */
  private val WindowBytes = 64 << 20
  private val BackgroundWindowBytes = 16 << 20
  /** A piece is not held back longer than this, however many commits there are. */
  private val GiveWayNanosMax = 200L * 1000000

  /** For work that somebody waits for. */
  private lazy val pool = Executors.newFixedThreadPool(Threads, threads("quire-io", identity))
  private lazy val background = Executors.newFixedThreadPool(BackgroundThreads, threads("quire-base", lowered))
  private val apartThreads = threads("quire-base-pages", lowered)

  private def threads(name: String, as: Runnable => Runnable): ThreadFactory = new ThreadFactory {
    private val count = new AtomicInteger
    override def newThread(work: Runnable): Thread = {
      val thread = new Thread(as(work), s"$name-${count.incrementAndGet()}")
      thread.setDaemon(true)
      thread
    }
  }

  private def poolFor(urgent: Boolean): Executor = if (urgent) pool else background

  private def lowered(work: Runnable): Runnable = () => {
    Native.lowerPriority()
    work.run()
  }

  /** Nobody who waits is to wait for the background's bytes. */
  private val windows = Map(true -> new Semaphore(WindowBytes), false -> new Semaphore(BackgroundWindowBytes))
  private val commits = new AtomicInteger

  /** A commit, which bases give way to. */
  def committing[T](body: => T): T = {
    commits.incrementAndGet()
    try body finally commits.decrementAndGet()
  }

  /** Does a piece of a base's work, after the commits under way unless somebody waits for it. */
  def gently[T](urgent: Boolean)(work: => T): T = {
    val asked = System.nanoTime()
    while (!urgent && commits.get() > 0 && System.nanoTime() - asked < GiveWayNanosMax) {
      LockSupport.parkNanos(1000000)
    }
    work
  }

  /**
   * Runs some time, when a thread is free; must not wait for other work of these threads. If it fails nobody hears of
   * it: an executor ends when a thread does.
   */
  def sometime(work: () => Unit): Unit = pool.execute(() => try work() catch { case NonFatal(_) => })

  /**
   * Runs all at once and waits for them; the first failure is thrown when they have ended. An
   * interrupt waits, too: they use memory that is freed afterwards.
   */
  def all(works: Seq[() => Unit]): Unit = all(pool)(works)

  private def all(runner: Executor)(works: Seq[() => Unit]): Unit = {
    val failure = new AtomicReference[Throwable]
    val left = new CountDownLatch(works.size)
    works.foreach { work =>
      val noted: Runnable = () =>
        try work() catch { case e: Throwable => failure.compareAndSet(null, e) } finally left.countDown()
      // Without a thread to be had it is done here: those that run are waited for in any case.
      try runner.execute(noted) catch { case _: OutOfMemoryError => noted.run() }
    }
    var interrupted = false
    while (left.getCount > 0) {
      try left.await() catch { case _: InterruptedException => interrupted = true }
    }
    if (interrupted) Thread.currentThread().interrupt()
    if (failure.get() != null) throw failure.get()
  }

  /**
   * Runs work that may wait for other work of these threads, and waits for it: at a low priority,
   * and so in a thread of its own (a priority cannot be raised again), unless somebody waits for it.
   */
  def apart(urgent: Boolean)(work: => Unit): Unit =
    if (urgent) work else all(apartThreads.newThread(_).start())(Seq(() => work))

  /**
   * Work that is done piece by piece, in the order in which it came, by one thread at a time. A
   * piece that fails is the last; whoever adds the next hears of it.
   */
  final class Line(urgent: Boolean) {
    private val pieces = new ConcurrentLinkedQueue[(Int, () => Unit)]()
    private val waiting = new AtomicInteger
    private val failure = new AtomicReference[Throwable]
    private val window = windows(urgent)

    /** Adds a piece that keeps so many bytes in memory; waits while too many do. */
    def add(bytes: Int)(piece: => Unit): Unit = {
      check()
      val counted = math.min(bytes, if (urgent) WindowBytes else BackgroundWindowBytes)
      while (!window.tryAcquire(counted, 100, TimeUnit.MILLISECONDS)) check()
      pieces.add((counted, () => piece))
      if (waiting.getAndIncrement() == 0) {
        try poolFor(urgent).execute(() => run()) catch { case _: OutOfMemoryError => run() }
      }
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
      synchronized(notifyAll())
    }

    def check(): Unit = if (failure.get() != null) throw failure.get()

    /** Waits until everything that was added is done, or has failed. */
    def settle(): Unit = {
      var interrupted = false
      synchronized {
        while (waiting.get() > 0) {
          try wait() catch { case _: InterruptedException => interrupted = true }
        }
      }
      if (interrupted) Thread.currentThread().interrupt()
    }

    /** The same, and throws what failed. */
    def await(): Unit = {
      settle()
      check()
    }
  }
}
