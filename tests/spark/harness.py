"""What the tests of the Spark provider share: sessions, random input in files, queries in stages, and their results.

QUIRE_TEST_PROVIDER  another provider class to test in Quire's place; no jar is then built or loaded.
QUIRE_TEST_SEED      the seed of all random input, see seeds.py.
QUIRE_TEST_MODE      the checkpoint mode that queries have which do not choose one.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from seeds import SEED

# Workers run what the tests run, wherever "python3" may point.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

REAL = "io.quire.spark.QuireStateStoreProvider"
QUIRE = os.environ.get("QUIRE_TEST_PROVIDER", REAL)
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


STORE = "spark.sql.streaming.stateStore."
MODE = STORE + "quire.checkpointMode"
MODES = ("delta", "pages", "cec", "auto")
SCHEMA = "id LONG, key STRING, other LONG, value LONG, word STRING, ts TIMESTAMP"

MAINTENANCE = 1
MORNING = datetime(2024, 2, 3, 10, tzinfo=timezone.utc)

# Small machines run these tests: nothing that costs time and proves nothing about state.
BASE = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.noDataProgressEventInterval": "100",
    "spark.sql.streaming.pollingDelay": "10ms",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    STORE + "maintenanceInterval": f"{MAINTENANCE}s",
    # Few deltas before a base, so that short tests see bases too.
    STORE + "minDeltasForSnapshot": "3",
    STORE + "rocksdb.changelogCheckpointing.enabled": "true",
    **({MODE: os.environ["QUIRE_TEST_MODE"]} if "QUIRE_TEST_MODE" in os.environ else {}),
}


def session(master: str = "local[2]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """A new session with Quire (or what stands in for it) as the store."""
    builder = SparkSession.builder.master(master).appName("quire-tests")
    if QUIRE == REAL:
        import quire

        builder = quire.configure(builder)
    else:
        builder = builder.config(STORE + "providerClass", QUIRE)
    for name, value in {**BASE, **(conf or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@contextlib.contextmanager
def settings(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session for the time of a block."""
    before = {name: spark.conf.get(name, None) for name in conf}
    for name, value in conf.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


# ------------------------------------------------------------------------------------------------ input


def words(rng: random.Random) -> str:
    """Mostly short text; empty, not ASCII, and longer than a page of state now and then."""
    shape = rng.random()
    if shape < 0.1:
        return ""
    if shape < 0.2:
        return "naïve ☃ " + "é" * rng.randrange(20)
    if shape < 0.23:
        return rng.choice("xyz") * rng.randrange(4_000, 20_000)
    return "".join(rng.choices("abcdefgh", k=rng.randrange(1, 12)))


def rows(seed: object, count: int = 240, keys: int = 30, minutes: int = 30) -> list[dict[str, Any]]:
    """Events in rough order of time, a few of them late, a few without a key."""
    rng = random.Random(f"{SEED} {seed}")
    found = []
    for number in range(count):
        second = 60 * minutes * number // count + rng.randrange(-90, 30)
        if rng.random() < 0.03:
            second -= rng.randrange(600)
        second = max(second, 0)
        key = None if rng.random() < 0.03 else f"k{int(keys * rng.random() ** 2)}"
        found.append(
            {
                "id": number,
                "key": key,
                "other": rng.randrange(4),
                "value": rng.randrange(-1000, 1000),
                "word": words(rng),
                "ts": (MORNING + timedelta(seconds=second)).isoformat(),
            }
        )
    return found


def cuts(seed: object, data: Sequence[dict[str, Any]], files: int) -> list[list[dict[str, Any]]]:
    """The rows in so many batches of random size; a batch may be empty but for the first."""
    rng = random.Random(f"{SEED} cuts {seed}")
    edges = [0, *sorted(rng.randrange(1, len(data) + 1) for _ in range(files - 1)), len(data)]
    return [list(data[low:high]) for low, high in itertools.pairwise(edges)]


def release(folder: Path, batches: Iterable[Sequence[dict[str, Any]]]) -> None:
    """Puts batches where a file source looks, one file each, in an order that their times of change make certain."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.glob("*.json")))
    for number, batch in enumerate(batches, first):
        hidden = folder / f"_{number:06d}.json"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in batch), encoding="utf-8")
        os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
        hidden.rename(folder / f"{number:06d}.json")


def stream(spark: SparkSession, folder: Path, schema: str = SCHEMA) -> DataFrame:
    """A stream of a folder's files, one a batch."""
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").json(str(folder))


def ticks(spark: SparkSession, seed: object, rows: int = 60) -> DataFrame:
    """A stream without end, whose batches are the same however often a query is killed and started again.

    A source of files promises less: killed between its own log and the query's, it makes two batches into one.
    """
    salt = zlib.crc32(f"{SEED} {seed}".encode())
    source = spark.readStream.format("rate-micro-batch").options(
        rowsPerBatch=rows,
        numPartitions=1,
        startTimestamp=int(MORNING.timestamp() * 1000),
        advanceMillisPerBatch=120_000,
    )

    def number(name: str, limit: int) -> str:
        return f"pmod(xxhash64(value, '{name}', {salt}L), {limit})"

    return source.load().selectExpr(
        "value AS id",
        f"concat('k', {number('key', 12)}) AS key",
        f"{number('other', 4)} AS other",
        f"{number('value', 2000)} - 1000 AS value",
        f"repeat('x', CAST(pow(10, {number('word', 5)}) AS INT)) AS word",
        f"timestamp + make_dt_interval(0, 0, 0, {number('ts', 200)} - 90) AS ts",
    )


