"""A windowed aggregate: count, sum, least and greatest by group over sliding windows. On whole columns.

A window begins at every multiple of ``slide`` and takes ``size``, its end left out. Events may be late by less than
``delay``, in any order; a window is given when the watermark has passed its end.
"""

import random
from collections import defaultdict
from datetime import datetime, timedelta, timezone
from typing import Any

import local_spark
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import quire

SIZE, SLIDE, DELAY = timedelta(minutes=10), timedelta(minutes=5), timedelta(minutes=2)
TIME = pa.timestamp("us", "UTC")
INPUT = pa.schema([("group", pa.string()), ("time", TIME), ("value", pa.int64())])
TICK = timedelta.resolution  # ranges end before their upper bound


class WindowedAggregate(quire.Operator):
    """Keeps what is known of each open window, the earliest first."""

    output = "start timestamp, group string, n bigint, total bigint, least bigint, greatest bigint"

    def __init__(self, size: timedelta = SIZE, slide: timedelta = SLIDE, delay: timedelta = DELAY) -> None:
        if size % slide:
            raise ValueError(f"size {size} and slide {slide}: give a size that is a multiple of the slide")
        self.size = size
        self.slide = slide
        self.delay = delay

    def open(self, state: quire.State) -> None:
        """Windows by start and group."""
        values = "n bigint, total bigint, least bigint, greatest bigint"
        self.windows = state.ordered_map("windows", "start timestamp, group string", values)
        self.watermark = state.watermark(delay=self.delay)

    def process(self, batch: pa.RecordBatch) -> None:
        """Adds up the rows of the batch by window and group, and then these to the windows that there are."""
        self.watermark.observe(batch["time"])
        starts, rows = self.starts(batch["time"])
        table = pa.table({"start": starts, "group": batch["group"].take(rows), "value": batch["value"].take(rows)})
        found = table.group_by(["start", "group"]).aggregate([("value", how) for how in ("count", "sum", "min", "max")])
        found = found.rename_columns(["start", "group", "n", "total", "least", "greatest"])
        self.windows.update_many(found.select(["start", "group"]), found, merge)

    def starts(self, times: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The starts of all windows that the times are in, and for each the row of the time."""
        slide, count = self.slide // TICK, self.size // self.slide
        ticks = times.cast(pa.int64()).to_numpy()
        latest = ticks - ticks % slide
        starts = latest[:, None] - slide * np.arange(count)
        return pa.array(starts.ravel()).cast(TIME), pa.array(np.repeat(np.arange(len(ticks)), count))

    def flush(self) -> pa.Table | None:
        """Gives the windows that have ended, and forgets them."""
        if self.watermark.value is None:
            return None
        return self.windows.pop_range(hi=(self.watermark.value - self.size + TICK,))


def merge(old: pa.RecordBatch, new: pa.RecordBatch) -> dict[str, Any]:
    """What becomes of windows; nulls in ``old`` are those that are new."""
    return {
        "n": pc.add(pc.fill_null(old["n"], 0), new["n"]),
        "total": pc.add(pc.fill_null(old["total"], 0), new["total"]),
        "least": pc.min_element_wise(old["least"], new["least"]),
        "greatest": pc.max_element_wise(old["greatest"], new["greatest"]),
    }


def reference(
    rows: list[local_spark.Row], size: timedelta = SIZE, slide: timedelta = SLIDE, delay: timedelta = DELAY
) -> list[local_spark.Row]:
    """What must come out: the values of each window in a list."""
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    windows = defaultdict(list)
    for row in rows:
        start = row["time"] - (row["time"] - epoch) % slide
        while start + size > row["time"]:
            windows[start, row["group"]].append(row["value"])
            start -= slide
    watermark = max((row["time"] for row in rows), default=epoch) - delay
    return [
        {"start": start, "group": group, "n": len(v), "total": sum(v), "least": min(v), "greatest": max(v)}
        for (start, group), v in windows.items()
        if start + size <= watermark
    ]


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Events, slightly out of order; and one of each group the next day, so that all windows before it have ended."""
    groups = [f"group-{i}" for i in range(max(1, count // 50))]
    at = local_spark.times(rng, count, step=SLIDE / (2 * len(groups)))
    rows = [
        {"group": rng.choice(groups), "time": time - local_spark.shift(rng, DELAY), "value": rng.randint(-1000, 1000)}
        for time in at
    ]
    return rows + [{"group": group, "time": at[-1] + timedelta(days=1), "value": 0} for group in groups]


def main() -> None:
    """A streaming query on a local Spark."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as events:
        made = local_spark.collect(quire.stateful(events, WindowedAggregate(), by="group", partitions=2))
    local_spark.show(made, reference(rows))


if __name__ == "__main__":
    main()
