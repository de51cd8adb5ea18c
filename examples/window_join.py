"""A window join: pairs of two streams with the same key and times at most a window apart. On whole columns.

Both sides come in one stream, with a column that says which. Rows may be late by less than ``delay``, in any order;
each pair is given once. Unlike ``interval_join.py`` it reads all that a key has: for few rows a key, or many a batch.
"""

import random
from datetime import timedelta

import local_spark
import pyarrow as pa
import pyarrow.compute as pc

import quire

WINDOW, DELAY = timedelta(minutes=3), timedelta(minutes=2)
INPUT = pa.schema(
    [("side", pa.string()), ("key", pa.string()), ("time", pa.timestamp("us", "UTC")), ("id", pa.int64())]
)


class WindowJoin(quire.Operator):
    """Keeps the rows of both sides as lists by key."""

    output = "key string, left_id bigint, right_id bigint"

    def __init__(self, window: timedelta = WINDOW, delay: timedelta = DELAY) -> None:
        self.window = window
        self.delay = delay

    def open(self, state: quire.State) -> None:
        """Both sides, and when all that a key has is too old."""
        self.left = state.map("left", "key string", "time timestamp, id bigint")
        self.right = state.map("right", "key string", "time timestamp, id bigint")
        self.idle = state.timers("idle", "key string")
        self.watermark = state.watermark(delay=self.delay)
        self.touched: list[pa.Array] = []

    def process(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Gives the pairs that these rows make: left ones with what there was, then right ones also with these."""
        self.watermark.observe(batch["time"])
        self.touched.append(batch["key"].unique())
        left, right = (batch.filter(pc.equal(batch["side"], side)) for side in ("left", "right"))
        with_old = self.pairs(left, self.right)
        self.left.append_many(left["key"], left.select(["time", "id"]))
        with_all = self.pairs(right, self.left)
        self.right.append_many(right["key"], right.select(["time", "id"]))
        return [
            with_old.rename_columns(["key", "left_id", "right_id"]),
            with_all.rename_columns(["key", "right_id", "left_id"]),
        ]

    def pairs(self, rows: pa.RecordBatch, others: quire.Map) -> pa.RecordBatch:
        """Key and id of the rows with the id of each of the others that lies near."""
        found = others.get_lists(rows["key"])
        rows, other = rows.take(pc.list_parent_indices(found)), found.flatten()
        apart = pc.abs(pc.subtract(rows["time"], other.field("time")).cast(pa.int64()))
        pairs = pa.record_batch({"key": rows["key"], "id": rows["id"], "other": other.field("id")})
        return pairs.filter(pc.less_equal(apart, self.window // timedelta.resolution))

    def flush(self) -> None:
        """Drops what no row after the watermark can be paired with: of the keys of this batch, and whole keys."""
        if not self.touched:
            return
        keys = pa.chunked_array(self.touched).unique()
        now = self.watermark.value
        for side in (self.left, self.right):
            side.expire_before(keys, now - self.window, "time")
        self.idle.set_many(keys, pa.repeat(now + self.delay + self.window, len(keys)))
        idle = self.idle.due(now - timedelta.resolution)["key"]
        for side in (self.left, self.right):
            side.remove_many(idle)


def reference(rows: list[local_spark.Row], window: timedelta = WINDOW) -> list[local_spark.Row]:
    """What must come out: every row with every other."""
    left = [row for row in rows if row["side"] == "left"]
    right = [row for row in rows if row["side"] == "right"]
    return [
        {"key": a["key"], "left_id": a["id"], "right_id": b["id"]}
        for a in left
        for b in right
        if a["key"] == b["key"] and abs(a["time"] - b["time"]) <= window
    ]


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Rows of both sides, slightly out of order; keys come and go."""
    at = local_spark.times(rng, count, step=WINDOW / 8)
    return [
        {
            "side": rng.choice(("left", "right")),
            "key": f"key-{number // 80 + rng.randrange(4)}",
            "time": time - local_spark.shift(rng, DELAY),
            "id": number,
        }
        for number, time in enumerate(at)
    ]


def main() -> None:
    """A streaming query on a local Spark. Two streams become one by ``left.unionByName(right)``."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as both:
        made = local_spark.collect(quire.stateful(both, WindowJoin(), by="key", partitions=2))
    local_spark.show(made, reference(rows))


if __name__ == "__main__":
    main()
