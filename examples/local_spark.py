"""What the examples share: random event times, a stream on a local Spark, and a look at what came out of it."""

import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import quire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Row = dict[str, Any]
START = datetime(2026, 1, 5, 9, tzinfo=timezone.utc)


def times(rng: random.Random, count: int, step: timedelta) -> list[datetime]:
    """So many times in order, on the whole second, a step apart on average."""
    found = START
    return [found := found + timedelta(seconds=rng.randint(0, int(2 * step.total_seconds()))) for _ in range(count)]


def shift(rng: random.Random, delay: timedelta) -> timedelta:
    """By how much an event is late: less than a watermark with this delay allows."""
    return timedelta(seconds=rng.randrange(int(delay.total_seconds())))


@contextlib.contextmanager
def stream_of(rows: list[Row], schema: pa.Schema, batches: int = 6) -> Iterator["DataFrame"]:
    """The rows as a streaming DataFrame of so many micro-batches, in a session that knows Quire."""
    from pyspark.sql import SparkSession
    from pyspark.sql.pandas.types import from_arrow_schema

    builder = SparkSession.builder.master("local[2]")
    quiet: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = builder.config(map=quiet)
    spark = quire.configure(builder).getOrCreate()
    with tempfile.TemporaryDirectory(prefix="quire-example-") as folder:
        size = -(-len(rows) // batches)
        for number in range(batches):
            part = pa.Table.from_pylist(rows[number * size : (number + 1) * size], schema)
            file = Path(folder) / f"{number}.parquet"
            pq.write_table(part, file)
            os.utime(file, (number, number))  # Spark reads the oldest first
        reader = spark.readStream.schema(from_arrow_schema(schema)).option("maxFilesPerTrigger", 1)
        yield reader.parquet(folder)
    spark.stop()


def collect(df: "DataFrame") -> list[Row]:
    """Runs the query to the end of its input and gives all rows of all its batches."""
    with tempfile.TemporaryDirectory(prefix="quire-example-") as folder:
        writer = df.writeStream.format("memory").queryName("output").outputMode("append")
        query = writer.option("checkpointLocation", folder).trigger(availableNow=True).start()
        query.awaitTermination()
    for progress in query.recentProgress:
        for name, metrics in progress["observedMetrics"].items():
            if not name.endswith(".input"):
                shown = ", ".join(f"{key} {metrics[key]}" for key in ("rows_out", "keys", "bytes", "written"))
                print(f"batch {progress['batchId']}: rows {progress['numInputRows']}, {shown}")
    made: list[Row] = df.sparkSession.table("output").toArrow().to_pylist()
    return made


def multiset(rows: list[Row]) -> Counter[str]:
    """Rows in no order, to be compared."""
    return Counter(str({key: _plain(row[key]) for key in sorted(row)}) for row in rows)


def _plain(value: Any) -> Any:
    return value.astimezone(timezone.utc).isoformat() if isinstance(value, datetime) else value


def show(made: list[Row], expected: list[Row]) -> None:
    """Prints some rows, and whether all are as expected."""
    for row in made[:5]:
        print("  " + ", ".join(f"{name} {_plain(value)}" for name, value in row.items()))
    same = multiset(made) == multiset(expected)
    print(f"{len(made)} rows, {len(expected)} expected: {'equal' if same else 'NOT EQUAL'} to the reference")
    if not same:
        raise SystemExit(1)
