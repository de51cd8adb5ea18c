"""Arrow arrays to the core's rows and back, without copying the bytes."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError


class Rows:
    """A binary-like Arrow array as the core reads it (``quire_rows``). Keeps the array alive.

    >>> Rows(pa.array([b"a", b"bc"])).pointer.row_count
    2
    """

    __slots__ = ("_array", "_buffers", "pointer")

    def __init__(self, array: Any) -> None:
        self._array = array
        self._buffers = array.buffers()
        self.pointer = rows = ffi.new("quire_rows *")
        rows.offset = array.offset
        rows.row_count = len(array)
        if array.null_count:
            rows.validity = address(self._buffers[0], "const uint8_t *")
        kind = array.type
        if pa.types.is_fixed_size_binary(kind):
            rows.width = kind.byte_width
            rows.bytes = address(self._buffers[1], "const uint8_t *")
            return
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            rows.offsets32 = address(self._buffers[1], "const int32_t *")
        elif pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            rows.offsets64 = address(self._buffers[1], "const int64_t *")
        else:
            raise InvalidError(
                f"an Arrow array of {kind} cannot hold bytes: binary, large_binary, string, large_string and "
                "fixed_size_binary are taken; cast it, or give the map a schema"
            )
        rows.bytes = address(self._buffers[2], "const uint8_t *")


def address(buffer: Any, kind: str) -> Any:
    """Where an Arrow buffer's memory is, as a C pointer."""
    return ffi.NULL if buffer is None else ffi.cast(kind, buffer.address)


def as_array(values: Any, what: str) -> Any:
    """An Arrow array or chunked array as it is; anything iterable over bytes as a new binary array."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Iterable):
        raise InvalidError(f"{what}: give an Arrow array or several bytes objects, not one {type(values).__name__}")
    rows = values if isinstance(values, (list, tuple)) else list(values)
    for kind in set(map(type, rows)):
        if not issubclass(kind, (bytes, bytearray, memoryview, type(None))):
            raise InvalidError(
                f"{what}: give an Arrow array or several bytes objects; there is a {kind.__name__} among them"
            )
    return pa.array(rows, pa.binary())


def chunks(array: Any) -> list[Any]:
    """The plain arrays that an array or chunked array is made of."""
    return list(array.chunks) if isinstance(array, pa.ChunkedArray) else [array]


def aligned(keys: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of plain arrays of equal length that together are the two given; slices, not copies."""
    if len(keys) != len(values):
        raise InvalidError(f"{len(keys)} keys but {len(values)} values: give as many of one as of the other")
    if isinstance(keys, pa.Array) and isinstance(values, pa.Array):
        yield keys, values
        return
    for batch in pa.table([keys, values], names=["key", "value"]).to_batches():
        yield batch.column(0), batch.column(1)


class Column:
    """A binary column that the core fills (``quire_column``)."""

    __slots__ = ("pointer",)

    def __init__(self) -> None:
        self.pointer = ffi.gc(ffi.new("quire_column *"), lib.quire_column_free)

    def reset(self) -> None:
        """Empties the column but keeps its memory for the next rows."""
        self.pointer.row_count = 0
        self.pointer.bytes_count = 0
        self.pointer.null_count = 0

    def to_list(self) -> list[bytes]:
        """The rows as bytes objects; the column must hold no nulls."""
        column = self.pointer
        if column.row_count == 0:
            return []
        data = ffi.buffer(column.bytes, column.bytes_count)[:] if column.bytes_count else b""
        offsets = ffi.unpack(column.offsets32 or column.offsets64, column.row_count + 1)
        return [data[start:end] for start, end in pairwise(offsets)]

    def to_array(self) -> Any:
        """Hands the memory over to a pyarrow array, which frees it; the column must not be used afterwards."""
        column = self.pointer
        rows = column.row_count
        large = column.offsets32 == ffi.NULL and column.offsets64 != ffi.NULL
        kind = pa.large_binary() if large else pa.binary()
        if rows == 0:
            return pa.array([], kind)
        offsets, width = (column.offsets64, 8) if large else (column.offsets32, 4)
        validity = None
        if column.null_count:
            validity = self._buffer(column.validity, (rows + 7) // 8)
        buffers = [validity, self._buffer(offsets, (rows + 1) * width), self._buffer(column.bytes, column.bytes_count)]
        return pa.Array.from_buffers(kind, rows, buffers, column.null_count)

    def _buffer(self, pointer: Any, size: int) -> Any:
        if size == 0:
            return pa.py_buffer(b"")
        return pa.foreign_buffer(int(ffi.cast("uintptr_t", pointer)), size, base=self)
