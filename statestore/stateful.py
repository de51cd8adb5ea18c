"""Operators in Python as steps of Spark's DataFrames.

``stateful(df, operator, by)`` brings rows with equal keys together and hands each partition to the operator in a
Python worker. The worker finds the partition's state on the host, or in the checkpoint, commits the next version, and
only then lets the output go. Nothing of this needs the driver: what a task must know (the query's checkpoint, the
number of the batch) comes with it as local properties.

A micro-batch must reach every partition, even one that has no rows at all, or versions would have gaps. Spark's
optimizer takes a repartition of nothing away, unless something lies between that it does not look through: an
observation, which also tells how many rows came.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire.checkpoint.reader import MANIFEST, OPERATORS_FOLDER
from quire.checkpoint.storage import join, storage_for
from quire.pagemgr.errors import InvalidError, MismatchError, NotFoundError
from quire.pagemgr.page_manager import parse_bytes
from quire.statestore.arenas import Arenas
from quire.statestore.manifest import Manifest
from quire.statestore.operator import Operator, Outbox, execute, output_schema
from quire.statestore.partition import Measured, Partition, Place
from quire.statestore.read import operators
from quire.structures import PageManager

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# What the tasks of a streaming query know: by Spark, and the last by Quire's extension.
BATCH_PROPERTY = "streaming.sql.batchId"
QUERY_PROPERTY = "sql.streaming.queryId"
RUN_PROPERTY = "spark.jobGroup.id"
CHECKPOINT_PROPERTY = "quire.checkpoint"

MODES = ("delta", "pages", "auto")

# A column that Quire's extension adds to what a task is given, with a row before all others that has the number of the
# partition there, and nothing else: behind a coalesce() or a union() the task has another number.
PARTITION = "__quire_partition"

# The column that carries what happened to the state, in a row of its own, from the tasks to the observation.
METRICS = "__quire"
METRICS_TYPE = pa.struct(
    [
        ("rows_out", pa.int64()),
        ("keys", pa.int64()),
        ("bytes", pa.int64()),
        ("written", pa.int64()),
        ("load_ms", pa.float64()),
        ("commit_ms", pa.float64()),
        ("loaded", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Step:
    """An operator with all that its tasks must know."""

    operator: Operator
    name: str
    by: tuple[str, ...]
    types: tuple[str, ...]
    partitions: int
    checkpoint: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def manifest(self, query: str) -> Manifest:
        """What the checkpoint is to say of the operator, before its first batch."""
        return Manifest(self.name, list(self.by), list(self.types), self.partitions, query=query)


@dataclass(frozen=True)
class Task:
    """What Spark says of a running task. batch: None outside of a streaming query."""

    number: int
    batch: int | None
    query: str
    run: str
    checkpoint: str | None

    @staticmethod
    def current() -> "Task":
        """The task that this worker runs."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise InvalidError("stateful() runs in Spark's tasks only: Operator.run() runs an operator without Spark")
        batch = context.getLocalProperty(BATCH_PROPERTY)
        return Task(
            context.partitionId(),
            None if batch is None else int(batch),
            context.getLocalProperty(QUERY_PROPERTY) or "",
            context.getLocalProperty(RUN_PROPERTY) or "",
            context.getLocalProperty(CHECKPOINT_PROPERTY),
        )


def told(batches: Iterable[pa.RecordBatch], task: Task) -> tuple[int, Iterator[pa.RecordBatch]]:
    """The number of the partition, and its rows, from what a task is given."""
    rest = iter(batches)
    first = next(rest, None)
    if first is not None and PARTITION in first.schema.names:
        number = first.column(PARTITION)[0].as_py()
        whole = (batch.drop_columns([PARTITION]) for batch in itertools.chain([first.slice(1)], rest))
        return number, (batch for batch in whole if batch.num_rows)
    if task.batch is not None:
        raise InvalidError(
            "stateful() in a streaming query needs the extension that tells its tasks their partitions: make the "
            "session with quire.configure()"
        )
    return task.number, rest if first is None else itertools.chain([first], rest)


