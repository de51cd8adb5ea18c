"""Runs benchmarks: each case in a process of its own, repetitions of all peers interleaved, results saved as they come.

No peer always comes first: their order is drawn from the seed, and moves on by one with each repetition.

A case that fails is noted with its reason and not repeated, and none of its numbers count, those of earlier repetitions
included. Ctrl-C ends the run and keeps what there is; a later run can go on from there.
"""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.bench import checkpoint, core, operators, papers, spark
from quire.bench.core import Benchmark, Case, Measurement
from quire.bench.data import KEY_BYTES, RECORD_BYTES, VALUE_BYTES, ZIPF_EXPONENT
from quire.bench.machine import SHARED_MEMORY, compact_memory, machine, storage, versions
from quire.bench.peers import MissingPeer

# A family is a module: its benchmarks, and how long a case of them takes.
FAMILIES: dict[str, Any] = {
    "core": core,
    "papers": papers,
    "checkpoint": checkpoint,
    "spark": spark,
    "python": operators,
}
BENCHMARKS: tuple[Benchmark, ...] = tuple(each for family in FAMILIES.values() for each in family.BENCHMARKS)
FORMAT = 1
CASE_SECONDS_MAX = 3600
BETWEEN_SECONDS = 0.2  # from one case to the next: compacting the machine's memory
FILES_PER_RECORD_BYTES = 6 * RECORD_BYTES


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do: all cases once, and again while the estimates stay within ``seconds_max``."""

    mode: str
    repetitions: int
    seed: int
    operations_max: int
    seconds_max: float = float("inf")
    everything: bool = False  # all peers also in a quick run, for what was asked for by its name

    def sizes(self, benchmark: Benchmark) -> tuple[int, ...]:
        """How many records (or what the benchmark counts)."""
        return benchmark.full if self.mode == "full" else benchmark.quick

    def takes(self, benchmark: Benchmark, variant: str, peer: str) -> bool:
        """Whether a peer takes part."""
        kept = QUICK_PEERS.get(f"{benchmark.name} {variant}", QUICK_PEERS.get(benchmark.name, (peer,)))
        return self.mode == "full" or self.everything or peer in kept


QUICK = Settings("quick", repetitions=3, seed=20, operations_max=200_000, seconds_max=14 * 60)
FULL = Settings("full", repetitions=3, seed=20, operations_max=1 << 62, seconds_max=4 * 3600)
# The peers that a quick run has of a benchmark, or of a variant of it, where it has not all; none: it is left to the
# full run. With this a quick run of everything takes less than 15 minutes on two cores; a test adds up the estimates.
QUICK_PEERS: dict[str, tuple[str, ...]] = {
    "checkpoint.log": ("no checks", "Q = 2"),
    "spark.operations": (),
    "spark.aggregation": (*spark.DURABLE, "limit"),
    "spark.deduplication": (),
    "spark.join": ("quire", "hdfs"),
    "spark.sessions": (),
    "spark.transform": ("quire", "rocksdb-changelog"),
    "spark.nexmark": (),
    "spark.nexmark q5": ("quire", "hdfs"),
    "spark.commits": (),
    f"spark.commits {spark.HDFS}": ("quire", "hdfs"),
    "spark.few_changes": (),
    "spark.restart": (),
    "spark.bases": (),
    "spark.many_stores": (),
    "python.count": ("quire", "transformWithState"),
    "python.recent": (),
    "python.held": (),
}


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of those names or families; all if there are none."""
    if not names:
        return list(BENCHMARKS)
    found = [each for each in BENCHMARKS if each.name in names or each.family in names]
    known = {each.name for each in BENCHMARKS} | set(FAMILIES)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return found


