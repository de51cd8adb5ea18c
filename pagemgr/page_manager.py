"""Arenas and their snapshots, as far as pages and sets go; ``quire.PageManager`` adds the structures.

How calls are kept apart (see ``lifetime.py`` for the reasons):

* everything on the state being written runs under the arena's lock, one call at a time;
* everything on a snapshot or a cursor runs side by side, counted by a gate;
* ``close()`` closes the gates, waits for the calls inside, closes snapshots and cursors, then takes the lock and
  closes the rest.
"""

import atexit
import contextlib
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from quire._native import ffi, lib
from quire.pagemgr.callbacks import Sink, run
from quire.pagemgr.errors import BusyError, ClosedError, InvalidError, NotFoundError, QuireError, check
from quire.pagemgr.lifetime import Face, Gate, Handle, Scope, in_cell

RESERVED_PREFIX = "quire:"
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LOCK_WAIT_SLICE_SECONDS = 0.1

RELEASE_SNAPSHOT = in_cell(lib.quire_snap_release)

Pair = TypeVar("Pair")
ArenaSelf = TypeVar("ArenaSelf", bound="Arena")
SnapshotSelf = TypeVar("SnapshotSelf", bound="ArenaSnapshot")


@dataclass(frozen=True)
class Stats:
    """What an arena holds at the moment of the call.

    A frame is room for one page. ``pinned`` says how many frames only the snapshots at each pinned epoch keep alive.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     epoch = pm.commit()
    ...     pm.stats().epoch_committed == epoch
    True
    """

    page_bytes: int
    frames_used: int
    frames_dirty: int
    frames_retired: int
    frames_free: int
    bytes_held: int
    bytes_limit: int
    bytes_reserved: int
    snapshots: int
    sets: int
    epoch_committed: int
    epoch_writing: int
    epoch_pinned_min: int
    pinned: dict[int, int]


def parse_bytes(size: int | str | None) -> int:
    """A number of bytes, or text such as ``"512m"`` (k, m, g); None is 0, no limit.

    >>> parse_bytes("64k")
    65536
    """
    if size is None:
        return 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+)\s*([kmg]?)b?\s*", size.lower())
        if match is None:
            raise InvalidError(f"{size!r} is no size: give a number of bytes, or one with k, m or g such as '512m'")
        return int(match[1]) * UNITS[match[2]]
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0 or size >= 1 << 63:
        raise InvalidError(f"{size!r} is no size: give a positive number of bytes, or text such as '512m'")
    return size


