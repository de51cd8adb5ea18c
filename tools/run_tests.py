"""Runs the tests in rings, each on top of the one before, and ends with one line a ring and a total.

1. pytest on the installed package, queries on real Spark and on a real HDFS included.
2. A part of Spark's own streaming tests on Quire's provider (all of them: make conformance).
3. pytest again on a build of the core with the address and undefined-behaviour sanitizers, with a search for leaks.
4. The C programs in tests/c, each compiled with the core and the thread sanitizer.

Use: run_tests.py [arguments for pytest]; with arguments only the first ring runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
LAYERS = ["pagemgr", "structures", "checkpoint", "statestore"]
CORE = sorted(path for layer in LAYERS for path in ROOT.glob(f"{layer}/*.c"))
# A JVM that starts, or a child that is killed, keeps no two cores busy. A file's tests share what they have set up, and
# the order of files puts those that take long first.
IN_PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
# A JVM does not run under the sanitizers, and benchmarks call nothing of the core that its own tests do not.
NOT_SANITIZED = ["tests/spark", "tests/hdfs", "tests/jvm_bridge", "tests/bench"]


class Ring:
    """The result of one ring."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.passed = self.failed = self.skipped = 0
        self.notes: list[str] = []
        self.cases: dict[str, int] = {}
        self.started = time.monotonic()
        self.seconds = 0.0
        print(f"\n== {name}", flush=True)

    def fail(self, note: str) -> None:
        """Counts one failure, with a line that says what it was."""
        self.failed += 1
        self.notes.append(note)

    def line(self) -> str:
        """The summary of the ring."""
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.name}: {self.passed} passed, {self.failed} failed{skipped} ({self.seconds:.0f} s)"


def run_pytest(ring: Ring, arguments: list[str], environment: dict[str, str]) -> None:
    """Runs pytest with its own progress on the screen and adds its counts, and the tests' own, to the ring."""
    BUILD.mkdir(exist_ok=True)
    report = BUILD / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode
    if not report.exists():
        ring.fail(f"pytest ended with exit code {code} before it could report")
        return
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        ring.passed += tests - failed - skipped
        ring.failed += failed
        ring.skipped += skipped
        for counted in suite.iterfind("properties/property"):
            name, value = counted.get("name", ""), counted.get("value", "")
            # Hypothesis has properties of its own.
            if value.isdigit():
                ring.cases[name] = ring.cases.get(name, 0) + int(value)
    if code != 0 and ring.failed == 0:
        ring.fail(f"pytest ended with exit code {code}")


def runtime_library(name: str) -> str | None:
    """The compiler's sanitizer runtime, or None if it has none."""
    compiler = os.environ.get("CC", "cc")
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return str(Path(found).resolve()) if Path(found).is_absolute() else None


def ring_plain(arguments: list[str]) -> Ring:
    """The tests as they are."""
    ring = Ring("Tests")
    run_pytest(ring, arguments or IN_PARALLEL, {} if arguments else shared_classes())
    return ring


