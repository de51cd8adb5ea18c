"""Stateful operators written in Python: what an author writes, and what runs it on Arrow batches.

An operator sees the rows of its partition as Arrow batches, keeps what it likes in structures on pages, and gives
Arrow batches back. ``Operator.run`` runs one without Spark; ``quire.stateful`` makes one a step of a DataFrame.
"""

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from quire.pagemgr.errors import InvalidError, MismatchError
from quire.statestore.state import State
from quire.structures import PageManager, ddl

# What process() and flush() may give: nothing, rows, or several of such.
Output: TypeAlias = Any
# Output beyond so many bytes waits for the commit in a file.
OUTPUT_BYTES_IN_MEMORY = 64 << 20


class Operator(ABC):
    """A step that keeps state from batch to batch; to be derived from.

    output     the columns it gives, as an Arrow schema or as DDL text such as ``"user string, n bigint"``.
    batch      the number of the micro-batch that is running; 0 without Spark.
    partition  which part of the keys this is.

    >>> import pyarrow as pa, quire
    >>> class Count(quire.Operator):
    ...     output = "user string, n bigint"
    ...
    ...     def open(self, state):
    ...         self.counts = state.map("counts", key="user string", value="n bigint")
    ...
    ...     def process(self, batch):
    ...         return self.counts.add_many(batch["user"], pa.array([1] * len(batch)))
    >>> Count().run([pa.record_batch({"user": ["al", "bo", "al"]})]).to_pylist()
    [{'user': 'al', 'n': 2}, {'user': 'bo', 'n': 1}]

    An operator is pickled, sent to the tasks and opened there for each batch: what it is to remember belongs into its
    state, not into its attributes. Of what ``process`` raises, nothing gets into the state.
    """

    output: Any = None
    batch: int = 0
    partition: int = 0

    @abstractmethod
    def open(self, state: State) -> None:
        """Declares what it keeps, as ``self.counts = state.map(...)``; called before each micro-batch."""

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Output:
        """Takes some rows of the micro-batch; gives a record batch, a table, several of these, or None.

        Columns of timestamps are in UTC, whatever the session's time zone is.
        """

    def flush(self) -> Output:  # noqa: B027
        """Called when all rows of the micro-batch were processed; gives rows as ``process`` does."""

    def close(self) -> None:  # noqa: B027
        """Called at the end, whether it went well or not."""

    def run(self, batches: Iterable[pa.RecordBatch], pm: PageManager | None = None) -> pa.Table:
        """Runs the operator on the rows of one micro-batch without Spark, for tests; gives all its output.

        pm: the pages to keep its state in from one call to the next, which is committed unless something is raised, and
        then aborted, with all else in it that was not committed; by default the state begins empty and is thrown away.

        >>> import pyarrow as pa, quire
        >>> class Total(quire.Operator):
        ...     output = "total bigint"
        ...
        ...     def open(self, state):
        ...         self.total = state.value("total", "bigint", default=0)
        ...
        ...     def process(self, batch):
        ...         self.total.set(self.total.get() + sum(batch["n"].to_pylist()))
        ...
        ...     def flush(self):
        ...         return pa.record_batch({"total": [self.total.get()]})
        >>> with quire.PageManager() as pm:
        ...     for _ in range(2):
        ...         print(Total().run([pa.record_batch({"n": [1, 2]})], pm).to_pylist())
        [{'total': 3}]
        [{'total': 6}]
        """
        schema = output_schema(self)
        if isinstance(batches, (pa.RecordBatch, pa.Table)) or not isinstance(batches, Iterable):
            raise InvalidError(f"run() takes a list of Arrow record batches, not {type(batches).__name__}")
        if pm is not None and not isinstance(pm, PageManager):
            raise InvalidError(f"run() keeps its state in a quire.PageManager, not {type(pm).__name__}")
        with contextlib.ExitStack() as stack:
            pages = stack.enter_context(PageManager()) if pm is None else pm
            try:
                table = pa.Table.from_batches(list(execute(self, pages, batches)), schema)
            except BaseException:
                pages.abort()
                raise
            pages.commit()
        return table


