"""Deduplication: an event is dropped if one with its id was let through less than ``keep`` before it. On whole columns.

Events of one id come in the order of their times from batch to batch, as those do that a sender sends again; within a
batch in any order. Those of different ids may be out of order by less than ``delay``.
"""

import random
from datetime import timedelta
from typing import Any

import local_spark
import pyarrow as pa
import pyarrow.compute as pc

import quire

KEEP, DELAY = timedelta(minutes=10), timedelta(minutes=2)
INPUT = pa.schema([("id", pa.string()), ("time", pa.timestamp("us", "UTC")), ("what", pa.int64())])


class Deduplicate(quire.Operator):
    """Keeps when each id was last let through, and forgets it when that no longer matters."""

    output = "id string, time timestamp, what bigint"

    def __init__(self, keep: timedelta = KEEP, delay: timedelta = DELAY) -> None:
        self.keep = keep
        self.delay = delay

    def open(self, state: quire.State) -> None:
        """The time of each id, and when to forget it."""
        self.last = state.map("last", "id string", "time timestamp")
        self.forget = state.timers("forget", "id string")
        self.watermark = state.watermark(delay=self.delay)
        self.rows: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> None:
        """Waits for the whole batch: only then the order of events is known."""
        self.watermark.observe(batch["time"])
        self.rows.append(batch)

    def flush(self) -> pa.Table | None:
        """Gives the events that are let through."""
        if not self.rows:
            return None
        rows = pa.Table.from_batches(self.rows).sort_by("time")
        passed: list[pa.RecordBatch] = []

        def decide(last: Any, new: Any) -> Any:
            """Called for the first events of all ids, then for the second ones, and so on."""
            age = pc.subtract(new["time"], last)
            fresh = pc.fill_null(pc.greater_equal(age, pa.scalar(self.keep)), True)
            passed.append(new.filter(fresh))
            return pc.if_else(fresh, new["time"], last)

        self.last.update_many(rows["id"], rows, decide)
        made = pa.Table.from_batches(passed)
        self.forget.set_many(made["id"], pc.add(made["time"], pa.scalar(self.keep)))
        self.last.remove_many(self.forget.due(self.watermark.value)["id"])
        return made


def reference(rows: list[local_spark.Row], keep: timedelta = KEEP) -> list[local_spark.Row]:
    """What must come out: all events one by one, and nothing is forgotten."""
    last: dict[str, Any] = {}
    found = []
    for row in rows:
        if row["id"] not in last or row["time"] - last[row["id"]] >= keep:
            last[row["id"]] = row["time"]
            found.append(row)
    return found


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Events, many of which come again; each id is late by a time of its own."""
    ids = {f"id-{i}": local_spark.shift(rng, DELAY) for i in range(max(1, count // 8))}
    rows = []
    for what, time in enumerate(local_spark.times(rng, count, step=2 * KEEP / len(ids))):
        id = rng.choice(list(ids))
        # No two events at one time, of which either might be let through.
        rows.append({"id": id, "time": time - ids[id] + timedelta(microseconds=what), "what": what})
    return rows


def main() -> None:
    """A streaming query on a local Spark."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as events:
        made = local_spark.collect(quire.stateful(events, Deduplicate(), by="id", partitions=2))
    local_spark.show(made, reference(rows))


if __name__ == "__main__":
    main()