def run_step(step: Step, given: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What a task does: the operator's output for a partition's rows, given once the state is safe."""
    task = Task.current()
    number, batches = told(given, task)
    operator = step.operator
    operator.partition, operator.batch = number, task.batch or 0
    schema = output_schema(operator)
    with Outbox(schema) as outbox:
        if task.batch is None:
            with PageManager(limit=step.options["limit"]) as pm:
                for batch in execute(operator, pm, batches):
                    outbox.add(batch)
            measured = Measured()
        else:
            place, first = open_place(step, task)
            partition = Partition(place, number, task.batch, first)
            with partition as pm:
                for batch in execute(operator, pm, batches):
                    outbox.add(batch)
                partition.commit()
            measured = partition.measured
        yield from with_metrics(outbox, schema, measured)


def with_metrics(outbox: Outbox, schema: pa.Schema, measured: Measured) -> Iterator[pa.RecordBatch]:
    """The output, with an empty column for the metrics; and the row that has them."""
    whole = schema.append(pa.field(METRICS, METRICS_TYPE))
    for batch in outbox.take():
        empty = pa.nulls(batch.num_rows, METRICS_TYPE)
        yield pa.RecordBatch.from_arrays([*batch.columns, empty], schema=whole)
    metrics = {
        "rows_out": outbox.rows,
        "keys": measured.keys,
        "bytes": measured.bytes,
        "written": measured.written,
        "load_ms": measured.load_seconds * 1000,
        "commit_ms": measured.commit_seconds * 1000,
        "loaded": 0 if measured.in_memory else 1,
    }
    blank = [pa.nulls(1, each.type) for each in schema]
    yield pa.RecordBatch.from_arrays([*blank, pa.array([metrics], METRICS_TYPE)], schema=_nullable(whole))


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([each.with_nullable(True) for each in schema])


def open_place(step: Step, task: Task) -> tuple[Place, int]:
    """Where the operator's state is, and the batch that it began with."""
    assert task.batch is not None
    root = step.checkpoint or task.checkpoint
    if root is None:
        raise InvalidError(
            f"operator {step.name!r} does not know the query's checkpoint: make the session with quire.configure(), "
            "which brings the extension that tells it, or give stateful() a checkpoint="
        )
    storage, path = storage_for(root)
    folder = join(join(path, OPERATORS_FOLDER), step.name)
    manifest = _manifest(root, folder, step, task)
    # A new generation of the partitions has arenas of its own.
    arenas = Arenas(storage.display(path), f"{step.name}.{manifest.generation}", step.options["arena_dir"])
    place = Place(
        storage,
        folder,
        arenas,
        step.options["mode"],
        step.options["limit"],
        step.options["bases_every"],
        step.options["retain"],
        manifest.generation,
    )
    return place, manifest.first_batch


def _manifest(root: str, folder: str, step: Step, task: Task) -> Manifest:
    """What the checkpoint says of the operator, written by its first task; refuses an operator that does not fit."""
    found = _read_manifest(root, folder, task.run)
    if found is None:
        _read_manifest.cache_clear()
        if task.batch:
            _refuse_late(root, folder, step, task)
        found = step.manifest(task.query).write(storage_for(root)[0], folder)
    # In a query's own checkpoint nobody else can be.
    if step.checkpoint is not None and found.query and task.query != found.query:
        raise MismatchError(
            f"checkpoint={step.checkpoint!r} has the state that operator {step.name!r} keeps for another query, of id "
            f"{found.query}; this one is {task.query}: give each query a checkpoint of its own"
        )
    if found.partitions != step.partitions:
        raise MismatchError(
            f"operator {step.name!r} has its state in {found.partitions} partitions and was given partitions="
            f"{step.partitions}: give {found.partitions}, or stop the query and move the state with "
            f"quire repartition {root} --operator {step.name} --partitions {step.partitions}"
        )
    has, given = _columns(found.by, found.types), _columns(step.by, step.types)
    if has != given:
        raise MismatchError(
            f"operator {step.name!r} has its state by {has}, not by {given}: keys would be looked for in the wrong "
            "partitions. Give the columns it had, or another name= for a new operator"
        )
    return found


def _refuse_late(root: str, folder: str, step: Step, task: Task) -> None:
    """Refuses to begin with nothing in the middle of a query: a state that has another name, or is gone, was there."""
    others = [name for name in operators(root) if name != step.name]
    there = f"There are {', '.join(map(repr, others))}: give name= if it is one of these. " if others else ""
    raise NotFoundError(
        f"the query is at batch {task.batch}, and its checkpoint has no {storage_for(root)[0].display(folder)}/"
        f"{MANIFEST}, which the first batch of operator {step.name!r} should have left. {there}If its files were "
        "removed, bring them back; an operator that is new needs a query with a new checkpoint"
    )


def _columns(names: Iterable[str], types: Iterable[str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in zip(names, types, strict=True))


@functools.lru_cache(maxsize=64)
def _read_manifest(root: str, folder: str, run: str) -> Manifest | None:
    """run: of the query, in which nothing changes it."""
    try:
        return Manifest.read(storage_for(root)[0], folder)
    except NotFoundError:
        return None


# ---------------------------------------------------------------------------------------------------- the driver


def stateful(
    df: "DataFrame",
    operator: Operator,
    by: "str | list[str]",
    *,
    partitions: int | None = None,
    name: str | None = None,
    checkpoint: str | None = None,
    mode: str = "delta",
    limit: int | str | None = None,
    arena_dir: str | None = None,
    bases_every: int = 10,
    retain: int = 100,
) -> "DataFrame":
    """A DataFrame of what the operator gives for the rows of another, streaming or not.

    by           the column, or columns, by which rows belong together: those with equal values meet in one partition.
    partitions   how many there are, for good; by default ``spark.sql.shuffle.partitions``.
    name         of the operator in the query's checkpoint, by default its class's; one query cannot have two of a name.
    checkpoint   where to keep the state; by default in the query's own checkpoint, which the session knows that
                 ``quire.configure()`` made.
    mode         what a commit writes: "delta", changed records; "pages", changed pages; "auto", whichever is less.
    limit        bytes of memory for the state of a partition, such as ``"512m"``.
    arena_dir    a folder on each host for the state of its partitions; by default in the host's shared memory.
    bases_every  after so many batches a partition's whole state is written, beside the batches that follow.
    retain       how many batches back the state can still be read, and the query be restarted from.

    >>> counts = quire.stateful(clicks, Count(), by="user")  # doctest: +SKIP
    >>> counts.writeStream.option("checkpointLocation", "/data/counts").start()  # doctest: +SKIP

    In a batch DataFrame the state begins empty and is thrown away. In a streaming one, each batch shows what happened
    in ``query.recentProgress``, under ``observedMetrics`` and the operator's name.
    """
    from py4j.java_gateway import JavaObject
    from pyspark import cloudpickle
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    if not isinstance(getattr(df, "_jdf", None), JavaObject):
        raise InvalidError(
            f"stateful() takes a DataFrame of a Spark session in this process, not {type(df).__name__} of "
            f"{type(df).__module__}"
        )
    if isinstance(operator, type):
        called = operator.__name__
        raise InvalidError(f"stateful() takes a quire.Operator, not the class {called}: write {called}()")
    if not isinstance(operator, Operator):
        raise InvalidError(f"stateful() takes a quire.Operator, not {type(operator).__name__}")
    keys = [by] if isinstance(by, str) else list(by) if isinstance(by, (list, tuple)) else [by]
    missing = [key for key in keys if not isinstance(key, str) or key not in df.columns]
    if not keys or missing:
        shown, has = ", ".join(map(str, missing)) or "nothing", ", ".join(df.columns)
        raise InvalidError(f"by {shown}: give names of columns of the DataFrame, which has {has}")
    odd = [name for name in df.columns if "." in name or "`" in name]
    if odd:
        raise InvalidError(
            f"column {odd[0]!r}: Spark hands no names with . or ` to Python; use withColumnRenamed() first"
        )
    if mode not in MODES:
        raise InvalidError(f"mode {mode!r}: give one of {', '.join(map(repr, MODES))}")
    shuffled = df.sparkSession.conf.get("spark.sql.shuffle.partitions")
    count = partitions if partitions is not None else int(shuffled or 200)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1 << 20:
        raise InvalidError(f"partitions {count!r}: give a whole number from 1")
    for option, value in (("bases_every", bases_every), ("retain", retain)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidError(f"{option} {value!r}: give a whole number from 1")
    parse_bytes(limit)
    chosen = name if name is not None else type(operator).__name__
    if not chosen or not chosen.replace("_", "").replace("-", "").isalnum():
        raise InvalidError(f"name {chosen!r}: give letters, digits, - and _: it names a folder of the checkpoint")
    if f"quire_{chosen}(" in df._jdf.queryExecution().logical().toString():
        raise InvalidError(f"the DataFrame has an operator {chosen!r} already: give one of the two another name=")
    schema = output_schema(operator)
    try:
        cloudpickle.dumps(operator)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InvalidError(
            f"operator {chosen!r} cannot be sent to Spark's workers: {error}. Give a new {type(operator).__name__}(), "
            "not one that has run; what cannot be pickled is made in open()"
        ) from error
    options = {"mode": mode, "limit": limit, "arena_dir": arena_dir, "bases_every": bases_every, "retain": retain}
    types = tuple(df.schema[key].dataType.simpleString() for key in keys)
    step = Step(operator, chosen, tuple(keys), types, count, checkpoint, options)
    whole = from_arrow_schema(_nullable(schema.append(pa.field(METRICS, METRICS_TYPE))))
    came = df.observe(f"{chosen}.input", F.count(F.lit(1)).alias("rows"))
    gone = came.repartition(count, *keys).mapInArrow(_function(step), whole)
    return gone.observe(chosen, *_observed()).where(F.col(METRICS).isNull()).drop(METRICS)


def _function(step: Step) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What Spark calls in each task. Its name shows in the plan."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return run_step(step, batches)

    run.__name__ = run.__qualname__ = f"quire_{step.name}"
    return run


def _observed() -> "list[Column]":
    from pyspark.sql import functions as F

    sums = {name: f"{METRICS}.{name}" for name in ("rows_out", "keys", "bytes", "written", "loaded")}
    greatest = {name: f"{METRICS}.{name}" for name in ("load_ms", "commit_ms")}
    return [F.sum(path).alias(name) for name, path in sums.items()] + [
        F.max(path).alias(name) for name, path in greatest.items()
    ]
