"""A moving top-k: of the last n events of each key, the k greatest scores. On whole columns.

Events are numbered within their key, and come in that order from batch to batch; within a batch in any. Each batch
gives a row for each key that it touches, with the number of the key's last event, by which the latest row is found.
"""

import random
from collections import defaultdict

import local_spark
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import quire

K, N = 3, 10
INPUT = pa.schema([("key", pa.string()), ("number", pa.int64()), ("score", pa.float64())])


class TopK(quire.Operator):
    """Keeps the last n scores of each key as a list."""

    output = "key string, number bigint, scores array<double>"

    def __init__(self, k: int = K, n: int = N) -> None:
        self.k = k
        self.n = n

    def open(self, state: quire.State) -> None:
        """The scores of each key in the order of events."""
        self.scores = state.map("scores", "key string", "score double")
        self.rows: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> None:
        """Waits for the whole batch: only then their order is known."""
        self.rows.append(batch)

    def flush(self) -> pa.Table | None:
        """Gives the new top-k of each key of the batch."""
        if not self.rows:
            return None
        rows = pa.Table.from_batches(self.rows).sort_by("number")
        touched = rows.group_by("key").aggregate([("number", "max")])
        self.scores.append_many(rows["key"], rows["score"])
        self.scores.keep_last(touched["key"], self.n)
        best = greatest(self.scores.get_lists(touched["key"]), self.k)
        return pa.table({"key": touched["key"], "number": touched["number_max"], "scores": best})


def greatest(lists: pa.ListArray, k: int) -> pa.ListArray:
    """The k greatest values of each list, in descending order; no list is empty."""
    values, list_of = lists.flatten().to_numpy(), pc.list_parent_indices(lists).to_numpy()
    order = np.lexsort((-values, list_of))  # as the lists lie, each from its greatest value down
    lengths = np.bincount(list_of)
    starts = np.cumsum(lengths) - lengths
    first = np.arange(len(values)) - starts[list_of] < k
    ends = np.cumsum(np.minimum(lengths, k))
    return pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), values[order][first])


def reference(rows: list[local_spark.Row], k: int = K, n: int = N) -> list[local_spark.Row]:
    """What must come out last for each key."""
    events = defaultdict(list)
    for row in rows:
        events[row["key"]].append((row["number"], row["score"]))
    found = []
    for key, numbered in events.items():
        last = sorted(numbered)[-n:]
        found.append({"key": key, "number": last[-1][0], "scores": sorted((s for _, s in last), reverse=True)[:k]})
    return found


def latest(made: list[local_spark.Row]) -> list[local_spark.Row]:
    """Of all rows that came out, the last of each key."""
    return list({row["key"]: row for row in sorted(made, key=lambda row: row["number"])}.values())


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Events with scores, some of them equal."""
    keys = [f"key-{i}" for i in range(max(1, count // 20))]
    events: dict[str, int] = defaultdict(int)
    rows = []
    for _ in range(count):
        key = rng.choice(keys)
        rows.append({"key": key, "number": events[key], "score": rng.randint(-100, 100) / 4})
        events[key] += 1
    return rows


def main() -> None:
    """A streaming query on a local Spark."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as events:
        made = local_spark.collect(quire.stateful(events, TopK(), by="key", partitions=2))
    local_spark.show(latest(made), reference(rows))


if __name__ == "__main__":
    main()
