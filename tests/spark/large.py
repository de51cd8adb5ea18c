"""A driver with a heap of 512 MB and a state of its own size: new keys, batch by batch, then keys that are known.

Use: large.py FOLDER MEGABYTES. Prints "held ROWS BYTES" after the first run of the query, "known ROWS NEW" after the
second, which finds every key in the state that it loads from the checkpoint; ROWS are in the state, NEW were let
through.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyspark.sql import SparkSession
from spark import harness
from spark.harness import STORE

HEAP = "512m"
PER_BATCH = 200_000
# What a key takes in the state, with all its tables; the test holds it against what the store says.
KEY_BYTES = 400
CONF = {
    "spark.driver.memory": HEAP,
    "spark.sql.streaming.minBatchesToRetain": "2",
    # One base is written in the middle, so the restart reads a base and deltas.
    STORE + "minDeltasForSnapshot": "10",
}


def run(spark: SparkSession, folder: Path, batches: int, repeat: int) -> dict[str, int]:
    """Distinct keys of so many batches, each of which comes `repeat` batches later again."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", PER_BATCH).option("numPartitions", 2)
    keys = source.load().selectExpr(f"concat(value % {repeat * PER_BATCH}L, repeat('k', 350)) AS key")
    query = keys.dropDuplicates().writeStream.format("noop").option("checkpointLocation", str(folder))
    running = query.start()
    try:
        while running.isActive and (running.lastProgress is None or running.lastProgress["batchId"] < batches - 1):
            running.awaitTermination(0.2)
    finally:
        running.stop()
    running.awaitTermination()  # raises what it failed with
    progress = [each["stateOperators"][0] for each in running.recentProgress if each["stateOperators"]]
    return {
        "rows": progress[-1]["numRowsTotal"],
        "new": sum(each["numRowsUpdated"] for each in progress),
        "bytes": progress[-1]["memoryUsedBytes"],
    }


def main() -> None:
    folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    batches = megabytes * 2**20 // (KEY_BYTES * PER_BATCH)
    spark = harness.session(conf=CONF)
    heap = spark._jvm.java.lang.Runtime.getRuntime().maxMemory()
    assert heap <= 512 * 2**20, heap
    first = run(spark, folder, batches, batches)
    print("held", first["rows"], first["bytes"], flush=True)
    # Whatever the first run had begun beyond its last batch is known by now as well.
    spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()
    second = run(spark, folder, 2 * batches + 2, batches)
    print("known", second["rows"], second["new"], flush=True)
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
