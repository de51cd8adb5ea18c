"""Makes an archive of the classes that a Spark driver loads, which the tests' drivers then map instead of loading them.

Loading and verifying them is half of what a driver costs before its first batch, and the tests start a hundred drivers.
A driver without the archive, or with another class path, works as ever.

Use: share_classes.py FILE
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

import quire


def main(file: Path) -> None:
    """Runs a small query from a session's start to its end, and has the JVM leave its classes in the file."""
    options = f"-XX:ArchiveClassesAtExit={file} -Xlog:disable -Xlog:all=error:stderr"
    with tempfile.TemporaryDirectory() as folder:
        source, checkpoint = Path(folder, "source"), str(Path(folder, "checkpoint"))
        source.mkdir()
        (source / "rows.json").write_text('{"time": "2026-01-01T00:00:00", "key": "a", "value": 1}\n')
        builder = SparkSession.builder.master("local[2]").config("spark.driver.extraJavaOptions", options)
        spark = quire.configure(builder.config("spark.sql.shuffle.partitions", "2")).getOrCreate()
        jvm = spark.sparkContext._gateway.proc
        rows = spark.readStream.schema("time timestamp, key string, value long").json(str(source))
        counts = rows.withWatermark("time", "1 minute").groupBy("key", "time").agg({"value": "sum"})
        counts.writeStream.outputMode("update").option("checkpointLocation", checkpoint).trigger(
            availableNow=True
        ).foreachBatch(lambda batch, _: batch.collect()).start().awaitTermination()
        spark.read.format("statestore").load(checkpoint).collect()
        spark.stop()
        spark.sparkContext._gateway.shutdown()
        jvm.stdin.close()
        jvm.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
