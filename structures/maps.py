"""The two maps as Python sees them: ``Map`` (any order) and ``OrderedMap`` (order of the keys' bytes).

Both hold bytes under bytes. With a ``Schema`` they take and give Python objects, and Arrow columns in bulk; the schema
turns them into bytes and back. ``PlainBytes`` stands in for it in maps without one.
"""

import contextlib
import struct
from collections.abc import Callable, Generator, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire._native import ffi, lib
from quire.pagemgr.callbacks import STOP, collect, keep_error
from quire.pagemgr.errors import InvalidError, NotFoundError, QuireError, check, fail, shown
from quire.pagemgr.lifetime import Face, Handle, Scope, in_cell
from quire.structures.arrow import Column, Rows, aligned, as_array, chunks
from quire.structures.groups import (
    ADDED,
    COMPARED,
    Combine,
    add,
    among_last,
    as_columns,
    combine_columns,
    greatest,
    groups_of,
    kept_lists,
    least,
    make_lists,
    refuse_family,
    rounds,
    split_lists,
    whole,
)
from quire.structures.schema import Schema

# A scan reads blocks that grow: looking at the first record stays cheap, a long scan crosses into C seldom.
BLOCK_ROWS_FIRST = 16
BLOCK_ROWS_MAX = 1024
BLOCK_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 28
BATCH_ROWS_MAX = 1 << 62
# Read buffers that grew past this are not kept.
BUFFER_BYTES_KEPT = 1 << 16


def as_bytes(value: Any, what: str) -> bytes:
    """Bytes as they are, other bytes-like objects copied, anything else refused."""
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    hints = ["encode it first, e.g. with .encode()"] if isinstance(value, str) else []
    if what != "record":
        hints.append("give the map a schema")
    hint = ": " + ", or ".join(hints) if hints else ""
    raise InvalidError(f"a {what} is bytes or bytes-like here, not {type(value).__name__}{hint}")


class PlainBytes:
    """Keys and values that are bytes already."""

    def key_bytes(self, key: Any) -> bytes:
        """The key itself."""
        return key if type(key) is bytes else as_bytes(key, "key")

    def value_bytes(self, value: Any) -> bytes:
        """The value itself."""
        return value if type(value) is bytes else as_bytes(value, "value")

    def key_from_bytes(self, data: bytes) -> bytes:
        """The key itself."""
        return data

    def value_from_bytes(self, data: bytes) -> bytes:
        """The value itself."""
        return data

    def encode_keys(self, keys: Any) -> Any:
        """An Arrow array, or bytes objects made into one."""
        return as_array(keys, "keys")

    def encode_values(self, values: Any) -> Any:
        """An Arrow array, or bytes objects made into one."""
        return as_array(values, "values")

    def decode_keys(self, array: Any) -> Any:
        """The array itself."""
        return array

    def decode_values(self, array: Any) -> Any:
        """The array itself."""
        return array


# What a map needs to know about its keys and values.
Codec: TypeAlias = PlainBytes | Schema


