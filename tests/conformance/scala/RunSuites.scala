package io.quire.conformance

import java.io.{File, FileWriter, PrintWriter, StringWriter}

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.ObjectMapper
import com.fasterxml.jackson.databind.node.ObjectNode
import org.scalatest.{Args, DynaTags, Filter, Reporter, Suite}
import org.scalatest.events._

/**
 * Runs ScalaTest suites one after the other and writes what happens, an event a line in JSON, as it
 * happens. Unlike ScalaTest's own runner it reports in the thread that runs the tests, so that the
 * stores counted between two events belong to the test between them.
 *
 * Arguments: a file with the suites to run, `[{"name": class, "only": [tests], "skip": [regular
 * expressions]}]`, where no tests named in `only` means all of them; the file to write events to;
 * the file in which executor processes count the stores they open.
 */
object RunSuites {
  private val json = new ObjectMapper
  private val Chosen = "io.quire.conformance.Chosen"

  def main(arguments: Array[String]): Unit = {
    val out = new PrintWriter(new FileWriter(arguments(1), true), true)
    val run = new RunSuites(out, new File(arguments(2)))
    json.readTree(new File(arguments(0))).asScala.foreach { suite =>
      def texts(field: String): Set[String] = suite.get(field).asScala.map(_.asText).toSet
      run(suite.get("name").asText, texts("only"), texts("skip"))
    }
    out.close()
    // Threads that a suite left behind must not keep the process.
    System.exit(0)
  }

  private case class Counts(opened: Long, redirected: Long) {
    def since(earlier: Counts): Counts =
      Counts(opened - earlier.opened, redirected - earlier.redirected)
  }
}

private class RunSuites(out: PrintWriter, tally: File) extends Reporter {
  import RunSuites._

  private var suite = ""
  private var before = counts()

  private def counts(): Counts =
    Counts(Redirects.openedCount + tally.length, Redirects.redirectedCount)

  def apply(name: String, only: Set[String], skip: Set[String]): Unit = {
    suite = name
    val start = counts()
    val began = System.nanoTime()
    var problem: Option[Throwable] = None
    try {
      val instance = Class.forName(name).getConstructor().newInstance().asInstanceOf[Suite]
      val tests = if (only.isEmpty) instance.testNames else instance.testNames.intersect(only)
      write("suite") { event =>
        val names = event.putArray("tests")
        tests.foreach(names.add)
        val missing = event.putArray("missing")
        only.diff(instance.testNames).foreach(missing.add)
      }
      val chosen = tests.filterNot(test => skip.exists(test.matches))
      val tags = Map(instance.suiteId -> chosen.map(_ -> Set(Chosen)).toMap)
      val filter =
        Filter(Some(Set(Chosen)), Set("org.scalatest.Ignore"), dynaTags = DynaTags(Map.empty, tags))
      instance.run(None, Args(this, filter = filter))
    } catch {
      case e: Throwable => problem = Some(e)
    }
    write("end") { event =>
      record(event, counts().since(start))
      event.put("seconds", (System.nanoTime() - began) / 1e9)
      problem.foreach(failure(event, _))
    }
  }

  override def apply(event: Event): Unit = event match {
    case e: TestStarting =>
      before = counts()
      write("start")(_.put("test", e.testName))
    case e: TestSucceeded => end(e.testName, "passed", e.duration, None)
    case e: TestFailed => end(e.testName, "failed", e.duration, e.throwable, e.message)
    case e: TestCanceled => end(e.testName, "canceled", e.duration, e.throwable, e.message)
    case e: TestIgnored => end(e.testName, "ignored", None, None)
    case e: TestPending => end(e.testName, "pending", e.duration, None)
    case _ =>
  }

  private def end(
      test: String,
      status: String,
      milliseconds: Option[Long],
      thrown: Option[Throwable],
      message: String = ""): Unit = write("test") { event =>
    event.put("test", test).put("status", status).put("message", message)
    event.put("seconds", milliseconds.getOrElse(0L) / 1e3)
    thrown.foreach(failure(event, _))
    // An ignored test has no start of its own.
    record(event, if (status == "ignored") Counts(0, 0) else counts().since(before))
  }

  private def record(event: ObjectNode, counts: Counts): Unit =
    event.put("opened", counts.opened).put("redirected", counts.redirected)

  private def failure(event: ObjectNode, thrown: Throwable): Unit = {
    val trace = new StringWriter
    thrown.printStackTrace(new PrintWriter(trace))
    event.put("error", thrown.toString).put("trace", trace.toString)
  }

  private def write(kind: String)(fill: ObjectNode => Unit): Unit = synchronized {
    val event = json.createObjectNode().put("event", kind).put("suite", suite)
    fill(event)
    out.println(json.writeValueAsString(event))
  }
}
