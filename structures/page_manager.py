"""``PageManager`` and ``Snapshot``: an arena and its snapshots, with the structures that live in them."""

import builtins
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError, MismatchError, NotFoundError, check
from quire.pagemgr.page_manager import (
    RESERVED_PREFIX,
    Arena,
    ArenaSnapshot,
    check_found,
    encode_name,
    user_name,
)
from quire.structures.maps import Map, OrderedMap
from quire.structures.raw import Raw
from quire.structures.schema import Schema
from quire.structures.sequences import Deque, List, Records

KINDS = {
    lib.QUIRE_KIND_MAP: "map",
    lib.QUIRE_KIND_ORDERED: "ordered_map",
    lib.QUIRE_KIND_SEQUENCE: "sequence",
    lib.QUIRE_KIND_RAW: "raw",
}
MAP_CLASSES: dict[int, type[Map]] = {lib.QUIRE_KIND_MAP: Map, lib.QUIRE_KIND_ORDERED: OrderedMap}

# A structure's schema lies in a set of its own beside it: cloning, images and snapshots of chosen sets carry it along.
SCHEMA_PREFIX = RESERVED_PREFIX + "schema:"
SCHEMA_KEY = b"schema"
SCHEMA_NAME_BYTES_MAX = lib.QUIRE_NAME_BYTES_MAX - len(SCHEMA_PREFIX)

MapType = TypeVar("MapType", bound=Map)
RecordsType = TypeVar("RecordsType", bound=Records)


def schema_set(name: str) -> str:
    """The set that holds the schema of the structure of that name."""
    if len(encode_name(name)) > SCHEMA_NAME_BYTES_MAX:
        raise InvalidError(
            f"{name!r}: the name of a structure with a schema may have {SCHEMA_NAME_BYTES_MAX} bytes at most"
        )
    return SCHEMA_PREFIX + name


def visible(kinds: dict[str, int]) -> dict[str, str]:
    """The sets that users made, with the names of their kinds."""
    return {
        name: KINDS.get(kind, f"kind {kind}") for name, kind in kinds.items() if not name.startswith(RESERVED_PREFIX)
    }


class Snapshot(ArenaSnapshot):
    """The last commit, pinned: read it as long as you like while the writer goes on.

    Any number of threads may read a snapshot at once. Made by ``pm.snapshot()``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     users = pm.map("users")
    ...     users[b"alice"] = b"1"
    ...     epoch = pm.commit()
    ...     with pm.snapshot() as s:
    ...         users[b"alice"] = b"changed"
    ...         s.map("users")[b"alice"]
    b'1'
    """

    def _open_map(self, face: type[MapType], name: str) -> MapType:
        schema = None
        stored = SCHEMA_PREFIX + name
        if not name.startswith(RESERVED_PREFIX) and stored in self._kinds():
            schema = Schema.from_bytes(self._open_map(Map, stored)[SCHEMA_KEY])
        out = ffi.new("quire_kv **")
        with self._handle.gate:
            pointer, kind = self._handle.pointer, face.KIND
            check_found(lib.quire_kv_open_snap(pointer, encode_name(name), kind, out), "set in this snapshot", name)
            return face(self, self._handle.scope, out[0], name, schema)

    def _open_records(self, face: type[RecordsType], name: str) -> RecordsType:
        out = ffi.new("quire_sequence **")
        with self._handle.gate:
            pointer = self._handle.pointer
            check_found(lib.quire_sequence_open_snap(pointer, encode_name(name), out), "set in this snapshot", name)
            return face(self, self._handle.scope, out[0], name)

    def map(self, name: str) -> Map:
        """The map of that name as it was, read only."""
        return self._open_map(Map, name)

    def ordered_map(self, name: str) -> OrderedMap:
        """The ordered map of that name as it was, read only."""
        return self._open_map(OrderedMap, name)

    def list(self, name: str) -> List:
        """The list of that name as it was, read only."""
        return self._open_records(List, name)

    def deque(self, name: str) -> Deque:
        """The deque of that name as it was, read only."""
        return self._open_records(Deque, name)

    def sets(self) -> dict[str, str]:
        """What the snapshot holds: each name with its kind."""
        return visible(self._kinds())

    def check(self) -> None:
        """Proves the invariants of every structure as it was; raises ``CorruptError`` where one is broken."""
        for name, kind in self._kinds().items():
            if kind in MAP_CLASSES:
                self._open_map(MAP_CLASSES[kind], name).check()
            elif kind == lib.QUIRE_KIND_SEQUENCE:
                self.list(name).check()

    def changes(self, older: "Snapshot", name: str) -> Iterator[tuple[Any, builtins.list[Any] | None]]:
        """What changed in a map since an older snapshot: each key with its values now, or None if it was removed.

        Visits only pages that differ, so the cost follows the changes, not the size.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     users.update({b"alice": b"1", b"bob": b"2"})
        ...     epoch = pm.commit()
        ...     older = pm.snapshot()
        ...     users[b"alice"] = b"3"
        ...     del users[b"bob"]
        ...     epoch = pm.commit()
        ...     with older, pm.snapshot() as newer:
        ...         sorted(newer.changes(older, "users"))
        [(b'alice', [b'3']), (b'bob', None)]
        """
        kind = self._kinds().get(name)
        if kind is None:
            raise NotFoundError(f"no set in this snapshot named {name!r}")
        face = MAP_CLASSES.get(kind)
        if face is None:
            raise MismatchError(f"{name!r} is a {KINDS.get(kind, kind)}: changes are told of maps and ordered maps")
        before = older._open_map(face, name) if name in older._kinds() else None
        return iter(self._open_map(face, name)._changes(before))


