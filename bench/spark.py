"""The family "spark": Quire's state store provider beside Spark's own, each case in a JVM of its own.

    spark.operations      put, get, delete, evict, merge, as Spark's StateStoreBasicOperationsBenchmark does them
    spark.aggregation     a streaming query: count, min and max per key, seconds a batch, memory
    spark.commits         bytes and time of commits that update some of a state of wide rows
    spark.few_changes     a commit of 1,000 changed keys, on a small and on a large state
    spark.restart         a new provider loads a checkpoint: a full copy (of cec: its log), and five commits beyond it
    spark.many_stores     empty stores, all open in one JVM

Three peers are there for scale: ``limit`` keeps nothing, so that a query costs Spark's own work and no more;
``limit-answering`` says the same value for every key, so that Spark has old rows to merge, as with a real store;
``heap-map`` is a bare hash map in the heap with nothing durable. The work is done in Scala (``bench/scala``), which
checks all results and writes one line of JSON for each number. Checkpoints and Spark's own files lie in the folder of
the case.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.core import Benchmark, Case, Measurement
from quire.bench.data import WrongResult
from quire.bench.peers import MissingPeer
from quire.jvm_bridge import jar as jars

SOURCES = Path(__file__).parent / "scala"
HEAP = "6g"
# As Spark's own launcher sets them for Java 17.
OPEN_PACKAGES = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "sun.nio.ch", "sun.nio.cs", "sun.security.action"),
    "sun.util.calendar",
)

STORE = "spark.sql.streaming.stateStore."
SPARKS_OWN = "org.apache.spark.sql.execution.streaming.state."
ROCKSDB = {
    "providerClass": SPARKS_OWN + "RocksDBStateStoreProvider",
    "rocksdb.changelogCheckpointing.enabled": "false",
    "rocksdb.trackTotalNumberOfRows": "true",
}
QUIRE = {"providerClass": "io.quire.spark.QuireStateStoreProvider"}
# Each peer by its settings under STORE; all others are Spark's defaults.
PROVIDERS: dict[str, dict[str, str]] = {
    "quire": QUIRE,
    "quire-pages": QUIRE | {"quire.checkpointMode": "pages"},
    "quire-cec": QUIRE | {"quire.checkpointMode": "cec"},
    "quire-auto": QUIRE | {"quire.checkpointMode": "auto"},
    "hdfs": {"providerClass": SPARKS_OWN + "HDFSBackedStateStoreProvider"},
    "rocksdb": ROCKSDB,
    "rocksdb-changelog": ROCKSDB | {"rocksdb.changelogCheckpointing.enabled": "true"},
    "rocksdb-untracked": ROCKSDB | {"rocksdb.trackTotalNumberOfRows": "false"},
    "heap-map": {"providerClass": "io.quire.bench.HeapMapProvider"},
    "limit-answering": {"providerClass": "io.quire.bench.AnsweringLimitProvider"},
    "limit": {"providerClass": "io.quire.bench.LimitProvider"},
}
FOR_SCALE = ("heap-map", "limit-answering", "limit")
SETTINGS = f"local[2], 2 partitions, heap of {HEAP} at most, Spark's default settings"

SECONDS_OF_OPERATIONS = 1.5  # for each kind, warm-up included
SECONDS_OF_FEW_CHANGES = 30
TINY = 10_000  # below it a case is run once to see that it works, not for its times


def bench_jar() -> Path:
    """The compiled Scala sources, kept where Quire's jar is kept; compiled if need be."""
    return jars.program("quire-bench", sorted(SOURCES.glob("*.scala")))


def command(case: Case, work: str, **arguments: object) -> list[str]:
    """The command that runs one kind of work in a JVM, which ends when its standard input does."""
    try:
        path = [bench_jar(), *([jars.jar()] if case.peer.startswith("quire") else []), jars.installed_spark() / "*"]
        java = jars.find_java().command
    except jars.BuildError as error:
        raise MissingPeer(str(error)) from None
    local = case.folder / "local"
    local.mkdir(exist_ok=True)
    options: dict[str, object] = {"size": case.size, "seed": case.seed, "folder": case.folder, **arguments}
    options |= {STORE + name: value for name, value in PROVIDERS[case.peer].items()}
    options |= {"spark.local.dir": local, "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": 2}
    return [
        *(str(java), f"-Xmx{HEAP}", f"-Djava.io.tmpdir={local}", "-Dlog4j2.level=error"),
        *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPEN_PACKAGES),
        *("-cp", ":".join(map(str, path)), "io.quire.bench.Main", work),
        *(f"{name}={value}" for name, value in options.items()),
    ]


