"""Sessions: the clicks of a user that lie less than a gap apart, given when no more can come. In plain Python.

Clicks may come late by less than ``delay``, in any order. One that falls between two sessions may join them into one.
"""

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import local_spark
import pyarrow as pa

import quire

GAP, DELAY = timedelta(minutes=30), timedelta(minutes=10)
INPUT = pa.schema([("user", pa.string()), ("time", pa.timestamp("us", "UTC"))])


class Sessions(quire.Operator):
    """Keeps the open sessions of each user in the order of their starts."""

    output = "user string, start timestamp, end timestamp, clicks bigint"

    def __init__(self, gap: timedelta = GAP, delay: timedelta = DELAY) -> None:
        self.gap = gap
        self.delay = delay

    def open(self, state: quire.State) -> None:
        """Sessions by user and start, and the time at which each is over."""
        self.sessions = state.ordered_map("sessions", "user string, start timestamp", "end timestamp, clicks bigint")
        self.over = state.timers("over", "user string, start timestamp")
        self.watermark = state.watermark(delay=self.delay)

    def process(self, batch: pa.RecordBatch) -> None:
        """Adds the clicks to their sessions."""
        self.watermark.observe(batch["time"])
        for click in batch.to_pylist():
            self.add(click["user"], click["time"])

    def add(self, user: str, time: Any) -> None:
        """Makes one session of a click and of those that it touches: one, none, or the two that it lies between."""
        start, end, clicks = time, time, 1
        for key, session in self.sessions.range((user,), (user, time + self.gap), reverse=True):
            if session["end"] <= time - self.gap:
                break
            start, end, clicks = min(start, key[1]), max(end, session["end"]), clicks + session["clicks"]
            del self.sessions[key]
            self.over.cancel(key)
        self.sessions[user, start] = {"end": end, "clicks": clicks}
        self.over.set((user, start), end + self.gap)

    def flush(self) -> pa.RecordBatch | None:
        """Gives the sessions that are over: every click to come is after the watermark."""
        if self.watermark.value is None:
            return None
        over = self.over.due(self.watermark.value).select(["user", "start"]).to_pylist()
        rows = [{**key, **self.sessions.pop((key["user"], key["start"]))} for key in over]
        return pa.RecordBatch.from_pylist(rows) if rows else None


def reference(rows: list[local_spark.Row], gap: timedelta = GAP, delay: timedelta = DELAY) -> list[local_spark.Row]:
    """What must come out, from all clicks at once."""
    times = defaultdict(list)
    for row in rows:
        times[row["user"]].append(row["time"])
    found = []
    for user, clicks in times.items():
        clicks.sort()
        starts = [i for i in range(len(clicks)) if i == 0 or clicks[i] - clicks[i - 1] >= gap]
        for i, j in zip(starts, [*starts[1:], len(clicks)], strict=True):
            found.append({"user": user, "start": clicks[i], "end": clicks[j - 1], "clicks": j - i})
    watermark = max((row["time"] for row in rows), default=local_spark.START) - delay
    return [session for session in found if session["end"] + gap <= watermark]


def generate(rng: random.Random, count: int) -> list[local_spark.Row]:
    """Clicks, slightly out of order; and one of each user the next day, so that all sessions before it are over."""
    users = [f"user-{i}" for i in range(max(1, count // 40))]
    at = local_spark.times(rng, count, step=2 * GAP / (3 * len(users)))
    rows = [{"user": rng.choice(users), "time": time - local_spark.shift(rng, DELAY)} for time in at]
    return rows + [{"user": user, "time": at[-1] + timedelta(days=1)} for user in users]


def main() -> None:
    """A streaming query on a local Spark."""
    rows = generate(random.Random(1), 2000)
    with local_spark.stream_of(rows, INPUT) as clicks:
        made = local_spark.collect(quire.stateful(clicks, Sessions(), by="user", partitions=2))
    local_spark.show(made, reference(rows))


if __name__ == "__main__":
    main()