class Buffers:
    """Buffers that the core reads values into, lent to one call each."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self) -> Any:
        """A buffer for one call."""
        try:
            return self._free.pop()
        except IndexError:
            return ffi.gc(ffi.new("quire_buffer *"), lib.quire_buffer_free)

    def read(self, buffer: Any) -> bytes:
        """Copies the bytes and takes the buffer back; after an error the garbage collector frees it instead."""
        count = buffer.count
        data: bytes = ffi.buffer(buffer.bytes, count)[:] if count else b""
        if count <= BUFFER_BYTES_KEPT:
            self._free.append(buffer)
        return data

    def give_back(self, buffer: Any) -> None:
        """Takes the buffer back unread."""
        self._free.append(buffer)


def split_values(data: bytes, count: int) -> list[bytes]:
    """Takes apart values that lie back to back, each behind its length."""
    values, position = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, position)
        values.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return values


def after_prefix(prefix: bytes) -> bytes | None:
    """The smallest key greater than all that start with prefix; None if there is none.

    >>> after_prefix(b"ab"), after_prefix(b"a\\xff"), after_prefix(b"\\xff")
    (b'ac', b'b', None)
    """
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


@ffi.def_extern(name="quire_python_visit_change", error=STOP, onerror=keep_error)  # type: ignore[untyped-decorator]
def visit_change(context: Any, change: Any) -> int:
    """Collects (key, values), values None for a key that was removed."""

    def found() -> tuple[bytes, list[bytes] | None]:
        key = bytes(ffi.buffer(change.key, change.key_bytes)) if change.key_bytes else b""
        if change.values == ffi.NULL:
            return key, None
        return key, split_values(bytes(ffi.buffer(change.values, change.values_bytes)), change.value_count)

    return ffi.from_handle(context).add(found)  # type: ignore[no-any-return]


CLOSE_CURSOR = in_cell(lib.quire_cursor_close)


class Cursor:
    """An open scan. It sees the map as it was when the scan began; closed at its end or when nobody holds it."""

    def __init__(self, source: "Map", lo: bytes | None, hi: bytes | None, reverse: bool) -> None:
        scope = source._scope
        flags = lib.QUIRE_CURSOR_REVERSE if reverse else 0
        self._source = source  # keeps what it scans open
        self._scope = scope
        self._handle = Handle(ffi.new("quire_cursor **"), CLOSE_CURSOR, scope.pinned, scope.gate)
        with scope.gate, scope.guard:
            lo_pointer, lo_count = (ffi.NULL, 0) if lo is None else (lo, len(lo))
            hi_pointer, hi_count = (ffi.NULL, 0) if hi is None else (hi, len(hi))
            kv = source._handle.pointer or scope.closed()
            bounds = (lo_pointer, lo_count, hi_pointer, hi_count)
            self._handle.open(lambda out: check(lib.quire_cursor_open(kv, *bounds, flags, out)))

    def __enter__(self) -> "Cursor":
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.close()

    def read(self, rows: int, bytes_max: int, keys: Column | None, values: Column | None) -> int:
        """Adds the next rows to the columns; 0 at the end."""
        out = ffi.new("int64_t *")
        key_column = ffi.NULL if keys is None else keys.pointer
        value_column = ffi.NULL if values is None else values.pointer
        with self._scope.gate:
            cursor = self._handle.pointer or self._scope.closed()
            check(lib.quire_cursor_next_many(cursor, rows, bytes_max, key_column, value_column, out))
        return int(out[0])

    def read_all(self) -> tuple[bytes, list[bytes]] | None:
        """The next key with all its values; None at the end."""
        buffers = Buffers()
        key, values, count = buffers.take(), buffers.take(), ffi.new("uint64_t *")
        with self._scope.gate:
            cursor = self._handle.pointer or self._scope.closed()
            code = lib.quire_cursor_next_all(cursor, key, values, count)
            if code == lib.QUIRE_E_NOTFOUND:
                return None
            check(code)
            return buffers.read(key), split_values(buffers.read(values), count[0])


def block_sizes() -> Iterator[int]:
    """How many rows to read at a time."""
    rows = BLOCK_ROWS_FIRST
    while True:
        yield rows
        rows = min(rows * 4, BLOCK_ROWS_MAX)


def scan_column(cursor: Cursor, keys: bool) -> Generator[bytes, None, None]:
    """All keys, or all values, in the cursor's order."""
    column = Column()
    with cursor:
        for rows in block_sizes():
            column.reset()
            if not cursor.read(rows, BLOCK_BYTES_MAX, column if keys else None, None if keys else column):
                return
            yield from column.to_list()


def scan_pairs(cursor: Cursor, codec: Codec) -> Generator[tuple[Any, Any], None, None]:
    """All pairs in the cursor's order."""
    keys, values = Column(), Column()
    key_out, value_out = codec.key_from_bytes, codec.value_from_bytes
    plain = not isinstance(codec, Schema)
    with cursor:
        for rows in block_sizes():
            keys.reset()
            values.reset()
            if not cursor.read(rows, BLOCK_BYTES_MAX, keys, values):
                return
            pairs = zip(keys.to_list(), values.to_list(), strict=True)
            if plain:
                yield from pairs
            else:
                for key, value in pairs:
                    yield key_out(key), value_out(value)


def scan_batches(cursor: Cursor, rows: int, codec: Codec) -> Generator[Any, None, None]:
    """The records as Arrow record batches of up to that many rows."""
    with cursor:
        while True:
            keys, values = Column(), Column()
            if not cursor.read(rows, BATCH_BYTES_MAX, keys, values):
                return
            yield make_batch(codec, keys.to_array(), values.to_array())


def make_batch(codec: Codec, keys: Any, values: Any) -> Any:
    """Columns key and value, or those of the schema: first the key's, then the value's."""
    if not isinstance(codec, Schema):
        return pa.record_batch([keys, values], names=["key", "value"])
    columns: list[Any] = []
    for part in (codec.decode_keys(keys), codec.decode_values(values)):
        columns += columns_of(part)
    return pa.record_batch(columns, schema=pa.schema([*codec.key, *codec.value]))


class Keys(KeysView[Any]):
    """The keys of a map."""

    _mapping: "Map"

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(ordered(self._mapping))


