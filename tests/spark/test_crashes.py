"""Spark's provider is killed at every step of commits, bases, cleaning and loading: no committed version is lost.
And it is given damaged files of every kind: it names one of them, or has the right state; never another.

A JVM with a store and no query (scala/Crashes.scala) makes versions, each a function of the seed and of the generations
that made it and those before it, and tells before and after each commit. It is killed when it passes a given point
(Fault.scala) for the nth time. Another then loads the version that was committed last, as Spark would, and the older
ones that are to be kept, compares each with the model, makes more versions and compares again; and all files verify.
Seeds that are even have checkpoint ids, and so do not; each seed has a codec.

QUIRE_CORRUPTION=all  more damage.
QUIRE_CRASHES=all  up to PASSINGS_MAX passings of every point, with ids and without, and a second kill on top of some.
"""

import itertools
import os
import random
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from seeds import SEED
from spark import harness
from stores import frame_ends

from quire.bench.spark import OPEN_PACKAGES
from quire.checkpoint import Checkpoint, tools
from quire.jvm_bridge import jar as jars

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(harness.QUIRE != harness.REAL, reason="another provider has no such points"),
]

ALL = os.environ.get("QUIRE_CRASHES") == "all"
SEEDS = [1, 2] if ALL else [1 + SEED % 2]
PASSINGS_MAX = 12
DAMAGED = 600 if os.environ.get("QUIRE_CORRUPTION") == "all" else 60
VERSIONS_BEFORE, VERSIONS_MORE = 6, 9
KILLED = 137
POINTS = {
    *("commit.start", "commit.durable", "commit.done"),
    *("write.start", "write.frame", "write.written", "write.published"),
    *("base.start", "part.piece", "base.parts", "base.done"),
    *("clean.delete", "clean.done", "load.file", "load.done"),
}
CASES_NORMAL = 3
LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs Crashes; with the classes that it loads in an archive, since one JVM is started for each kill."""
    quire = jars.jar()
    program = jars.program("quire-crashes", [Path(__file__).parent / "scala/Crashes.scala"], quire)
    spark = sorted(jars.installed_spark().glob("*.jar"))
    archive = tmp_path_factory.mktemp("classes") / "archive.jsa"
    java = [str(jars.find_java().command), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    java += [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPEN_PACKAGES]
    logging = archive.with_name("log4j2.properties")
    logging.write_text(LOGGING)
    rest = ["-cp", ":".join(map(str, [program, quire, *spark])), f"-Dlog4j2.configurationFile={logging}"]
    rest += ["io.quire.spark.Crashes"]
    with Jvm([*java, f"-XX:ArchiveClassesAtExit={archive}", *rest], archive.with_name("first")) as first:
        for mode, seed in itertools.product(harness.MODES, (1, 2)):
            first.ask("work", archive.with_name(f"{mode}-{seed}"), mode, seed, "-", 0, 6)
    # Where it could not be made, JVMs take a little longer to start.
    return [*java, *([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []), *rest]


class Jvm:
    """A JVM that does what it is asked, one after the other, until it is killed or closed."""

    def __init__(self, command, log, fault=None):
        # Its options are all in the command: an archive of its own goes with no other.
        not_for_it = ("QUIRE_FAULT", "JAVA_TOOL_OPTIONS")
        environment = {name: value for name, value in os.environ.items() if name not in not_for_it}
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                env={**environment, **({"QUIRE_FAULT": fault} if fault else {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, *words):
        """What it answers, up to the end, or to its own."""
        print(*words, file=self.process.stdin, flush=True)
        lines = []
        for line in self.process.stdout:
            lines.append(line.split())
            if lines[-1] == ["end"]:
                return lines
            assert lines[-1][0] != "failed", f"{words}: {line}\n{self._log.read_text()[-5000:]}"
        assert self.process.wait() == KILLED, self._log.read_text()[-5000:]
        return lines

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class History:
    """The versions that were committed: the generation that made each, and its id. highest: of all there ever were."""

    mode: str
    seed: int
    generation: int = 0
    made: list = field(default_factory=list)
    highest: int = 0

    def replay(self, told):
        """Takes in what a JVM told until it ended."""
        for what, *words in told:
            if what == "done":
                assert int(words[0]) == len(self.made) + 1
                self.made.append((int(words[1]), words[2] if len(words) > 2 else ""))
                self.highest = max(self.highest, len(self.made))
            elif what == "back":
                del self.made[int(words[0]) :]
                self.generation += 1

    def question(self, what, folder, last):
        made = ",".join(f"{generation}/{id}" for generation, id in self.made) or "-"
        return what, folder, self.mode, self.seed, made, self.generation, last

    def copy(self):
        return replace(self, made=list(self.made))


@pytest.fixture(scope="module")
def recovering(command, tmp_path_factory):
    """The JVM that recovers what others left."""
    with Jvm(command, tmp_path_factory.mktemp("recovering") / "errors") as jvm:
        yield jvm


@pytest.fixture(scope="module", params=harness.MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def prepared(mode, command, recovering, tmp_path_factory):
    """For each seed a folder with some versions, what is in it, and how often each point is passed from there on."""
    found = {}
    for seed in SEEDS:
        folder = tmp_path_factory.mktemp(f"{mode}-{seed}") / "before"
        history = History(mode, seed)
        history.replay(recovering.ask(*history.question("work", folder, VERSIONS_BEFORE)))
        trial = folder.with_name("trial")
        shutil.copytree(folder, trial)
        with Jvm(command, folder.with_name("errors"), "tell:1") as jvm:
            told = jvm.ask(*history.question("work", trial, VERSIONS_MORE))
        shutil.rmtree(trial)
        found[seed] = (folder, history, Counter(words[1] for words in told if words[0] == "passed"))
    return found


def cases(prepared):
    """Seeds and points with the passings at which to kill: all of them, or a few."""
    every = [
        (seed, point, nth)
        for seed, (_, _, counts) in prepared.items()
        for point, count in sorted(counts.items())
        for nth in sorted({1 + n * (count - 1) // (PASSINGS_MAX - 1) for n in range(PASSINGS_MAX)})
    ]
    return every if ALL else random.Random(SEED).sample(every, CASES_NORMAL)


def test_every_point_is_passed(prepared, mode):
    """Else a kill there would prove nothing."""
    passed = {point for _, _, counts in prepared.values() for point in counts}
    # Some have ids, and others whole versions among their own.
    assert passed == POINTS, mode


def test_kills(prepared, mode, command, recovering, folder, tally):
    killed = Counter()
    for seed, point, nth in cases(prepared):
        before, known, _ = prepared[seed]
        place, history = folder / f"{seed}-{point}-{nth}", known.copy()
        shutil.copytree(before, place)
        faults = [f"{point}:{nth}"]
        rng = random.Random(f"{seed} {point} {nth}")
        if ALL and rng.random() < 0.2:
            # Again, in the run that goes on from what the first one left.
            faults.append(f"{rng.choice(sorted(POINTS))}:{rng.randrange(1, 6)}")
        for fault in faults:
            with Jvm(command, folder / "errors", fault) as jvm:
                told = jvm.ask(*history.question("work", place, VERSIONS_MORE))
            killed[point] += told[-1] != ["end"]
            history.replay(told)
        # Often in another mode: it may change with every start.
        history.mode = rng.choice([mode, *harness.MODES])
        recovering.ask(*history.question("recover", place, history.highest))
        verdict = tools.examine(Checkpoint(place).store(), True, lambda count: None)
        assert not verdict.problems, f"{faults}: {verdict.problems}"
        shutil.rmtree(place)
    tally[f"kills of the JVM, mode {mode}"] += sum(killed.values())
    # Threads race: a point may be passed less often than in the run that counted.
    assert sum(killed.values()) >= (150 if ALL else CASES_NORMAL - 2)


# ------------------------------------------------------------------------------------------------ damage


def spoil(path, rng, others):
    """One file cut off (where a frame ends, or anywhere), flipped, longer, empty, another, or gone; which."""
    data = path.read_bytes()
    what = rng.choice(["end", "end", "cut", "flip", "flip", "flip", "longer", "empty", "other", "gone"])
    if what == "end" and path.suffix != ".qimage":
        path.write_bytes(data[: rng.choice(frame_ends(data)[:-1])])
    elif what == "flip":
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    elif what == "longer":
        path.write_bytes(data + rng.randbytes(rng.randrange(1, 64)))
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "other":
        path.write_bytes(rng.choice(others))
    elif what == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: rng.randrange(len(data))])
    return what


def test_damage(prepared, mode, recovering, folder, tally):
    outcomes, kinds = Counter(), set()
    for number in range(DAMAGED):
        rng = random.Random(f"{SEED} {mode} {number}")
        before, history, _ = prepared[rng.choice(sorted(prepared))]
        place = folder / str(number)
        shutil.copytree(before, place)
        state = place / "state/0/0"
        # The newest base, its parts and what follows it are what a load needs; the rest is there for repair.
        files = sorted(path for path in state.iterdir() if path.suffix[:2] == ".q")
        newest = max((number_of(path) for path in files if path.suffix == ".qbase"), default=0)
        wanted = [path for path in files if number_of(path) >= newest]
        spoiled = rng.sample(wanted, rng.choice([1, 1, 1, 2]) if len(wanted) > 1 else 1)
        if number % 4 == 0:
            # All that has the last version in it: nothing is left to repair it from.
            last = max(map(number_of, files))
            spoiled = [path for path in files if number_of(path) == last and path.suffix != ".qpart"]
        others = [path.read_bytes() for path in files if path not in spoiled] or [b""]
        done = [spoil(path, rng, others) for path in spoiled]
        *_, (outcome, *why), _ = recovering.ask(*history.question("load", place, 0)[:5])
        if outcome == "refused":
            # A part is named, or the base that names it. Where one is gone, what is missed may be older.
            named = {path.name for path in spoiled} | {f"{path.name.partition('.')[0]}.q" for path in spoiled}
            named |= {".qdelta", ".qbase"} if "gone" in done else set()
            assert any(name in " ".join(why) for name in named), f"{number}: {[p.name for p in spoiled]}: {why}"
        else:
            assert outcome == "right", (number, outcome, why)
        outcomes[outcome] += 1
        kinds |= {path.suffix for path in spoiled}
        shutil.rmtree(place)
    tally[f"files damaged for the JVM, mode {mode}"] += DAMAGED
    print(mode, outcomes, kinds)
    assert outcomes["refused"] > DAMAGED // 10 and ".qdelta" in kinds


def number_of(path):
    return int(path.name.partition(".")[0].partition("_")[0])
