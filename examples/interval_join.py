"""An interval join: pairs of the same key with ``left.time - before <= right.time <= left.time + after``.

Both sides come in one stream, with a column that says which. Rows may be late by less than ``delay``, in any order;
each pair is given once, when the second of the two has come.
"""

import random
from datetime import timedelta
from typing import Any

import local_spark
import pyarrow as pa

import quire

BEFORE, AFTER, DELAY = timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=2)
INPUT = pa.schema(
    [("side", pa.string()), ("key", pa.string()), ("time", pa.timestamp("us", "UTC")), ("id", pa.int64())]
)
TICK = timedelta.resolution  # ranges end before their upper bound


class Side:
    """The rows of one side that may still find a partner: by key to look for them, by time to drop them."""

    def __init__(self, state: quire.State, name: str) -> None:
        self.by_key = state.ordered_map(name, "key string, time timestamp, id bigint", "void")
        self.by_time = state.ordered_map(f"{name}_by_time", "time timestamp, key string, id bigint", "void")

    def add(self, key: str, time: Any, id: int) -> None:
        """Keeps a row."""
        self.by_key[key, time, id] = None
        self.by_time[time, key, id] = None

    def between(self, key: str, first: Any, last: Any) -> list[tuple[Any, int]]:
        """Time and id of the rows of a key from one time to another, both included."""
        return [found[1:] for found, _ in self.by_key.range((key, first), (key, last + TICK))]

    def drop_before(self, time: Any) -> None:
        """Forgets all rows before a time."""
        self.by_key.remove_many(self.by_time.pop_range(hi=(time,)).select(["key", "time", "id"]))


class IntervalJoin(quire.Operator):
    """Looks for the partners of each row among those of the other side that came before it."""

    output = "key string, left_id bigint, left_time timestamp, right_id bigint, right_time timestamp"

    def __init__(self, before: timedelta = BEFORE, after: timedelta = AFTER, delay: timedelta = DELAY) -> None:
        self.before = before
        self.after = after
        self.delay = delay

    def open(self, state: quire.State) -> None:
        """Both sides."""
        self.left, self.right = Side(state, "left"), Side(state, "right")
        self.watermark = state.watermark(delay=self.delay)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Gives the pairs that these rows make."""
        self.watermark.observe(batch["time"])
        pairs = [pair for row in batch.to_pylist() for pair in self.join(**row)]
        return pa.RecordBatch.from_pylist(pairs) if pairs else None

    def join(self, side: str, key: str, time: Any, id: int) -> list[local_spark.Row]:
        """Keeps a row and gives its pairs."""
        if side == "left":
            self.left.add(key, time, id)
            found = self.right.between(key, time - self.before, time + self.after)
            return [pair(key, (time, id), right) for right in found]
        self.right.add(key, time, id)
        found = self.left.between(key, time - self.after, time + self.before)
        return [pair(key, left, (time, id)) for left in found]

    def flush(self) -> None:
        """Forgets what no row after the watermark can be paired with."""
        if self.watermark.value is not None:
            self.left.drop_before(self.watermark.value - self.after)
            self.right.drop_before(self.watermark.value - self.before)


def pair(key: str, left: tuple[Any, int], right: tuple[Any, int]) -> local_spark.Row:
    """A row of the output, of (time, id) on both sides."""
    return {"key": key, "left_id": left[1], "left_time": left[0], "right_id": right[1], "right_time": right[0]}


def reference(
    rows: list[local_spark.Row], before: timedelta = BEFORE, after: timedelta = AFTER
) -> list[local_spark.Row]:
    """What must come out: every row with every other."""
    left = [row for row in rows if row["side"] == "left"]
    right = [row for row in rows if row["side"] == "right"]
    return [
        pair(a["key"], (a["time"], a["id"]), (b["time"], b["id"]))
        for a in left
        for b in right
        if a["key"] == b["key"] and a["time"] - before <= b["time"] <= a["time"] + after
    ]


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Rows of both sides, slightly out of order."""
    keys = [f"key-{i}" for i in range(max(1, count // 100))]
    at = local_spark.times(rng, count, step=AFTER / (2 * len(keys)))
    return [
        {
            "side": rng.choice(("left", "right")),
            "key": rng.choice(keys),
            "time": time - local_spark.shift(rng, DELAY),
            "id": number,
        }
        for number, time in enumerate(at)
    ]


def main() -> None:
    """A streaming query on a local Spark. Two streams become one by ``left.unionByName(right)``."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as both:
        made = local_spark.collect(quire.stateful(both, IntervalJoin(), by="key", partitions=2))
    local_spark.show(made, reference(rows))


if __name__ == "__main__":
    main()