def narrowed(
    benchmarks: Sequence[Benchmark], peers: Sequence[str], variants: Sequence[str], sizes: Sequence[int]
) -> list[Benchmark]:
    """The benchmarks with those peers, variants and sizes only, also where they would not be measured; empty: as is."""
    known = {
        "peer": (peers, {peer for each in benchmarks for peers in each.variants.values() for peer in peers}),
        "variant": (variants, {variant for each in benchmarks for variant in each.variants}),
    }
    for option, (wanted, there) in known.items():
        if unknown := [name for name in wanted if name not in there]:
            raise SystemExit(f"--{option} {unknown[0]}: not in what is run; there are {', '.join(sorted(there))}")
    if wrong := [size for size in sizes if size < 1]:
        raise SystemExit(f"--size {wrong[0]}: give a whole number from 1")
    found = []
    for each in benchmarks:
        kept = {
            variant: tuple(peer for peer in there if not peers or peer in peers)
            for variant, there in each.variants.items()
            if not variants or variant in variants
        }
        if any(kept.values()):
            each = replace(each, variants=kept, at={} if peers or sizes else each.at)
            found.append(replace(each, quick=tuple(sizes), full=tuple(sizes)) if sizes else each)
    return found


def once(benchmark: Benchmark, settings: Settings) -> Iterator[list[Case]]:
    """The cases of one repetition, those of one size and variant together."""
    limit, seed = settings.operations_max, settings.seed
    for size in settings.sizes(benchmark):
        for variant, peers in benchmark.variants.items():
            there = [peer for peer in peers if peer in benchmark.at.get(size, peers)]
            taken = [peer for peer in there if settings.takes(benchmark, variant, peer)]
            yield [Case(benchmark.name, variant, peer, size, limit, seed, Path()) for peer in taken]


def seconds_once(benchmark: Benchmark, settings: Settings) -> float:
    """Roughly how long one repetition of a benchmark takes."""
    return sum(estimate(case) for group in once(benchmark, settings) for case in group)


def repetitions(benchmarks: Sequence[Benchmark], settings: Settings) -> dict[str, int]:
    """How often each benchmark that has cases is repeated: all once, the short ones more often first, while the time
    allows it."""
    times = {each.name: seconds_once(each, settings) for each in benchmarks}
    seconds = {name: taken for name, taken in times.items() if taken}
    left = settings.seconds_max - sum(seconds.values())
    given = dict.fromkeys(seconds, 1)
    for wanted in range(2, settings.repetitions + 1):
        for each in sorted((each for each in benchmarks if each.name in seconds), key=lambda each: seconds[each.name]):
            if wanted <= each.repetitions_max and seconds[each.name] <= left:
                left -= seconds[each.name]
                given[each.name] = wanted
    return given


def in_turn(group: Sequence[Case], seed: int, repetition: int) -> list[Case]:
    """The cases of one benchmark, variant and size in the order in which a repetition runs them."""
    if not group:
        return []
    first = group[0]
    drawn = random.Random(f"{seed} {first.benchmark} {first.variant} {first.size}").sample(group, len(group))
    start = repetition % len(drawn)
    return drawn[start:] + drawn[:start]


def plan(benchmarks: Sequence[Benchmark], settings: Settings) -> Iterator[tuple[int, Case]]:
    """All cases in the order they run, each with its repetition: B C A C A B, since the machine's speed drifts."""
    given = repetitions(benchmarks, settings)
    for benchmark in benchmarks:
        for group in once(benchmark, settings):
            for repetition in range(given.get(benchmark.name, 0)):
                for case in in_turn(group, settings.seed, repetition):
                    yield repetition, replace(case, seed=settings.seed + repetition)


def records(case: Case) -> int:
    """How many records a case holds."""
    unit = next(each.size_unit for each in BENCHMARKS if each.name == case.benchmark)
    return (case.size << 20) // RECORD_BYTES if unit == "MB" else case.size


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    seconds: float = FAMILIES[case.benchmark.partition(".")[0]].estimate(case)
    return BETWEEN_SECONDS + seconds


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ------------------------------------------------------------------------------------------------ one case


