"""Queries with every stateful operator Spark has, written as a user of PySpark would."""

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupStateTimeout
from spark.harness import ROCKSDB, STORE, Workload

import quire

# Spark's Python workers do not have the tests' folder on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def late(frame: DataFrame, delay: str = "2 minutes") -> DataFrame:
    return frame.withWatermark("ts", delay)


def aggregate(grouped: Any) -> DataFrame:
    return grouped.agg(
        F.count("*").alias("rows"),
        F.sum("value").alias("sum"),
        F.min("word").alias("low"),
        F.max("word").alias("high"),
        F.avg("value").alias("mean"),
        F.sum(F.col("value").cast("decimal(30,4)")).alias("exact"),
    )


# ------------------------------------------------------------------------------------------------ aggregation


def by_key(frame: DataFrame) -> DataFrame:
    return aggregate(frame.groupBy("key", "other"))


def tally(frame: DataFrame) -> DataFrame:
    """What TallyInPython gives, by Spark itself."""
    return frame.groupBy("key", "other").agg(
        F.count("*").alias("rows"), F.sum("value").alias("sum"), F.min("word").alias("low"), F.max("word").alias("high")
    )


class TallyInPython(quire.Operator):
    """A row a key, with plain Python objects."""

    output = "key string, other bigint, rows bigint, sum bigint, low string, high string"

    def open(self, state: quire.State) -> None:
        self.touched: set[tuple[str | None, int]] = set()
        self.seen = state.map(
            "seen", key="key string, other bigint", value="rows bigint, sum bigint, low string, high string"
        )

    def process(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            key, word = (row["key"], row["other"]), row["word"]
            old = self.seen.get(key) or {"rows": 0, "sum": 0, "low": word, "high": word}
            low, high = min(old["low"], word), max(old["high"], word)
            self.seen[key] = {"rows": old["rows"] + 1, "sum": old["sum"] + row["value"], "low": low, "high": high}
            self.touched.add(key)

    def flush(self) -> list[pa.RecordBatch]:
        keys = [{"key": key, "other": other} for key, other in self.touched]
        rows = [{**key, **self.seen[(key["key"], key["other"])]} for key in keys]
        return [pa.RecordBatch.from_pylist(rows)] if rows else []


def tally_in_python(frame: DataFrame) -> DataFrame:
    return quire.stateful(frame, TallyInPython(), by=["key", "other"], bases_every=3)


def wide(frame: DataFrame) -> DataFrame:
    """Rows of thirty columns, few of which change in a batch."""
    columns = [F.min(F.col("id") + number).alias(f"low{number}") for number in range(28)]
    return frame.groupBy("key").agg(F.count("*").alias("rows"), F.max("word").alias("high"), *columns)


def by_number(frame: DataFrame) -> DataFrame:
    """State that a test can tell from the ids of the rows, and read without Spark."""
    return frame.groupBy(F.expr("id * id % 211").alias("number")).agg(
        F.count("*").alias("rows"), F.sum("id").alias("sum")
    )


def by_many_keys(frame: DataFrame) -> DataFrame:
    """More keys a batch than are looked up at once, some of whose values are larger than a page."""
    return aggregate(frame.groupBy(F.expr("id * id % 1511").alias("number")))


def by_window(frame: DataFrame) -> DataFrame:
    return aggregate(late(frame).groupBy(F.window("ts", "4 minutes"), "key"))


def by_sliding_window(frame: DataFrame) -> DataFrame:
    return aggregate(late(frame).groupBy(F.window("ts", "6 minutes", "2 minutes"), "other"))


def collected(frame: DataFrame) -> DataFrame:
    return frame.groupBy("key").agg(F.sort_array(F.collect_list("word")).alias("words"), F.max_by("word", "id"))


def global_count(frame: DataFrame) -> DataFrame:
    return aggregate(frame.groupBy())


def sessions(frame: DataFrame) -> DataFrame:
    return aggregate(late(frame).groupBy(F.session_window("ts", "90 seconds"), "key"))


# ------------------------------------------------------------------------------------------------ deduplication, limit


def distinct(frame: DataFrame) -> DataFrame:
    return frame.select("key", "other").dropDuplicates()


def distinct_until_late(frame: DataFrame) -> DataFrame:
    return late(frame.select("key", "ts")).dropDuplicates(["key", "ts"])


def distinct_within(frame: DataFrame) -> DataFrame:
    return (
        late(frame.select("key", "other", "ts")).dropDuplicatesWithinWatermark(["key", "other"]).select("key", "other")
    )


def limited(frame: DataFrame) -> DataFrame:
    return frame.select("id").limit(100)


# ------------------------------------------------------------------------------------------------ several operators


def windows_of_windows(frame: DataFrame) -> DataFrame:
    inner = late(frame).groupBy(F.window("ts", "1 minute"), "key").agg(F.sum("value").alias("value"))
    outer = inner.groupBy(F.window(F.window_time("window"), "5 minutes"))
    return outer.agg(F.count("*").alias("keys"), F.max("value").alias("high"))


def distinct_then_windows(frame: DataFrame) -> DataFrame:
    once = late(frame.select("key", "ts")).dropDuplicates(["key", "ts"])
    return once.groupBy(F.window("ts", "5 minutes")).agg(F.count("*").alias("events"))


def join_then_windows(left: DataFrame, right: DataFrame) -> DataFrame:
    joined = join("left_outer")(left, right)
    return joined.groupBy(F.window("left_ts", "5 minutes")).agg(F.count("*").alias("pairs"), F.sum("right_value"))


# ------------------------------------------------------------------------------------------------ joins


def join(kind: str) -> Any:
    def build(left: DataFrame, right: DataFrame) -> DataFrame:
        left = left.selectExpr("key AS left_key", "id AS left_id", "word AS left_word", "ts AS left_ts").withWatermark(
            "left_ts", "2 minutes"
        )
        right = right.selectExpr("key AS right_key", "value AS right_value", "ts AS right_ts").withWatermark(
            "right_ts", "3 minutes"
        )
        near = F.expr(
            "left_key = right_key AND right_ts BETWEEN left_ts - INTERVAL 1 MINUTE AND left_ts + INTERVAL 2 MINUTES"
        )
        return left.join(right, near, kind)

    return build


def join_forever(left: DataFrame, right: DataFrame) -> DataFrame:
    """An inner join without watermarks keeps every row."""
    left, right = left.select("key", "id"), right.select("key", "other", "value")
    return left.join(right, "key").where("id % 5 = other")


# ------------------------------------------------------------------------------------------------ arbitrary state


def in_pandas(timeout: str) -> Any:
    def update(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            count, length, longest = state.get
            state.remove()
            yield pd.DataFrame({"key": [key[0]], "count": [-count], "length": [length], "longest": [longest]})
            return
        count, length, longest = state.get if state.exists else (0, 0, "")
        for frame in frames:
            for word in frame["word"]:
                count, length = count + 1, length + len(word)
                longest = max(longest, word, key=lambda text: (len(text), text))
        if timeout == GroupStateTimeout.NoTimeout and count % 7 == 0:
            state.remove()
        else:
            state.update((count, length, longest))
        if timeout == GroupStateTimeout.EventTimeTimeout:
            state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 120_000)
        yield pd.DataFrame({"key": [key[0]], "count": [count], "length": [length], "longest": [longest]})

    def build(frame: DataFrame) -> DataFrame:
        rows = late(frame) if timeout == GroupStateTimeout.EventTimeTimeout else frame
        return rows.groupBy("key").applyInPandasWithState(
            update,
            "key STRING, count LONG, length LONG, longest STRING",
            "count LONG, length LONG, longest STRING",
            "update",
            timeout,
        )

    return build


# ------------------------------------------------------------------------------------------------ transformWithState

OUT = "key STRING, what STRING, number LONG, text STRING"
NAMES = ["key", "what", "number", "text"]


class Logic:
    """What a processor does with a group's rows, apart from how Spark hands them over.

    Each kind has open(), which makes its state variables, and step(key, rows), which gives the output for a key's rows.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open()

    def expired(self, key: str, at: int) -> list[tuple[Any, ...]]:
        return []

    def first(self, key: str, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Totals(Logic):
    """Value state."""

    def open(self) -> None:
        self.total = self.handle.getValueState("total", "count LONG, sum LONG, last STRING")
        self.flag = self.handle.getValueState("flag", "raised BOOLEAN")

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        count, total, last = self.total.get() if self.total.exists() else (0, 0, "")
        count, total = count + len(rows), total + sum(row["value"] for row in rows)
        last = rows[-1]["word"]
        self.total.update((count, total, last))
        raised = self.flag.exists()
        if total < 0:
            self.flag.update((True,))
        else:
            self.flag.clear()
        return [(key, f"raised {raised}", count, last), (key, "sum", total, "")]

    def first(self, key: str, row: dict[str, Any]) -> None:
        self.total.update((row["number"], 10 * row["number"], "initial"))


class Lists(Logic):
    """List state: put, append one, append many, clear."""

    def open(self) -> None:
        self.words = self.handle.getListState("words", "word STRING, id LONG")

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        held = list(self.words.get()) if self.words.exists() else []
        if len(held) > 25:
            self.words.clear()
        elif len(held) > 15:
            self.words.put([tuple(item) for item in held[-3:]])
        self.words.appendValue((rows[0]["word"], rows[0]["id"]))
        if rows[1:]:
            self.words.appendList([(row["word"], row["id"]) for row in rows[1:]])
        return [(key, "held", len(held), "|".join(str(item[0])[:9] for item in held))]


class Maps(Logic):
    """Map state: look up, update, remove, iterate, clear."""

    def open(self) -> None:
        self.counts = self.handle.getMapState("counts", "other LONG, word STRING", "count LONG, longest STRING")

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        found = []
        for row in rows:
            field = (row["other"], row["word"][:2])
            count, longest = self.counts.getValue(field) if self.counts.containsKey(field) else (0, "")
            self.counts.updateValue(field, (count + 1, max(longest, row["word"], key=len)))
            if count == 3:
                self.counts.removeKey(field)
                found.append((key, "full", row["other"], row["word"][:2]))
        held = sorted((tuple(name), tuple(value)) for name, value in self.counts.iterator())
        found += [(key, f"{other}{word}", count, longest[:20]) for (other, word), (count, longest) in held]
        assert len(list(self.counts.keys())) == len(list(self.counts.values())) == len(held)
        if len(held) > 12:
            self.counts.clear()
            self.counts.updateValue(field, (1, "after a clear"))
        return found


class Timers(Logic):
    """Timers in event time, moved and deleted."""

    def open(self) -> None:
        self.pending = self.handle.getValueState("pending", "count LONG")

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        count = (self.pending.get()[0] if self.pending.exists() else 0) + len(rows)
        self.pending.update((count,))
        timers = sorted(self.handle.listTimers())
        for timer in timers[2:]:
            self.handle.deleteTimer(timer)
        latest = max(int(row["ts"].timestamp() * 1000) for row in rows)
        self.handle.registerTimer(latest + 60_000)
        self.handle.registerTimer(latest + 240_000)
        return [(key, "timers", len(timers), ",".join(map(str, timers)))]

    def expired(self, key: str, at: int) -> list[tuple[Any, ...]]:
        count = self.pending.get()[0] if self.pending.exists() else 0
        if count > 5:
            self.pending.clear()
        return [(key, "expired", count, str(at))]


class Everything(Logic):
    """All of the above in one processor: it costs one start of Python a batch, not four."""

    def __init__(self) -> None:
        self.parts = [Totals(), Lists(), Maps(), Timers()]

    def open(self) -> None:
        for part in self.parts:
            part.init(self.handle)

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [found for part in self.parts for found in part.step(key, rows)]

    def expired(self, key: str, at: int) -> list[tuple[Any, ...]]:
        return [found for part in self.parts for found in part.expired(key, at)]

    def first(self, key: str, row: dict[str, Any]) -> None:
        for part in self.parts:
            part.first(key, row)


class Expiring(Logic):
    """Values, lists and maps that live for a second, an hour and forever; the test waits for more than a second."""

    def open(self) -> None:
        self.kept = self.handle.getValueState("kept", "count LONG")
        self.short = self.states("short", 1000)
        self.long = self.states("long", 3_600_000)

    def states(self, name: str, life: int) -> tuple[Any, Any, Any]:
        return (
            self.handle.getValueState(f"{name}Value", "count LONG", life),
            self.handle.getListState(f"{name}List", "id LONG", life),
            self.handle.getMapState(f"{name}Map", "id LONG", "id LONG", life),
        )

    def step(self, key: str, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        there = [self.kept.exists(), *(state.exists() for state in (*self.short, *self.long))]
        held = [len(list(self.long[1].get())), len(list(self.long[2].keys()))]
        self.kept.update((len(rows),))
        for value, items, fields in (self.short, self.long):
            value.update((len(rows),))
            items.appendList([(row["id"],) for row in rows])
            fields.updateValue((rows[0]["id"],), (rows[-1]["id"],))
        return [(key, str(held), len(rows), str(there))]


class RowFace(StatefulProcessor):
    """Hands rows to a Logic, by the row interface."""

    def __init__(self, logic: Logic) -> None:
        self.logic = logic

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.logic.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        given = sorted((row.asDict() for row in rows), key=lambda row: row["id"])
        return iter([Row(**dict(zip(NAMES, found, strict=True))) for found in self.logic.step(key[0], given)])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        results = self.logic.expired(key[0], expiredTimerInfo.getExpiryTimeInMs())
        return iter([Row(**dict(zip(NAMES, found, strict=True))) for found in results])

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.logic.first(key[0], initialState.asDict())

    def close(self) -> None:
        self.logic.close()


class PandasFace(RowFace):
    """Hands rows to a Logic, by the interface of pandas."""

    def frames(self, found: list[tuple[Any, ...]]) -> Iterator[pd.DataFrame]:
        return iter([pd.DataFrame(found, columns=NAMES)])

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        given = pd.concat(list(rows)).sort_values("id").to_dict("records")
        return self.frames(self.logic.step(key[0], given))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return self.frames(self.logic.expired(key[0], expiredTimerInfo.getExpiryTimeInMs()))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.logic.first(key[0], initialState.to_dict("records")[0])


def transform(logic: type[Logic], face: type[RowFace], time: str, initial: bool = False) -> Any:
    def build(frame: DataFrame) -> DataFrame:
        rows = frame.na.drop(subset=["key"])
        grouped = (late(rows) if time == "EventTime" else rows).groupBy("key")
        before = None
        if initial:
            spark = SparkSession.active()
            before = spark.createDataFrame([(f"k{key}", key) for key in range(0, 40, 3)], "key STRING, number LONG")
        method = grouped.transformWithStateInPandas if face is PandasFace else grouped.transformWithState
        return method(
            statefulProcessor=face(logic()),
            outputStructType=OUT,
            outputMode="update",
            timeMode=time,
            initialState=None if before is None else before.groupBy("key"),
        )

    return build


class Marked(RowFace):
    """Gives each group's latest time and count, for an operator that follows."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        given = [row.asDict() for row in rows]
        found = self.logic.step(key[0], given)
        return iter([Row(key=key[0], at=max(row["ts"] for row in given), count=found[0][2])])


def chained(frame: DataFrame) -> DataFrame:
    rows = late(frame.na.drop(subset=["key"]))
    marked = rows.groupBy("key").transformWithState(
        statefulProcessor=Marked(Totals()),
        outputStructType="key STRING, at TIMESTAMP, count LONG",
        outputMode="append",
        timeMode="EventTime",
        eventTimeColumnName="at",
    )
    return marked.groupBy(F.window("at", "4 minutes")).agg(F.count("*").alias("updates"), F.max("count").alias("high"))


# ------------------------------------------------------------------------------------------------ the list

IDS = {STORE + "checkpointFormatVersion": "2"}
CHECKSUMS = {STORE + "rowChecksum.enabled": "true"}
JOIN = "spark.sql.streaming.join.stateFormatVersion"
# From 4.3 on, Spark gives a new join the later formats only where the provider is RocksDB's, and format 2 elsewhere.
JOIN_FORMATS = ("2", "3", "4") if pyspark.__version__.startswith("4.2.") else ("2",)
AGGREGATION = "spark.sql.streaming.aggregation.stateFormatVersion"
SESSION = "spark.sql.streaming.sessionWindow.merge.sessions.in.local.partition"

AGGREGATIONS = [
    Workload("by key", by_key, "update"),
    Workload("by key", by_key, "update", conf={AGGREGATION: "1"}, variant="format 1"),
    Workload("by key", by_key, "update", conf=IDS, peer_conf={}, variant="ids"),
    Workload("by many keys", by_many_keys, "update", count=6000),
    Workload("by many keys", by_many_keys, "update", count=6000, conf={AGGREGATION: "1"}, variant="format 1"),
    Workload("by key complete", by_key, "complete"),
    Workload("by window", by_window, "append"),
    Workload("by window update", by_window, "update"),
    Workload("by window complete", by_window, "complete"),
    Workload("by sliding window", by_sliding_window, "append"),
    Workload("collected", collected, "update"),
    Workload("global", global_count, "complete", conf={"spark.sql.shuffle.partitions": "4"}),
    Workload("sessions", sessions, "append"),
    Workload("sessions", sessions, "append", conf={SESSION: "true"}, variant="merged early"),
    Workload("sessions complete", sessions, "complete"),
]
OTHERS = [
    Workload("distinct", distinct),
    Workload("distinct until late", distinct_until_late),
    Workload("distinct within watermark", distinct_within),
    Workload("limit", limited),
    Workload("windows of windows", windows_of_windows),
    Workload("distinct then windows", distinct_then_windows),
    Workload("join then windows", join_then_windows, sources=2),
    Workload("pandas state", in_pandas(GroupStateTimeout.NoTimeout), "update"),
    Workload("pandas state event time", in_pandas(GroupStateTimeout.EventTimeTimeout), "update"),
]
JOINS = [
    Workload(f"join {kind}", join(kind), sources=2, conf={JOIN: version}, peer_conf={}, variant=f"format {version}")
    for kind in ("inner", "left_outer", "right_outer", "full_outer", "left_semi")
    for version in JOIN_FORMATS
] + [
    Workload("join forever", join_forever, sources=2, conf={JOIN: version}, peer_conf={}, variant=f"format {version}")
    for version in JOIN_FORMATS
]
# Spark refuses format 1 for all but inner joins, and starts no new checkpoint with it outside its own tests.
OLD_JOIN = Workload("join inner", join("inner"), sources=2, conf={JOIN: "1"}, peer_conf={}, variant="format 1")
TRANSFORMS = (
    [
        Workload(
            f"transform {face.__name__}",
            transform(Everything, face, "EventTime", initial=True),
            "update",
            peer=ROCKSDB,
            keys=8,
        )
        for face in (RowFace, PandasFace)
    ]
    + [
        Workload(
            f"expiring {face.__name__}",
            transform(Expiring, face, "ProcessingTime"),
            "update",
            peer=ROCKSDB,
            files=2,
            count=60,
            pause=1.5,
            clock=True,
        )
        for face in (RowFace, PandasFace)
    ]
    + [
        Workload("transform then windows", chained, peer=ROCKSDB),
        Workload("transform then windows", chained, conf=IDS, peer_conf={}, peer=ROCKSDB, variant="ids"),
    ]
)