def output_schema(operator: Operator) -> pa.Schema:
    """The columns that an operator gives."""
    name, output = type(operator).__name__, operator.output
    if isinstance(output, pa.Schema):
        return output
    if isinstance(output, str):
        return ddl.parse(output)
    raise InvalidError(
        f"{name}.output is {output!r}: give the columns that it gives, as an Arrow schema or as DDL text such as "
        "'user string, n bigint'"
    )


def execute(operator: Operator, pm: PageManager, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """An operator's output for the rows of one micro-batch, in its declared columns."""
    schema, name = output_schema(operator), type(operator).__name__
    state = State(pm)
    try:
        operator.open(state)
        for batch in batches:
            if not isinstance(batch, pa.RecordBatch):
                raise InvalidError(f"an operator is run on Arrow record batches, not on {type(batch).__name__}")
            if batch.num_rows:
                yield from fitted(operator.process(in_utc(batch)), schema, f"{name}.process()")
        yield from fitted(operator.flush(), schema, f"{name}.flush()")
    finally:
        operator.close()


def in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its times in UTC, as state and output have them: Spark sends them in the session's time zone."""
    for place, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz not in (None, "UTC"):
            kind = pa.timestamp(field.type.unit, "UTC")
            batch = batch.set_column(place, field.with_type(kind), batch.column(place).cast(kind))
    return batch


def fitted(output: Output, schema: pa.Schema, source: str) -> Iterator[pa.RecordBatch]:
    """What an operator gave, as batches of its declared columns; says which column does not fit."""
    if output is None:
        return
    if isinstance(output, pa.RecordBatch):
        if output.num_rows:
            yield pa.RecordBatch.from_arrays([_column(output, field, source) for field in schema], schema=schema)
        return
    if isinstance(output, pa.Table):
        yield from fitted(output.to_batches(), schema, source)
        return
    if not isinstance(output, (list, tuple, Iterator)):
        raise InvalidError(
            f"{source} gave {type(output).__name__}: give an Arrow record batch, a table, several of these, or None"
        )
    for each in output:
        yield from fitted(each, schema, source)


def _column(batch: pa.RecordBatch, field: pa.Field, source: str) -> pa.Array:
    places = batch.schema.get_all_field_indices(field.name)
    if len(places) != 1:
        has = ", ".join(batch.schema.names)
        count = "no column" if not places else f"{len(places)} columns"
        raise MismatchError(f"{source} gave {count} {field.name!r}, which its output has; the batch has {has}")
    column = batch.column(places[0])
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except pa.ArrowException as error:
            raise MismatchError(
                f"{source} gave column {field.name!r} as {column.type}, which does not fit {field.type}: {error}"
            ) from error
    if not field.nullable and column.null_count:
        raise MismatchError(f"{source} gave nulls in column {field.name!r}, which its output says is not null")
    return column


class Outbox:
    """Output that waits for the commit: in memory as long as it is small, then in a file."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file: Any = None
        self._writer: Any = None
        self.rows = 0

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batches.clear()
        if self._writer is not None:
            self._writer.close()
            self._file.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Keeps a batch."""
        self.rows += batch.num_rows
        if self._writer is None and self._bytes + batch.nbytes > OUTPUT_BYTES_IN_MEMORY:
            self._file = tempfile.TemporaryFile(prefix="quire-output-")  # noqa: SIM115, closed by __exit__
            self._writer = pa.ipc.new_stream(self._file, self._schema)
        if self._writer is None:
            self._bytes += batch.nbytes
            self._batches.append(batch)
        else:
            self._writer.write_batch(batch)

    def take(self) -> Iterator[pa.RecordBatch]:
        """All batches in order, once."""
        yield from self._batches
        self._batches.clear()
        if self._writer is not None:
            self._writer.close()
            self._file.seek(0, os.SEEK_SET)
            yield from pa.ipc.open_stream(self._file)