class Values(ValuesView[Any]):
    """The values of a map."""

    _mapping: "Map"

    def __iter__(self) -> Iterator[Any]:
        return self._mapping._scan_values(reverse=False)

    def __reversed__(self) -> Iterator[Any]:
        return ordered(self._mapping)._scan_values(reverse=True)


class Items(ItemsView[Any, Any]):
    """The pairs of a map."""

    _mapping: "Map"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._scan(None, None, False)

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return ordered(self._mapping)._scan(None, None, True)


def ordered(source: "Map") -> "OrderedMap":
    """Refuses what only an ordered map can do."""
    if not isinstance(source, OrderedMap):
        raise TypeError("a Map has no order to reverse; use an ordered_map")
    return source


class Map(Face, MutableMapping[Any, Any]):
    """A persistent dictionary in no particular order; opened with ``pm.map(name)``.

    Iterating sees the map as it is when the iteration begins, whatever is written meanwhile.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     users = pm.map("users")
    ...     users[b"alice"] = b"1"
    ...     users.update({b"bob": b"2"})
    ...     sorted(users.items()), len(users), b"carol" in users
    ([(b'alice', b'1'), (b'bob', b'2')], 2, False)
    """

    KIND = lib.QUIRE_KIND_MAP

    def __init__(self, owner: object, scope: Scope, pointer: Any, name: str, schema: Schema | None) -> None:
        self._owner = owner  # keeps the page manager alive
        self._scope = scope
        self._guard = scope.guard
        self._handle = Handle(pointer, lib.quire_kv_close, scope.open, scope.guard)
        self._buffers = Buffers()
        self._name = name
        self._schema = schema
        self._codec: Codec = PlainBytes() if schema is None else schema

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
    def schema(self) -> Schema | None:
        """What keys and values are made of; None: bytes."""
        return self._schema

    def _kv(self) -> Any:
        """The pointer; the guard must be held."""
        return self._handle.pointer or self._scope.closed()

    # ------------------------------------------------------------------------------------------------ one key

    def _get(self, key: Any) -> bytes | None:
        encoded = self._codec.key_bytes(key)
        buffer = self._buffers.take()
        with self._guard:
            code = lib.quire_kv_get(self._handle.pointer or self._scope.closed(), encoded, len(encoded), buffer)
            if not code:
                return self._buffers.read(buffer)
        if code != lib.QUIRE_E_NOTFOUND:
            fail(code)
        self._buffers.give_back(buffer)
        return None

    def __getitem__(self, key: Any) -> Any:
        value = self._get(key)
        if value is None:
            raise NotFoundError(f"no key {shown(key)} in {self._name!r}")
        return self._codec.value_from_bytes(value)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of key (the first, if it has several), or the default."""
        value = self._get(key)
        return default if value is None else self._codec.value_from_bytes(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        encoded, data = self._codec.key_bytes(key), self._codec.value_bytes(value)
        with self._guard:
            check(lib.quire_kv_put(self._kv(), encoded, len(encoded), data, len(data)))

    def __delitem__(self, key: Any) -> None:
        encoded = self._codec.key_bytes(key)
        with self._guard:
            code = lib.quire_kv_remove(self._kv(), encoded, len(encoded))
            if code == lib.QUIRE_E_NOTFOUND:
                raise NotFoundError(f"no key {shown(key)} in {self._name!r}")
            check(code)

    def __contains__(self, key: object) -> bool:
        encoded = self._codec.key_bytes(key)
        found = ffi.new("bool *")
        with self._guard:
            check(lib.quire_kv_contains(self._kv(), encoded, len(encoded), found))
        return bool(found[0])

    def __len__(self) -> int:
        count = ffi.new("uint64_t *")
        with self._guard:
            check(lib.quire_kv_count(self._kv(), count))
        return int(count[0])

    def append(self, key: Any, value: Any) -> None:
        """Adds a value behind those the key has.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits")
        ...     visits.append(b"alice", b"home")
        ...     visits.append(b"alice", b"cart")
        ...     visits.get_all(b"alice")
        [b'home', b'cart']
        """
        encoded, data = self._codec.key_bytes(key), self._codec.value_bytes(value)
        with self._guard:
            check(lib.quire_kv_append(self._kv(), encoded, len(encoded), data, len(data)))

    def get_all(self, key: Any) -> list[Any]:
        """All values of a key, oldest first; an empty list if it is not there."""
        encoded = self._codec.key_bytes(key)
        buffer, count = self._buffers.take(), ffi.new("uint64_t *")
        with self._guard:
            code = lib.quire_kv_get_all(self._kv(), encoded, len(encoded), buffer, count)
            if code == lib.QUIRE_E_NOTFOUND:
                return []
            check(code)
            data = self._buffers.read(buffer)
        return [self._codec.value_from_bytes(value) for value in split_values(data, count[0])]

    def _end(self, reverse: bool) -> tuple[Any, Any]:
        """The first pair of a scan."""
        pairs = self._scan(None, None, reverse)
        pair = next(pairs, None)
        pairs.close()
        if pair is None:
            raise NotFoundError(f"{self._name!r} is empty")
        return pair

    def popitem(self) -> tuple[Any, Any]:
        """Takes out some pair; ``NotFoundError`` if the map is empty."""
        with self._guard:
            pair = self._end(reverse=False)
            del self[pair[0]]
        return pair

    def clear(self) -> None:
        """Removes every key."""
        with self._guard:
            check(lib.quire_kv_clear(self._kv()))

    # ------------------------------------------------------------------------------------------------ in bulk

    def get_many(self, keys: Any) -> Any:
        """The value of each key as one Arrow array, null where a key is missing.

        Keys are an Arrow array (binary, string, fixed-size binary) or bytes objects; with a schema, its columns.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     users.put_many([b"alice", b"bob"], [b"1", b"2"])
        ...     users.get_many([b"bob", b"carol"]).to_pylist()
        [b'2', None]
        """
        encoded = self._codec.encode_keys(keys)
        parts = [self._codec.decode_values(self._get_rows(chunk)) for chunk in chunks(encoded)]
        return join(parts) if isinstance(encoded, pa.ChunkedArray) else parts[0]

    def _get_rows(self, keys: Any) -> Any:
        """The value of each key, all of them bytes."""
        rows, column = Rows(keys), Column()
        with self._guard:
            check(lib.quire_kv_get_many(self._kv(), rows.pointer, column.pointer))
        return column.to_array()

    def contains_many(self, keys: Any) -> Any:
        """For each key whether it is there, as an Arrow array of booleans."""
        parts = []
        for chunk in chunks(self._codec.encode_keys(keys)):
            rows, found = Rows(chunk), np.zeros(len(chunk), np.bool_)
            with self._guard:
                check(lib.quire_kv_contains_many(self._kv(), rows.pointer, ffi.from_buffer("uint8_t[]", found)))
            parts.append(found)
        return pa.array(np.concatenate(parts) if parts else np.zeros(0, np.bool_))

    def put_many(self, keys: Any, values: Any) -> None:
        """Stores each value under its key; of equal keys the last one counts.

        An error's ``rows_done`` says how many rows were stored before it.
        """
        self._store_many(lib.quire_kv_put_many, keys, values)

    def append_many(self, keys: Any, values: Any) -> None:
        """Adds each value behind those that its key has."""
        self._store_many(lib.quire_kv_append_many, keys, values)

    def _store_many(self, call: Any, keys: Any, values: Any) -> None:
        encoded_keys, encoded_values = self._codec.encode_keys(keys), self._codec.encode_values(values)
        before = 0
        for key_chunk, value_chunk in aligned(encoded_keys, encoded_values):
            self._store_rows(call, key_chunk, value_chunk, before)
            before += len(key_chunk)

    def _store_rows(self, call: Any, keys: Any, values: Any, before: int = 0) -> None:
        """Stores bytes under bytes; before: how many rows of the call were stored already."""
        key_rows, value_rows, done = Rows(keys), Rows(values), ffi.new("int64_t *")
        with rows_done(done, before), self._guard:
            check(call(self._kv(), key_rows.pointer, value_rows.pointer, done))

    def get_lists(self, keys: Any) -> Any:
        """All values of each key as an Arrow array of lists, null where a key is missing.

        With several columns the values are structs.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits", quire.Schema(key="user string", value="page string"))
        ...     visits.append_many(["bo", "al", "bo"], ["home", "home", "cart"])
        ...     visits.get_lists(["bo", "cy"]).to_pylist()
        [['home', 'cart'], None]
        """
        offsets, values = self._get_list_rows(whole(self._codec.encode_keys(keys)))
        decoded = self._codec.decode_values(values)
        return make_lists(offsets, decoded.to_struct_array() if isinstance(decoded, pa.RecordBatch) else decoded)

    def _get_list_rows(self, keys: Any) -> tuple[Any, Any]:
        """Where the values of each key begin, and all values, as bytes."""
        rows, column = Rows(keys), Column()
        offsets = np.zeros(len(keys) + 1, np.int64)
        with self._guard:
            out = ffi.from_buffer("int64_t[]", offsets)
            check(lib.quire_kv_get_lists(self._kv(), rows.pointer, out, column.pointer))
        return offsets, column.to_array()

    def put_lists(self, keys: Any, lists: Any) -> None:
        """Replaces all values of each key by those of its list; an empty list removes the key.

        ``lists`` is an Arrow array of lists, of structs if there are several columns, or a list of lists. An error's
        ``rows_done`` says how many keys were done before it; the one after these may have a part of its values.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits", quire.Schema(key="user string", value="page string"))
        ...     visits.put_lists(["bo", "al"], [["home", "cart"], ["home"]])
        ...     visits.put_lists(["al"], [[]])
        ...     visits.get_all("bo"), "al" in visits
        (['home', 'cart'], False)
        """
        encoded = whole(self._codec.encode_keys(keys))
        offsets, values = split_lists(lists, self._codec.encode_values, self._codec.value_bytes)
        if len(encoded) != len(offsets) - 1:
            raise InvalidError(f"{len(encoded)} keys but {len(offsets) - 1} lists: give as many of one as of the other")
        self._put_list_rows(encoded, offsets, values)

    def _put_list_rows(self, keys: Any, offsets: Any, values: Any) -> None:
        """As put_lists, of bytes."""
        key_rows, value_rows, done = Rows(keys), Rows(values), ffi.new("int64_t *")
        starts = ffi.from_buffer("int64_t[]", offsets)
        with rows_done(done, 0), self._guard:
            check(lib.quire_kv_put_lists(self._kv(), key_rows.pointer, starts, value_rows.pointer, done))

    def remove_many(self, keys: Any) -> int:
        """Removes each key that is there, and says how many were.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     users.put_many([b"alice", b"bob"], [b"1", b"2"])
        ...     users.remove_many([b"bob", b"carol"])
        1
        """
        removed, total = ffi.new("int64_t *"), 0
        for chunk in chunks(self._codec.encode_keys(keys)):
            rows = Rows(chunk)
            with self._guard:
                check(lib.quire_kv_remove_many(self._kv(), rows.pointer, ffi.NULL, removed))
            total += int(removed[0])
        return total

    # ------------------------------------------------------------------------------------------------ by key, in bulk

    def update_many(self, keys: Any, values: Any, function: Callable[[Any, Any], Any]) -> None:
        """As ``m[key] = function(m.get(key), value)`` row by row, with a function of whole columns.

        ``function(old, new)`` is given the values that there are, null where there is none, and those of this call, as
        Arrow arrays (record batches where there are several columns), and returns as many values to store. It is called
        once if no key comes twice, else once for the first rows of all keys, once for the second ones, and so on,
        while other threads wait. An error's ``rows_done`` counts rows in that order.

        >>> import pyarrow.compute as pc
        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     last = pm.map("last", quire.Schema(key="user string", value="bigint"))
        ...     last.update_many(["bo", "al", "bo"], [3, 5, 4], lambda old, new: pc.add(pc.fill_null(old, 100), new))
        ...     sorted(last.items())
        [('al', 105), ('bo', 107)]
        """
        encoded, given = whole(self._codec.encode_keys(keys)), as_columns(values)
        refuse_lengths(encoded, given)
        done = 0
        with self._guard:
            for rows in rounds(groups_of(encoded)[1]):
                part = encoded.take(pa.array(rows))
                old = self._codec.decode_values(self._get_rows(part))
                made = whole(self._codec.encode_values(function(old, given.take(pa.array(rows)))))
                if len(made) != len(part):
                    raise InvalidError(f"the function gave {len(made)} values for {len(part)} keys: give one for each")
                self._store_rows(lib.quire_kv_put_many, part, made, done)
                done += len(part)

    def add_many(self, keys: Any, values: Any) -> Any:
        """Adds each value to what its key has, column by column; a key that is not there gets the value itself.

        Gives the keys with their new values, as a record batch with the columns of the schema. Numbers only; a sum
        that its column cannot hold is an ``InvalidError``, and nothing is stored.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     counts = pm.map("counts", quire.Schema(key="user string", value="n bigint"))
        ...     counts["bo"] = 10
        ...     counts.add_many(["bo", "al", "bo"], [1, 1, 1]).to_pylist()
        [{'user': 'bo', 'n': 12}, {'user': 'al', 'n': 1}]
        """
        return self._combine(keys, values, add, ADDED, "added")

    def min_many(self, keys: Any, values: Any) -> Any:
        """Keeps the least of each value and what its key has, column by column: numbers, times, text or bytes.

        Gives the keys with their values now, as ``add_many`` does. NaN is above all numbers.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     first = pm.map("first", quire.Schema(key="user string", value="page string"))
        ...     first.min_many(["bo", "al", "bo"], ["cart", "home", "about"]).to_pylist()
        [{'user': 'bo', 'page': 'about'}, {'user': 'al', 'page': 'home'}]
        """
        return self._combine(keys, values, least, COMPARED, "compared")

    def max_many(self, keys: Any, values: Any) -> Any:
        """Keeps the greatest of each value and what its key has; see ``min_many``.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     top = pm.map("top", quire.Schema(key="user string", value="n int, score double"))
        ...     top["bo"] = {"n": 5, "score": 0.5}
        ...     top.max_many(["bo", "bo"], {"n": [3, 4], "score": [0.25, 0.75]}).to_pylist()
        [{'user': 'bo', 'n': 5, 'score': 0.75}]
        """
        return self._combine(keys, values, greatest, COMPARED, "compared")

    def _combine(self, keys: Any, values: Any, combine: Combine, families: tuple[str, ...], verb: str) -> Any:
        schema = self._schema
        if schema is None:
            raise InvalidError(f"bytes cannot be {verb} as numbers: give the map {self._name!r} a schema")
        called = [schema._value.called(field) for field in schema.value]
        for field, name in zip(schema.value, called, strict=True):
            refuse_family(field, name, families, verb)
        encoded, given = whole(schema.encode_keys(keys)), schema._value.arrays(values)
        refuse_lengths(encoded, given[0])
        distinct, groups = groups_of(encoded)
        with self._guard:
            found = columns_of(schema.decode_values(self._get_rows(distinct)))
            columns = zip(schema.value, called, found, given, strict=True)
            made = [whole(combine_columns(*column, groups, combine)) for column in columns]
            self._store_rows(lib.quire_kv_put_many, distinct, schema.encode_values(made if len(made) > 1 else made[0]))
        fields = pa.schema([*schema.key, *schema.value])
        return pa.record_batch([*columns_of(schema.decode_keys(distinct)), *made], schema=fields)

    def keep_last(self, keys: Any, n: int) -> int:
        """Each of these keys keeps the last n of its values; gives how many values were dropped.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits", quire.Schema(key="user string", value="page string"))
        ...     visits.append_many(["bo"] * 4, ["home", "cart", "home", "help"])
        ...     visits.keep_last(["bo"], 2), visits.get_all("bo")
        (2, ['home', 'help'])
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidError(f"n is {n!r}: give how many values each key keeps, 0 or more")
        return self._keep(keys, lambda offsets, values: among_last(offsets, n))

    def expire_before(self, keys: Any, bound: Any, column: str | None = None) -> int:
        """Drops those values of these keys that are less than the bound; gives how many they were.

        With several columns, ``column`` says which one is compared. A key that has no values left is removed. Nulls
        and NaN stay.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits", quire.Schema(key="user string", value="t bigint, page string"))
        ...     visits.append_many(["bo", "bo"], {"t": [1, 7], "page": ["home", "cart"]})
        ...     visits.expire_before(["bo", "al"], 5, "t"), visits.get_all("bo")
        (1, [{'t': 7, 'page': 'cart'}])
        """
        limit: Any
        if self._schema is not None:
            index, limit = self._schema._value.bound(bound, column)
        elif column is None:
            index, limit = 0, pa.scalar(as_bytes(bound, "bound"))
        else:
            raise InvalidError(f"{self._name!r} holds bytes and has no column {column!r}: give the map a schema")

        def young(offsets: Any, values: Any) -> Any:
            compared = columns_of(self._codec.decode_values(values))[index]
            if self._schema is None:
                compared = compared.cast(pa.large_binary())
            old = pc.fill_null(pc.less(compared, limit), False)
            return ~old.to_numpy(zero_copy_only=False)

        return self._keep(keys, young)

    def _keep(self, keys: Any, choose: Callable[[Any, Any], Any]) -> int:
        """Drops the values that choose, given lists as offsets and bytes, says False to."""
        encoded = whole(self._codec.encode_keys(keys))
        distinct = encoded.filter(encoded.is_valid()).unique()
        with self._guard:
            offsets, values = self._get_list_rows(distinct)
            keep = choose(offsets, values)
            self._put_list_rows(*kept_lists(distinct, offsets, values, keep))
        return int(len(keep) - np.count_nonzero(keep))

    # ------------------------------------------------------------------------------------------------ scans

    def _bound(self, key: Any) -> bytes | None:
        """A bound of a range as bytes; None stays None."""
        if key is None:
            return None
        if self._schema is None:
            return as_bytes(key, "bound")
        return self._schema.prefix_bytes(*key) if isinstance(key, tuple) else self._schema.prefix_bytes(key)

    def _scan(self, lo: bytes | None, hi: bytes | None, reverse: bool) -> Generator[tuple[Any, Any], None, None]:
        return scan_pairs(Cursor(self, lo, hi, reverse), self._codec)

    def _scan_keys(self, reverse: bool) -> Iterator[Any]:
        keys = scan_column(Cursor(self, None, None, reverse), keys=True)
        return keys if self._schema is None else map(self._codec.key_from_bytes, keys)

    def _scan_values(self, reverse: bool) -> Iterator[Any]:
        values = scan_column(Cursor(self, None, None, reverse), keys=False)
        return values if self._schema is None else map(self._codec.value_from_bytes, values)

    def __iter__(self) -> Iterator[Any]:
        return self._scan_keys(reverse=False)

    def keys(self) -> KeysView[Any]:
        """A view of the keys."""
        return Keys(self)

    def values(self) -> ValuesView[Any]:
        """A view of the values (the first of each key)."""
        return Values(self)

    def items(self) -> ItemsView[Any, Any]:
        """A view of the pairs (each key with its first value)."""
        return Items(self)

    def to_batches(self, rows: int = 65536) -> Iterator[Any]:
        """The whole map as Arrow record batches: columns key and value, or those of the schema.

        There is a row for each key, with its first value; ``get_all`` gives the others of a key that has several.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     users[b"alice"] = b"1"
        ...     [batch.to_pydict() for batch in users.to_batches()]
        [{'key': [b'alice'], 'value': [b'1']}]
        """
        return scan_batches(Cursor(self, None, None, False), batch_rows(rows), self._codec)

    def to_table(self) -> Any:
        """The whole map as one Arrow table: a row for each key with its first value, as in ``to_batches``."""
        return self._table(list(self.to_batches()))

    def _table(self, batches: list[Any]) -> Any:
        return pa.Table.from_batches(batches or [make_batch(self._codec, *[pa.array([], pa.binary())] * 2)])

    def to_rows(self) -> Any:
        """As ``to_table``, with a row for each value of a key that has several.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     visits = pm.map("visits", quire.Schema(key="user string", value="page string"))
        ...     visits.append_many(["al", "al"], ["home", "cart"])
        ...     visits.to_rows().to_pylist()
        [{'user': 'al', 'page': 'home'}, {'user': 'al', 'page': 'cart'}]
        """
        table = self.to_table()
        if self._schema is None:
            keys, names = table["key"], (["key"], ["value"])
        else:
            keys, names = table.select(self._schema.key.names), (self._schema.key.names, self._schema.value.names)
        lists = self.get_lists(keys)
        if pc.max(pc.list_value_length(lists)).as_py() in (None, 1):
            return table
        places, values = pc.list_parent_indices(lists), pc.list_flatten(lists)
        columns = values.flatten() if len(names[1]) > 1 else [values]
        key_columns = table.select(names[0]).take(places).columns
        return pa.table([*key_columns, *columns], names=[*names[0], *names[1]])

    # ------------------------------------------------------------------------------------------------ checks

    def check(self) -> None:
        """Raises ``CorruptError`` where an invariant of the structure is broken."""
        with self._guard:
            check(lib.quire_kv_check(self._kv()))

    def stats(self) -> dict[str, int]:
        """How many keys, pages (of all kinds) and index pages there are."""
        numbers = ffi.new("quire_kv_stats *")
        with self._guard:
            check(lib.quire_kv_stats_get(self._kv(), numbers))
        return {name: int(getattr(numbers, name)) for name in ("count", "pages", "index_pages")}

    def _changes(self, older: "Map | None") -> list[tuple[Any, list[Any] | None]]:
        """What changed since an older snapshot's map (None: everything)."""
        if older is None:
            with Cursor(self, None, None, False) as cursor:
                found: list[Any] = list(iter(cursor.read_all, None))
        else:
            with self._guard, older._guard:
                newer_kv, older_kv = self._kv(), older._kv()
                visit = lib.quire_python_visit_change
                found = collect(lambda context: lib.quire_kv_changes(newer_kv, older_kv, visit, context))
        key_out, value_out = self._codec.key_from_bytes, self._codec.value_from_bytes
        return [(key_out(key), None if values is None else [value_out(v) for v in values]) for key, values in found]


