"""The records that benchmarks store, and a model of what a store must hold.

Record number i has a key of 16 bytes (a mix of i, then i itself) and values of 64 bytes made from i and a version, so
that any key or value can be checked without keeping a copy of it. Keys look random to a hash and to an ordered store.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
VALUE_BYTES = 64
RECORD_BYTES = KEY_BYTES + VALUE_BYTES
ZIPF_EXPONENT = 0.99
ABSENT = -1

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class WrongResult(Exception):
    """A store gave back something else than was put in."""


def mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A one-to-one scramble of 64-bit numbers (the last steps of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def keys_of(ids: Ids) -> Bytes:
    """One row of 16 bytes for each record number."""
    numbers = ids.astype(np.uint64)
    return np.stack([mix(numbers + np.uint64(1)), numbers], axis=1).astype(">u8").view(np.uint8)


def values_of(ids: Ids, versions: Ids) -> Bytes:
    """One row of 64 bytes for each record number and version."""
    start = mix(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + versions.astype(np.uint64))
    steps = np.arange(VALUE_BYTES // 8, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return mix(start[:, None] + steps).view(np.uint8)


def in_key_order(ids: Ids) -> Ids:
    """The record numbers in ascending order of their keys."""
    order = np.argsort(mix(ids.astype(np.uint64) + np.uint64(1)))
    return ids[order]


def uniform(size: int, count: int, random: np.random.Generator) -> Ids:
    """Record numbers below size in random order, each at most once."""
    return random.permutation(size)[:count]


def zipf(size: int, count: int, random: np.random.Generator) -> Ids:
    """Record numbers below size by Zipf's law: the r-th most frequent one comes up in proportion to 1 / r**0.99.

    Which ones are frequent depends on the size alone: they are the same in every draw.
    """
    shares = np.cumsum(np.arange(1, size + 1) ** -ZIPF_EXPONENT)
    ranks = np.searchsorted(shares, random.random(count) * shares[-1], side="right")
    drawn: Ids = np.random.default_rng(size).permutation(size)[np.minimum(ranks, size - 1)]
    return drawn


def to_list(rows: Bytes) -> list[bytes]:
    """Each row as a bytes object."""
    listed: list[bytes] = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel().tolist()
    return listed


def pieces(ids: Ids, rows: int) -> Iterator[Ids]:
    """The numbers, so many at a time."""
    for start in range(0, len(ids), rows):
        yield ids[start : start + rows]


class Model:
    """What a store should hold: the version of each record number, or ABSENT."""

    def __init__(self, capacity: int) -> None:
        self.versions = np.full(capacity, ABSENT, np.int64)
        self._clock = 0

    def put(self, ids: Ids) -> Bytes:
        """Notes a put of each record in turn and gives the values to put."""
        versions = np.arange(self._clock, self._clock + len(ids))
        self._clock += len(ids)
        self.versions[ids] = versions  # of equal numbers the last counts, as in the stores
        return values_of(ids, versions)

    def remove(self, ids: Ids) -> None:
        """Notes that the records are gone."""
        self.versions[ids] = ABSENT

    @property
    def count(self) -> int:
        """How many records there are."""
        return int(np.count_nonzero(self.versions != ABSENT))

    def check_values(self, ids: Ids, found: bytes) -> None:
        """Refuses values that are not those of the records, in this order."""
        if found != values_of(ids, self.versions[ids]).tobytes():
            raise WrongResult(f"reading {len(ids)} records gave other values than were put")

    def check_records(self, keys: bytes, values: bytes) -> Ids:
        """Refuses records that were not put or have another value; gives their numbers."""
        rows = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        ids: Ids = rows[:, KEY_BYTES - 8 :].copy().view(">u8").ravel().astype(np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.versions) and (keys_of(ids) == rows).all()):
            raise WrongResult("a scan gave keys that were never put")
        if (self.versions[ids] == ABSENT).any():
            raise WrongResult("a scan gave keys that had been removed")
        self.check_values(ids, values)
        return ids

    def check_all(self, scanned: Iterator[tuple[bytes, bytes]], ordered: bool) -> None:
        """Refuses a full scan that misses a record, gives one twice, or (ordered) in another order."""
        seen = np.zeros(len(self.versions), np.bool_)
        total, last = 0, np.zeros(0, np.uint64)
        for keys, values in scanned:
            ids = self.check_records(keys, values)
            seen[ids] = True
            total += len(ids)
            order = np.concatenate([last, mix(ids.astype(np.uint64) + np.uint64(1))])
            if ordered and (order[1:] <= order[:-1]).any():
                raise WrongResult("a scan gave keys out of order")
            last = order[-1:]
        if total != self.count or int(seen.sum()) != total:
            raise WrongResult(f"a scan gave {total} records, {int(seen.sum())} different ones, of {self.count}")


def joined(result: Any) -> bytes:
    """The values of a bulk read back to back: from an Arrow array, a list of bytes, or a list of pairs."""
    if not isinstance(result, list):
        if result.null_count:
            raise WrongResult(f"{result.null_count} keys were not found")
        return arrow_bytes(result)
    if result and isinstance(result[0], tuple):
        result = [value for _, value in result]
    if None in result:
        raise WrongResult(f"{result.count(None)} keys were not found")
    return b"".join(result)


def joined_pairs(block: Any) -> tuple[bytes, bytes]:
    """The keys and the values of scanned records back to back: from an Arrow record batch or a list of pairs."""
    if not isinstance(block, list):
        return arrow_bytes(block.column(0)), arrow_bytes(block.column(1))
    return b"".join([key for key, _ in block]), b"".join([value for _, value in block])


def arrow_bytes(array: Any) -> bytes:
    """The bytes of all rows of a binary Arrow array, which must not be a slice, back to back."""
    data = array.buffers()[2]
    return data.to_pybytes() if data is not None else b""
