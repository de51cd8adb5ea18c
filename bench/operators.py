"""The family "python": stateful operators written in Python, Quire's beside Spark's own.

    python.count     how often each key came: one number a key
    python.recent    the events of each key in the last three batches: a list a key, appended to and expired

A batch is 50,000 rows, drawn from so many keys as the case's size says (of 100,000 keys, about 39,000 come in a batch).
With more than 100,000 keys all of them come once before, for the peers that can. Every peer gives a row for each key of
the batch; their number and sum are compared with what the rows say. Two partitions, commit included; the checkpoint
lies on the local disk. ``limit`` sends the rows to Python and back and keeps nothing.

``quire`` works on whole columns, ``quire-plain`` key by key with Python objects. Spark's operators have the store that
is best for them: RocksDB with changelog for transformWithState, which takes no other of Spark's.
"""

import os
import statistics
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

import quire
from quire.bench.core import Benchmark, Case, Measurement
from quire.bench.data import WrongResult
from quire.bench.peers import MissingPeer
from quire.bench.spark import PROVIDERS, STORE, TINY

ROWS, ROWS_TINY = 50_000, 500
PRELOAD_FROM = 100_000
BATCHES = 6  # of all peers, the later half of which counts
PRELOADED = ("quire", "quire-plain", "limit")  # whose first batch has every key, where there are many
KEPT = 3  # batches
OUTPUT = "key bigint, n bigint"


class Columns(quire.Operator):
    """Works on all rows of a batch at once."""

    output = OUTPUT

    def process(self, batch: pa.RecordBatch) -> None:
        self.rows.append(batch)

    def flush(self) -> Any:
        return self.done(pa.Table.from_batches(self.rows)) if self.rows else None

    def open(self, state: quire.State) -> None:
        self.rows: list[pa.RecordBatch] = []
        self.declare(state)

    @abstractmethod
    def declare(self, state: quire.State) -> None: ...

    @abstractmethod
    def done(self, rows: pa.Table) -> Any: ...


class Count(Columns):
    """python.count, on columns."""

    def declare(self, state: quire.State) -> None:
        self.counts = state.map("counts", key="key bigint", value="n bigint")

    def done(self, rows: pa.Table) -> Any:
        return self.counts.add_many(rows["key"], np.ones(len(rows), np.int64))


class Recent(Columns):
    """python.recent, on columns."""

    def declare(self, state: quire.State) -> None:
        self.events = state.map("events", key="key bigint", value="time bigint")

    def done(self, rows: pa.Table) -> Any:
        self.events.append_many(rows["key"], rows["time"])
        keys = pc.unique(rows["key"])
        self.events.expire_before(keys, pc.max(rows["time"]).as_py() - KEPT + 1)
        return pa.table({"key": keys, "n": pc.list_value_length(self.events.get_lists(keys))})


class Plain(quire.Operator):
    """Works row by row."""

    output = OUTPUT
    touched: dict[int, int]

    def flush(self) -> Any:
        return pa.table({"key": list(self.touched), "n": list(self.touched.values())}) if self.touched else None


class PlainCount(Plain):
    """python.count, key by key."""

    def open(self, state: quire.State) -> None:
        self.touched = {}
        self.counts = state.map("counts", key="key bigint", value="n bigint")

    def process(self, batch: pa.RecordBatch) -> None:
        for key in batch["key"].to_pylist():
            self.counts[key] = self.touched[key] = self.counts.get(key, 0) + 1


class PlainRecent(Plain):
    """python.recent, key by key."""

    def open(self, state: quire.State) -> None:
        self.touched = {}
        self.events = state.map("events", key="key bigint", value="events array<bigint>")

    def process(self, batch: pa.RecordBatch) -> None:
        for key, time in zip(batch["key"].to_pylist(), batch["time"].to_pylist(), strict=True):
            events = [old for old in self.events.get(key, ()) if old > time - KEPT]
            self.events[key] = [*events, time]
            self.touched[key] = len(events) + 1