# ------------------------------------------------------------------------------------------------ queries

Build = Callable[..., DataFrame]
Output = dict[int, Counter[str]]


@dataclass(frozen=True)
class Workload:
    """A query, its settings and what its results are compared with."""

    name: str
    build: Build
    mode: str = "append"
    sources: int = 1
    conf: Mapping[str, str] = field(default_factory=dict)
    peer: str = HDFS
    peer_conf: Mapping[str, str] | None = None
    files: int = 3
    count: int = 240
    keys: int = 30
    pause: float = 0.0
    """Seconds between the stages."""
    clock: bool = False
    """Whether the query acts on the time of day: it then runs batches without new data for as long as it is let."""
    variant: str = ""
    """Tells workloads apart that have one input and one expected output."""

    def __str__(self) -> str:
        return f"{self.name} {self.variant}".strip().replace(" ", "-")

    def input(self) -> list[list[list[dict[str, Any]]]]:
        """The batches of each source."""
        return [
            cuts((self.name, side), rows((self.name, side), self.count, self.keys), self.files)
            for side in range(self.sources)
        ]


def shown(row: Any) -> str:
    """A row as text: long strings by length and ends, so that a failed comparison stays readable."""

    def short(value: Any) -> str:
        text = repr(value)
        return text if len(text) < 200 else f"{text[:40]}...{zlib.crc32(text.encode())}...{text[-20:]}({len(text)})"

    return ", ".join(f"{name}={short(value)}" for name, value in row.asDict(recursive=True).items())


def start(
    frame: DataFrame, mode: str, checkpoint: Path, output: Output | None = None, forever: bool = False
) -> StreamingQuery:
    """Starts a query over all files there are (or ever will be); each batch's rows land in output.

    The rows of a batch that is repeated replace those of its first run.
    """

    def keep(batch: DataFrame, number: int) -> None:
        found = Counter(shown(row) for row in batch.collect())
        if output is not None:
            output[number] = found

    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(checkpoint))
    writer = writer.foreachBatch(keep)
    return (writer if forever else writer.trigger(availableNow=True)).start()


def finish(query: StreamingQuery) -> StreamingQuery:
    """Waits for a query's end; raises what it failed with."""
    query.awaitTermination()
    return query


def stop_after(query: StreamingQuery, files: int) -> None:
    """Stops a query that never runs out of batches by itself once so many files went through it."""
    while query.isActive:
        progress = query.lastProgress
        if progress is not None and json.loads(progress["sources"][0]["endOffset"])["logOffset"] >= files - 1:
            break
        time.sleep(0.1)
    query.stop()


def wait_for_maintenance() -> None:
    """Long enough for the background to have had its turn, twice."""
    time.sleep(2 * MAINTENANCE + 1)


def stages(seed: object, files: int, count: int = 2) -> list[slice]:
    """Where a query is stopped and started again."""
    rng = random.Random(f"{SEED} stages {seed}")
    edges = [0, *sorted(rng.sample(range(1, files), count - 1)), files]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def run(spark: SparkSession, workload: Workload, provider: str, folder: Path) -> Output:
    """Runs a workload on a provider, with restarts in the middle, and gives each batch's rows."""
    shutil.rmtree(folder, ignore_errors=True)
    output: Output = {}
    conf = workload.conf if provider == QUIRE or workload.peer_conf is None else workload.peer_conf
    batches = workload.input()
    with settings(spark, {**conf, STORE + "providerClass": provider}):
        for number, stage in enumerate(stages(workload.name, workload.files)):
            if number and workload.pause:
                time.sleep(workload.pause)
            for side in range(workload.sources):
                release(folder / f"source{side}", batches[side][stage])
            frames = [stream(spark, folder / f"source{side}") for side in range(workload.sources)]
            query = start(workload.build(*frames), workload.mode, folder / "checkpoint", output, forever=workload.clock)
            if workload.clock:
                stop_after(query, stage.stop)
            finish(query)
    recorded = recorded_conf(folder / "checkpoint")
    assert recorded[STORE + "providerClass"] == provider
    assert {name: recorded[name] for name in conf if name in recorded} == {
        name: value for name, value in conf.items() if name in recorded
    }
    if workload.clock:
        return dict(enumerate(output[number] for number in sorted(output) if output[number]))
    return output


def recorded_conf(checkpoint: Path) -> dict[str, str]:
    """The settings that a query keeps from its first start on, from Spark's own log of offsets."""
    first = min((path for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    metadata = json.loads(first.read_text(encoding="utf-8").splitlines()[1])
    return dict(metadata["conf"])


def difference(found: Output, expected: Output) -> str:
    """What differs, in a few lines; empty if nothing does."""
    lines = []
    if sorted(found) != sorted(expected):
        lines.append(f"batches {sorted(found)}, expected {sorted(expected)}")
    for number in sorted(set(found) & set(expected)):
        missing, extra = expected[number] - found[number], found[number] - expected[number]
        if missing or extra:
            lines.append(f"batch {number}: {missing.total()} rows missing, {extra.total()} rows too many")
            lines += [f"  missing {row} x{times}" for row, times in list(missing.items())[:3]]
            lines += [f"  extra   {row} x{times}" for row, times in list(extra.items())[:3]]
    return "\n".join(lines[:30])


def total(output: Output) -> int:
    """Rows in all batches."""
    return sum(batch.total() for batch in output.values())
