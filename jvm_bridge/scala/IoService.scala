package io.quire.spark

import java.util.concurrent.{ConcurrentLinkedQueue, CountDownLatch, Executors, Semaphore, ThreadFactory, TimeUnit}
import java.util.concurrent.atomic.{AtomicInteger, AtomicReference}
import java.util.concurrent.locks.LockSupport

/**
 * The threads that write bases and read files ahead, for all stores of this process.
 *
 * A base is the background's work and gives way: its threads have a low priority, so that they take
 * what the tasks leave, and they rest while a commit of any store writes. What waits to be
 * written is bounded.
 */
private[spark] object IoService {
  private val Threads = 4
  /** Bytes that may wait to be written, of all bases together. */
  private val WindowBytes = 64 << 20
  /** A piece is not held back longer than this, however many commits there are. */
  private val GiveWayNanosMax = 200L * 1000000

  /** For work that somebody waits for. */
  private lazy val pool = Executors.newFixedThreadPool(Threads, threads("quire-io", identity))
  private lazy val background = Executors.newFixedThreadPool(Threads, threads("quire-base", lowered))

  private def threads(name: String, as: Runnable => Runnable): ThreadFactory = new ThreadFactory {
    private val count = new AtomicInteger
    override def newThread(work: Runnable): Thread = {
      val thread = new Thread(as(work), s"$name-${count.incrementAndGet()}")
      thread.setDaemon(true)
      thread
    }
  }

  private def lowered(work: Runnable): Runnable = () => {
    Native.lowerPriority()
    work.run()
  }

  private val window = new Semaphore(WindowBytes)
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

  /** Writes a base in a thread of low priority unless somebody waits for it; gives what that gives. */
  def writing[T](urgent: Boolean)(body: => T): T = {
    if (urgent) {
      body
    } else {
      // A thread of its own: it waits for those of the pool.
      var result: Either[Throwable, T] = null
      val thread = new Thread(
        lowered(() => result = try Right(body) catch { case e: Throwable => Left(e) }), "quire-base")
      thread.setDaemon(true)
      thread.start()
      joined(thread)
      result.fold(e => throw e, identity)
    }
  }

  /** Waits for its end come what may: what it reads is freed afterwards. */
  private def joined(thread: Thread): Unit = {
    var interrupted = false
    while (thread.isAlive) {
      try thread.join() catch { case _: InterruptedException => interrupted = true }
    }
    if (interrupted) Thread.currentThread().interrupt()
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
      if (waiting.getAndIncrement() == 0) (if (urgent) pool else background).execute(() => run())
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