def shared_classes() -> dict[str, str]:
    """The environment in which Spark's drivers start in half the time, if that can be had."""
    file = BUILD / "spark-classes.jsa"
    if not file.exists():
        print("Archiving the classes of Spark's drivers, so that they start faster", flush=True)
        BUILD.mkdir(exist_ok=True)
        command = [sys.executable, "tools/share_classes.py", str(file)]
        with (BUILD / "spark-classes.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    return {"QUIRE_TEST_CLASSES": str(file)} if file.exists() else {}


def ring_conformance() -> Ring:
    """The quick part of Spark's own tests."""
    ring = Ring("Spark's own tests")
    report = BUILD / "conformance" / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "tests/conformance/run.py", "--quick"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.exists():
        ring.fail(f"tests/conformance/run.py ended with exit code {code} before it could report")
        return ring
    for suite in json.loads(report.read_text())["suites"]:
        for test in suite["tests"]:
            if test["status"] == "passed":
                ring.passed += 1
            elif test["left_out"] or test["status"] in ("canceled", "pending", "ignored"):
                ring.skipped += 1
            else:
                ring.fail(f"{suite['suite'].rpartition('.')[2]}: {test['name']}")
    if code != 0 and ring.failed == 0:
        ring.fail(f"tests/conformance/run.py ended with exit code {code}")
    return ring


def sanitized(ring: Ring) -> dict[str, str] | None:
    """Compiles a core that watches every access to memory; the environment to use it in, leaks to build/asan/leaks."""
    asan = runtime_library("libasan.so")
    if asan is None:
        ring.fail("the compiler has no libasan: install gcc (Debian, Ubuntu) or libasan and libubsan (Fedora)")
        return None
    folder = BUILD / "asan"
    print("Compiling the core with the sanitizers into build/asan", flush=True)
    places = ["--build-base", str(folder), "--build-lib", str(folder / "lib")]
    flags = {**os.environ, "QUIRE_SANITIZE": "address,undefined"}
    command = [sys.executable, "setup.py", "--quiet", "build", *places]
    if subprocess.run(command, cwd=ROOT, env=flags, check=False).returncode:
        ring.fail("the core does not compile with the sanitizers")
        return None
    leaks = folder / "leaks"
    shutil.rmtree(leaks, ignore_errors=True)
    leaks.mkdir()
    return {
        "PYTHONPATH": str(folder / "lib"),
        "LD_PRELOAD": asan,
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:max_allocation_size_mb=4096",
        "LSAN_OPTIONS": f"exitcode=0:log_path={leaks / 'report'}:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "QUIRE_TEST_PROFILE": "quick",
        "QUIRE_TEST_KILLS": "60",
        "QUIRE_TEST_EXPECT": str(folder / "lib"),
    }


def ring_sanitized() -> Ring:
    """The tests on a core that watches every access to memory."""
    ring = Ring("Tests under the address and undefined-behaviour sanitizers")
    environment = sanitized(ring)
    if environment is None:
        return ring
    not_here = [f"--ignore={path}" for path in NOT_SANITIZED]
    run_pytest(ring, ["-m", "not slow", "-p", "no:cacheprovider", *not_here, *IN_PARALLEL], environment)
    for leak in our_leaks(BUILD / "asan" / "leaks"):
        ring.fail(f"leak: {leak}")
    return ring


def our_leaks(folder: Path) -> list[str]:
    """The leaks whose memory the core asked for; those of Python and Arrow are not ours."""
    found = []
    for report in folder.iterdir():
        for block in report.read_text(errors="replace").split("\n\n"):
            if "leak of" not in block:
                continue
            frames = re.findall(r"#\d+ \S+ in (.+)", block)
            callers = [frame for frame in frames if not re.match(r"\S*(alloc|strdup)", frame)]
            if callers and re.search(rf"({'|'.join(LAYERS)})/\w+\.c", callers[0]):
                found.append(block.strip().splitlines()[0] + " " + " < ".join(callers[:4]))
    return found


def ring_threads() -> Ring | None:
    """The C programs that race threads against each other."""
    programs = sorted(ROOT.glob("tests/c/*.c"))
    if not programs:
        return None
    ring = Ring("Threads under the thread sanitizer")
    folder = BUILD / "tsan"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-strict-aliasing", "-fsanitize=thread", "-pthread"]
    for source in programs:
        program = folder / source.stem
        print(f"tests/c/{source.name}", flush=True)
        compiled = subprocess.run(
            [compiler, *flags, f"-I{ROOT}", "-o", str(program), str(source), *map(str, CORE), "-lm"],
            check=False,
            cwd=ROOT,
        )
        if compiled.returncode:
            ring.fail(f"{source.name} does not compile")
        elif subprocess.run([str(program)], check=False, cwd=folder).returncode:
            ring.fail(f"{source.name} failed")
        else:
            ring.passed += 1
    return ring


def main(arguments: list[str]) -> int:
    """Runs the rings and prints the summary; 1 if anything failed."""
    rings = []
    for run in [lambda: ring_plain(arguments)] + (
        [] if arguments else [ring_conformance, ring_sanitized, ring_threads]
    ):
        ring = run()
        if ring is not None:
            ring.seconds = time.monotonic() - ring.started
            rings.append(ring)
    print("\n== Summary")
    for ring in rings:
        for note in ring.notes:
            print(f"   {note}")
        print(ring.line())
    passed, failed = sum(ring.passed for ring in rings), sum(ring.failed for ring in rings)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