def encode_name(name: str) -> bytes:
    """The name of a set as the core takes it."""
    if not isinstance(name, str):
        raise InvalidError(f"a name is a str, not {type(name).__name__}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        encoded = b""
    if not 0 < len(encoded) <= lib.QUIRE_NAME_BYTES_MAX or b"\0" in encoded:
        raise InvalidError(
            f"{name!r} is no name: 1 to {lib.QUIRE_NAME_BYTES_MAX} bytes of UTF-8 without NUL are allowed"
        )
    return encoded


def user_name(name: str) -> str:
    """Refuses what is no name, and the names that Quire keeps for itself."""
    encode_name(name)
    if name.startswith(RESERVED_PREFIX):
        raise InvalidError(f"{name!r}: names that start with {RESERVED_PREFIX!r} are kept for Quire itself")
    return name


def fetch(item: str, call: Callable[[Any, int, Any], int], take: Callable[[Any], Pair]) -> list[Pair]:
    """What a call of the core that fills an array has to say: asked once for how many there are, then for them.

    take copies what is of interest out of an item, whose memory goes with the array.
    """
    count, room = ffi.new("size_t *"), 0
    items = ffi.NULL
    while True:
        check(call(items, room, count))
        if count[0] <= room:
            return [take(items[i]) for i in range(count[0])]
        room = count[0]
        items = ffi.new(f"{item}[]", room)


def set_kinds(call: Callable[[Any, int, Any], int]) -> dict[str, int]:
    """Names and kinds of the sets that the call lists."""
    return dict(fetch("quire_set_info", call, lambda info: (ffi.string(info.name).decode(), info.kind)))


def changed_pages(pages: Any, since: int) -> dict[int, bool]:
    """The pages of a set that changed after an epoch, with whether they are in use."""
    return dict(
        fetch(
            "quire_page_state",
            lambda *to: lib.quire_set_changed(pages, since, *to),
            lambda page: (page.id, page.in_use),
        )
    )


class SnapHandle(Handle):
    """A snapshot with the handles opened on it, and the gate that counts the calls on them."""

    __slots__ = ("children", "gate", "scope")

    def __init__(self, siblings: set[Handle], guard: Gate) -> None:
        self.gate = Gate()
        self.children: set[Handle] = set()
        self.scope = Scope(self.gate, self.gate, self.children, self.children)
        super().__init__(ffi.new("quire_snap **"), RELEASE_SNAPSHOT, siblings, guard)

    def close_unguarded(self) -> None:
        """Waits for the calls on the snapshot, closes what is open on it, then itself."""
        self.gate.refuse_own_thread()
        self.gate.close("the snapshot is closed")
        for child in list(self.children):
            child.close_unguarded()
        super().close_unguarded()

    def abandon(self, reason: str) -> None:
        """After a fork."""
        super().abandon(reason)
        self.gate.abandon(reason)
        for child in self.children:
            child.abandon(reason)


class ArenaSnapshot(Face):
    """A committed state, pinned: pages and sets as they were. Made by ``Arena.snapshot()``."""

    def __init__(self, arena: "Arena", handle: SnapHandle, named: bool) -> None:
        self._arena = arena
        self._handle = handle
        self._named = named

    def __enter__(self: SnapshotSelf) -> SnapshotSelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A named snapshot stays until it is closed by hand: it can be found again by its name.
        if not getattr(self, "_named", True):
            self._handle.close()

    def __repr__(self) -> str:
        with contextlib.suppress(ClosedError):
            return f"<{type(self).__name__} of epoch {self.epoch}>"
        return f"<{type(self).__name__}, closed>"

    def close(self) -> None:
        """Unpins the state; what was read from it and copied stays valid. Closing twice is fine."""
        self._handle.close()

    @property
    def epoch(self) -> int:
        """The epoch of the commit that the snapshot shows."""
        with self._handle.gate:
            return int(lib.quire_snap_epoch(self._handle.pointer))

    def _kinds(self) -> dict[str, int]:
        """Every set with its kind, those of Quire itself included."""
        with self._handle.gate:
            return set_kinds(lambda *to: lib.quire_snap_list(self._handle.pointer, *to))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the snapshot as an image file, which ``load()`` of any arena with the same page size takes in.

        The file appears under its name only when it is complete and synced. Writers go on meanwhile.

        >>> import quire, tempfile, os
        >>> with tempfile.TemporaryDirectory() as folder, quire.PageManager() as pm, quire.PageManager() as other:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     epoch = pm.commit()
        ...     with pm.snapshot() as s:
        ...         s.save(os.path.join(folder, "users.image"))
        ...     other.load(os.path.join(folder, "users.image"))
        ...     other.map("users")[b"alice"]
        b'1'
        """
        with self._handle.gate:
            check(lib.quire_snap_write_file(self._handle.pointer, os.fsencode(path)))

    def write(self, take: Callable[[Any], None]) -> None:
        """As ``save``, to a function that gets the image's bytes piece by piece, in order.

        A piece is a buffer that is gone when the function returns; what it raises ends the writing.

        >>> import quire
        >>> with quire.PageManager() as pm, quire.PageManager() as other:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     epoch = pm.commit()
        ...     image = bytearray()
        ...     with pm.snapshot() as s:
        ...         s.write(image.extend)
        ...     other.load_bytes(image)
        ...     other.map("users")[b"alice"]
        b'1'
        """
        with self._handle.gate:
            pointer = self._handle.pointer
            run(Sink(take), lambda context: lib.quire_snap_write(pointer, lib.quire_python_take_bytes, context))

    def page(self, name: str, page_id: int) -> bytes:
        """The bytes of one page of a set."""
        view = ffi.new("quire_view *")
        with self._handle.gate:
            check_found(lib.quire_snap_view(self._handle.pointer, encode_name(name), 0, view), "set", name)
            page = lib.quire_page_read(view, page_number(page_id))
            if page == ffi.NULL:
                raise NotFoundError(f"page {page_id} of {name!r} is not in use")
            return bytes(ffi.buffer(page, self._arena.page_size))


def page_number(page_id: int) -> int:
    """Refuses what is no page id."""
    if not isinstance(page_id, int) or not 0 <= page_id < 1 << 32:
        raise InvalidError(f"{page_id!r} is no page id: a number from 0 to {(1 << 32) - 1}")
    return page_id


def check_found(code: int, what: str, name: str) -> None:
    """As check(), with a message that names what was not found."""
    if code == lib.QUIRE_E_NOTFOUND:
        raise NotFoundError(f"no {what} named {name!r}")
    check(code)


class Arena(Face):
    """An arena of pages: opening, committing, snapshots, sets. ``quire.PageManager`` is this with structures."""

    _snapshot_class: type[ArenaSnapshot] = ArenaSnapshot
    _pointer: Any

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
        options = self._prepare(path, limit, page_size, read_only)
        options.in_place = in_place
        open_arena(options, wait, self._out)
        self._pointer = self._out[0]

    def _prepare(
        self, path: str | os.PathLike[str] | None, limit: int | str | None, page_size: int | None, read_only: bool
    ) -> Any:
        """An arena that is not open yet, and how to open it."""
        # What _out holds must be closed; _pointer is the same while calls are let in, else None.
        self._out: Any = ffi.new("quire_arena **")
        self._pointer = None
        self._lock = threading.RLock()
        self._gate = Gate()
        self._closing = threading.RLock()
        self._close_runs = False
        self._live_handles: set[Handle] = set()
        self._pinned_handles: set[Handle] = set()
        self._scope = Scope(self._lock, self._gate, self._live_handles, self._pinned_handles)
        self._read_only = read_only
        if page_size is not None and (isinstance(page_size, bool) or not isinstance(page_size, int) or page_size <= 0):
            raise InvalidError(f"page_size {page_size!r}: give a power of two from 1024 to 65536, or None")
        self._path = None if path is None else os.fspath(path)
        self._encoded_path = ffi.NULL if path is None else ffi.new("char[]", os.fsencode(path))
        _open_arenas.add(self)
        return ffi.new(
            "quire_arena_options *",
            {
                "path": self._encoded_path,
                "page_bytes": min(page_size or 0, 0xFFFFFFFF),
                "limit_bytes": parse_bytes(limit),
                "read_only": read_only,
            },
        )

    @classmethod
    def from_image(
        cls: type[ArenaSelf],
        image: str | os.PathLike[str] | bytes | bytearray | memoryview,
        limit: int | str | None = None,
        *,
        name: str = "the image",
    ) -> ArenaSelf:
        """An arena in memory that is an image (see ``Snapshot.save``): a file, which is mapped, or its bytes.

        A mapped file is read, and verified, piece by piece when its pages are first used, so that this costs the same
        for any size. It must not change; it may be removed. name stands for bytes in messages.

        >>> import quire, tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder, quire.PageManager() as pm:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     epoch = pm.commit()
        ...     with pm.snapshot() as s:
        ...         s.save(pathlib.Path(folder, "users.image"))
        ...     with quire.PageManager.from_image(pathlib.Path(folder, "users.image")) as other:
        ...         other.map("users")[b"alice"]
        b'1'
        """
        arena = cls.__new__(cls)
        options = arena._prepare(None, limit, None, False)
        if isinstance(image, (bytes, bytearray, memoryview)):
            begun = ffi.new("quire_image **")
            data = bytes(image)
            check(lib.quire_image_begin(options, len(data), name.encode("utf-8", "replace"), begun))
            ffi.memmove(lib.quire_image_room(begun[0]), data, len(data))
            check(lib.quire_image_end(begun, arena._out))
        elif isinstance(image, (str, os.PathLike)):
            check_found(lib.quire_image_map(options, os.fsencode(image), arena._out), "image", os.fsdecode(image))
        else:
            raise InvalidError(f"an image is a path or bytes, not {type(image).__name__}")
        arena._pointer = arena._out[0]
        return arena

    def __enter__(self: ArenaSelf) -> ArenaSelf:
        with self._lock:
            self._live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pinned_handles"):
            self.close()

    def __repr__(self) -> str:
        where = "in memory" if self._path is None else f"at {self._path!r}"
        return f"<{type(self).__name__} {where}{', closed' if self._pointer is None else ''}>"

    # ------------------------------------------------------------------------------------------------ guards

    def _live(self) -> Any:
        """The arena's pointer; the lock must be held."""
        if self._pointer is None:
            raise ClosedError(self._gate.reason or "the arena is closed")
        return self._pointer

    def _refuse_own_thread(self) -> None:
        """Refuses if this thread is in the middle of another call, whose bytes would move under it.

        Only a signal handler can get there.
        """
        # threading.Condition leans on the same method of RLock.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise BusyError("called from inside a running call of the same thread; call it after that returns")

    def close(self) -> None:
        """Closes the arena and everything opened on it; changes since the last commit are dropped.

        Closing twice is fine. Calls that run on other threads are waited for; later ones raise ``ClosedError``.

        >>> import quire
        >>> pm = quire.PageManager()
        >>> pm.close()
        >>> pm.map("users")
        Traceback (most recent call last):
        quire.pagemgr.errors.ClosedError: the arena is closed
        """
        if self._out[0] == ffi.NULL:
            return
        self._refuse_own_thread()
        self._gate.refuse_own_thread()
        with self._closing:
            if self._out[0] == ffi.NULL or self._close_runs:
                return
            try:
                self._close_runs = True
                self._gate.close("the arena is closed")
                # Not yet under the lock: a call on a snapshot may have to wait for it, and this waits for that call.
                for handle in list(self._pinned_handles):
                    handle.close_unguarded()
                with self._lock:
                    for handle in list(self._live_handles):
                        handle.close_unguarded()
                    self._pointer = None
                    check(lib.quire_arena_close_all(self._out))
            finally:
                self._close_runs = False

    def _abandon(self) -> None:
        """In the child of a fork: everything opened before is closed, without a call of the core."""
        reason = "opened before a fork: open the arena again in this process"
        for handle in [*self._live_handles, *self._pinned_handles]:
            handle.abandon(reason)
        self._live_handles.clear()
        self._pinned_handles.clear()
        self._gate.abandon(reason)
        self._pointer = None
        self._out = ffi.new("quire_arena **")

    # ------------------------------------------------------------------------------------------------ states

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        with self._lock:
            return int(lib.quire_arena_page_bytes(self._live()))

    @property
    def epoch(self) -> int:
        """The epoch of the last commit."""
        with self._lock:
            return int(lib.quire_arena_epoch(self._live()))

    @property
    def read_only(self) -> bool:
        """True if the arena was opened for snapshots only."""
        return self._read_only

    def commit(self) -> int:
        """Publishes all changes since the last commit as one state, as a whole or not at all, and gives its epoch.

        Once it returns, the death of this process does not lose it (file arenas); ``sync()`` guards against a loss of
        power, too.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     first = pm.commit()
        ...     pm.map("users")[b"bob"] = b"2"
        ...     pm.commit() > first
        True
        """
        self._refuse_own_thread()
        with self._lock:
            arena = self._live()
            check(lib.quire_arena_commit(arena))
            return int(lib.quire_arena_epoch(arena))

    def abort(self) -> None:
        """Goes back to the last commit. Structures made since then are gone; the others stay usable.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     epoch = pm.commit()
        ...     users[b"alice"] = b"1"
        ...     pm.abort()
        ...     len(users)
        0
        """
        self._refuse_own_thread()
        with self._lock:
            check(lib.quire_arena_abort(self._live()))

    def restore(self, snapshot: ArenaSnapshot) -> int:
        """Makes the state of a snapshot of this arena the last commit again, and gives its new epoch.

        What is not committed is dropped. Structures that the snapshot has stay usable, but for those destroyed since,
        or destroyed and made again: open these once more. The snapshot, and those taken since, stay as they are.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     users[b"alice"] = b"1"
        ...     epoch = pm.commit()
        ...     with pm.snapshot() as s:
        ...         users[b"alice"] = b"2"
        ...         epoch = pm.commit()
        ...         pm.restore(s) > epoch, users[b"alice"]
        (True, b'1')
        """
        if not isinstance(snapshot, ArenaSnapshot):
            raise InvalidError(f"restore what? give a snapshot of this arena, not {type(snapshot).__name__}")
        self._refuse_own_thread()
        with snapshot._handle.gate, self._lock:
            arena = self._live()
            check(lib.quire_arena_restore(arena, snapshot._handle.pointer))
            return int(lib.quire_arena_epoch(arena))

    def sync(self) -> None:
        """Makes the last commit of a file arena survive a loss of power, too."""
        with self._lock:
            check(lib.quire_arena_sync(self._live()))

    def check(self) -> None:
        """Walks every page and raises ``CorruptError`` where an invariant is broken.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     pm.check()
        """
        with self._lock:
            check(lib.quire_arena_check(self._live()))

    def stats(self) -> Stats:
        """How much the arena holds, and for whom."""
        numbers = ffi.new("quire_stats *")
        with self._lock:
            arena = self._live()
            check(lib.quire_arena_stats(arena, numbers))
            pinned = fetch(
                "quire_pinned", lambda *to: lib.quire_arena_pinned(arena, *to), lambda pin: (pin.epoch, pin.frames)
            )
        fields = {name: int(getattr(numbers, name)) for name in Stats.__dataclass_fields__ if name != "pinned"}
        return Stats(**fields, pinned=dict(pinned))

    # ------------------------------------------------------------------------------------------------ snapshots

    def _acquire(self, name: str | None, sets: Sequence[str] | None, weak: bool = False) -> SnapHandle:
        """Pins the last commit. Takes no lock, so it never waits for a writer, unless that one changes pages in place.

        weak: only for the writer to tell what changed since, and to go back to (pagemgr.h).
        """
        if name is None and sets is None:
            acquire = lib.quire_snap_acquire_weak if weak else lib.quire_snap_acquire
            with self._gate:
                handle = SnapHandle(self._pinned_handles, self._gate)
                handle.open(lambda out: check(acquire(self._pointer, out)))
                return handle
        encoded = [ffi.new("char[]", encode_name(each)) for each in sets or ()]
        chosen = ffi.new("char *[]", encoded)
        label = f"{RESERVED_PREFIX}{next(_counter)}" if name is None else user_name(name)

        def create(out: Any) -> None:
            code = lib.quire_snap_create(self._pointer, encode_name(label), chosen, len(encoded), out)
            check_found(code, "set among", ", ".join(sets or ()))

        with self._gate:
            handle = SnapHandle(self._pinned_handles, self._gate)
            handle.open(create)
            return handle

    def _find(self, name: str) -> SnapHandle:
        """The open snapshot of that name."""
        out = ffi.new("quire_snap **")
        with self._gate:
            check_found(lib.quire_snap_find(self._pointer, encode_name(name), out), "snapshot", name)
            for handle in list(self._pinned_handles):
                if isinstance(handle, SnapHandle) and handle.pointer == out[0]:
                    return handle
        raise NotFoundError(f"no snapshot named {name!r}")

    # ------------------------------------------------------------------------------------------------ sets

    def _kinds(self) -> dict[str, int]:
        """Every set with its kind, those of Quire itself included."""
        with self._lock:
            arena = self._live()
            return set_kinds(lambda *to: lib.quire_set_list(arena, *to))

    def _exists(self, name: str) -> bool:
        with self._lock:
            found = lib.quire_set_exists(self._live(), encode_name(name))
            check(min(found, 0))
        return bool(found)

    def _destroy(self, name: str) -> None:
        with self._lock:
            check_found(lib.quire_set_destroy(self._live(), encode_name(name)), "set", name)

    def _clone(self, source: str, name: str) -> None:
        with self._lock:
            check_found(lib.quire_set_clone(self._live(), encode_name(source), encode_name(name)), "set", source)

    def changed_pages(self, name: str, since_epoch: int) -> dict[int, bool]:
        """The pages of a set changed after an epoch; False for those in changed tables that are free now.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     users = pm.map("users")
        ...     first = pm.commit()
        ...     users[b"alice"] = b"1"
        ...     len(pm.changed_pages("users", first)) > 0
        True
        """
        if not isinstance(since_epoch, int) or not 0 <= since_epoch < 1 << 32:
            raise InvalidError(f"since_epoch {since_epoch!r}: give an epoch that commit() returned")
        out = ffi.new("quire_set **")
        with self._lock:
            check_found(lib.quire_set_open(self._live(), encode_name(name), 0, out), "set", name)
            return changed_pages(out[0], since_epoch)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Adds every set of an image file (see ``Snapshot.save``) to the state being written; all of them or none."""
        self._refuse_own_thread()
        with self._lock:
            check_found(lib.quire_arena_load_file(self._live(), os.fsencode(path)), "image", os.fsdecode(path))

    def load_bytes(self, image: bytes | bytearray | memoryview, name: str = "the image") -> None:
        """As ``load``, of an image that is in memory; name stands for it in messages.

        >>> import quire, tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder, quire.PageManager() as pm, quire.PageManager() as other:
        ...     pm.map("users")[b"alice"] = b"1"
        ...     epoch = pm.commit()
        ...     with pm.snapshot() as s:
        ...         s.save(pathlib.Path(folder, "users.image"))
        ...     other.load_bytes(pathlib.Path(folder, "users.image").read_bytes())
        ...     other.map("users")[b"alice"]
        b'1'
        """
        if not isinstance(image, (bytes, bytearray, memoryview)):
            raise InvalidError(f"an image is bytes or bytes-like here, not {type(image).__name__}: load() takes a path")
        data = ffi.from_buffer(image if isinstance(image, bytearray) else bytes(image))
        if int(ffi.cast("uintptr_t", data)) % 8:  # as a bytearray may be that something was cut off from
            data = ffi.from_buffer(bytes(image))
        self._refuse_own_thread()
        with self._lock:
            check(lib.quire_arena_load(self._live(), data, len(data), name.encode("utf-8", "replace")))


def open_arena(options: Any, wait: float, out: Any) -> None:
    """Opens, waiting up to wait seconds (negative: for ever) for another writer; in slices, so that Ctrl-C is heard.

    out belongs to the caller, so that an interrupt does not lose what was opened.
    """
    deadline = float("inf") if wait < 0 else time.monotonic() + wait
    while True:
        options.lock_wait_seconds = max(0.0, min(LOCK_WAIT_SLICE_SECONDS, deadline - time.monotonic()))
        code = lib.quire_arena_open(options, out)
        if code != lib.QUIRE_E_BUSY or time.monotonic() >= deadline:
            break
    check(code)


def close_all() -> None:
    """At the end of the program, while everything still works: what is left open is closed in the right order."""
    for arena in list(_open_arenas):
        with contextlib.suppress(QuireError):
            arena.close()


_open_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()
_held_for_fork: list[Arena] = []
_counter = itertools.count(1)


def _before_fork() -> None:
    # With the locks held no call of the core is under way in another thread, so the child gets memory in a sane state.
    for arena in list(_open_arenas):
        arena._lock.acquire()
        _held_for_fork.append(arena)


def _after_fork(in_child: Callable[[Arena], None] | None) -> None:
    for arena in _held_for_fork:
        arena._lock.release()
    _held_for_fork.clear()
    if in_child is not None:
        for arena in list(_open_arenas):
            in_child(arena)


atexit.register(close_all)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(None),
    after_in_child=lambda: _after_fork(Arena._abandon),
)
