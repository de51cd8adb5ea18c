"""The family "spark": Quire's state store provider beside Spark's own, each case in a JVM of its own.

    spark.operations      put, get, delete, evict, merge, as Spark's StateStoreBasicOperationsBenchmark does them
    spark.aggregation     a streaming query: count, min and max per key
    spark.deduplication   a streaming query: rows whose id has not come before
    spark.join            a streaming query: impressions with their clicks, by time, or without
    spark.sessions        a streaming query: visits by user and session
    spark.transform       a streaming query: transformWithState with a value and a list per key
    spark.nexmark         Nexmark's queries 3, 4, 5, 7, 8, 9, 11, 12, by number of events
    spark.commits         bytes and time of commits that update some of a state of wide rows, on local disk and HDFS
    spark.few_changes     a commit of 1,000 changed keys, on a small and on a large state
    spark.restart         a new provider loads a checkpoint: a full copy (of cec: its log) and five commits, from either
    spark.bases           the aggregation while full copies are written in the background, and while none is
    spark.many_stores     empty stores, all open in one JVM

docs/benchmarks.md says what each does, how it knows that its result is right, and what is set for whom.
Three peers are there for scale: ``limit`` keeps nothing, so that a query costs Spark's own work and no more;
``limit-answering`` says the same value for every key, so that Spark has old rows to merge, as with a real store;
``heap-map`` is a bare hash map in the heap with nothing durable. The work is done in Scala (``bench/scala``), which
checks all results and writes one line of JSON for each number. Checkpoints and Spark's own files lie in the folder of
the case.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.core import Benchmark, Case, Measurement
from quire.bench.data import WrongResult
from quire.bench.hdfs_cluster import CLIENT, Cluster, ClusterError
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
# By default it looks up each key that it puts or removes, to count its rows: Spark's own advice is to do without.
ROCKSDB = {
    "providerClass": SPARKS_OWN + "RocksDBStateStoreProvider",
    "rocksdb.changelogCheckpointing.enabled": "false",
    "rocksdb.trackTotalNumberOfRows": "false",
}
QUIRE = {"providerClass": "io.quire.spark.QuireStateStoreProvider"}
# Each peer by its settings under STORE; all others are Spark's defaults.
PROVIDERS: dict[str, dict[str, str]] = {
    "quire": QUIRE,
    "quire-pages": QUIRE | {"quire.checkpointMode": "pages"},
    "quire-cec": QUIRE | {"quire.checkpointMode": "cec"},
    "quire-auto": QUIRE | {"quire.checkpointMode": "auto"},
    "quire-alone": QUIRE,  # without the extension
    "quire-no-bases": QUIRE | {"minDeltasForSnapshot": "1000000", "maintenanceInterval": "500ms"},
    "quire-bases": QUIRE | {"minDeltasForSnapshot": "1", "maintenanceInterval": "500ms"},
    "hdfs": {"providerClass": SPARKS_OWN + "HDFSBackedStateStoreProvider"},
    "rocksdb": ROCKSDB,
    "rocksdb-changelog": ROCKSDB | {"rocksdb.changelogCheckpointing.enabled": "true"},
    "rocksdb-counting": ROCKSDB | {"rocksdb.trackTotalNumberOfRows": "true"},
    "rocksdb-changelog-counting": ROCKSDB
    | {"rocksdb.changelogCheckpointing.enabled": "true", "rocksdb.trackTotalNumberOfRows": "true"},
    "heap-map": {"providerClass": "io.quire.bench.HeapMapProvider"},
    "limit-answering": {"providerClass": "io.quire.bench.AnsweringLimitProvider"},
    "limit": {"providerClass": "io.quire.bench.LimitProvider"},
}
FOR_SCALE = ("heap-map", "limit-answering", "limit")
SETTINGS = f"local[2], 2 partitions, heap of {HEAP} at most, Spark's default settings but for docs/benchmarks.md"
LOCAL, HDFS = "local disk", "HDFS"
LOCAL_ALONE, HDFS_ALONE = (f"{place}, a full copy alone" for place in (LOCAL, HDFS))
HDFS_NETWORK = "HDFS, 1 Gbit/s a DataNode"
NETWORK_BYTES = 120_000_000  # a second, that a DataNode of HDFS_NETWORK gives

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
    if case.peer.startswith("quire") and case.peer != "quire-alone":
        options |= {"spark.sql.extensions": "io.quire.spark.QuireExtensions"}
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


def shape(case: Case) -> tuple[int, int, int]:
    """How many rows a batch of a query has, how many batches there are, and how many of them count.

    Of a query over keys a batch is half as many rows, so that most batches run on compiled code and a full state; of
    millions of keys a tenth. Keys of the aggregation and of transform are drawn, and 70 % of them have come by the
    twelfth batch. A batch of Nexmark's is two seconds of event time; windows are of ten.
    """
    tiny, many = case.size < TINY, case.size > 1_000_000
    if case.benchmark == "spark.nexmark":
        batches = 6 if tiny else 30 if many else 15
        return case.size // batches, batches, batches // 2
    if tiny:
        return case.size // 2, 3, 2
    if many:
        drawn = case.benchmark in ("spark.aggregation", "spark.bases", "spark.transform")
        return case.size // 10, 12 if drawn else 16, 4
    return case.size // 2, 16, 8


def query(case: Case) -> Iterator[Measurement]:
    """spark.aggregation and the other queries over keys: the state has about so many in the end, where they expire"""
    return measured_query(case, case.benchmark.removeprefix("spark."))


def bases(case: Case) -> Iterator[Measurement]:
    """spark.bases: the same query as spark.aggregation"""
    return measured_query(case, "aggregation")


def nexmark(case: Case) -> Iterator[Measurement]:
    """spark.nexmark, a query a variant"""
    return measured_query(case, case.variant)


def measured_query(case: Case, name: str) -> Iterator[Measurement]:
    """A query by its name in Queries.scala."""
    rows, batches, measured = shape(case)
    checked = str(not case.peer.startswith("limit")).lower()
    return jvm(case, name, rows=rows, batches=batches, measured=measured, checked=checked)


@contextlib.contextmanager
def state_folder(case: Case) -> Iterator[dict[str, object]]:
    """The arguments by which a case's variant has its stores on the local disk or on a new HDFS on this machine."""
    if not case.variant.startswith(HDFS):
        yield {}
        return
    conf = {"dfs.datanode.data.read.bandwidthPerSec": NETWORK_BYTES} if case.variant == HDFS_NETWORK else {}
    try:
        with Cluster(case.folder / "hdfs", conf=conf) as cluster:
            client = {f"spark.hadoop.{name}": value for name, value in CLIENT.items()}
            yield {"folder": cluster.uri("/case"), **client}
    except (ClusterError, jars.BuildError) as error:
        raise MissingPeer(str(error)) from None


