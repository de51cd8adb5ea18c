"""What changed between two states of an arena, as pages; and those pages put into another arena.

Pages can only be put on the very state that they were changed in: that of an image of the same arena, or where the
pages before them led to. ``pages.h`` says how their bytes lie.
"""

from typing import Any

from quire._native import ffi, lib
from quire.checkpoint.delta import _payload
from quire.pagemgr.callbacks import collect
from quire.pagemgr.errors import InvalidError, check
from quire.pagemgr.page_manager import Arena


def write(arena: Arena, since: int) -> list[bytes]:
    """The pages changed after an epoch, up to the state being written, as payloads.

    since: the epoch of a commit of this arena, that of its ``origin``, or 0 for all of it.

    >>> import quire
    >>> with quire.PageManager() as pm, quire.PageManager() as other:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     for payload in write(pm, 0):
    ...         apply(other, payload)
    ...     epoch = other.commit()
    ...     other.map("users")[b"alice"]
    b'1'
    """
    since = _epoch(since)
    with arena._lock:
        pointer, take = arena._live(), lib.quire_python_take_payload
        return collect(lambda context: lib.quire_pages_write(pointer, since, take, context))


def size(arena: Arena, since: int) -> int:
    """About how many bytes ``write`` would give."""
    out = ffi.new("uint64_t *")
    with arena._lock:
        check(lib.quire_pages_bytes(arena._live(), _epoch(since), out))
    return int(out[0])


def apply(arena: Arena, payload: bytes) -> None:
    """Puts the pages of one payload into an arena; those of one ``write`` in order, then a commit.

    ``MismatchError`` if the arena is not where they start from. After an error the arena is of no use: close it.
    """
    data = _payload(payload)
    with arena._lock:
        check(lib.quire_pages_apply(arena._live(), data, len(data)))


def origin(arena: Arena) -> int:
    """The epoch at which the arena was what it was loaded from: an image, or pages. 0 if it began empty."""
    point = ffi.new("quire_point *")
    with arena._lock:
        return int(lib.quire_arena_origin(arena._live(), point))


def identity(arena: Arena) -> str:
    """The random name that an arena has from when it is made, whatever happens to its path."""
    point = ffi.new("quire_point *")
    with arena._lock:
        lib.quire_arena_point(arena._live(), point)
    return bytes(point.identity).hex()


def _epoch(since: Any) -> int:
    if isinstance(since, bool) or not isinstance(since, int) or not 0 <= since < 1 << 32:
        raise InvalidError(f"since {since!r}: give the epoch of a commit, that of origin(), or 0")
    return since
