"""Runs Spark 4.2.0's own streaming tests on Quire's state store provider.

Fetches Spark and its published test jars with Maven, compiles the agent that brings Quire's provider into the tests
(``agent/``) and the suites written for it (``scala/``), runs the suites listed in ``suites.py``, and prints a table:
suite, passed, total. Tests in ``left_out.txt`` run, too, but may fail. A suite with a failed test is run once more by
itself; tests that pass only then are named, with what they failed with at first. Everything is kept in
``build/conformance``.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

from suites import SUITES, Suite  # noqa: E402

BUILD = ROOT / "build" / "conformance"
JARS = BUILD / "jars"
TESTS = BUILD / "test-classes"
AGENT = BUILD / "agent.jar"
OWN = BUILD / "own-classes"
SPARK_HOME = BUILD / "spark-home"
WORK = BUILD / "work"
SPARK = "4.2.0"
PROVIDER = "io.quire.spark.QuireStateStoreProvider"
EXTENSIONS = "io.quire.spark.QuireExtensions"
# Folders whose files end up in the provider's jar.
SOURCES = ["pagemgr", "structures", "checkpoint", "statestore", "jvm_bridge"]
# A suite that reports nothing for this long hangs: Spark's own tests wait for a minute or two at most.
SILENCE_SECONDS = 420

# What Spark's own build gives its tests.
OPENED = [
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs"),
    *("sun.security.action", "sun.util.calendar"),
]
JVM_FLAGS = [
    "-ea",
    # Most of the time goes into what runs once: tests, plans, generated code.
    "-XX:TieredStopAtLevel=1",
    "-Xss4m",
    "-Xmx3g",
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dspark.testing=1",
]


class ConformanceError(Exception):
    """The run cannot go on; the text says why and what to do."""


# ---- What is left out ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOut:
    """A test that may fail on Quire's provider, or is not even run; ``*`` in either name stands for anything."""

    suite: str
    test: str
    reason: str
    skipped: bool

    def covers(self, suite: str, test: str) -> bool:
        """Whether this entry is about that test."""
        return _matches(self.suite, suite) and _matches(self.test, test)


def _expression(pattern: str) -> str:
    return ".*".join(map(re.escape, pattern.split("*")))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(_expression(pattern), name, re.DOTALL) is not None


def read_left_out(path: Path) -> tuple[list[LeftOut], list[tuple[str, str]]]:
    """The tests, and the whole suites with their reasons, that the file names; its own head describes the format."""
    tests: list[LeftOut] = []
    whole: list[tuple[str, str]] = []
    reason: list[str] = []
    listed = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not line.startswith(" "):
            if listed:
                reason, listed = [], False
            reason.append(text)
            continue
        if not reason:
            raise ConformanceError(f"{path}:{number}: a test without a reason above it: {text}")
        listed = True
        suite, colon, test = text.removeprefix("! ").partition(": ")
        if colon:
            tests.append(LeftOut(suite, test, " ".join(reason), text.startswith("! ")))
        else:
            whole.append((suite, " ".join(reason)))
    return tests, whole


# ---- Building what the run needs -----------------------------------------------------------------


def say(text: str) -> None:
    """Prints one step of the work."""
    print(f"== {text}", flush=True)


def tool(name: str) -> str:
    """The path of one of the JDK's programs."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(name, path=str(Path(home) / "bin")) if home else shutil.which(name)
    if not found:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        raise ConformanceError(f"No {name} in {where}: install a JDK 17 (Debian, Ubuntu: openjdk-17-jdk-headless)")
    return found


def call(what: str, command: list[str], **options: Any) -> None:
    """Runs a command whose output matters only when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise ConformanceError(f"{what} failed ({done.returncode}): {' '.join(command)}\n{done.stdout[-4000:]}")