def run_case(case: Case) -> list[Measurement]:
    """Runs a case in this process."""
    benchmark = next(each for each in BENCHMARKS if each.name == case.benchmark)
    return list(benchmark.function(case))


def child() -> None:
    """The process of one case: reads the case from its standard input, writes a file."""
    wanted = json.load(sys.stdin)
    case = Case(**{**wanted, "folder": Path(wanted["folder"])})
    try:
        outcome: dict[str, Any] = {"measurements": [asdict(each) for each in run_case(case)]}
    except MissingPeer as missing:
        outcome = {"reason": str(missing), "missing": True}
    except Exception as error:
        outcome = {"reason": f"{type(error).__name__}: {error}"}
    (case.folder / "outcome.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # all is closed or failed; peers that hang when torn down must not count as failures


class CaseFailed(Exception):
    """A case gave no numbers; the message says why."""


class Interrupt:
    """Ctrl-C (and a request to end) while it is installed: noted, and acted upon only where nothing is left behind."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.came = True


def run_isolated(case: Case, interrupt: Interrupt) -> list[Measurement]:
    """Runs a case in a process of its own, which has ended when this returns or raises."""
    command = [sys.executable, "-c", "from quire.bench.runner import child; child()"]
    wanted, errors = case.folder / "case.json", case.folder / "errors.txt"
    wanted.write_text(json.dumps({**asdict(case), "folder": str(case.folder)}))
    deadline = time.monotonic() + CASE_SECONDS_MAX
    with wanted.open() as stdin, errors.open("w") as stderr:
        # In a session of its own Ctrl-C does not reach it.
        process = subprocess.Popen(command, stdin=stdin, stderr=stderr, cwd=case.folder, start_new_session=True)
    while process.poll() is None:
        if interrupt.came or time.monotonic() > deadline:
            process.kill()
            process.wait()
            if interrupt.came:
                raise KeyboardInterrupt
            raise CaseFailed(f"not done after {CASE_SECONDS_MAX} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    try:
        outcome = json.loads((case.folder / "outcome.json").read_text())
    except OSError:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing on its standard error"]
        raise CaseFailed(f"the process ended with {how}: {last[0]}") from None
    if outcome.get("missing"):
        raise MissingPeer(outcome["reason"])
    if "reason" in outcome:
        raise CaseFailed(outcome["reason"])
    return [Measurement(**each) for each in outcome["measurements"]]


# ------------------------------------------------------------------------------------------------ a run


def place_of(case: Case) -> dict[str, Any]:
    """Where a case stands in the plan, repetitions aside."""
    return {"benchmark": case.benchmark, "variant": case.variant, "size": case.size, "peer": case.peer}


class Run:
    """The results of a run, as they are saved."""

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        settings: Settings,
        before: dict[str, Any] | None = None,
        compacts: bool = False,
    ) -> None:
        """before: what an earlier run saved, to go on from. compacts: memory is compacted before each case."""
        self.results: dict[tuple[str, ...], dict[str, Any]] = {}
        self.document: dict[str, Any] = {
            "format": FORMAT,
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "seconds": 0.0,
            "state": "running",
            "machine": machine(),
            "versions": versions(),
            "settings": {
                **{
                    name: value for name, value in asdict(settings).items() if name not in ("seconds_max", "everything")
                },
                "repetitions": repetitions(benchmarks, settings),
                "benchmarks": [each.name for each in benchmarks],
                "key_bytes": KEY_BYTES,
                "value_bytes": VALUE_BYTES,
                "zipf_exponent": ZIPF_EXPONENT,
                "files_of_peers": "in memory (tmpfs) if there is room; Spark's in the folder for temporary files",
                "order_of_peers": "drawn from the seed, moved on by one with each repetition; cases stand as they ran",
                "memory_compacted_before_each_case": compacts,
                "clock": "wall clock; of the core on one thread with Python's garbage collector off",
                "spark": spark.SETTINGS,
            },
            "sittings": [],
            "results": [],
            "failures": [],
            "cases": [],
        }
        if before is not None:
            self._refuse_other(before)
            mine, theirs = self.document["settings"], before["settings"]
            mine["benchmarks"] = list(dict.fromkeys([*theirs["benchmarks"], *mine["benchmarks"]]))
            mine["repetitions"] = theirs["repetitions"] | mine["repetitions"]
            self.document |= {name: before[name] for name in ("started", "sittings", "results", "failures", "cases")}
            self.results = {
                (each["benchmark"], each["variant"], str(each["size"]), each["peer"], each["measure"]): each
                for each in before["results"]
            }
        self._sitting = {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "seconds": 0.0}
        self.document["sittings"].append(self._sitting)
        self._started = time.monotonic()

    def _refuse_other(self, before: dict[str, Any]) -> None:
        """Refuses to go on from a run under other conditions, whose numbers could not stand beside ours."""
        may_differ = ("load_at_start", "benchmarks", "repetitions")
        if "sittings" not in before:
            raise SystemExit("the file is of a version that could not go on with a run yet: give --json another file")
        for part in ("format", "versions", "settings", "machine"):
            mine, theirs = ({part: each[part]} if part == "format" else each[part] for each in (self.document, before))
            for name in mine.keys() | theirs.keys():
                if name not in may_differ and mine.get(name) != theirs.get(name):
                    raise SystemExit(
                        f"the file is of a run with another {name}: {theirs.get(name)}, now {mine.get(name)}. Go on "
                        "with what it was begun with, or give --json another file"
                    )

    def has(self, case: Case, repetition: int) -> bool:
        """Whether the case was run, or has failed."""
        place = place_of(case)
        done = (
            {**place, "repetition": repetition} == {name: each[name] for name in (*place, "repetition")}
            for each in self.document["cases"]
        )
        return any(done) or any(place == {name: each[name] for name in place} for each in self.document["failures"])

    def add(self, case: Case, repetition: int, measurement: Measurement) -> None:
        """One more number."""
        peer = f"{case.peer} {measurement.state}".strip()
        size = case.size if measurement.size is None else measurement.size
        key = (case.benchmark, case.variant, str(size), peer, measurement.measure)
        entry = self.results.get(key)
        if entry is None:
            entry = {**place_of(case), "peer": peer, "size": size, "case": place_of(case)}
            entry |= {"measure": measurement.measure, "unit": measurement.unit, "operations": measurement.operations}
            entry |= {"calls": [], "repetitions": [], "values": []}
            self.results[key] = entry
            self.document["results"].append(entry)
        if measurement.call not in entry["calls"]:
            entry["calls"].append(measurement.call)
        entry["repetitions"].append(repetition)
        entry["values"].append(measurement.value)
        values = entry["values"]
        entry |= {"median": statistics.median(values), "min": min(values), "max": max(values)}

    def fail(self, case: Case, repetition: int, reason: str, missing: bool) -> None:
        """A case that gave no numbers; those that it gave before are withdrawn. missing: the peer is not installed."""
        failure = {**place_of(case), "repetition": repetition, "reason": reason, "missing": missing}
        self.document["failures"].append(failure)
        self.results = {key: each for key, each in self.results.items() if each["case"] != place_of(case)}
        self.document["results"] = list(self.results.values())

    def save(self, file: Path | None, state: str) -> None:
        """Writes the file anew, as a whole or not at all."""
        self.document["state"] = state
        self._sitting["seconds"] = round(time.monotonic() - self._started, 1)
        self.document["seconds"] = sum(sitting["seconds"] for sitting in self.document["sittings"])
        if file is not None:
            partial = file.with_name(file.name + ".partial")
            partial.write_text(json.dumps(self.document, indent=1) + "\n")
            partial.replace(file)


class Progress:
    """Where the run is: a bar with rich on a terminal, else a line now and then."""

    LINE_SECONDS = 10.0

    def __init__(self, total_seconds: float) -> None:
        self._total, self._done, self._started = total_seconds, 0.0, time.monotonic()
        self._last_line = 0.0
        self.failed = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn
                from rich.progress import Progress as Bar

                columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %  {task.description}"))
                self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
                self._bar.start()
                self._task = self._bar.add_task("", total=total_seconds)

    def show(self, case: Case, repetition: int) -> None:
        """What runs now."""
        spent = time.monotonic() - self._started
        pace = spent / self._done if self._done > 20 else 1.0
        left = (self._total - self._done) * pace
        text = f"{case.benchmark} {case.variant} {case.size} {case.peer}, run {repetition + 1}"
        text += f"; about {duration(left)} left" + (f"; {self.failed} failed" if self.failed else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif spent - self._last_line >= self.LINE_SECONDS or not self._done:
            self._last_line = spent
            print(f"{spent:5.0f} s  {text}", file=sys.stderr, flush=True)

    def step(self, seconds: float) -> None:
        """A case is done that was estimated to take so long."""
        self._done += seconds

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


def run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    file: Path | None,
    isolate: bool = True,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs everything and gives the document, which is also kept in the file. before: one to go on from."""
    # Not for cases in this process, whose memory stays what it is.
    results = Run(benchmarks, settings, before, compacts=isolate and compact_memory())
    planned = plan(benchmarks, settings)
    cases = [(repetition, case) for repetition, case in planned if not results.has(case, repetition)]
    results.save(file, "running")
    progress = Progress(sum(estimate(case) for _, case in cases))
    state = "interrupted"
    try:
        with Interrupt() as interrupt:
            for repetition, case in cases:
                progress.show(case, repetition)
                # One that has failed is not repeated.
                if not results.has(case, repetition):
                    run_one(results, case, repetition, interrupt, isolate)
                    progress.failed = sum(not each["missing"] for each in results.document["failures"])
                progress.step(estimate(case))
                results.save(file, "running")
                if interrupt.came:
                    raise KeyboardInterrupt
        state = "complete"
    except KeyboardInterrupt:
        pass
    finally:
        progress.close()
        results.save(file, state)
    return results.document


def folder_for(case: Case) -> Path:
    """Where the files of a case lie: checkpoints of Spark's on a disk, where they would be, others in memory."""
    if case.benchmark.startswith(("spark.", "python.")):
        return Path(tempfile.gettempdir())
    return storage(records(case) * FILES_PER_RECORD_BYTES)


def run_one(results: Run, case: Case, repetition: int, interrupt: Interrupt, isolate: bool) -> None:
    """Runs a case and notes its numbers or why there are none."""
    if results.document["settings"]["memory_compacted_before_each_case"]:
        compact_memory()
    started, load = time.monotonic(), round(os.getloadavg()[0], 2)
    work = Path(tempfile.mkdtemp(prefix=f"quire-bench-{os.getpid()}-", dir=folder_for(case)))
    case = replace(case, folder=work)
    try:
        measurements = run_isolated(case, interrupt) if isolate else run_case(case)
        if wrong := [each.measure for each in measurements if not math.isfinite(each.value)]:
            raise CaseFailed(f"no number for {', '.join(wrong)}")
        if not measurements:
            raise CaseFailed("it ended without a number")
    except Exception as error:
        missing = isinstance(error, MissingPeer)
        known = missing or isinstance(error, CaseFailed)
        results.fail(case, repetition, str(error) if known else f"{type(error).__name__}: {error}", missing)
        return
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for measurement in measurements:
        results.add(case, repetition, measurement)
    seconds = round(time.monotonic() - started, 2)
    files = "in memory" if work.is_relative_to(SHARED_MEMORY) else "on a disk"
    told = {"repetition": repetition, "seconds": seconds, "files": files, "load_before": load}
    results.document["cases"].append({**place_of(case), **told})
