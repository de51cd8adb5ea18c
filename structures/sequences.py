"""Lists and deques: two faces of one structure, so a set made as one can be opened as the other.

They hold bytes. Made with columns they take and give Python objects, and Arrow columns in bulk, as the values of maps.
"""

import operator
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableSequence
from typing import Any, overload

import pyarrow as pa

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError, PositionError, check
from quire.pagemgr.lifetime import Face, Handle, Scope, in_cell
from quire.structures.arrow import Column, Rows, as_array, chunks
from quire.structures.maps import (
    BATCH_BYTES_MAX,
    BLOCK_BYTES_MAX,
    Buffers,
    PlainBytes,
    as_bytes,
    batch_rows,
    block_sizes,
    columns_of,
    rows_done,
)
from quire.structures.schema import ColumnsLike, Schema

# Far beyond any sequence, and still a number that C can take.
POSITION_MAX = 1 << 62


def as_index(value: Any, what: str = "position") -> int:
    """Refuses what is no whole number."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidError(f"a {what} is a whole number, not {value!r}") from error


def slice_range(index: slice, count: int) -> range:
    """The positions that a slice means in a sequence of so many records."""
    for part in (index.start, index.stop, index.step):
        if part is not None:
            as_index(part)
    if index.step is not None and as_index(index.step) == 0:
        raise InvalidError("the step of a slice cannot be 0")
    return range(*index.indices(count))


class PlainRecords(PlainBytes):
    """Records that are bytes already."""

    def value_bytes(self, value: Any) -> bytes:
        """The record itself."""
        return as_bytes(value, "record")

    def encode_values(self, values: Any) -> Any:
        """An Arrow array, or bytes objects made into one."""
        return as_array(values, "records")


def record_schema(value: ColumnsLike) -> Schema:
    """The schema of a sequence: that of a map without keys."""
    return Schema(key=pa.null(), value=value)


CLOSE_CURSOR = in_cell(lib.quire_sequence_cursor_close)


class SequenceCursor:
    """An open scan of a sequence as it was when the scan began."""

    def __init__(self, source: "Records", index: int, reverse: bool) -> None:
        scope = source._scope
        self._source = source  # keeps what it scans open
        self._scope = scope
        self._handle = Handle(ffi.new("quire_sequence_cursor **"), CLOSE_CURSOR, scope.pinned, scope.gate)
        with scope.gate, scope.guard:
            sequence = source._sequence()
            self._handle.open(lambda out: check(lib.quire_sequence_cursor_open(sequence, index, reverse, out)))

    def __enter__(self) -> "SequenceCursor":
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.close()

    def read(self, rows: int, bytes_max: int, column: Column) -> int:
        """Adds the next rows to the column; 0 at the end."""
        out = ffi.new("int64_t *")
        with self._scope.gate:
            cursor = self._handle.pointer or self._scope.closed()
            check(lib.quire_sequence_cursor_next_many(cursor, rows, bytes_max, column.pointer, out))
        return int(out[0])


def scan(cursor: SequenceCursor, codec: PlainRecords | Schema, count: int | None = None) -> Generator[Any, None, None]:
    """The records from the cursor on, up to count of them."""
    column = Column()
    plain = not isinstance(codec, Schema)
    with cursor:
        for rows in block_sizes():
            column.reset()
            wanted = rows if count is None else min(rows, count)
            if wanted == 0 or not cursor.read(wanted, BLOCK_BYTES_MAX, column):
                return
            block = column.to_list()
            if count is not None:
                count -= len(block)
            yield from block if plain else map(codec.value_from_bytes, block)


def scan_arrays(cursor: SequenceCursor, codec: PlainRecords | Schema, rows: int) -> Generator[Any, None, None]:
    """The records as Arrow arrays, record batches if there are several columns, of up to that many rows."""
    with cursor:
        while True:
            column = Column()
            if not cursor.read(rows, BATCH_BYTES_MAX, column):
                return
            yield codec.decode_values(column.to_array())


class Records(Face, MutableSequence[Any]):
    """What lists and deques have in common."""

    KIND = lib.QUIRE_KIND_SEQUENCE

    def __init__(self, owner: object, scope: Scope, pointer: Any, name: str, schema: Schema | None) -> None:
        self._owner = owner  # keeps the page manager alive
        self._scope = scope
        self._guard = scope.guard
        self._handle = Handle(pointer, lib.quire_sequence_close, scope.open, scope.guard)
        self._buffers = Buffers()
        self._count = ffi.new("uint64_t *")
        self._name = name
        self._schema = schema
        self._codec: PlainRecords | Schema = PlainRecords() if schema is None else schema

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}{', closed' if self._handle.pointer is None else ''}>"

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._name

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of records; None: bytes."""
        return None if self._schema is None else self._schema.value

    def _sequence(self) -> Any:
        """The pointer; the guard must be held."""
        return self._handle.pointer or self._scope.closed()

    def _position(self, index: Any) -> int:
        """A position counted from the start; the guard must be held."""
        count = len(self)
        position = as_index(index)
        if position < 0:
            position += count
        if not 0 <= position < count:
            raise PositionError(f"position {index} of {self._name!r}, which has {count} records")
        return position

    # ------------------------------------------------------------------------------------------------ by position

    def __len__(self) -> int:
        with self._guard:
            check(lib.quire_sequence_count(self._sequence(), self._count))
            return int(self._count[0])

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        with self._guard:
            record = self._get(index)
        return self._codec.value_from_bytes(record)

    def _get(self, index: int) -> bytes:
        """The record at index as bytes; the guard must be held."""
        buffer = self._buffers.take()
        position = index if type(index) is int and 0 <= index < POSITION_MAX else self._position(index)
        code = lib.quire_sequence_get(self._sequence(), position, buffer)
        if code == lib.QUIRE_E_NOTFOUND:
            self._position(index)  # raises, with a message that has the count
        check(code)
        return self._buffers.read(buffer)

    def _slice(self, index: slice) -> list[Any]:
        with self._guard:
            positions = slice_range(index, len(self))
            if not positions:
                return []
            if abs(positions.step) > 1:
                return [self[position] for position in positions]
            cursor = SequenceCursor(self, positions[0], positions.step < 0)
        return list(scan(cursor, self._codec, len(positions)))

    @overload
    def __setitem__(self, index: int, value: Any) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[Any]) -> None: ...
    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            self._set_slice(index, self._encoded(value))
        else:
            self._set(index, self._codec.value_bytes(value))

    def _set(self, index: int, data: bytes) -> None:
        with self._guard:
            check(lib.quire_sequence_set(self._sequence(), self._position(index), data, len(data)))

    def _encoded(self, values: Any) -> list[bytes]:
        """Records out of anything iterable, as bytes."""
        if isinstance(values, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(values, Iterable):
            what = "bytes objects" if self._schema is None else "records"
            raise InvalidError(f"give several {what}, not one {type(values).__name__}")
        return [self._codec.value_bytes(value) for value in values]

    def _set_slice(self, index: slice, records: list[bytes]) -> None:
        with self._guard:
            positions = slice_range(index, len(self))
            if positions.step == 1:
                del self[index]
                for position, record in enumerate(records, positions.start):
                    self._insert(position, record)
                return
            if len(positions) != len(records):
                raise InvalidError(f"{len(records)} records for a slice of {len(positions)}: give as many")
            for position, record in zip(positions, records, strict=True):
                self._set(position, record)

    def __delitem__(self, index: int | slice) -> None:
        with self._guard:
            if not isinstance(index, slice):
                check(lib.quire_sequence_remove(self._sequence(), self._position(index), 1))
                return
            positions = slice_range(index, len(self))
            if abs(positions.step) == 1 and positions:
                check(lib.quire_sequence_remove(self._sequence(), min(positions), len(positions)))
                return
            for position in sorted(positions, reverse=True):
                check(lib.quire_sequence_remove(self._sequence(), position, 1))

    def insert(self, index: int, value: Any) -> None:
        """Puts a record before the one at index; beyond either end, at that end."""
        data = self._codec.value_bytes(value)
        with self._guard:
            position = as_index(index)
            if position != 0:
                count = len(self)
                position = max(0, position + count) if position < 0 else min(position, count)
            self._insert(position, data)

    def _insert(self, position: int, data: bytes) -> None:
        """Puts bytes at a position that is there, or at the end; the guard must be held."""
        check(lib.quire_sequence_insert(self._sequence(), position, data, len(data)))

    def append(self, value: Any) -> None:
        """Adds a record at the end."""
        data = self._codec.value_bytes(value)
        with self._guard:
            self._insert(len(self), data)

    def extend(self, values: Any) -> None:
        """Adds the rows of an Arrow array, or any number of records, at the end.

        With columns it takes what a map takes as values: a record batch or table, or for one column its array.

        >>> import quire
        >>> import pyarrow as pa
        >>> with quire.PageManager() as pm:
        ...     log = pm.list("log")
        ...     log.extend(pa.array([b"a", b"b"]))
        ...     log.extend([b"c"])
        ...     log[:]
        [b'a', b'b', b'c']
        """
        done, before = ffi.new("int64_t *"), 0
        for chunk in chunks(self._encoded_rows(values)):
            rows = Rows(chunk)
            done[0] = 0
            with rows_done(done, before), self._guard:
                check(lib.quire_sequence_extend(self._sequence(), rows.pointer, done))
            before += len(chunk)

    def _encoded_rows(self, values: Any) -> Any:
        """Columns, or records one by one, as an Arrow array of bytes."""
        if isinstance(values, Records):
            values = values[:]
        columns = isinstance(values, (pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table, Mapping))
        if columns or self._schema is None or len(self._schema.value) == 1:
            return self._codec.encode_values(values)
        return pa.array(self._encoded(values), pa.binary())

    def pop(self, index: int = -1) -> Any:
        """Takes out the record at index, the last one unless told otherwise."""
        with self._guard:
            record = self._codec.value_from_bytes(self._get(index))
            self._drop(index)
        return record

    def _drop(self, index: int) -> None:
        """Takes out the record at index, which is there; the guard must be held."""
        position = index if index == 0 else self._position(index)
        check(lib.quire_sequence_remove(self._sequence(), position, 1))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Where the value is first found, from start on and before stop; ``InvalidError`` if it is not."""
        with self._guard:
            positions = slice_range(slice(start, stop), len(self))
            if not positions:
                raise InvalidError(f"{value!r} is not in {self._name!r}")
            records = scan(SequenceCursor(self, positions[0], False), self._codec, len(positions))
        for position, record in zip(positions, records, strict=True):
            if record == value:
                return position
        raise InvalidError(f"{value!r} is not in {self._name!r}")

    def remove(self, value: Any) -> None:
        """Takes out the first record that equals the value; ``InvalidError`` if there is none."""
        with self._guard:
            del self[self.index(value)]

    def clear(self) -> None:
        """Removes every record."""
        with self._guard:
            check(lib.quire_sequence_clear(self._sequence()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Records, list, tuple)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=False))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------------ scans

    def __iter__(self) -> Generator[Any, None, None]:
        return scan(SequenceCursor(self, 0, False), self._codec)

    def __reversed__(self) -> Iterator[Any]:
        with self._guard:
            count = len(self)
            if count == 0:
                return iter(())
            return scan(SequenceCursor(self, count - 1, True), self._codec)

    def to_batches(self, rows: int = 65536) -> Iterator[Any]:
        """The records as Arrow record batches, with the columns they have; a column without a name is called value."""
        fields = self._batch_schema()
        arrays = scan_arrays(SequenceCursor(self, 0, False), self._codec, batch_rows(rows))
        if self._schema is None:
            return (pa.record_batch([array], names=["value"]) for array in arrays)
        return (pa.record_batch(columns_of(array), schema=fields) for array in arrays)

    def _batch_schema(self) -> pa.Schema:
        if self._schema is None:
            return pa.schema([("value", pa.binary())])
        return pa.schema([field if field.name else field.with_name("value") for field in self._schema.value])

    def to_table(self) -> Any:
        """All records as one Arrow table, with the columns of ``to_batches``.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     log = pm.list("log", "user string, n bigint")
        ...     log.append({"user": "bo", "n": 3})
        ...     log.to_table().to_pylist()
        [{'user': 'bo', 'n': 3}]
        """
        batches = list(self.to_batches(1 << 62))
        # Bytes past 2 GiB are large_binary.
        return pa.Table.from_batches(batches, None if batches else self._batch_schema())

    def to_array(self) -> Any:
        """All records as one Arrow array (a chunked one past 2 GiB), of structs if there are several columns.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     log = pm.list("log")
        ...     log.extend([b"a", b"b"])
        ...     log.to_array().to_pylist()
        [b'a', b'b']
        """
        parts = list(scan_arrays(SequenceCursor(self, 0, False), self._codec, 1 << 62))
        arrays = [part.to_struct_array() if isinstance(part, pa.RecordBatch) else part for part in parts]
        if len(arrays) > 1:
            return pa.chunked_array(arrays)
        if arrays:
            return arrays[0]
        fields = list(self._batch_schema())
        return pa.array([], fields[0].type if len(fields) == 1 else pa.struct(fields))

    def check(self) -> None:
        """Raises ``CorruptError`` where an invariant of the structure is broken."""
        with self._guard:
            check(lib.quire_sequence_check(self._sequence()))


class List(Records):
    """A persistent list of bytes, or of rows; opened with ``pm.list(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     log = pm.list("log")
    ...     log.extend([b"a", b"b", b"c"])
    ...     log[-1], log[:2], len(log)
    (b'c', [b'a', b'b'], 3)
    >>> with quire.PageManager() as pm:
    ...     numbers = pm.list("numbers", "bigint")
    ...     numbers.extend([3, 5])
    ...     numbers[:]
    [3, 5]
    """


class Deque(Records):
    """A persistent double-ended queue of bytes, or of rows; opened with ``pm.deque(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     jobs = pm.deque("jobs")
    ...     jobs.extend([b"b", b"c"])
    ...     jobs.appendleft(b"a")
    ...     jobs.popleft(), jobs.pop(), len(jobs)
    (b'a', b'c', 1)
    """

    def appendleft(self, value: Any) -> None:
        """Adds a record at the start."""
        self.insert(0, value)

    def extendleft(self, values: Iterable[Any]) -> None:
        """Adds each record at the start in turn, so that they end up in reverse."""
        for record in self._encoded(values):
            with self._guard:
                self._insert(0, record)

    def popleft(self) -> Any:
        """Takes out the first record."""
        return self.pop(0)

    def rotate(self, steps: int = 1) -> None:
        """Moves that many records from the end to the start (negative: the other way), as collections.deque does."""
        steps = as_index(steps, "number of steps")
        with self._guard:
            count = len(self)
            steps = steps % count if count else 0
            taken, turns = (-1, steps) if steps <= count // 2 else (0, count - steps)
            for _ in range(turns):
                record = self._get(taken)
                self._drop(taken)
                self._insert(0 if taken else count - 1, record)