@contextmanager
def alone() -> Iterator[None]:
    """Keeps a second run out of build/conformance until this one ends."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another conformance run to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def newest(*places: Path) -> float:
    """When the newest file in these places was changed."""
    files = (file for place in places for file in (place.rglob("*") if place.is_dir() else [place]))
    skipped = ("__pycache__", ".so", ".o")
    return max((f.stat().st_mtime for f in files if f.is_file() and not str(f).endswith(skipped)), default=0.0)


def current(result: Path, *sources: Path) -> bool:
    """Whether the result is newer than all it is made from."""
    return result.exists() and result.stat().st_mtime >= newest(*sources)


def fetch() -> None:
    """Brings Spark, its tests and ScalaTest into build/conformance, once."""
    stamp = JARS / "complete"
    pom = HERE / "pom.xml"
    if not current(stamp, pom):
        say(f"Fetching Spark {SPARK} and its test jars with Maven (370 MB the first time)")
        maven = shutil.which("mvn")
        if not maven:
            raise ConformanceError("No mvn in PATH: install Maven (Debian, Ubuntu: apt-get install maven)")
        shutil.rmtree(JARS, ignore_errors=True)
        copy = ["dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        call("Fetching Spark", [maven, "--batch-mode", "--quiet", f"--file={pom}", *copy])
        shutil.rmtree(TESTS, ignore_errors=True)
        stamp.touch()
    if not TESTS.exists():
        say("Unpacking Spark's tests: some read their resources as files")
        part = TESTS.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with zipfile.ZipFile(JARS / f"spark-sql_2.13-{SPARK}-tests.jar") as jar:
            jar.extractall(part)
        part.rename(TESTS)
    # Spark looks for the jars of its executor processes in its home.
    SPARK_HOME.mkdir(parents=True, exist_ok=True)
    if not (SPARK_HOME / "jars").is_symlink():
        (SPARK_HOME / "jars").symlink_to(JARS, target_is_directory=True)


def fetch_pyspark() -> None:
    """Brings PySpark of the same version into the tests' home, for the suites whose operators run Python."""
    home = SPARK_HOME / "python"
    if home.exists():
        return
    say(f"Fetching PySpark {SPARK} with pip (450 MB the first time)")
    part = SPARK_HOME / "python.part"
    shutil.rmtree(part, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={part}", f"pyspark=={SPARK}"]
    call("Fetching PySpark", pip)
    shutil.rmtree(part / "pyspark" / "jars")  # the tests run on Maven's
    (part / "lib").symlink_to(Path("pyspark", "python", "lib"))
    part.rename(home)


def build_agent() -> None:
    """Compiles the agent into a jar."""
    if current(AGENT, HERE / "agent"):
        return
    say("Compiling the agent")
    classes = BUILD / "agent-classes"
    shutil.rmtree(classes, ignore_errors=True)
    sources = sorted(map(str, (HERE / "agent").rglob("*.java")))
    javac = [tool("javac"), "-Xlint:all", "-Werror", "--release", "17", "-cp", asm(), "-d", str(classes), *sources]
    call("Compiling the agent", javac)
    with zipfile.ZipFile(AGENT, "w", zipfile.ZIP_DEFLATED) as jar:
        jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\nPremain-Class: io.quire.conformance.Agent\n")
        for file in sorted(classes.rglob("*.class")):
            jar.write(file, file.relative_to(classes).as_posix())


def asm() -> str:
    """The jar among Spark's with the library that rewrites classes."""
    return str(next(JARS.glob("xbean-asm9-shaded-*.jar")))


def build_provider() -> Path:
    """Compiles the provider's jar for this Spark."""
    jar = BUILD / "quire.jar"
    sources = [ROOT / folder for folder in SOURCES]
    if not current(jar, *(folder for folder in sources if folder.exists())):
        say(f"Compiling the provider for Spark {SPARK}")
        quire = Path(sys.executable).with_name("quire")
        if not quire.exists():
            raise ConformanceError(f"No quire next to {sys.executable}: run make setup, or name a jar with --jar")
        call("quire jar", [str(quire), "jar", "--jars", str(JARS), "--output", str(jar)])
    return jar


def build_own(provider: Path) -> None:
    """Compiles the Scala sources of this folder against the provider."""
    stamp = BUILD / "own-classes.stamp"
    if stamp.exists() and stamp.read_text() == str(provider) and current(stamp, HERE / "scala", provider, AGENT):
        return
    say("Compiling the suites written for Quire")
    shutil.rmtree(OWN, ignore_errors=True)
    OWN.mkdir(parents=True)
    sources = sorted(map(str, (HERE / "scala").glob("*.scala")))
    flags = ["-usejavacp", "-Xlint", "-Werror", "-d", str(OWN)]
    java = [tool("java"), "-Xss8m", "-cp", class_path(provider), "scala.tools.nsc.Main"]
    call("Compiling the suites", [*java, *flags, *sources])
    stamp.write_text(str(provider))


def class_path(provider: Path) -> str:
    """What every JVM of the run has on its class path; the unpacked tests hide the jar with the same classes."""
    return os.pathsep.join(map(str, [OWN, TESTS, provider, AGENT, JARS / "*"]))


# ---- Running suites ------------------------------------------------------------------------------


@dataclass
class Test:
    """How one test ended: passed, failed, canceled (by the test itself), ignored (by Spark) or lost (never ran)."""

    name: str
    status: str
    seconds: float = 0.0
    opened: int = 0
    redirected: int = 0
    message: str = ""
    trace: str = ""
    left_out: str = ""
    first_time: str = ""  # why it failed, if it passed only when it was run again

    @property
    def counts(self) -> bool:
        """Whether the test is one of the suite's total: those that Spark itself does not run are not."""
        return self.status not in ("ignored", "canceled", "pending")

    @property
    def bad(self) -> bool:
        """Whether it failed and may not."""
        return self.status in ("failed", "lost") and not self.left_out


@dataclass
class Result:
    """How one suite ended; ``opened`` stores of Quire, ``redirected`` requests for one of Spark's own providers."""

    suite: str
    group: str
    names: str
    tests: list[Test] = field(default_factory=list)
    opened: int = 0
    redirected: int = 0
    seconds: float = 0.0
    problem: str = ""

    def count(self, *statuses: str) -> int:
        """How many tests ended so."""
        return sum(test.status in statuses for test in self.tests)

    @property
    def total(self) -> int:
        """The tests that Spark itself runs."""
        return sum(test.counts for test in self.tests)

    @property
    def left_out(self) -> int:
        """The tests that failed and may."""
        return sum(test.status in ("failed", "lost") and bool(test.left_out) for test in self.tests)

    @property
    def on_quire(self) -> int:
        """The tests passed in which at least one store of Quire was opened."""
        return sum(test.status == "passed" and test.opened > 0 for test in self.tests)

    @property
    def failed(self) -> int:
        """The tests that failed and may not."""
        return sum(test.bad for test in self.tests)

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if self.problem or self.failed:
            return "FAILED"
        return "ok" if self.on_quire else "NOT PROVEN"

    def amend(self, again: Result) -> None:
        """Counts tests that failed, and passed when the suite was run again, as passed; keeps why they had failed."""
        passed = {test.name: test for test in again.tests if test.status == "passed"}
        self.tests = [
            replace(passed[test.name], first_time=first_line(test.message))
            if test.bad and test.name in passed
            else test
            for test in self.tests
        ]


class Runner:
    """Runs suites in JVMs, a JVM for each group, some groups at a time, and follows what they report."""

    def __init__(self, provider: Path, left_out: list[LeftOut]) -> None:
        self.provider = provider
        self.left_out = left_out
        self.jvms = itertools.count(1)
        self.ending = threading.Event()
        self.live = sys.stdout.isatty()

    def run(self, suites: list[Suite], jobs: int) -> list[Result]:
        """Runs the suites, tells of each as soon as it ends, and gives the results in the suites' order."""
        batches: dict[tuple[str, str], list[Suite]] = {}
        for suite in suites:
            batches.setdefault((suite.group, suite.names), []).append(suite)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                running = [pool.submit(self._batch, batch) for batch in batches.values()]
                results = [result for future in as_completed(running) for result in future.result()]
            except BaseException:
                self.ending.set()
                pool.shutdown(cancel_futures=True)
                raise
        order = {suite.name: place for place, suite in enumerate(suites)}
        return sorted(results, key=lambda result: order[result.suite])

    def run_again(self, suites: list[Suite], results: list[Result]) -> None:
        """Runs suites with failed tests once more, one at a time: some of Spark's tests race with the query they watch.

        A suite that broke off, or whose JVM died, has failed for good.
        """
        failed = {result.suite: result for result in results if result.failed and not result.problem}
        for suite in suites:
            if suite.name in failed and not self.ending.is_set():
                print(f"Again, by itself: {suite.short}", flush=True)
                failed[suite.name].amend(self.run([suite], 1)[0])

    def _batch(self, todo: list[Suite]) -> list[Result]:
        results: list[Result] = []
        while todo and not self.ending.is_set():
            before = len(results)
            results.extend(self._jvm(todo))
            # A JVM that died or hung in a suite reported that one; the others get a new JVM.
            todo = todo[len(results) - before :]
        return results

    def _jvm(self, suites: list[Suite]) -> Iterator[Result]:
        work = WORK / f"{next(self.jvms):02d}"
        shutil.rmtree(work, ignore_errors=True)
        (work / "tmp").mkdir(parents=True)
        events, tally, log = work / "events.jsonl", work / "tally", work / "output.log"
        events.touch()
        plan = [{"name": s.name, "only": s.only, "skip": self._skipped(s)} for s in suites]
        (work / "suites.json").write_text(json.dumps(plan))
        command = self._command(work, suites[0].names, [str(work / "suites.json"), str(events), str(tally)])
        environment = {
            **os.environ,
            "SPARK_TESTING": "1",
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            # This Python has what PySpark needs; PySpark itself is the tests' own.
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(SPARK_HOME / "python"),
        }
        environment.pop("SPARK_CONF_DIR", None)
        clean = True
        with log.open("wb") as output:
            jvm = subprocess.Popen(
                command, cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            patience = 0
            try:
                for result in self._follow(jvm, suites, events, log):
                    clean = clean and result.verdict == "ok"
                    yield result
                patience = 0 if self.ending.is_set() or result.problem else 30
            finally:
                _end(jvm, patience)
        if clean:
            shutil.rmtree(work, ignore_errors=True)

    def _command(self, work: Path, names: str, arguments: list[str]) -> list[str]:
        options = f"tests={TESTS},names={names}"
        executor = f"-javaagent:{AGENT}={options},tally={work / 'tally'} -Djava.io.tmpdir={work / 'tmp'}"
        properties = {
            "java.io.tmpdir": work / "tmp",
            "spark.test.home": SPARK_HOME,
            "spark.executor.extraClassPath": class_path(self.provider),
            "spark.executor.extraJavaOptions": executor,
        }
        if names == "own":
            properties["spark.sql.streaming.stateStore.providerClass"] = PROVIDER
            properties["spark.sql.extensions"] = EXTENSIONS
        return [
            tool("java"),
            *JVM_FLAGS,
            f"-javaagent:{AGENT}={options}",
            *(f"-D{key}={value}" for key, value in properties.items()),
            "-cp",
            class_path(self.provider),
            "io.quire.conformance.RunSuites",
            *arguments,
        ]

    def _follow(self, jvm: subprocess.Popen[bytes], suites: list[Suite], path: Path, log: Path) -> Iterator[Result]:
        """Yields a result for each suite that ended, the last of them perhaps because the JVM did."""
        waiting = list(suites)
        result, announced, running = _fresh(waiting[0]), list[str](), ""
        began = heard = time.monotonic()
        with path.open() as stream:
            line = ""
            while True:
                line += stream.readline()
                if line.endswith("\n"):
                    event, line, heard = json.loads(line), "", time.monotonic()
                    if event["event"] == "suite":
                        announced = event["tests"]
                        result.problem = "".join(f"no such test: {name}; " for name in event["missing"])
                    elif event["event"] == "start":
                        running = event["test"]
                        self._progress(result, len(announced), running)
                    elif event["event"] == "test":
                        result.tests.append(self._test(waiting[0], event))
                        running = ""
                    elif event["event"] == "end":
                        result.opened, result.redirected = event["opened"], event["redirected"]
                        result.seconds = event["seconds"]
                        if "error" in event:
                            result.problem += f"the suite broke off: {event['error']}"
                        yield self._finished(waiting.pop(0), result, announced, "")
                        if not waiting:
                            return
                        result, announced, began = _fresh(waiting[0]), [], time.monotonic()
                    continue
                if self.ending.is_set():
                    return
                if jvm.poll() is not None:
                    tail = log.read_bytes()[-600:].decode(errors="replace")
                    result.problem += f"the JVM ended with {jvm.returncode}: {tail}"
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    stack = log.with_name("stack.txt")
                    with stack.open("wb") as out:
                        subprocess.run([tool("jstack"), str(jvm.pid)], stdout=out, stderr=out, timeout=60, check=False)
                    result.problem += f"no sign of life for {SILENCE_SECONDS} s, see {stack.relative_to(ROOT)}"
                else:
                    time.sleep(0.1)
                    continue
                result.seconds = time.monotonic() - began
                result.opened = sum(test.opened for test in result.tests)
                result.redirected = sum(test.redirected for test in result.tests)
                yield self._finished(waiting.pop(0), result, announced, running)
                return

    def _test(self, suite: Suite, event: dict[str, Any]) -> Test:
        return Test(
            name=event["test"],
            status=event["status"],
            seconds=event["seconds"],
            opened=event["opened"],
            redirected=event["redirected"],
            message=event["message"] or event.get("error", ""),
            trace=event.get("trace", ""),
            left_out=self._reason(suite, event["test"]),
        )

    def _reason(self, suite: Suite, test: str) -> str:
        return next((entry.reason for entry in self.left_out if entry.covers(suite.short, test)), "")

    def _skipped(self, suite: Suite) -> list[str]:
        entries = (entry for entry in self.left_out if entry.skipped and _matches(entry.suite, suite.short))
        return [_expression(entry.test) for entry in entries]

    def _finished(self, suite: Suite, result: Result, announced: list[str], running: str) -> Result:
        seen = {test.name for test in result.tests}
        for name in announced:
            if name not in seen:
                message = "it was running when the suite ended" if name == running else "it was not run"
                result.tests.append(Test(name, "lost", message=message, left_out=self._reason(suite, name)))
        numbers = f"{result.count('passed')} of {result.total} passed"
        if result.left_out:
            numbers += f", {result.left_out} left out"
        numbers += f", {result.opened} stores, {result.seconds:.0f} s"
        lines = [f"  {suite.group}, {suite.short}: {numbers}  {result.verdict}"]
        lines += [f"    failed: {test.name}\n      {first_line(test.message)}" for test in result.tests if test.bad]
        lines += [f"    {result.problem}"] if result.problem else []
        # One call: suites of other groups end at the same time.
        print(("\r\033[K" if self.live else "") + "\n".join(lines) + "\n", end="", flush=True)
        return result

    def _progress(self, result: Result, total: int, test: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns
            text = f"  {result.suite.rpartition('.')[2]} {len(result.tests) + 1}/{total} {test}".replace("\n", " ")
            print(f"\r\033[K{text[: width - 1]}", end="", flush=True)


def _fresh(suite: Suite) -> Result:
    return Result(suite.name, suite.group, suite.names)


def _end(jvm: subprocess.Popen[bytes], patience: float) -> None:
    """Ends a JVM, after some patience, and the executor processes it started: all are one process group."""
    try:
        jvm.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(jvm.pid, sign)
        except ProcessLookupError:
            break
        time.sleep(1)
    jvm.wait()


def first_line(text: str, width: int = 160) -> str:
    """The first line of a message, cut to fit."""
    line = (text.strip().splitlines() or [""])[0]
    return line if len(line) <= width else line[: width - 1] + "…"


# ---- Telling what came out -----------------------------------------------------------------------

HEAD = ["suite", "passed", "total", "left out", "on Quire", "stores", "redirected", "seconds", ""]


def rows(results: list[Result]) -> list[list[str]]:
    """The table, a total at its end."""
    table = []
    for r in results:
        numbers = [r.count("passed"), r.total, r.left_out, r.on_quire, r.opened, r.redirected, round(r.seconds)]
        table.append([r.suite.rpartition(".")[2], *map(str, numbers), r.verdict])
    sums = [str(sum(int(row[column]) for row in table)) for column in range(1, 8)]
    return [*table, [f"{len(results)} suites", *sums, ""]]


def text_table(table: list[list[str]]) -> str:
    """The table with its columns lined up."""
    widths = [max(len(row[column]) for row in [HEAD, *table]) for column in range(len(HEAD))]

    def line(row: list[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:8], widths[1:8], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *numbers, row[8]]).rstrip()

    body = [line(row) for row in table]
    rule = "-" * len(line(HEAD))
    return "\n".join([line(HEAD), rule, *body[:-1], rule, body[-1]])


def surprises(results: list[Result], left_out: list[LeftOut]) -> tuple[list[str], list[str]]:
    """Left-out tests that passed everywhere, and entries that name no test; only where all their suites ran."""
    passing, unknown = [], []
    for entry in left_out:
        about = {suite.name for suite in SUITES if _matches(entry.suite, suite.short)}
        ran = [r for r in results if r.suite in about and not r.problem]
        if len(ran) < len(about):
            continue
        statuses = [test.status for r in ran for test in r.tests if _matches(entry.test, test.name)]
        if not statuses:
            unknown.append(f"{entry.suite}: {entry.test}")
        elif set(statuses) == {"passed"}:
            passing.append(f"{entry.suite}: {entry.test}")
    return passing, unknown


def passed_again(results: list[Result]) -> list[tuple[Result, Test]]:
    """The tests that failed at first."""
    return [(r, test) for r in results for test in r.tests if test.first_time]


def write_report(
    results: list[Result], whole: list[tuple[str, str]], passing: list[str], provider: Path, seconds: float
) -> None:
    """Writes report.md for people and report.json for programs."""
    lines = [
        f"# Spark {SPARK}'s own tests on Quire's state store provider",
        "",
        f"Run in {seconds / 60:.0f} minutes with `{provider.name}`.",
        "",
        "- *total*: the tests that Spark runs itself; those it ignores, or that cancel themselves, are not counted.",
        "- *left out*: tests that failed and may, each with its reason below.",
        "- *on Quire*: tests passed in which at least one store of Quire was opened; *stores*: how many in all.",
        "- *redirected*: requests for one of Spark's own providers that Quire's answered; elsewhere the tests'",
        "  configuration names Quire's provider itself.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" + "|--:" * 7 + "|---|",
        *("| " + " | ".join(row) + " |" for row in rows(results)),
    ]
    for title, chosen in (("Failed", "bad"), ("Left out", "left_out")):
        lines += ["", f"## {title}", ""]
        before = len(lines)
        for r in results:
            if chosen == "bad" and r.problem:
                lines.append(f"- `{r.suite.rpartition('.')[2]}`: {first_line(r.problem)}")
            for test in r.tests:
                if chosen == "bad" and test.bad:
                    lines.append(f"- `{r.suite.rpartition('.')[2]}`: {test.name}  \n  {first_line(test.message)}")
                if chosen == "left_out" and test.left_out and test.status != "passed":
                    lines.append(f"- `{r.suite.rpartition('.')[2]}`: {test.name}  \n  {test.left_out}")
        if len(lines) == before:
            lines.append("None.")
    lines += ["", "## Passed only when run again", ""]
    lines += [
        f"- `{r.suite.rpartition('.')[2]}`: {test.name}  \n  at first: {test.first_time}"
        for r, test in passed_again(results)
    ] or ["None."]
    lines += ["", "## Suites not run", "", *(f"- `{suite}`: {reason}" for suite, reason in whole)]
    if passing:
        lines += ["", "## Left out, but passing now", "", *(f"- {entry}" for entry in passing)]
    canceled = [(r, test) for r in results for test in r.tests if test.status in ("canceled", "pending")]
    if canceled:
        lines += ["", "## Canceled by the tests themselves", ""]
        lines += [f"- `{r.suite.rpartition('.')[2]}`: {t.name}  \n  {first_line(t.message)}" for r, t in canceled]
    (BUILD / "report.md").write_text("\n".join(lines) + "\n")
    data = {"spark": SPARK, "provider": PROVIDER, "seconds": seconds, "suites": [asdict(r) for r in results]}
    (BUILD / "report.json").write_text(json.dumps(data, indent=1) + "\n")


def choose(arguments: argparse.Namespace) -> list[Suite]:
    """The suites asked for."""
    chosen = [suite for suite in SUITES if suite.quick or not arguments.quick]
    if arguments.suite:
        wanted = [part.lower() for part in arguments.suite]
        chosen = [suite for suite in SUITES if any(part in suite.name.lower() for part in wanted)]
        if not chosen:
            raise ConformanceError(f"No suite has {' or '.join(arguments.suite)} in its name; --list shows them all")
    return chosen


def main() -> int:
    """Runs what the command line asks for; 0 if all of it passed."""
    parser = argparse.ArgumentParser(description=f"Run Spark {SPARK}'s own streaming tests on Quire's provider.")
    parser.add_argument("--quick", action="store_true", help="only a part that takes a few minutes")
    parser.add_argument("--suite", action="append", metavar="NAME", help="only suites with this in their name")
    parser.add_argument("--jar", type=Path, help=f"the provider's jar for Spark {SPARK} (default: compile it)")
    cores = min(2, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help="JVMs at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the suites and leave")
    arguments = parser.parse_args()
    chosen = choose(arguments)
    if arguments.list:
        for suite in chosen:
            print(f"{suite.group:30} {suite.short}{'  (quick)' if suite.quick else ''}")
        return 0
    left_out, whole = read_left_out(HERE / "left_out.txt")
    if arguments.jar and not arguments.jar.is_file():
        raise ConformanceError(f"--jar {arguments.jar}: no such file; leave --jar away to have it compiled")
    if arguments.jobs < 1:
        raise ConformanceError(f"--jobs {arguments.jobs}: at least 1")
    with alone():
        return conform(chosen, arguments.jobs, arguments.jar, left_out, whole)


def conform(
    chosen: list[Suite], jobs: int, jar: Path | None, left_out: list[LeftOut], whole: list[tuple[str, str]]
) -> int:
    """Builds what is needed, runs the suites and tells what came out; 0 if all passed on Quire."""
    fetch()
    if any("Pandas" in suite.short for suite in chosen):
        fetch_pyspark()
    build_agent()
    provider = jar.resolve() if jar else build_provider()
    build_own(provider)

    began = time.monotonic()
    say(f"Running {len(chosen)} of Spark's suites")
    runner = Runner(provider, left_out)
    results = runner.run(chosen, jobs)
    runner.run_again(chosen, results)
    seconds = time.monotonic() - began
    passing, unknown = surprises(results, left_out)
    write_report(results, whole, passing, provider, seconds)

    print("\n" + text_table(rows(results)))
    for r, test in passed_again(results):
        print(f"Passed only when run again: {r.suite.rpartition('.')[2]}: {test.name} ({test.first_time})")
    for entry in passing:
        print(f"Left out, but passing now: {entry}")
    for entry in unknown:
        print(f"left_out.txt names a test that does not exist: {entry}")
    print(f"Report: {(BUILD / 'report.md').relative_to(ROOT)}, {(BUILD / 'report.json').relative_to(ROOT)}")
    bad = [r for r in results if r.verdict != "ok"]
    if bad or unknown:
        print(f"Conformance: FAILED ({len(bad)} of {len(results)} suites)")
        return 1
    print(f"Conformance: all {len(results)} suites passed on Quire")
    return 0


if __name__ == "__main__":
    # So that the JVM of the moment ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except ConformanceError as error:
        sys.exit(f"conformance: {error}")