@contextlib.contextmanager
def rows_done(done: Any, before: int) -> Iterator[None]:
    """Tells an error of a bulk call how many rows were stored before it."""
    try:
        yield
    except QuireError as error:
        error.rows_done = before + int(done[0])
        raise


def refuse_lengths(keys: Any, values: Any) -> None:
    """Refuses more or fewer values than keys."""
    if len(keys) != len(values):
        raise InvalidError(f"{len(keys)} keys but {len(values)} values: give as many of one as of the other")


def columns_of(rows: Any) -> list[Any]:
    """The columns of a record batch, or the one that an array is."""
    return list(rows.columns) if isinstance(rows, pa.RecordBatch) else [rows]


def batch_rows(rows: int) -> int:
    """Refuses batch sizes that make no sense."""
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= BATCH_ROWS_MAX:
        raise InvalidError(f"rows {rows!r}: give how many rows a batch may have, from 1 to {BATCH_ROWS_MAX}")
    return rows


def join(parts: list[Any]) -> Any:
    """The results of several chunks as one chunked array."""
    if not parts:
        return pa.chunked_array([], pa.binary())
    if any(part.type != parts[0].type for part in parts):
        parts = [part.cast(pa.large_binary()) for part in parts]
    return pa.chunked_array(parts)


class OrderedMap(Map):
    """A persistent dictionary in the order of its keys; opened with ``pm.ordered_map(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     events = pm.ordered_map("events")
    ...     events.update({b"2024-03": b"c", b"2024-01": b"a", b"2024-02": b"b"})
    ...     list(events), events.first(), list(events.range(b"2024-02"))
    ([b'2024-01', b'2024-02', b'2024-03'], (b'2024-01', b'a'), [(b'2024-02', b'b'), (b'2024-03', b'c')])
    """

    KIND = lib.QUIRE_KIND_ORDERED

    def __reversed__(self) -> Iterator[Any]:
        return self._scan_keys(reverse=True)

    def range(self, lo: Any = None, hi: Any = None, reverse: bool = False) -> Generator[tuple[Any, Any], None, None]:
        """The pairs with lo <= key < hi in order (reverse: from the last down); None for an open bound.

        With a schema a bound is a key or the first columns of one, as a tuple.
        """
        return self._scan(self._bound(lo), self._bound(hi), reverse)

    def prefix(self, prefix: Any, reverse: bool = False) -> Generator[tuple[Any, Any], None, None]:
        """The pairs whose key starts with prefix, in order.

        With a schema, a tuple gives the first columns of a key, whole; a text (or bytes) alone is what the first
        column, of such a type, starts with.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     events = pm.ordered_map("events")
        ...     events.update({b"2024-01": b"a", b"2025-01": b"b"})
        ...     list(events.prefix(b"2024-"))
        [(b'2024-01', b'a')]
        """
        if self._schema is not None and isinstance(prefix, (str, bytes)):
            start = self._schema.prefix_bytes(prefix, partial=True)
        else:
            start = self._bound(prefix) or b""
        return self._scan(start, after_prefix(start), reverse)

    def range_batches(self, lo: Any = None, hi: Any = None, rows: int = 65536) -> Iterator[Any]:
        """As ``range``, in Arrow record batches: a row for each key with its first value, as in ``to_batches``."""
        cursor = Cursor(self, self._bound(lo), self._bound(hi), False)
        return scan_batches(cursor, batch_rows(rows), self._codec)

    def remove_range(self, lo: Any = None, hi: Any = None) -> int:
        """Removes the keys with lo <= key < hi and says how many they were."""
        low, high, removed = self._bound(lo), self._bound(hi), ffi.new("uint64_t *")
        low_pointer, low_count = (ffi.NULL, 0) if low is None else (low, len(low))
        high_pointer, high_count = (ffi.NULL, 0) if high is None else (high, len(high))
        with self._guard:
            check(lib.quire_kv_remove_range(self._kv(), low_pointer, low_count, high_pointer, high_count, removed))
        return int(removed[0])

    def pop_range(self, lo: Any = None, hi: Any = None) -> Any:
        """Takes out the keys with lo <= key < hi and gives them as an Arrow table, in order.

        There is a row for each key, with its first value, as in ``to_batches``.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     jobs = pm.ordered_map("jobs", quire.Schema(key="at bigint", value="what string"))
        ...     jobs.update({3: "c", 1: "a", 2: "b"})
        ...     jobs.pop_range(hi=3).to_pylist(), list(jobs)
        ([{'at': 1, 'what': 'a'}, {'at': 2, 'what': 'b'}], [3])
        """
        with self._guard:
            table = self._table(list(self.range_batches(lo, hi)))
            self.remove_range(lo, hi)
        return table

    def first(self) -> tuple[Any, Any]:
        """The pair with the smallest key; ``NotFoundError`` if the map is empty."""
        return self._end(reverse=False)

    def last(self) -> tuple[Any, Any]:
        """The pair with the greatest key; ``NotFoundError`` if the map is empty."""
        return self._end(reverse=True)

    def pop_first(self) -> tuple[Any, Any]:
        """Takes out the pair with the smallest key."""
        with self._guard:
            pair = self.first()
            del self[pair[0]]
        return pair

    def pop_last(self) -> tuple[Any, Any]:
        """Takes out the pair with the greatest key."""
        with self._guard:
            pair = self.last()
            del self[pair[0]]
        return pair

    def popitem(self) -> tuple[Any, Any]:
        """Takes out the last pair, as dict.popitem does."""
        return self.pop_last()
