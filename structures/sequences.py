"""Lists and deques of bytes: two faces of one structure, so a set made as one can be opened as the other."""

import operator
from collections.abc import Generator, Iterable, Iterator, MutableSequence
from typing import Any, overload

import pyarrow as pa

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError, PositionError, QuireError, check
from quire.pagemgr.lifetime import Face, Handle, Scope, in_cell
from quire.structures.arrow import Column, Rows, as_array, chunks
from quire.structures.maps import BATCH_BYTES_MAX, BLOCK_BYTES_MAX, Buffers, as_bytes, batch_rows, block_sizes

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


def as_records(values: Any) -> list[bytes]:
    """Records out of anything iterable."""
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Iterable):
        raise InvalidError(f"give several bytes objects, not one {type(values).__name__}")
    return [as_bytes(record, "record") for record in values]


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


def scan(cursor: SequenceCursor, count: int | None = None) -> Generator[bytes, None, None]:
    """The records from the cursor on, up to count of them."""
    column = Column()
    with cursor:
        for rows in block_sizes():
            column.reset()
            wanted = rows if count is None else min(rows, count)
            if wanted == 0 or not cursor.read(wanted, BLOCK_BYTES_MAX, column):
                return
            block = column.to_list()
            if count is not None:
                count -= len(block)
            yield from block


def scan_arrays(cursor: SequenceCursor, rows: int) -> Generator[Any, None, None]:
    """The records as Arrow arrays of up to that many rows."""
    with cursor:
        while True:
            column = Column()
            if not cursor.read(rows, BATCH_BYTES_MAX, column):
                return
            yield column.to_array()


