"""Moves the state of a Python operator to another number of partitions, while its query is stopped.

A key's partition is Spark's to say (the hash of the columns that ``stateful()`` had as ``by``), so Spark is asked. The
new partitions are written beside the old ones, as another *generation*, and count from the moment that the operator's
manifest names it: whatever goes wrong before leaves everything as it was.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from quire.checkpoint import Manager
from quire.checkpoint.storage import join, storage_for
from quire.pagemgr.errors import InvalidError, NotFoundError
from quire.statestore.read import OperatorState
from quire.structures import Map, OrderedMap, PageManager

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMITS_FOLDER = "commits"


def repartition(
    checkpoint: str,
    operator: str,
    partitions: int,
    *,
    spark: "SparkSession",
    least: Iterable[str] = (),
    drop: Iterable[str] = (),
) -> int:
    """Moves an operator's state; gives how many keys were moved. The query must not run.

    least  values that belong to no key, such as a watermark, of which the least of all partitions is given to each.
    drop   structures that are forgotten.
    """
    if isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
        raise InvalidError(f"partitions {partitions!r}: give a whole number from 1")
    found = OperatorState.find(checkpoint, operator)
    version = next_batch(checkpoint)
    if version is None:
        version = found.newest()
    olds: list[PageManager] = []
    news = [PageManager() for _ in range(partitions)]
    try:
        olds = [found.load(each, version) for each in range(found.manifest.partitions)]
        moved = _move(found, olds, news, spark, set(least), set(drop))
        _publish(found, news, version)
    finally:
        for pm in (*olds, *news):
            pm.close()
    return moved


def next_batch(checkpoint: str) -> int | None:
    """The batch that the query goes on with, by its log of commits; None if there is no such log."""
    storage, path = storage_for(checkpoint)
    try:
        names = [entry.name for entry in storage.list(join(path, COMMITS_FOLDER))]
    except NotFoundError:
        return None
    return max((int(name) for name in names if name.isdecimal()), default=-1) + 1


def _move(
    found: OperatorState,
    olds: list[PageManager],
    news: list[PageManager],
    spark: "SparkSession",
    least: set[str],
    drop: set[str],
) -> int:
    kinds = {name: kind for pm in olds for name, kind in pm.sets().items()}
    unknown = sorted((least | drop) - kinds.keys())
    if unknown:
        raise NotFoundError(f"{found.name!r} keeps no {', '.join(unknown)}: there are {', '.join(sorted(kinds))}")
    moved = 0
    for name in sorted(kinds.keys() - drop):
        sources = [_opened(pm, name, kinds[name]) for pm in olds if name in pm.sets()]
        if name in least:
            _give_least(name, sources, news)
        elif all(_is_splittable(source, found.manifest.by) for source in sources):
            for source in sources:
                moved += _split(source, found, news, spark)
        elif any(len(source) for source in sources):
            raise InvalidError(
                f"{name!r} of {found.name!r} does not have {', '.join(found.manifest.by)} in its keys, so nothing says "
                f"which partition its records belong to: --drop {name} forgets it, --least {name} gives a value's "
                "least to all partitions"
            )
    return moved


def _opened(pm: PageManager, name: str, kind: str) -> Any:
    if kind == "map":
        return pm.map(name)
    return pm.ordered_map(name) if kind == "ordered_map" else pm.list(name)


def _is_splittable(source: Any, by: list[str]) -> bool:
    return isinstance(source, Map) and source.schema is not None and set(by) <= set(source.schema.key.names)


def _give_least(name: str, sources: list[Any], news: list[PageManager]) -> None:
    values = []
    for source in sources:
        if not isinstance(source, Map) or source.schema is None or len(source) > 1 or len(source.schema.value) != 1:
            raise InvalidError(f"{name!r} is no single value of one column, of which there could be a least")
        values += list(source.values())
    if not values:
        return
    for pm in news:
        made = pm.map(name, sources[0].schema)
        made[None] = min(values)


def _split(source: Map, found: OperatorState, news: list[PageManager], spark: "SparkSession") -> int:
    assert source.schema is not None
    names, by = source.schema.key.names, found.manifest.by
    targets: list[Map] = [
        pm.ordered_map(source.name, source.schema)
        if isinstance(source, OrderedMap)
        else pm.map(source.name, source.schema)
        for pm in news
    ]
    moved = 0
    for batch in source.to_batches():
        keys = pa.table(batch).select(names)
        lists = source.get_lists(keys if len(names) > 1 else keys[0])
        places = partitions_of(keys.select(by), found.manifest.types, len(news), spark)
        for number, target in enumerate(targets):
            chosen = pc.equal(places, number)
            rows = keys.filter(chosen)
            if rows.num_rows:
                target.put_lists(rows if len(names) > 1 else rows[0], lists.filter(chosen))
                moved += rows.num_rows
    return moved


def partitions_of(keys: pa.Table, types: list[str], partitions: int, spark: "SparkSession") -> pa.Array:
    """Which partition ``repartition(partitions, *keys)`` puts each row in. types: of the columns, in Spark's words."""
    from pyspark.sql import functions as F

    frame = spark.createDataFrame(keys.append_column("__row", pa.array(range(keys.num_rows), pa.int64())))
    columns = [F.col(f"`{name}`").cast(kind) for name, kind in zip(keys.column_names, types, strict=True)]
    place = F.pmod(F.hash(*columns), F.lit(partitions)).cast("long").alias("place")
    table = frame.select("__row", place).toArrow().sort_by("__row")
    return table["place"].combine_chunks()


def _publish(found: OperatorState, news: list[PageManager], version: int) -> None:
    generation = found.manifest.generation + 1
    for number, pm in enumerate(news):
        with Manager(found.folder, generation, number, storage=found.storage) as manager:
            manager.write_version(pm, version)
    renewed = replace(found.manifest, partitions=len(news), first_batch=version, generation=generation)
    renewed.write(found.storage, found.folder, replace=True)