class PageManager(Arena):
    """An arena with named structures in it: the entrance to Quire.

    path       a file that the arena lives in, made if it is not there; None: memory of this process.
    limit      the most bytes to take from the system, as a number or as text such as ``"512m"``.
    page_size  bytes of a page, a power of two from 1024 to 65536; None: the default, or what the file has.
    read_only  open a file that another process may be writing, for snapshots only.
    wait       how many seconds to wait for another writer to let go of the file; negative: for ever.

    One writer at a time may have a file open. Changes become visible to snapshots and durable with ``commit()``;
    those not committed when the manager is closed, at the end of its ``with`` block too, are dropped.

    >>> import quire
    >>> with quire.PageManager(limit="64m") as pm:
    ...     users = pm.map("users")
    ...     users[b"alice"] = b"1"
    ...     epoch = pm.commit()
    ...     pm.sets()
    {'users': 'map'}
    """

    # ------------------------------------------------------------------------------------------------ structures

    def _kv(self, face: type[MapType], name: str, schema: Schema | None) -> MapType:
        """Opens or creates, with the lock held; no look at stored schemas."""
        out = ffi.new("quire_kv **")
        with self._lock:
            check(lib.quire_kv_open(self._live(), encode_name(name), face.KIND, out))
            return face(self, self._scope, out[0], name, schema)

    def _has_schema(self, name: str) -> bool:
        return len(name.encode()) <= SCHEMA_NAME_BYTES_MAX and self._exists(SCHEMA_PREFIX + name)

    def _stored_schema(self, name: str) -> Schema | None:
        if not self._has_schema(name):
            return None
        return Schema.from_bytes(self._kv(Map, schema_set(name), None)[SCHEMA_KEY])

    def _open_map(self, face: type[MapType], name: str, schema: Schema | None) -> MapType:
        if schema is not None and not isinstance(schema, Schema):
            raise InvalidError(f"schema is a quire.Schema or None, not {type(schema).__name__}")
        user_name(name)
        with self._lock:
            if self._exists(name):
                stored = self._stored_schema(name)
                if schema is not None and schema != stored:
                    raise MismatchError(f"{name!r} was made with {stored or 'no schema'}, not with {schema}")
                return self._kv(face, name, stored)
            if schema is None:
                return self._kv(face, name, None)
            stored_in = schema_set(name)
            made = self._kv(face, name, schema)
            try:
                self._kv(Map, stored_in, None)[SCHEMA_KEY] = schema.to_bytes()
            except BaseException:
                self._remove(name)
                raise
            return made

    def _open_records(self, face: type[RecordsType], name: str) -> RecordsType:
        out = ffi.new("quire_sequence **")
        with self._lock:
            check(lib.quire_sequence_open(self._live(), encode_name(user_name(name)), out))
            return face(self, self._scope, out[0], name)

    def map(self, name: str, schema: Schema | None = None) -> Map:
        """Opens or creates the map of that name.

        Without a schema it takes bytes, unless it was made with one, which is then used. Another schema than the one it
        was made with is a ``MismatchError``.
        """
        return self._open_map(Map, name, schema)

    def ordered_map(self, name: str, schema: Schema | None = None) -> OrderedMap:
        """Opens or creates the ordered map of that name; schema as in ``map``."""
        return self._open_map(OrderedMap, name, schema)

    def list(self, name: str) -> List:
        """Opens or creates the list of that name."""
        return self._open_records(List, name)

    def deque(self, name: str) -> Deque:
        """Opens or creates the deque of that name."""
        return self._open_records(Deque, name)

    def raw(self, name: str) -> Raw:
        """Opens or creates a set of raw pages."""
        out, encoded = ffi.new("quire_set **"), encode_name(user_name(name))
        with self._entered() as arena:
            code = lib.quire_set_open(arena, encoded, lib.QUIRE_KIND_RAW, out)
            if code == lib.QUIRE_E_NOTFOUND:
                code = lib.quire_set_create(arena, encoded, lib.QUIRE_KIND_RAW, out)
            check(code)
            return Raw(self, out[0], name)

    # ------------------------------------------------------------------------------------------------ sets

    def sets(self) -> dict[str, str]:
        """What the arena holds: each name with its kind."""
        return visible(self._kinds())

    def exists(self, name: str) -> bool:
        """True if there is a structure of that name."""
        return self._exists(user_name(name))

    def _remove(self, name: str) -> None:
        """Removes a structure with its schema; the lock is held."""
        self._destroy(name)
        if self._has_schema(name):
            self._destroy(SCHEMA_PREFIX + name)

    def destroy(self, name: str) -> None:
        """Removes a structure. Those who have it open get ``ClosedError`` from then on.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     pm.destroy("users")
        ...     pm.exists("users")
        False
        """
        user_name(name)
        self._refuse_own_thread()
        with self._lock:
            self._remove(name)

    def clone(self, source: str, name: str) -> None:
        """A second structure with the same content, sharing every page until one of the two is written: O(1).

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     pm.clone("users", "trial")
        ...     pm.map("trial")[b"alice"] = b"2"
        ...     pm.map("users")[b"alice"]
        b'1'
        """
        user_name(source), user_name(name)
        with self._lock:
            with_schema = self._has_schema(source)
            if with_schema:
                schema_set(name)
            self._clone(source, name)
            if with_schema:
                try:
                    self._clone(SCHEMA_PREFIX + source, SCHEMA_PREFIX + name)
                except BaseException:
                    self._destroy(name)
                    raise

    # ------------------------------------------------------------------------------------------------ snapshots

    def snapshot(self, name: str | None = None, sets: Sequence[str] | None = None) -> Snapshot:
        """Pins the last commit; costs the same whatever the size. Close it, or use it in a ``with`` block.

        sets: only these (for a smaller image). name: keep it, until it is closed, for ``find_snapshot`` to find.
        """
        if sets is not None:
            sets = self._with_schemas(sets)
        return Snapshot(self, self._acquire(name, sets), named=name is not None)

    def _with_schemas(self, sets: Sequence[str]) -> Sequence[str]:
        """The sets with those that hold their schemas, as of the last commit."""
        if isinstance(sets, str) or not sets:
            raise InvalidError(f"sets {sets!r}: give a list of names, or None for all")
        with Snapshot(self, self._acquire(None, None), named=False) as last:
            kinds = last._kinds()
        return [*map_names(sets), *(stored for name in sets if (stored := SCHEMA_PREFIX + name) in kinds)]

    def find_snapshot(self, name: str) -> Snapshot:
        """The open snapshot of that name; closing it closes it for all who found it.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     epoch = pm.commit()
        ...     first = pm.snapshot("monday")
        ...     pm.find_snapshot("monday").epoch == first.epoch
        True
        """
        return Snapshot(self, self._find(name), named=True)

    # ------------------------------------------------------------------------------------------------ checks

    def check(self) -> None:
        """Proves the invariants of the arena and of every structure in it; raises ``CorruptError`` where one is broken.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     pm.check()
        """
        if self.read_only:
            with self.snapshot() as last:
                last.check()
            return
        super().check()
        with self._lock:
            for name, kind in self._kinds().items():
                if kind in MAP_CLASSES:
                    self._kv(MAP_CLASSES[kind], name, None).check()
                elif kind == lib.QUIRE_KIND_SEQUENCE:
                    self._open_records(List, name).check()


def map_names(names: Sequence[str]) -> Sequence[str]:
    """Names that users may give."""
    return [user_name(name) for name in names]