# ---------------------------------------------------------------------------------------------------- Spark's own


def count_in_pandas(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """python.count by applyInPandasWithState."""
    import pandas as pd

    n = (state.get[0] if state.exists else 0) + sum(len(frame) for frame in frames)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def recent_in_pandas(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """python.recent by applyInPandasWithState; as bytes, because Spark 4.3 cannot read an array in the state's type."""
    import pandas as pd

    times = np.concatenate([frame["time"].to_numpy() for frame in frames])
    old = np.frombuffer(state.get[0] if state.exists else b"", np.int64)
    kept = np.concatenate([old[old > times.max() - KEPT], times])
    state.update((kept.tobytes(),))
    yield pd.DataFrame({"key": [key[0]], "n": [len(kept)]})


def processors() -> dict[str, Any]:
    """The classes for transformWithState, by benchmark and kind of rows."""
    import pandas as pd
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class CountRows(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "n bigint")

        def add(self, more: int) -> int:
            n: int = (self.count.get() or (0,))[0] + more
            self.count.update((n,))
            return n

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield Row(key=key[0], n=self.add(sum(1 for _ in rows)))

        def close(self) -> None:
            pass

    class CountPandas(CountRows):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield pd.DataFrame({"key": [key[0]], "n": [self.add(sum(len(frame) for frame in rows))]})

    class RecentRows(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.events = handle.getListState("events", "time bigint")

        def add(self, times: list[int]) -> int:
            old = [event[0] for event in self.events.get()]
            kept = [time for time in old if time > max(times) - KEPT] + times
            self.events.put([(time,) for time in kept])
            return len(kept)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield Row(key=key[0], n=self.add([row["time"] for row in rows]))

        def close(self) -> None:
            pass

    class RecentPandas(RecentRows):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            times = [time for frame in rows for time in frame["time"].tolist()]
            yield pd.DataFrame({"key": [key[0]], "n": [self.add(times)]})

    return {
        "python.count rows": CountRows,
        "python.count pandas": CountPandas,
        "python.recent rows": RecentRows,
        "python.recent pandas": RecentPandas,
    }


def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """To Python and back, with nothing kept: a row for each key, as all give."""
    rows = list(batches)
    if rows:
        keys = pc.unique(pa.Table.from_batches(rows)["key"])
        yield pa.record_batch({"key": keys, "n": pa.array(np.ones(len(keys), np.int64))})


def step(case: Case, frame: Any) -> Any:
    """The operator that the case is about, put on a stream."""
    recent = case.benchmark == "python.recent"
    if case.peer == "quire":
        return quire.stateful(frame, Recent() if recent else Count(), by="key")
    if case.peer == "quire-plain":
        return quire.stateful(frame, PlainRecent() if recent else PlainCount(), by="key")
    if case.peer == "limit":
        return frame.repartition(2, "key").mapInArrow(passed_on, OUTPUT)
    grouped = frame.groupBy("key")
    if case.peer == "applyInPandasWithState":
        function: Callable[..., Any] = recent_in_pandas if recent else count_in_pandas
        kept = "events binary" if recent else "n bigint"
        return grouped.applyInPandasWithState(function, OUTPUT, kept, "update", "NoTimeout")
    rows = case.peer == "transformWithState"
    method = grouped.transformWithState if rows else grouped.transformWithStateInPandas
    kind = processors()[f"{case.benchmark} {'rows' if rows else 'pandas'}"]
    return method(statefulProcessor=kind(), outputStructType=OUTPUT, outputMode="Update", timeMode="None")


# ---------------------------------------------------------------------------------------------------- the measurement


def drawn(case: Case) -> list[Any]:
    """The keys of each batch."""
    random, tiny = case.random(), case.size <= TINY
    count = 4 if tiny else BATCHES
    first = [np.arange(case.size)] if case.size > PRELOAD_FROM and case.peer in PRELOADED else []
    rows = ROWS_TINY if tiny else ROWS
    return first + [random.integers(0, case.size, rows) for _ in range(count)]


def expected(case: Case, batches: list[Any]) -> Iterator[tuple[int, int]]:
    """The rows of each batch's output, and the sum of their numbers."""
    counts = [np.bincount(keys, minlength=case.size) for keys in batches]
    for number, now in enumerate(counts):
        if case.peer == "limit":
            totals = np.ones(case.size, np.int64)
        elif case.benchmark == "python.recent":
            totals = np.sum(counts[max(0, number - KEPT + 1) : number + 1], axis=0)
        else:
            totals = np.sum(counts[: number + 1], axis=0)
        touched = now > 0
        yield int(touched.sum()), int(totals[touched].sum())


def operators(case: Case) -> Iterator[Measurement]:
    """python.count and python.recent"""
    try:
        from pyspark.sql import SparkSession
        from pyspark.sql import functions as F
    except ImportError as error:
        raise MissingPeer(str(error)) from None
    # What the workers get of this module is pickled with it: they need not find it.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    batches, source = drawn(case), case.folder / "in"
    source.mkdir()
    for number, keys in enumerate(batches):
        table = pa.table({"key": keys, "time": np.full(len(keys), number)})
        file = source / f"{number:04}.parquet"
        parquet.write_table(table, file)
        os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))
    builder = SparkSession.builder.master("local[2]").appName(case.peer)
    if case.peer.startswith("quire"):
        builder = quire.configure(builder)
    else:
        kind = "rocksdb-changelog" if case.peer.startswith("transform") else "hdfs"
        for name, value in PROVIDERS[kind].items():
            builder = builder.config(STORE + name, value)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "4g",
        "spark.local.dir": str(case.folder / "local"),
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        frame = spark.readStream.schema("key bigint, time bigint").option("maxFilesPerTrigger", 1).parquet(str(source))
        given = step(case, frame).observe("given", F.count(F.lit(1)).alias("rows"), F.sum("n").alias("sum"))
        query = (
            given.writeStream.format("noop")
            .outputMode("append" if case.peer.startswith(("quire", "limit")) else "update")
            .option("checkpointLocation", str(case.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        told = [each for each in query.recentProgress if each["numInputRows"]]
    finally:
        spark.stop()
    seconds = [each["durationMs"]["triggerExecution"] / 1000 for each in told]
    found = [(each["observedMetrics"]["given"].rows, each["observedMetrics"]["given"].sum) for each in told]
    if found != list(expected(case, batches)):
        raise WrongResult(f"{case.peer} gave rows and sums {found[-1]}, not {list(expected(case, batches))[-1]}")
    call = f"{len(batches[-1])} rows, median of the last batches, commit included"
    yield Measurement("time of a batch", statistics.median(seconds[len(seconds) // 2 :]), "s", len(batches[-1]), call)


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    own = {"transformWithState": 36.0, "applyInPandasWithState": 65.0, "transformWithStateInPandas": 105.0}
    return own.get(case.peer, 13.0) + case.size * 2.5e-6


OWN = ("applyInPandasWithState", "transformWithStateInPandas", "transformWithState")


def benchmark(name: str, summary: str, peers: tuple[str, ...], quick: int, full: tuple[int, ...]) -> Benchmark:
    """One of this family."""
    summary = f"operators in Python: {summary}"
    variants = {"50,000 rows a batch": peers}
    return Benchmark(name, summary, operators, variants, (quick,), full, size_unit="keys", repetitions_max=1)


BENCHMARKS = (
    benchmark("python.count", "how often each key came", ("quire", "quire-plain", *OWN, "limit"), 100_000, (100_000,)),
    benchmark(
        "python.recent",
        "each key's events of the last three batches, in lists",
        ("quire", "quire-plain", *OWN, "limit"),
        100_000,
        (100_000,),
    ),
    benchmark(
        "python.held",
        "how often each key came, by the number of keys held",
        ("quire", "limit"),
        1_000_000,
        (100_000, 1_000_000, 10_000_000),
    ),
)
