"""``PageManager`` and ``Snapshot``: an arena and its snapshots, with the structures that live in them."""

import builtins
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError, MismatchError, NotFoundError
from quire.pagemgr.lifetime import Face
from quire.pagemgr.page_manager import (
    RESERVED_PREFIX,
    Arena,
    ArenaSnapshot,
    Stats,
    check_found,
    parse_bytes,
)
from quire.pagemgr.page_manager import encode_name as any_name_bytes
from quire.pagemgr.page_manager import user_name as any_user_name
from quire.structures.maps import Map, OrderedMap
from quire.structures.raw import Raw
from quire.structures.schema import ColumnsLike, Schema
from quire.structures.sequences import Deque, List, Records, record_schema

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
Structure = TypeVar("Structure", bound=Face)


def encode_name(name: str) -> bytes:
    """The name of a set as the core takes it."""
    try:
        return any_name_bytes(name)
    except UnicodeEncodeError as error:
        raise InvalidError(f"{name!r} is no name: it cannot be written as UTF-8") from error


def user_name(name: str) -> str:
    """Refuses what is no name, and the names that Quire keeps for itself."""
    encode_name(name)
    return any_user_name(name)


def check_path(path: Any) -> None:
    """Refuses what cannot be the path of a file."""
    try:
        encoded = os.fsencode(path)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"path {path!r}: give a str, bytes or os.PathLike that names a file") from error
    if not encoded or b"\0" in encoded:
        raise InvalidError(f"path {path!r}: a path is not empty and has no NUL in it")


def check_limit(limit: Any) -> None:
    """Refuses what is no limit, as text too."""
    try:
        size = parse_bytes(limit)
    except InvalidError:
        raise
    except ValueError as error:  # more digits than Python reads
        raise InvalidError(f"limit {limit[:20]!r}...: give fewer than {1 << 63} bytes") from error
    if limit is not None and not 0 < size < 1 << 63:
        raise InvalidError(f"limit {limit!r}: give 1 to {(1 << 63) - 1} bytes, or None for no limit")


def check_wait(wait: Any) -> None:
    """Refuses what is no number of seconds."""
    if isinstance(wait, bool) or not isinstance(wait, Real) or math.isnan(wait):
        raise InvalidError(f"wait {wait!r}: give a number of seconds, or a negative one to wait for ever")


def check_page_size(page_size: Any) -> None:
    """Refuses what is no page size."""
    if page_size is None:
        return
    whole = isinstance(page_size, int) and not isinstance(page_size, bool)
    if not whole or not 1024 <= page_size <= 65536 or page_size & (page_size - 1):
        raise InvalidError(f"page_size {page_size!r}: give a power of two from 1024 to 65536, or None")


