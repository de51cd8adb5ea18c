"""A Spark driver of its own, for tests that kill it or its executors, and for the soak: runs queries, writes batches.

Use: child.py FOLDER PROVIDER MASTER JSON-of-settings QUERY...

Among Spark's settings may be: slow (milliseconds that each row takes), batches (how many to run, in place of BATCHES),
and checkpoint (a folder for all checkpoints, in place of FOLDER; a URL, too). "transform" runs half as many batches.

Lines it prints: "jvm PID" when Spark is up, "NAME BATCH" when a batch has been written, "sample JSON" now and then if
the query is "soak", "end" when all is done.
A batch's rows are in FOLDER/NAME/output/BATCH.json, put there whole or not at all.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from spark import harness, workloads

# A row that takes this long after its state was read keeps a batch open for whoever wants to kill something in it.
SLOW = "coalesce(reflect('java.lang.Thread', 'sleep', {}L), '') <> 'never'"

# How often the driver is killed; each life of it is a few batches long.
KILLS = int(os.environ.get("QUIRE_KILLS", "2"))
BATCHES = max(12, 4 * KILLS)
QUERIES = {
    "counts": harness.Workload("counts", workloads.by_key, "update"),
    "join": harness.Workload(
        "join", workloads.join("full_outer"), sources=2, conf={workloads.JOIN: workloads.JOIN_FORMATS[-1]}
    ),
    "tally": harness.Workload("tally", workloads.tally, "update"),
    "python": harness.Workload("tally", workloads.tally_in_python, "update"),
    "soak": harness.Workload("soak", workloads.by_window),
    "numbers": harness.Workload("numbers", workloads.by_number, "update"),
    "transform": harness.Workload(
        "transform", workloads.transform(workloads.Everything, workloads.RowFace, "EventTime"), "update"
    ),
}


def frame_of(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    """The query of that name."""
    workload = QUERIES[name]
    if name == "soak":
        return workload.build(harness.stream(spark, folder / name / "source0"))
    return workload.build(*(harness.ticks(spark, (workload.name, side)) for side in range(workload.sources)))


def launch(spark: SparkSession, folder: Path, checkpoints: str, name: str, milliseconds: int) -> StreamingQuery:
    """Starts one query; its batches go to files."""
    output = folder / name / "output"
    output.mkdir(parents=True, exist_ok=True)

    def write(batch: DataFrame, number: int) -> None:
        rows = Counter(harness.shown(row) for row in batch.collect())
        draft = output / f"{number}.draft"
        draft.write_text(json.dumps(rows), encoding="utf-8")
        draft.rename(output / f"{number}.json")
        print(name, number, flush=True)

    frame = frame_of(spark, folder, name)
    if milliseconds:
        frame = frame.where(SLOW.format(milliseconds))
    writer = frame.writeStream.outputMode(QUERIES[name].mode).foreachBatch(write)
    writer = writer.option("checkpointLocation", f"{checkpoints}/{name}/checkpoint")
    return (writer.trigger(availableNow=True) if name == "soak" else writer).start()


def enough(query: StreamingQuery, output: Path, batches: int) -> None:
    """Waits for the batches that are wanted; raises what the query failed with before it had them."""
    last = output / f"{batches - 1}.json"
    while query.isActive and not last.exists():
        time.sleep(0.1)
    # Spark interrupts a batch to stop, and takes what HDFS makes of that ("Failed to shutdown streamer") for a failure.
    with contextlib.suppress(StreamingQueryException if last.exists() else ()):
        query.stop()
        query.awaitTermination()


def soak(query: StreamingQuery, checkpoint: Path) -> None:
    """Prints, every few batches, what the query holds."""
    last = -10
    while query.isActive:
        progress = query.lastProgress
        if progress is None or progress["batchId"] < last + 10 or not progress["stateOperators"]:
            time.sleep(0.1)
            continue
        last, state = progress["batchId"], progress["stateOperators"][0]
        sample = {
            "batch": last,
            "rows": state["numRowsTotal"],
            "memory": state["memoryUsedBytes"],
            "files": sum(1 for path in (checkpoint / "state").rglob("*") if path.is_file()),
            "metrics": dict(state["customMetrics"]),
        }
        print("sample", json.dumps(sample), flush=True)


def main() -> None:
    folder, provider, master, conf, *names = sys.argv[1:]
    given = json.loads(conf)
    milliseconds, batches = int(given.pop("slow", 0)), int(given.pop("batches", BATCHES))
    checkpoints = given.pop("checkpoint", folder)
    spark = harness.session(master, given)
    print("jvm", spark._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    # Spark gives a query's Python workers ten seconds to start: nothing else is to run meanwhile.
    for together in ([name for name in names if name != "transform"], [name for name in names if name == "transform"]):
        queries = []
        for name in together:
            with harness.settings(spark, {**QUERIES[name].conf, harness.STORE + "providerClass": provider}):
                queries.append(launch(spark, Path(folder), checkpoints, name, milliseconds))
        for name, query in zip(together, queries, strict=True):
            if name == "soak":
                soak(query, Path(folder) / name / "checkpoint")
                query.awaitTermination()
            else:
                enough(query, Path(folder) / name / "output", batches // 2 if name == "transform" else batches)
    print("end", flush=True)
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
