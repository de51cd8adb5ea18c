package io.quire.spark

import java.util.concurrent.atomic.AtomicInteger

/**
 * Named steps at which tests end the process, as a crash would: no hook of the JVM runs, nothing is
 * flushed. `QUIRE_FAULT=commit.durable:3` in the environment does so when that point is passed the
 * third time (checkpoint/fault.py does the same for Python). Without it a point costs nothing: the
 * compiler knows that there is no hook.
 */
private[spark] object Fault {
  private final val Killed = 137

  private val hook: String => Unit = Option(System.getenv("QUIRE_FAULT")).map(killer).orNull

  def point(name: String): Unit = if (hook != null) hook(name)

  private def killer(spec: String): String => Unit = {
    val parsed = spec.lastIndexOf(':') match {
      case at if at > 0 => spec.substring(at + 1).toIntOption.filter(_ > 0).map(spec.substring(0, at) -> _)
      case _ => None
    }
    val (name, number) = parsed.getOrElse(throw new IllegalArgumentException(
      s"QUIRE_FAULT '$spec': give a point and a number from 1, as write.done:1"))
    val passings = new AtomicInteger
    if (name == Count) {
      passed => println(s"passed $passed")
    } else {
      passed => if (passed == name && passings.incrementAndGet() == number) Runtime.getRuntime.halt(Killed)
    }
  }

  /** In place of a point: says on standard output what is passed, and ends nothing. */
  private final val Count = "tell"
}