def check_kind(code: int, name: str, wanted: int, kinds: Callable[[], dict[str, int]]) -> None:
    """As check(), with a message that says what a set of another kind is."""
    if code == lib.QUIRE_E_MISMATCH:
        kind = kinds().get(name, wanted)
        if kind != wanted:
            is_kind, wanted_kind = KINDS.get(kind, f"kind {kind}"), KINDS[wanted]
            raise MismatchError(f"{name!r} is of kind {is_kind}, not {wanted_kind}: open it as what it was made")
    check_found(code, "set in this snapshot", name)


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

    def _stored_schema(self, name: str) -> Schema | None:
        stored = SCHEMA_PREFIX + name
        if name.startswith(RESERVED_PREFIX) or stored not in self._kinds():
            return None
        return Schema.from_bytes(self._open_map(Map, stored)[SCHEMA_KEY])

    def _open_map(self, face: type[MapType], name: str) -> MapType:
        encoded = encode_name(name)
        schema = self._stored_schema(name)
        out = ffi.new("quire_kv **")
        with self._handle.gate:
            pointer, kind = self._handle.pointer, face.KIND
            check_kind(lib.quire_kv_open_snap(pointer, encoded, kind, out), name, kind, self._kinds)
            return face(self, self._handle.scope, out[0], name, schema)

    def _open_records(self, face: type[RecordsType], name: str) -> RecordsType:
        encoded = encode_name(name)
        schema = self._stored_schema(name)
        out = ffi.new("quire_sequence **")
        with self._handle.gate:
            code = lib.quire_sequence_open_snap(self._handle.pointer, encoded, out)
            check_kind(code, name, face.KIND, self._kinds)
            return face(self, self._handle.scope, out[0], name, schema)

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

    def save(self, path: str | os.PathLike[str]) -> None:  # noqa: D102, the documentation is in the base class
        check_path(path)
        super().save(path)

    def changes(self, older: "Snapshot", name: str) -> Iterator[tuple[Any, builtins.list[Any] | None]]:
        """What changed in a map since an older snapshot: each key with its values now, or None if it was removed.

        Visits only pages that differ, so the cost follows the changes, not the size. A map that was destroyed in
        between and made again with another schema is a ``MismatchError``.

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
        if not isinstance(older, Snapshot):
            raise InvalidError(f"changes since what? give an older Snapshot, not {type(older).__name__}")
        encode_name(name)
        kind = self._kinds().get(name)
        if kind is None:
            raise NotFoundError(f"no set in this snapshot named {name!r}")
        face = MAP_CLASSES.get(kind)
        if face is None:
            raise MismatchError(f"{name!r} is a {KINDS.get(kind, kind)}: changes are told of maps and ordered maps")
        before = older._open_map(face, name) if name in older._kinds() else None
        after = self._open_map(face, name)
        if before is not None and before.schema != after.schema:
            raise MismatchError(
                f"{name!r} was made with {before.schema or 'no schema'} in the older snapshot and has "
                f"{after.schema or 'no schema'} in this one: read both in full instead"
            )
        return iter(after._changes(before))


class PageManager(Arena):
    """An arena with named structures in it: the entrance to Quire.

    path       a file that the arena lives in, made if it is not there; None: memory of this process.
    limit      the most bytes to take from the system, as a number or as text such as ``"512m"``.
    page_size  bytes of a page, a power of two from 1024 to 65536; None: the default, or what the file has.
    read_only  open a file that another process may be writing, for snapshots only.
    wait       how many seconds to wait for another writer to let go of the file; negative: for ever.
    in_place   in memory only: a change of a few bytes notes what was there instead of copying the page. Takes less
               memory where changes are spread thinly; a snapshot taken between two commits copies what was changed.

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

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        page_size: int | None = None,
        *,
        read_only: bool = False,
        wait: float = 0.0,
        in_place: bool = False,
    ) -> None:
        if path is not None:
            check_path(path)
            if in_place:
                raise InvalidError(f"in_place {in_place!r}: pages of a file are always copied; leave it, or path, out")
        check_limit(limit)
        check_page_size(page_size)
        check_wait(wait)
        if read_only not in (True, False):
            raise InvalidError(f"read_only {read_only!r}: give True or False")
        if in_place not in (True, False):
            raise InvalidError(f"in_place {in_place!r}: give True or False")
        try:
            super().__init__(path, limit, page_size, read_only=read_only, wait=wait, in_place=in_place)
        except NotFoundError as error:
            raise NotFoundError(f"there is no file {os.fspath(path or '')!r} to open read only") from error

    # ------------------------------------------------------------------------------------------------ structures

    def _kv(self, face: type[MapType], name: str, schema: Schema | None) -> MapType:
        """Opens or creates, with the lock held; no look at stored schemas."""
        out = ffi.new("quire_kv **")
        with self._lock:
            code = lib.quire_kv_open(self._live(), encode_name(name), face.KIND, out)
            check_kind(code, name, face.KIND, self._kinds)
            return face(self, self._scope, out[0], name, schema)

    def _has_schema(self, name: str) -> bool:
        return len(name.encode()) <= SCHEMA_NAME_BYTES_MAX and self._exists(SCHEMA_PREFIX + name)

    def _stored_schema(self, name: str) -> Schema | None:
        if not self._has_schema(name):
            return None
        return Schema.from_bytes(self._kv(Map, schema_set(name), None)[SCHEMA_KEY])

    def _records(self, face: type[RecordsType], name: str, schema: Schema | None) -> RecordsType:
        """As _kv, for a sequence."""
        out = ffi.new("quire_sequence **")
        with self._lock:
            code = lib.quire_sequence_open(self._live(), encode_name(name), out)
            check_kind(code, name, face.KIND, self._kinds)
            return face(self, self._scope, out[0], name, schema)

    def _with_schema(
        self, name: str, schema: Schema | None, open_it: Callable[[str, Schema | None], Structure]
    ) -> Structure:
        """Opens or creates, with the schema that is stored or is to be stored."""
        user_name(name)
        with self._lock:
            if self._exists(name):
                stored = self._stored_schema(name)
                found = open_it(name, stored)
                if schema is not None and schema != stored:
                    was, given = (told_schema(found, it) for it in (stored, schema))
                    raise MismatchError(f"{name!r} was made with {was}, not with {given}")
                return found
            if schema is None:
                return open_it(name, None)
            stored_in = schema_set(name)
            made = open_it(name, schema)
            try:
                self._kv(Map, stored_in, None)[SCHEMA_KEY] = schema.to_bytes()
            except BaseException:
                self._remove(name)
                raise
            return made

    def _open_map(self, face: type[MapType], name: str, schema: Schema | None) -> MapType:
        if schema is not None and not isinstance(schema, Schema):
            raise InvalidError(f"schema is a quire.Schema or None, not {type(schema).__name__}")
        return self._with_schema(name, schema, partial(self._kv, face))

    def _open_records(self, face: type[RecordsType], name: str, value: ColumnsLike) -> RecordsType:
        schema = None if value is None else record_schema(value)
        return self._with_schema(name, schema, partial(self._records, face))

    def map(self, name: str, schema: Schema | None = None) -> Map:
        """Opens or creates the map of that name.

        Without a schema it takes bytes, unless it was made with one, which is then used. Another schema than the one it
        was made with is a ``MismatchError``.
        """
        return self._open_map(Map, name, schema)

    def ordered_map(self, name: str, schema: Schema | None = None) -> OrderedMap:
        """Opens or creates the ordered map of that name; schema as in ``map``."""
        return self._open_map(OrderedMap, name, schema)

    def list(self, name: str, value: ColumnsLike = None) -> List:
        """Opens or creates the list of that name.

        value: the columns of its records, said as those of a ``Schema``: ``"bigint"``, ``"user string, n bigint"``,
        Arrow types. None: bytes, or what it was made with. Others than it was made with are a ``MismatchError``.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     log = pm.list("log", "user string, n bigint")
        ...     log.append({"user": "bo", "n": 3})
        ...     log[0]
        {'user': 'bo', 'n': 3}
        """
        return self._open_records(List, name, value)

    def deque(self, name: str, value: ColumnsLike = None) -> Deque:
        """Opens or creates the deque of that name; value as in ``list``."""
        return self._open_records(Deque, name, value)

    def raw(self, name: str) -> Raw:
        """Opens or creates a set of raw pages."""
        out, encoded = ffi.new("quire_set **"), encode_name(user_name(name))
        with self._lock:
            arena = self._live()
            code = lib.quire_set_open(arena, encoded, lib.QUIRE_KIND_RAW, out)
            if code == lib.QUIRE_E_NOTFOUND:
                code = lib.quire_set_create(arena, encoded, lib.QUIRE_KIND_RAW, out)
            check_kind(code, name, lib.QUIRE_KIND_RAW, self._kinds)
            return Raw(self, out[0], name)

    # ------------------------------------------------------------------------------------------------ sets

    def sets(self) -> dict[str, str]:
        """What the arena holds: each name with its kind. Read only: as of the last commit."""
        if self.read_only:
            with self.snapshot() as last:
                return last.sets()
        return visible(self._kinds())

    def exists(self, name: str) -> bool:
        """True if there is a structure of that name. Read only: in the last commit."""
        user_name(name)
        return name in self.sets() if self.read_only else self._exists(name)

    def stats(self) -> Stats:
        """How much the arena holds, and for whom.

        Only the writer knows about frames and its own epoch: read only, all ``frames_`` fields and ``epoch_writing``
        are 0, ``pinned`` is empty, the ``bytes_`` fields tell of this reader alone, and ``sets`` is as of the last
        commit.
        """
        if not self.read_only:
            return super().stats()
        with self.snapshot() as last:
            sets = len(last._kinds())
        return replace(super().stats(), sets=sets)

    def load(self, path: str | os.PathLike[str]) -> None:  # noqa: D102, the documentation is in the base class
        check_path(path)
        super().load(path)

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
        if name is not None:
            user_name(name)
        if sets is not None:
            sets = self._with_schemas(sets)
        return Snapshot(self, self._acquire(name, sets), named=name is not None)

    def _weak_snapshot(self) -> Snapshot:
        """The last commit, only to tell what changed since, and to restore it."""
        return Snapshot(self, self._acquire(None, None, weak=True), named=False)

    def _with_schemas(self, sets: Sequence[str]) -> Sequence[str]:
        """The sets with those that hold their schemas, as of the last commit."""
        chosen = [] if isinstance(sets, (str, bytes)) or not isinstance(sets, Iterable) else map_names(sets)
        if not chosen:
            raise InvalidError(f"sets {sets!r}: give a list of names, or None for all")
        with Snapshot(self, self._acquire(None, None), named=False) as last:
            kinds = last._kinds()
        missing = [name for name in chosen if name not in kinds]
        if missing:
            raise NotFoundError(f"no sets named {missing} in the last commit: commit first, or leave them out")
        return [*chosen, *(stored for name in chosen if (stored := SCHEMA_PREFIX + name) in kinds)]

    def find_snapshot(self, name: str) -> Snapshot:
        """The open snapshot of that name; closing it closes it for all who found it.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     epoch = pm.commit()
        ...     first = pm.snapshot("monday")
        ...     pm.find_snapshot("monday").epoch == first.epoch
        True
        """
        encode_name(name)
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
                    self._records(List, name, None).check()


def told_schema(structure: Face, schema: Schema | None) -> str:
    """How messages show what a structure is made of."""
    if schema is None:
        return "no schema"
    return repr(schema._value if isinstance(structure, Records) else schema)


def map_names(names: Iterable[str]) -> list[str]:
    """Names that users may give."""
    return [user_name(name) for name in names]