def jvm(case: Case, work: str, **arguments: object) -> Iterator[Measurement]:
    """Runs one kind of work in a JVM, which has ended when this returns or raises."""
    errors = case.folder / f"{work}.txt"
    with (
        errors.open("w") as stderr,
        # A pipe for its standard input, so that it ends even if this process is killed.
        subprocess.Popen(
            command(case, work, **arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        told: list[dict[str, Any]] = [json.loads(line) for line in process.stdout if line.startswith("{")]
        code = process.wait()
    if code != 0:
        last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing on its standard error"]
        reason = f"the JVM ended with exit code {code}: {last[0]}"
        reason = next((each["reason"] for each in told if "reason" in each), reason)
        wrong = reason.startswith("io.quire.bench.WrongResult")
        raise (WrongResult if wrong else RuntimeError)(reason)
    return (Measurement(**each) for each in told)


def operations(case: Case) -> Iterator[Measurement]:
    """spark.operations; HDFSBacked has no merge"""
    seconds = SECONDS_OF_OPERATIONS if case.size >= TINY else 0
    return jvm(case, "operations", seconds=seconds, merges=str(case.peer != "hdfs").lower())


def aggregation(case: Case) -> Iterator[Measurement]:
    """spark.aggregation: keys are drawn at random, so the last of 12 batches of a tenth of them finds 70 % known

    Small states get 24 batches: the first dozen is the JVM's warming up.
    """
    tiny = case.size < TINY
    rows = case.size // (2 if case.size <= 1_000_000 else 10)
    batches, measured = (3, 2) if tiny else (12, 4) if case.size > 1_000_000 else (24, 8)
    checked = str(not case.peer.startswith("limit")).lower()
    return jvm(case, "aggregation", rows=rows, batches=batches, measured=measured, checked=checked)


def commits(case: Case) -> Iterator[Measurement]:
    """spark.commits; no base is written meanwhile"""
    return jvm(case, "commits", repeats=1 if case.size < TINY else 5)


def few_changes(case: Case) -> Iterator[Measurement]:
    """spark.few_changes; the small state has 100,000 keys, or a tenth of the large one's if that is less"""
    tiny = case.size < TINY
    small, changed = min(100_000, case.size // 10), min(1000, case.size // 10)
    seconds, batches = (0, 1) if tiny else (SECONDS_OF_FEW_CHANGES, 100)
    return jvm(case, "few_changes", small=small, changed=changed, batches=batches, seconds=seconds)


def restart(case: Case) -> Iterator[Measurement]:
    """spark.restart; the checkpoint is written by one JVM and loaded by another"""
    changes = 5 if case.variant == COMMITS_TOO else 0
    list(jvm(case, "restart_fill", changes=changes))
    return jvm(case, "restart_load", changes=changes)


def many_stores(case: Case) -> Iterator[Measurement]:
    """spark.many_stores"""
    return jvm(case, "many_stores")


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    start, per_million = {
        "spark.operations": (35.0, 0.0),
        "spark.aggregation": (15.0, 15.0),
        "spark.commits": (25.0, 60.0),
        "spark.few_changes": (25.0, 10.0),
        "spark.restart": (20.0, 15.0),
        "spark.many_stores": (15.0, 0.0),
    }[case.benchmark]
    return start + per_million * case.size / 1e6


COMMITS_TOO = "full copy and five commits"
MODES = ("quire", "quire-pages", "quire-cec", "quire-auto")
DURABLE = ("quire", "hdfs", "rocksdb-changelog")

BENCHMARKS = (
    Benchmark(
        "spark.operations",
        "put, get, delete, evict, merge, as Spark's StateStoreBasicOperationsBenchmark does them",
        operations,
        {"provider": ("quire", "hdfs", "rocksdb", "rocksdb-untracked")},
        (10_000,),
        (10_000, 100_000),
    ),
    Benchmark(
        "spark.aggregation",
        "count, min and max per key in a streaming query: a batch with its commit, and memory",
        aggregation,
        {"update mode": ("quire", "hdfs", "rocksdb", "rocksdb-changelog", *FOR_SCALE)},
        (1_000_000,),
        (1_000_000, 10_000_000),
        size_unit="keys",
    ),
    Benchmark(
        "spark.commits",
        "commits that update some of a state of wide rows: time, and bytes written",
        commits,
        {"provider": (*MODES, "hdfs", "rocksdb-changelog")},
        (100_000,),
        (1_000_000,),
        size_unit="keys",
    ),
    Benchmark(
        "spark.few_changes",
        "a commit of 1,000 changed keys on a small and on a large state",
        few_changes,
        {"provider": DURABLE},
        (1_000_000,),
        (1_000_000, 10_000_000),
        size_unit="keys",
    ),
    Benchmark(
        "spark.restart",
        "a new provider loads a checkpoint: a full copy, or a log that needs none; and five commits beyond it",
        restart,
        dict.fromkeys(("full copy", COMMITS_TOO), ("quire-pages", "quire-cec", *DURABLE)),
        (1_000_000,),
        (1_000_000, 5_000_000),
        size_unit="keys",
    ),
    Benchmark(
        "spark.many_stores",
        "empty stores, all open in one JVM",
        many_stores,
        {"provider": DURABLE},
        (800,),
        (800,),
        size_unit="stores",
        repetitions_max=1,
    ),
)
