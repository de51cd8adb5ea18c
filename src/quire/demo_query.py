"""The Spark driver of ``quire demo``, a process of its own so that it can be killed.

Use: python -m quire.demo_query JSON, where the JSON is an object with the fields of Order. Each line that it prints is
a JSON object, which says what has happened.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STATE = "spark.sql.streaming.stateStore."
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Queries that have nothing to do wait this long before they look again.
    "spark.sql.streaming.pollingDelay": "100ms",
    STATE + "rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass
class Order:
    """What the driver is to do."""

    clicks: str
    """The folder of the input."""
    checkpoint: str
    """Where the query keeps its progress and its state."""
    provider: str
    """The class of the state store."""
    stop_after: int
    """Stop the query after so many batches and start it again; 0: never."""
    state: str
    """Where to write the state at the end, as Parquet; empty: nowhere."""
    compare: dict[str, str]
    """Stores to run the same query with at the end: their names and classes."""
    scratch: str
    """A folder for the checkpoints of those runs."""


def say(event: str, **fields: Any) -> None:
    """Tells the process that started this one what has happened."""
    print(json.dumps({"event": event, **fields}), flush=True)


def counts(spark: "SparkSession", clicks: str) -> "DataFrame":
    """The query of the demo: clicks per user and hour, and the time of the last one; one input file a batch."""
    from pyspark.sql import functions as F

    stream = spark.readStream.schema("user LONG, at TIMESTAMP").option("maxFilesPerTrigger", "1").parquet(clicks)
    return stream.groupBy("user", F.window("at", "1 hour")).agg(F.count("*").alias("clicks"), F.max("at").alias("last"))


def start(
    spark: "SparkSession", clicks: str, checkpoint: str, provider: str, trigger: dict[str, Any] | None = None
) -> "StreamingQuery":
    """Starts the query over all input that there is, or goes on with it."""
    spark.conf.set(STATE + "providerClass", provider)
    writer = counts(spark, clicks).writeStream.outputMode("update").format("noop")
    return writer.option("checkpointLocation", checkpoint).trigger(**trigger or {"availableNow": True}).start()


def batches_since(query: "StreamingQuery", seen: int) -> Iterator[dict[str, Any]]:
    """What the query says of its batches after a number."""
    for progress in query.recentProgress:
        if progress["batchId"] > seen and progress["stateOperators"]:
            seen = progress["batchId"]
            state = progress["stateOperators"][0]
            yield {
                "number": seen,
                "rows": progress["numInputRows"],
                "seconds": progress["durationMs"]["triggerExecution"] / 1000,
                "keys": state["numRowsTotal"],
                "memory": state["memoryUsedBytes"],
            }


def batches(query: "StreamingQuery") -> Iterator[dict[str, Any]]:
    """The batches of a query, each when it is done, until the query ends; raises what the query failed with."""
    seen = -1
    ended = False
    while not ended:
        time.sleep(0.1)
        ended = not query.isActive
        for batch in batches_since(query, seen):
            seen = batch["number"]
            yield batch
    query.awaitTermination()


def follow(spark: "SparkSession", order: Order) -> None:
    """The main part: runs the query to the end of the input, with a stop on the way if the order says so."""
    query = start(spark, order.clicks, order.checkpoint, order.provider)
    for batch in batches(query):
        say("batch", **batch)
        if batch["number"] + 1 == order.stop_after:
            query.stop()
            say("stopped", number=batch["number"])
            break
    else:
        return
    for batch in batches(start(spark, order.clicks, order.checkpoint, order.provider)):
        say("batch", **batch)


def write_state(spark: "SparkSession", checkpoint: str, folder: str) -> None:
    """Reads the state itself, by Spark's state data source, and writes it where any tool can read it."""
    state = spark.read.format("statestore").load(checkpoint)
    columns = state.selectExpr("key.user", "unix_seconds(key.window.start) AS hour", "value.count AS clicks")
    columns.write.parquet(folder)


def heap(spark: "SparkSession") -> int:
    """Bytes of the JVM's heap in use, after a collection."""
    jvm: Any = spark._jvm
    jvm.System.gc()
    time.sleep(0.2)
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    return int(runtime.totalMemory() - runtime.freeMemory())


def unload(spark: "SparkSession", query: "StreamingQuery", checkpoint: Path) -> None:
    """Takes the stores of a query out of the JVM."""
    state: Any = spark._jvm.org.apache.spark.sql.execution.streaming.state  # type: ignore[union-attr]
    stores = getattr(state, "StateStore$").__getattr__("MODULE$")
    run = spark._jvm.java.util.UUID.fromString(query.runId)  # type: ignore[union-attr]
    for partition in range(int(SETTINGS["spark.sql.shuffle.partitions"])):
        store = state.StateStoreProviderId(state.StateStoreId(f"file:{checkpoint}/state", 0, partition, "default"), run)
        if not stores.isLoaded(store):
            raise RuntimeError(f"Spark does not hold {store.toString()}, which has just been used")
        stores.doMaintenanceAndUnload(store)


def compare(spark: "SparkSession", order: Order) -> None:
    """Runs the query from its beginning with each store, and tells what each cost.

    They take turns, a batch each, so that none of them finds a warmer JVM than the others.
    """
    queries: dict[str, StreamingQuery] = {}
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in order.compare}
    for file in sorted(Path(order.clicks).iterdir()):
        for name, provider in order.compare.items():
            folder = Path(order.scratch) / provider
            (folder / "clicks").mkdir(parents=True, exist_ok=True)
            (folder / "clicks" / file.name).hardlink_to(file)
            if name not in queries:
                places = str(folder / "clicks"), str(folder / "checkpoint")
                queries[name] = start(spark, *places, provider, {"processingTime": "0 seconds"})
            queries[name].processAllAvailable()
            for batch in batches_since(queries[name], len(done[name]) - 1):
                say("measured", name=name, **batch)
                done[name].append(batch)
    for query in queries.values():
        query.stop()
    heap(spark)  # what the queries themselves held
    for name, provider in order.compare.items():
        checkpoint = Path(order.scratch) / provider / "checkpoint"
        files = [path for path in (checkpoint / "state").rglob("*") if path.is_file() and path.suffix != ".crc"]
        written = sum(path.stat().st_size for path in files)
        before = heap(spark)
        unload(spark, queries[name], checkpoint)
        say(
            "compared",
            name=name,
            seconds=statistics.median(batch["seconds"] for batch in done[name]),
            memory=done[name][-1]["memory"],
            heap=max(before - heap(spark), 0),
            written=written // len(done[name]),
            keys=done[name][-1]["keys"],
        )


def main() -> None:
    """Does what the order in the first argument says."""
    from pyspark.sql import SparkSession

    order = Order(**json.loads(sys.argv[1]))
    builder = quire.configure(SparkSession.builder.master("local[2]").appName("quire demo"))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    jvm: Any = spark._jvm
    say("ready", driver=os.getpid(), jvm=jvm.java.lang.ProcessHandle.current().pid(), spark=spark.version)
    follow(spark, order)
    if order.state:
        write_state(spark, order.checkpoint, order.state)
        say("state")
    compare(spark, order)
    spark.stop()


if __name__ == "__main__":
    main()
