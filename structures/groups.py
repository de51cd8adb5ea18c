"""Rows of a bulk call by their keys: which belong together, and what becomes of the values of each key.

All of it works on whole columns. A group is the rows of one key; groups are numbered in the order of their first rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quire.pagemgr.errors import InvalidError
from quire.structures.schema import family

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
# Decimals that can be added up without a look at how many they are.
DECIMAL_DIGITS_MAX = 57
TIMES = ("date", "time", "timestamp", "timestamp with zone", "duration")
ADDED = ("integer", "float", "decimal")
COMPARED = (*ADDED, *TIMES, "text", "bytes", "fixed bytes")

Indexes: TypeAlias = npt.NDArray[np.int64]
# Makes the new values of groups 0, 1, 2... out of the values of both columns; the second gives each value's group.
Combine: TypeAlias = Callable[[Any, Indexes], Any]


def whole(array: Any) -> Any:
    """A plain array with all rows of a chunked one."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(array.type)
    return (array if wide is None or array.nbytes <= INT32_MAX else array.cast(wide)).combine_chunks()


def as_columns(values: Any) -> Any:
    """Values as one Arrow array or record batch."""
    if isinstance(values, Mapping):
        values = pa.table(dict(values))
    if isinstance(values, pa.Table):
        columns = [whole(column) for column in values.columns]
        return pa.RecordBatch.from_arrays(columns, names=values.schema.names)
    if isinstance(values, (pa.Array, pa.ChunkedArray, pa.RecordBatch)):
        return whole(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidError(f"values: give Arrow or NumPy columns, not {type(values).__name__}: {error}") from error


def groups_of(keys: Any) -> tuple[Any, Indexes]:
    """The distinct keys of an array of bytes, in the order of their first rows, and the group of each row.

    >>> keys, groups = groups_of(pa.array([b"b", b"a", b"b"]))
    >>> keys.to_pylist(), groups.tolist()
    ([b'b', b'a'], [0, 1, 0])
    """
    if keys.null_count:
        row = np.flatnonzero(keys.is_null().to_numpy(zero_copy_only=False))[0]
        raise InvalidError(f"row {row} of the keys is null; nulls cannot be stored")
    found = keys.dictionary_encode()
    return found.dictionary, found.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def rounds(groups: Indexes) -> Iterator[Indexes]:
    """The first rows of all groups, then the second ones, and so on.

    >>> [rows.tolist() for rows in rounds(np.array([0, 1, 0, 0, 1]))]
    [[0, 1], [2, 4], [3]]
    """
    if len(groups) == 0:
        return
    order = np.argsort(groups, kind="stable")
    in_order = groups[order]
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1]))
    lengths = np.diff(np.append(starts, len(groups)))
    turn = np.empty(len(groups), np.int64)
    turn[order] = np.arange(len(groups)) - np.repeat(starts, lengths)
    yield from np.split(np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn))[:-1])


# ------------------------------------------------------------------------------------------------ one value a key