def commits(case: Case) -> Iterator[Measurement]:
    """spark.commits; no base is written meanwhile"""
    with state_folder(case) as where:
        yield from jvm(case, "commits", repeats=1 if case.size < TINY else 5, **where)


def few_changes(case: Case) -> Iterator[Measurement]:
    """spark.few_changes; the small state has 100,000 keys, or a tenth of the large one's if that is less"""
    tiny = case.size < TINY
    small, changed = min(100_000, case.size // 10), min(1000, case.size // 10)
    seconds, batches = (0, 1) if tiny else (SECONDS_OF_FEW_CHANGES, 100)
    return jvm(case, "few_changes", small=small, changed=changed, batches=batches, seconds=seconds)


def restart(case: Case) -> Iterator[Measurement]:
    """spark.restart; the checkpoint is written by one JVM and loaded by another"""
    changes = 0 if case.variant in (LOCAL_ALONE, HDFS_ALONE) else 5
    with state_folder(case) as where:
        list(jvm(case, "restart_fill", changes=changes, **where))
        yield from jvm(case, "restart_load", changes=changes, **where)


def many_stores(case: Case) -> Iterator[Measurement]:
    """spark.many_stores"""
    return jvm(case, "many_stores")


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    start, per_million = SECONDS[case.benchmark]
    millions = case.size / 1e6
    if case.benchmark in QUERIES:
        rows, batches, _ = shape(case)
        millions = rows * batches / 1e6
    few, many = SLOWNESS.get(f"{case.benchmark} {case.peer}") or SLOWNESS.get(case.peer, (1.0, 1.0))
    slowness = many if case.size > 1_000_000 else few
    return start + per_million * slowness * millions + (CLUSTER_SECONDS if case.variant.startswith(HDFS) else 0.0)


# What a case takes at least, and on Quire for a million rows, of queries, or keys. From the times of cases that
# bench/results has, rounded up.
SECONDS = {
    "spark.operations": (28.0, 170.0),
    "spark.aggregation": (17.0, 1.8),
    "spark.deduplication": (17.0, 2.5),
    "spark.join": (21.0, 5.5),
    "spark.sessions": (19.0, 5.5),
    "spark.transform": (18.0, 5.0),
    "spark.bases": (17.0, 1.8),
    "spark.nexmark": (22.0, 5.0),
    "spark.commits": (7.0, 20.0),
    "spark.few_changes": (7.0, 0.7),
    "spark.restart": (8.0, 2.0),
    "spark.many_stores": (0.0, 9000.0),
}
QUERIES = (
    *("spark.aggregation", "spark.deduplication", "spark.join", "spark.sessions", "spark.transform"),
    *("spark.bases", "spark.nexmark"),
)
# How many times as long as Quire the others take beyond the least, on up to a million keys and on more.
SLOWNESS = {
    "hdfs": (1.7, 5.0),
    "spark.join hdfs": (2.6, 5.0),
    "spark.few_changes hdfs": (1.7, 8.5),
    "spark.many_stores hdfs": (7.0, 7.0),
    "heap-map": (1.1, 2.0),
    "rocksdb": (2.2, 4.0),
    "rocksdb-counting": (4.0, 6.0),
    "rocksdb-changelog": (2.8, 4.0),
    "spark.few_changes rocksdb-changelog": (2.8, 5.0),
    "spark.many_stores rocksdb-changelog": (13.5, 13.5),
    "rocksdb-changelog-counting": (4.1, 6.5),
    "limit": (0.4, 0.4),
    "limit-answering": (0.4, 0.4),
}
CLUSTER_SECONDS = 10.0

MODES = ("quire", "quire-pages", "quire-cec", "quire-auto")
DURABLE = ("quire", "hdfs", "rocksdb-changelog")
PEERS = ("quire", "hdfs", "rocksdb", "rocksdb-changelog")
AGGREGATION_PEERS = (
    "quire",
    "quire-alone",
    "hdfs",
    "rocksdb",
    "rocksdb-changelog",
    "rocksdb-changelog-counting",
    *FOR_SCALE,
)
NEXMARK = ("q3", "q4", "q5", "q7", "q8", "q9", "q11", "q12")
MILLION = 1_000_000
KEYS_FULL = (100_000, MILLION, 10 * MILLION)


def query_benchmark(
    name: str,
    summary: str,
    peers: tuple[str, ...] = PEERS,
    million: tuple[str, ...] = DURABLE,
    largest: tuple[str, ...] = ("quire", "hdfs"),
) -> Benchmark:
    """One of the queries over keys. million, largest: the peers of a million keys and of the most, which take the most
    time."""
    summary = f"{summary}, in a streaming query: a batch with its commit, memory, restart"
    at = {MILLION: million, KEYS_FULL[-1]: largest}
    return Benchmark(name, summary, query, {"query": peers}, (100_000,), KEYS_FULL, size_unit="keys", at=at)


BENCHMARKS = (
    Benchmark(
        "spark.operations",
        "put, get, delete, evict, merge, as Spark's StateStoreBasicOperationsBenchmark does them",
        operations,
        {"provider": ("quire", "hdfs", "rocksdb", "rocksdb-counting")},
        (10_000,),
        (10_000, 100_000),
    ),
    query_benchmark(
        "spark.aggregation",
        "count, min and max per key",
        AGGREGATION_PEERS,
        AGGREGATION_PEERS,
        (*DURABLE, "rocksdb-changelog-counting", "quire-alone", "limit"),
    ),
    query_benchmark("spark.deduplication", "rows whose id has not come before"),
    query_benchmark("spark.join", "impressions with their clicks, by time, or without"),
    query_benchmark("spark.sessions", "visits by user and session"),
    query_benchmark(
        "spark.transform",
        "transformWithState with a value and a list per key",
        ("quire", "rocksdb", "rocksdb-changelog"),
        ("quire", "rocksdb-changelog"),
        ("quire", "rocksdb-changelog"),
    ),
    Benchmark(
        "spark.nexmark",
        "Nexmark's queries that keep a state: a batch with its commit, memory, restart",
        nexmark,
        dict.fromkeys(NEXMARK, PEERS),
        (600_000,),
        (MILLION,),
        size_unit="events",
    ),
    Benchmark(
        "spark.commits",
        "commits that update some of a state of wide rows: time, and bytes written",
        commits,
        dict.fromkeys((LOCAL, HDFS), (*MODES, "hdfs", "rocksdb-changelog")),
        (50_000,),
        (MILLION,),
        size_unit="keys",
    ),
    Benchmark(
        "spark.few_changes",
        "a commit of 1,000 changed keys on a small and on a large state",
        few_changes,
        {"provider": DURABLE},
        (MILLION,),
        (10 * MILLION,),
        size_unit="keys",
    ),
    Benchmark(
        "spark.restart",
        "a new provider loads a checkpoint: a full copy, or a log that needs none; and five commits beyond it",
        restart,
        dict.fromkeys((LOCAL, HDFS), (*MODES, "hdfs", "rocksdb-changelog"))
        | dict.fromkeys((LOCAL_ALONE, HDFS_ALONE, HDFS_NETWORK), MODES[:3]),
        (200_000,),
        (5 * MILLION,),
        size_unit="keys",
    ),
    Benchmark(
        "spark.bases",
        "the aggregation while full copies are written in the background all the time, and while none is",
        bases,
        {"aggregation": ("quire-no-bases", "quire-bases")},
        (100_000,),
        (MILLION,),
        size_unit="keys",
        reference="quire-no-bases",
        rivals=(),
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
