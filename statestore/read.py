"""Reading the state of Python operators from a checkpoint, while the query runs or afterwards."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire.checkpoint.reader import MANIFEST, OPERATORS_FOLDER, Listing, Store, StoreId
from quire.checkpoint.storage import Storage, join, storage_for
from quire.pagemgr.errors import InvalidError, NotFoundError
from quire.structures import PageManager

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class OperatorState:
    """The state that an operator has in a checkpoint, as its manifest describes it."""

    storage: Storage
    folder: str
    name: str
    by: tuple[str, ...]
    partitions: int
    first_batch: int

    @staticmethod
    def find(checkpoint: str, name: str) -> "OperatorState":
        """The operator of that name in a query's checkpoint."""
        storage, path = storage_for(checkpoint)
        folder = join(join(path, OPERATORS_FOLDER), name)
        try:
            with storage.open(join(folder, MANIFEST)) as stream:
                found = json.loads(stream.read())
        except NotFoundError as error:
            names = operators(checkpoint)
            there = f"there are {', '.join(names)}" if names else "it has none that Quire wrote"
            raise NotFoundError(f"{storage.display(path)} has no operator {name!r}: {there}") from error
        return OperatorState(
            storage, folder, name, tuple(found["by"]), int(found["partitions"]), int(found["first_batch"])
        )

    def store(self, partition: int) -> Store:
        """The checkpoint of a partition."""
        return Store(self.storage, join(self.folder, f"state/0/{partition}"), StoreId(0, partition), self.name)

    def newest(self) -> int:
        """The newest version that every partition has."""
        numbers = []
        for partition in range(self.partitions):
            try:
                listing = self.store(partition).listing()
            except NotFoundError:
                listing = Listing([], [])
            numbers.append(max((version.number for version in listing.versions), default=self.first_batch))
        return min(numbers)

    def load(self, partition: int, version: int) -> PageManager:
        """The state of a partition at a version."""
        if version == self.first_batch:
            return PageManager()
        store = self.store(partition)
        wanted = store.listing().last(version)
        if wanted is None:
            raise NotFoundError(f"{store.location} has no version {version}: {_there(store)}")
        return store.load(wanted.number, wanted.id, repair=True)


def _there(store: Store) -> str:
    versions = store.versions()
    return f"there are {versions[0].number} to {versions[-1].number}" if versions else "there is none"


def operators(checkpoint: str) -> list[str]:
    """The names of the Python operators that have state in a checkpoint."""
    storage, path = storage_for(checkpoint)
    try:
        return [entry.name for entry in storage.list(join(path, OPERATORS_FOLDER)) if entry.is_dir]
    except NotFoundError:
        return []


def read_state(
    checkpoint: str,
    operator: str,
    name: str | None = None,
    version: int | None = None,
    spark: "SparkSession | None" = None,
) -> "pa.Table | DataFrame":
    """What an operator keeps, of all partitions: an Arrow table; with a session, a Spark DataFrame.

    checkpoint  of the query: a path or URL, as ``option("checkpointLocation", ...)`` was given it.
    operator    its name: that of its class, unless ``stateful()`` was given another.
    name        of the structure that it declared; may be left out if there is only one.
    version     version n is what batch n - 1 left; by default the newest that all partitions have.

    A map gives a row for each key and value, in the columns of both; a list or queue its values in order, partition by
    partition. A query that runs meanwhile is not disturbed.

    >>> quire.read_state("/data/counts", "Count").to_pandas()  # doctest: +SKIP
    """
    found = OperatorState.find(checkpoint, operator)
    number = found.newest() if version is None else version
    if isinstance(number, bool) or not isinstance(number, int) or number < found.first_batch:
        raise InvalidError(
            f"version {version!r}: give a whole number from {found.first_batch}, the batch that {operator!r} began with"
        )
    if spark is None:
        tables = [table for table in (_table(found, each, number, name) for each in range(found.partitions)) if table]
        if not tables:
            raise NotFoundError(f"version {number} of {operator!r} keeps nothing yet")
        return pa.concat_tables(tables)
    return _frame(spark, found, number, name, checkpoint)


def _table(found: OperatorState, partition: int, version: int, name: str | None) -> pa.Table | None:
    with found.load(partition, version) as pm:
        sets = pm.sets()
        if not sets:
            return None
        if name is None and len(sets) > 1:
            raise InvalidError(f"{found.name!r} keeps several structures: give the name of one: {', '.join(sets)}")
        chosen = next(iter(sets)) if name is None else name
        if chosen not in sets:
            raise NotFoundError(f"{found.name!r} keeps no {chosen!r}: there are {', '.join(sets)}")
        kind = sets[chosen]
        if kind == "map":
            return pm.map(chosen).to_rows()
        if kind == "ordered_map":
            return pm.ordered_map(chosen).to_rows()
        return pm.list(chosen).to_table()


def _frame(spark: "SparkSession", found: OperatorState, version: int, name: str | None, checkpoint: str) -> "DataFrame":
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = next((t.schema for each in range(found.partitions) if (t := _table(found, each, version, name))), None)
    if schema is None:
        raise NotFoundError(f"version {version} of {found.name!r} keeps nothing yet")
    operator = found.name

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        source = OperatorState.find(checkpoint, operator)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                table: Any = _table(source, partition, version, name)
                if table is not None:
                    yield from table.to_batches()

    ids = spark.range(0, found.partitions, 1, found.partitions)
    return ids.mapInArrow(read, from_arrow_schema(schema))
