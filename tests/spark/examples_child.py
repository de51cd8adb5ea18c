"""A Spark driver that runs the operators of examples/ while everything happens to them that may; see child.py.

Use: examples_child.py FOLDER PROVIDER MASTER JSON-of-settings NAME...

Among Spark's settings is seed: of the rows, of where they are cut into batches, and of what goes wrong. Tasks raise,
and kill their own worker, in the middle of a batch, in the middle of a commit and behind it; queries are stopped and
started again; arenas are removed between batches. Lines it prints: "jvm PID", "NAME BATCH" when a batch has been
written, "end". What went wrong is in FOLDER/events, a word a line. A query's rows, batch by batch, are in
FOLDER/NAME/output.pickle.
"""

import concurrent.futures
import importlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from spark import harness

import quire
from quire.checkpoint import fault

# Example, its operator, and the column that it is given by.
EXAMPLES = {
    "sessions": ("Sessions", "user"),
    "interval_join": ("IntervalJoin", "key"),
    "top_k": ("TopK", "key"),
    "deduplicate": ("Deduplicate", "id"),
    "windowed_aggregate": ("WindowedAggregate", "group"),
    "window_join": ("WindowJoin", "key"),
}
# How likely it is that a task is hit at each of the places below, in its first two attempts.
LIKELY = 0.06
COMMIT_POINTS = ("commit.start", "commit.packed", "commit.durable", "commit.done")


def input_of(name: str, seed: int) -> tuple[ModuleType, list[dict[str, Any]]]:
    """An example and the rows that it is given."""
    module = importlib.import_module(name)
    return module, module.generate(random.Random(f"{seed} {name}"), 240)


class Hit(Exception):
    """What happens to tasks."""


class Trouble:
    """Decides what goes wrong in the tasks of a query."""

    def __init__(self, name: str, seed: int, events: Path) -> None:
        self.name, self.seed, self.events = name, seed, events

    def at(self, place: str) -> None:
        """Raises, ends the process, or goes on, as the seed says for this attempt of the task."""
        context = TaskContext.get()
        assert context is not None
        attempt, batch = context.attemptNumber(), context.getLocalProperty("streaming.sql.batchId")
        rng = random.Random(f"{self.seed} {self.name} {batch} {context.partitionId()} {attempt} {place}")
        if attempt < 2 and rng.random() < LIKELY:
            fatal = rng.random() < 0.5
            self.note(f"{'kill' if fatal else 'raise'}:{place}")
            if fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Hit(place)

    def note(self, event: str) -> None:
        """Writes down what happens."""
        with self.events.open("a", encoding="utf-8") as file:
            file.write(f"{event}\n")


def disturbed(kind: type[quire.Operator], trouble: Trouble) -> quire.Operator:
    """The operator, with trouble before, within and after what it does."""

    class Disturbed(kind):  # type: ignore[misc,valid-type]
        def open(self, state: quire.State) -> None:
            fault.hook = lambda point: trouble.at(point) if point in COMMIT_POINTS else None
            trouble.at("open")
            super().open(state)

        def process(self, batch: pa.RecordBatch) -> Any:
            found = super().process(batch)
            trouble.at("process")
            return found

        def flush(self) -> Any:
            found = super().flush()
            trouble.at("flush")
            return found

    return Disturbed()


def behind(trouble: Trouble) -> Any:
    """A step after the operator: when it sees rows, the state has been committed."""

    def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            trouble.at("behind")
            yield batch

    return passed


class Run:
    """One example from its first row to its last."""

    def __init__(self, spark: SparkSession, folder: Path, name: str, seed: int) -> None:
        self.spark, self.name = spark, name
        self.folder, self.events = folder / name, folder / "events"
        self.rng = random.Random(f"{seed} run {name}")
        self.output: dict[int, list[dict[str, Any]]] = {}
        self.module, self.rows = input_of(name, seed)
        self.trouble = Trouble(name, seed, self.events)

    def cuts(self, edges: int) -> list[list[dict[str, Any]]]:
        """The rows in batches of any size, in no order within each, some of them empty."""
        shown = [json.loads(json.dumps(row, default=lambda time: time.isoformat())) for row in self.rows]
        places = [0, *sorted(self.rng.randint(0, len(shown)) for _ in range(edges)), len(shown)]
        parts = [shown[low:high] for low, high in itertools.pairwise(places)]
        return [self.rng.sample(part, len(part)) for part in parts]

    def frame(self) -> DataFrame:
        """The query."""
        operator, by = EXAMPLES[self.name]
        reader = self.spark.readStream.schema(from_arrow_schema(self.module.INPUT)).option("maxFilesPerTrigger", 1)
        made = quire.stateful(
            reader.json(str(self.folder / "in")),
            disturbed(getattr(self.module, operator), self.trouble),
            by=by,
            partitions=2,
            name=operator,
            mode=self.rng.choice(("delta", "pages", "auto")),
            bases_every=2,
            arena_dir=str(self.folder / "arenas"),
        )
        return made.mapInArrow(behind(self.trouble), made.schema)

    def keep(self, batch: DataFrame, number: int) -> None:
        """Takes a batch's rows in place of those that an earlier run of it gave."""
        self.output[number] = batch.toArrow().to_pylist()
        print(self.name, number, flush=True)
        if self.rng.random() < 0.3:
            self.trouble.note("arenas")
            shutil.rmtree(self.folder / "arenas", ignore_errors=True)

    def go(self) -> None:
        """Some batches, a stop at any moment, some more, and then the rest."""
        (self.folder / "in").mkdir(parents=True)
        files = self.cuts(4)
        for last, part in ((False, files[:3]), (True, files[3:])):
            harness.release(self.folder / "in", part)
            writer = self.frame().writeStream.foreachBatch(self.keep)
            writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
            query = (writer.trigger(availableNow=True) if last else writer).start()
            until = self.rng.randint(1, 2)
            while query.isActive and not last and len(self.output) < until:
                time.sleep(0.05)
            if not last:
                time.sleep(self.rng.uniform(0, 1))
                self.trouble.note("stop")
                query.stop()
            query.awaitTermination()
        (self.folder / "output.pickle").write_bytes(pickle.dumps(self.output))


def main() -> None:
    """All examples that are named, some at a time."""
    folder, _, master, conf, *names = sys.argv[1:]
    given = json.loads(conf)
    seed = int(given.pop("seed"))
    for name in (*names, "local_spark"):
        cloudpickle.register_pickle_by_value(importlib.import_module(name))
    spark = harness.session(master, given)
    print("jvm", spark._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(Run(spark, Path(folder), name, seed).go) for name in names]:
            done.result()
    print("end", flush=True)
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
