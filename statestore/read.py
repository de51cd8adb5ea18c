"""Reading the state of Python operators from a checkpoint, while the query runs or afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire.checkpoint.reader import OPERATORS_FOLDER, Listing, Store, StoreId, Version
from quire.checkpoint.storage import Storage, join, storage_for
from quire.pagemgr.errors import InvalidError, NotFoundError
from quire.statestore.manifest import Manifest
from quire.structures import PageManager

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class OperatorState:
    """The state that an operator has in a checkpoint, as its manifest describes it."""

    storage: Storage
    folder: str
    manifest: Manifest

    @staticmethod
    def find(checkpoint: str, name: str) -> "OperatorState":
        """The operator of that name in a query's checkpoint."""
        storage, path = storage_for(checkpoint)
        folder = join(join(path, OPERATORS_FOLDER), name)
        try:
            manifest = Manifest.read(storage, folder)
        except NotFoundError as error:
            names = operators(checkpoint)
            there = f"there are {', '.join(names)}" if names else "it has none that Quire wrote"
            raise NotFoundError(f"{storage.display(path)} has no operator {name!r}: {there}") from error
        return OperatorState(storage, folder, manifest)

    @property
    def name(self) -> str:
        """The operator's."""
        return self.manifest.name

    def store(self, partition: int) -> Store:
        """The checkpoint of a partition."""
        number = self.manifest.generation
        folder = join(self.folder, f"state/{number}/{partition}")
        return Store(self.storage, folder, StoreId(number, partition), self.manifest.name)

    def newest(self) -> int:
        """The newest version that every partition has."""
        numbers = []
        for partition in range(self.manifest.partitions):
            try:
                listing = self.store(partition).listing()
            except NotFoundError:
                listing = Listing([], [])
            numbers.append(max((version.number for version in listing.versions), default=self.manifest.first_batch))
        return min(numbers)

    def load(self, partition: int, version: int) -> PageManager:
        """The state of a partition at a version."""
        store = self.store(partition)
        try:
            listing = store.listing()
        except NotFoundError:
            listing = Listing([], [])
        wanted = listing.last(version)
        if wanted is not None:
            return store.load(wanted.number, wanted.id, repair=True)
        if version != self.manifest.first_batch:
            raise NotFoundError(f"{store.location} has no version {version}: {_there(store)}")
        return store.load(version, "") if Version(version) in listing.bases else PageManager()


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
    if isinstance(number, bool) or not isinstance(number, int) or number < found.manifest.first_batch:
        raise InvalidError(
            f"version {version!r}: give a whole number from {found.manifest.first_batch}, the batch that {operator!r} "
            "began with"
        )
    if spark is None:
        tables = [table for table in _tables(found, number, name) if table is not None]
        if not tables:
            raise NotFoundError(f"version {number} of {operator!r} keeps nothing yet")
        return pa.concat_tables(tables)
    return _frame(spark, found, number, name, checkpoint)


def _tables(found: OperatorState, version: int, name: str | None) -> Iterator[pa.Table | None]:
    return (_table(found, partition, version, name) for partition in range(found.manifest.partitions))


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

    schema = next((table.schema for table in _tables(found, version, name) if table is not None), None)
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

    ids = spark.range(0, found.manifest.partitions, 1, found.manifest.partitions)
    return ids.mapInArrow(read, from_arrow_schema(schema))