class Records(Face, MutableSequence[bytes]):
    """What lists and deques have in common."""

    KIND = lib.QUIRE_KIND_SEQUENCE

    def __init__(self, owner: object, scope: Scope, pointer: Any, name: str) -> None:
        self._owner = owner  # keeps the page manager alive
        self._scope = scope
        self._guard = scope.guard
        self._handle = Handle(pointer, lib.quire_sequence_close, scope.open, scope.guard)
        self._buffers = Buffers()
        self._count = ffi.new("uint64_t *")
        self._name = name

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
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return self._slice(index)
        with self._guard:
            return self._get(index)

    def _get(self, index: int) -> bytes:
        """The record at index; the guard must be held."""
        buffer = self._buffers.take()
        position = index if type(index) is int and 0 <= index < POSITION_MAX else self._position(index)
        code = lib.quire_sequence_get(self._sequence(), position, buffer)
        if code == lib.QUIRE_E_NOTFOUND:
            self._position(index)  # raises, with a message that has the count
        check(code)
        return self._buffers.read(buffer)

    def _slice(self, index: slice) -> list[bytes]:
        with self._guard:
            positions = slice_range(index, len(self))
            if not positions:
                return []
            if abs(positions.step) > 1:
                return [self[position] for position in positions]
            cursor = SequenceCursor(self, positions[0], positions.step < 0)
        return list(scan(cursor, len(positions)))

    @overload
    def __setitem__(self, index: int, value: bytes) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[bytes]) -> None: ...
    def __setitem__(self, index: int | slice, value: bytes | Iterable[bytes]) -> None:
        if isinstance(index, slice):
            self._set_slice(index, as_records(value))
            return
        data = as_bytes(value, "record")
        with self._guard:
            check(lib.quire_sequence_set(self._sequence(), self._position(index), data, len(data)))

    def _set_slice(self, index: slice, records: list[bytes]) -> None:
        with self._guard:
            positions = slice_range(index, len(self))
            if positions.step == 1:
                del self[index]
                for position, record in enumerate(records, positions.start):
                    self.insert(position, record)
                return
            if len(positions) != len(records):
                raise InvalidError(f"{len(records)} records for a slice of {len(positions)}: give as many")
            for position, record in zip(positions, records, strict=True):
                self[position] = record

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

    def insert(self, index: int, value: bytes) -> None:
        """Puts a record before the one at index; beyond either end, at that end."""
        data = as_bytes(value, "record")
        with self._guard:
            position = as_index(index)
            if position != 0:
                count = len(self)
                position = max(0, position + count) if position < 0 else min(position, count)
            check(lib.quire_sequence_insert(self._sequence(), position, data, len(data)))

    def append(self, value: bytes) -> None:
        """Adds a record at the end."""
        data = as_bytes(value, "record")
        with self._guard:
            sequence = self._sequence()
            check(lib.quire_sequence_count(sequence, self._count))
            check(lib.quire_sequence_insert(sequence, self._count[0], data, len(data)))

    def extend(self, values: Any) -> None:
        """Adds the rows of an Arrow array, or any number of bytes objects, at the end.

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
        if isinstance(values, Records):
            values = values[:]
        for chunk in chunks(as_array(values, "records")):
            rows = Rows(chunk)
            done[0] = 0
            try:
                with self._guard:
                    check(lib.quire_sequence_extend(self._sequence(), rows.pointer, done))
            except QuireError as error:
                error.rows_done = before + int(done[0])
                raise
            before += len(chunk)

    def pop(self, index: int = -1) -> bytes:
        """Takes out the record at index, the last one unless told otherwise."""
        with self._guard:
            record = self._get(index)
            position = index if index == 0 else self._position(index)
            check(lib.quire_sequence_remove(self._sequence(), position, 1))
        return record

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Where the value is first found, from start on and before stop; ``InvalidError`` if it is not."""
        with self._guard:
            positions = slice_range(slice(start, stop), len(self))
            records = scan(SequenceCursor(self, positions[0], False), len(positions)) if positions else iter(())
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

    def __iter__(self) -> Generator[bytes, None, None]:
        return scan(SequenceCursor(self, 0, False))

    def __reversed__(self) -> Iterator[bytes]:
        with self._guard:
            count = len(self)
            if count == 0:
                return iter(())
            return scan(SequenceCursor(self, count - 1, True))

    def to_batches(self, rows: int = 65536) -> Iterator[Any]:
        """The records as Arrow record batches with one column, value."""
        arrays = scan_arrays(SequenceCursor(self, 0, False), batch_rows(rows))
        return (pa.record_batch([array], names=["value"]) for array in arrays)

    def to_array(self) -> Any:
        """All records as one Arrow array (a chunked one past 2 GiB).

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     log = pm.list("log")
        ...     log.extend([b"a", b"b"])
        ...     log.to_array().to_pylist()
        [b'a', b'b']
        """
        arrays = list(scan_arrays(SequenceCursor(self, 0, False), 1 << 62))
        if len(arrays) == 1:
            return arrays[0]
        return pa.chunked_array(arrays) if arrays else pa.array([], pa.binary())

    def check(self) -> None:
        """Raises ``CorruptError`` where an invariant of the structure is broken."""
        with self._guard:
            check(lib.quire_sequence_check(self._sequence()))


class List(Records):
    """A persistent list of bytes; opened with ``pm.list(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     log = pm.list("log")
    ...     log.extend([b"a", b"b", b"c"])
    ...     log[-1], log[:2], len(log)
    (b'c', [b'a', b'b'], 3)
    """


class Deque(Records):
    """A persistent double-ended queue of bytes; opened with ``pm.deque(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     jobs = pm.deque("jobs")
    ...     jobs.extend([b"b", b"c"])
    ...     jobs.appendleft(b"a")
    ...     jobs.popleft(), jobs.pop(), len(jobs)
    (b'a', b'c', 1)
    """

    def appendleft(self, value: bytes) -> None:
        """Adds a record at the start."""
        self.insert(0, value)

    def extendleft(self, values: Iterable[bytes]) -> None:
        """Adds each record at the start in turn, so that they end up in reverse."""
        for value in as_records(values):
            self.insert(0, value)

    def popleft(self) -> bytes:
        """Takes out the first record."""
        return self.pop(0)

    def rotate(self, steps: int = 1) -> None:
        """Moves that many records from the end to the start (negative: the other way), as collections.deque does."""
        steps = as_index(steps, "number of steps")
        with self._guard:
            count = len(self)
            steps = steps % count if count else 0
            if steps <= count // 2:
                for _ in range(steps):
                    self.appendleft(self.pop())
            else:
                for _ in range(count - steps):
                    self.append(self.popleft())