def combine_columns(field: pa.Field, called: str, old: Any, new: Any, groups: Indexes, combine: Combine) -> Any:
    """What becomes of a column: old has a row for each group, null where there is nothing yet; new any number."""
    if new.null_count:
        row = np.flatnonzero(new.is_null().to_numpy(zero_copy_only=False))[0]
        raise InvalidError(f"{called}: row {row} is null; give a value in every row")
    numbers = np.concatenate([np.arange(len(old)), groups])
    try:
        return combine(pa.concat_arrays([old, new]), numbers).cast(field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidError(f"{called} is {field.type}, which cannot hold what the values make: {error}") from error


def refuse_family(field: pa.Field, called: str, wanted: tuple[str, ...], verb: str) -> None:
    """Refuses a column whose values cannot be added or compared."""
    too_long = verb == "added" and pa.types.is_decimal(field.type) and field.type.precision > DECIMAL_DIGITS_MAX
    if family(field.type) not in wanted or pa.types.is_float16(field.type) or too_long:
        limits = f"decimals of at most {DECIMAL_DIGITS_MAX} digits and no float16"
        raise InvalidError(
            f"{called} is {field.type}, whose values cannot be {verb}; those of these can: {', '.join(wanted)} "
            f"({limits if verb == 'added' else 'no float16'})"
        )


def add(values: Any, groups: Indexes) -> Any:
    """The sum of each group, in a type that holds it; nulls count for nothing."""
    kind = values.type
    if pa.types.is_decimal(kind):
        values = values.cast(pa.decimal256(76, kind.scale))
    elif pa.types.is_integer(kind):
        ends = pc.min_max(values)
        low, high = ends["min"].as_py() or 0, ends["max"].as_py() or 0
        # Arrow's sums wrap around: those that might are made of decimals.
        small = max(-low, high) * len(values) <= INT64_MAX
        values = values.cast(pa.int64() if small else pa.decimal128(38, 0))
    table = pa.table({"group": groups, "value": values})
    return table.group_by("group", use_threads=False).aggregate([("value", "sum")]).sort_by("group")["value_sum"]


def first_in_order(values: Any, groups: Indexes, last: bool) -> Any:
    """The least or the greatest of each group, NaN above all numbers; nulls do not count."""
    there = values.is_valid()
    values, groups = values.filter(there), groups[there.to_numpy(zero_copy_only=False)]
    table = pa.table({"group": groups, "value": values})
    order = pc.sort_indices(table, [("group", "ascending"), ("value", "ascending")]).to_numpy()
    in_order = groups[order]
    changes = in_order[1:] != in_order[:-1]
    ends = np.append(changes, True) if last else np.append(True, changes)
    return values.take(pa.array(order[ends[: len(order)]]))


def least(values: Any, groups: Indexes) -> Any:
    """The least of each group."""
    return first_in_order(values, groups, last=False)


def greatest(values: Any, groups: Indexes) -> Any:
    """The greatest of each group."""
    return first_in_order(values, groups, last=True)


# ------------------------------------------------------------------------------------------------ lists of values


def make_lists(offsets: Indexes, values: Any) -> Any:
    """Lists of the values from one offset to the next; null where there are none."""
    large = offsets[-1] > INT32_MAX
    face, kind = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
    missing = pa.array(offsets[1:] == offsets[:-1])
    return face.from_arrays(pa.array(offsets, kind), values, mask=missing)


def split_lists(lists: Any, encode: Callable[[Any], Any], encode_one: Callable[[Any], bytes]) -> tuple[Indexes, Any]:
    """Where each list begins, the end of the last one behind them, and the values of all as bytes."""
    if isinstance(lists, (pa.Array, pa.ChunkedArray)):
        lists = whole(lists)
        if family(lists.type) != "list":
            raise InvalidError(f"lists: give an Arrow array of lists or a list of lists, not an array of {lists.type}")
        refuse_null_list(lists.is_null().to_pylist() if lists.null_count else [])
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        return ends_of(lengths), whole(encode(lists.flatten()))
    if isinstance(lists, (str, bytes, Mapping)) or not isinstance(lists, Iterable):
        raise InvalidError(f"lists: give an Arrow array of lists or a list of lists, not {type(lists).__name__}")
    rows = list(lists)
    refuse_null_list([row is None for row in rows])
    for row in rows:
        if isinstance(row, (str, bytes, Mapping)) or not isinstance(row, Iterable):
            raise InvalidError(f"lists: give a list of values for each key; there is a {type(row).__name__} among them")
    filled = [list(row) for row in rows]
    values = pa.array([encode_one(value) for row in filled for value in row], pa.binary())
    return ends_of([len(row) for row in filled]), values


def refuse_null_list(nulls: list[bool]) -> None:
    """Refuses a null in place of a list."""
    if any(nulls):
        raise InvalidError(f"list {nulls.index(True)} is null; give an empty list to remove the key")


def ends_of(lengths: Any) -> Indexes:
    """Where lists of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def kept_lists(keys: Any, offsets: Indexes, values: Any, keep: npt.NDArray[np.bool_]) -> tuple[Any, Indexes, Any]:
    """Of lists that lose values: their keys, their offsets and what they keep. keep has an entry for each value."""
    lengths = np.diff(offsets)
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    kept = kept_before[offsets[1:]] - kept_before[offsets[:-1]]
    changed = kept < lengths
    return (
        keys.filter(pa.array(changed)),
        ends_of(kept[changed]),
        values.filter(pa.array(keep & np.repeat(changed, lengths))),
    )


def among_last(offsets: Indexes, count: int) -> npt.NDArray[np.bool_]:
    """For each value whether it is one of the last so many of its list."""
    lengths = np.diff(offsets)
    left = np.repeat(offsets[1:], lengths) - np.arange(offsets[-1])
    return np.asarray(left <= count)
