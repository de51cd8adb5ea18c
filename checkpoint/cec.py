"""A log of changes that needs no base: continuous eventual checkpointing.

Each version of the log holds what changed and, besides, some keys that did not: those whose newest record is the
oldest. So the last stretch of the log holds every live key. ``cec.h`` says more; ``docs/checkpoint.md`` has the design.
"""

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from quire._native import ffi, lib
from quire.checkpoint.delta import _payload
from quire.pagemgr.callbacks import collect
from quire.pagemgr.errors import ClosedError, InvalidError, NotFoundError, check
from quire.pagemgr.lifetime import Face, Handle, in_cell
from quire.pagemgr.page_manager import Arena, ArenaSnapshot

NANOS = 1_000_000_000
DESTROY = in_cell(lib.quire_cec_destroy)


@dataclass(frozen=True)
class Summary:
    """What one version of a log holds, in records.

    opens       keys that are new.
    footprints  keys that were changed.
    results     keys that were removed.
    checks      keys that did not change and are written again.
    keys        live keys.
    records     the sum of the first four.
    extent      from the oldest record that is a live key's newest, to the end of the log: what the target is for.
    since       the version in which the extent begins: nothing before it is needed.
    to_read     from the first record of that version to the end.
    """

    opens: int
    footprints: int
    results: int
    checks: int
    keys: int
    records: int
    extent: int
    since: int
    to_read: int


class Log(Face):
    """The log of one arena.

    target       the most that the extent may have, in multiples of the live keys; more than 1.
    bytes_max    of keys and values that a version writes again, unless the target would be missed by more than one.
    seconds_max  the same for the time that this takes.

    A version: change the arena, ``write()``, make the payloads durable, commit the arena, ``committed()``. A write that
    is not followed by ``committed()`` counts as not made: abort the arena, or change and write it again. A restart: a
    new arena, and for each version from ``since`` on ``apply()`` its payloads, commit the arena, ``loaded()``; at the
    end ``complete()``.

    Close it before the arena, or use it in a ``with`` block; closing the arena closes it, too.

    >>> import quire
    >>> with quire.PageManager() as pm, Log(pm, target=2.0) as log:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     payloads, summary = log.write(None, 1)
    ...     epoch = pm.commit()
    ...     log.committed()
    >>> summary.opens, summary.since
    (1, 1)
    >>> with quire.PageManager() as pm, Log(pm, target=2.0) as log:
    ...     for payload in payloads:
    ...         log.apply(payload)
    ...     epoch = pm.commit()
    ...     log.loaded(1)
    ...     log.complete(summary.keys)
    ...     pm.map("users")[b"alice"]
    b'1'
    """

    def __init__(
        self, arena: Arena, target: float = 2.0, *, bytes_max: int | None = None, seconds_max: float | None = None
    ) -> None:
        policy = ffi.new(
            "quire_cec_policy *",
            {
                "extent_target": _number("target", target, 0.0),
                "bytes_max": int(_number("bytes_max", bytes_max, 0.0)),
                "nanos_max": int(_number("seconds_max", seconds_max, 0.0) * NANOS),
            },
        )
        if not isinstance(arena, Arena):
            raise InvalidError(f"a log of what? give a PageManager, not {type(arena).__name__}")
        self._arena = arena
        with arena._lock:
            pointer = arena._live()
            self._handle = Handle(ffi.new("quire_cec **"), DESTROY, arena._scope.open, arena._scope.guard)
            self._handle.open(lambda cell: check(lib.quire_cec_create(pointer, policy, cell)))

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def close(self) -> None:
        """Gives its memory back. Closing twice is fine."""
        self._handle.close()

    def _live(self) -> Any:
        """The object's pointer; the arena's lock must be held."""
        self._arena._live()
        if self._handle.pointer is None:
            raise ClosedError("the log is closed")
        return self._handle.pointer

    def write(self, older: ArenaSnapshot | None, version: int) -> tuple[list[bytes], Summary]:
        """The state being written as a version of the log: its payloads, and what they hold.

        older: a snapshot of the version before; None in the first version. It changes the arena (keys that are written
        again count as changed), so commit or abort this afterwards.
        """
        number = _version(version)
        if older is None:
            with self._arena._lock:
                return self._write(ffi.NULL, number)
        if not isinstance(older, ArenaSnapshot):
            raise InvalidError(f"changes since what? give a snapshot of the arena, not {type(older).__name__}")
        with older._handle.gate, self._arena._lock:
            return self._write(older._handle.pointer, number)

    def _write(self, older: Any, version: int) -> tuple[list[bytes], Summary]:
        pointer, take, found = self._live(), lib.quire_python_take_payload, ffi.new("quire_cec_summary *")
        payloads = collect(lambda context: lib.quire_cec_write(pointer, older, version, take, context, found))
        return payloads, Summary(*(int(getattr(found, name)) for name in Summary.__dataclass_fields__))

    def committed(self) -> None:
        """What was written last is durable, and the arena committed."""
        with self._arena._lock:
            check(lib.quire_cec_committed(self._live()))

    def apply(self, payload: bytes) -> None:
        """Does what one payload says to the state being written; after a ``CorruptError`` abort the arena."""
        data = _payload(payload)
        with self._arena._lock:
            check(lib.quire_cec_apply(self._live(), data, len(data)))

    def loaded(self, version: int) -> None:
        """All payloads of the version were applied, and the arena committed."""
        with self._arena._lock:
            check(lib.quire_cec_loaded(self._live(), _version(version)))

    def complete(self, keys: int) -> None:
        """``CorruptError`` unless the arena holds that many live keys: those of the last loaded version's summary."""
        with self._arena._lock:
            check(lib.quire_cec_complete(self._live(), _version(keys)))

    def foreign(self, version: int) -> None:
        """The arena's last commit is this version and came from elsewhere, such as a base: the log goes on from there.

        The log needs that state until all of its keys were written again: until then ``since`` is this version.
        """
        with self._arena._lock:
            check(lib.quire_cec_foreign(self._live(), _version(version)))

    def restored(self, version: int) -> None:
        """After ``restore()``: the arena's last commit is this version of the log again, and later ones are not.

        ``NotFoundError`` if that is too long ago: then load it from its payloads.
        """
        with self._arena._lock:
            code = lib.quire_cec_restored(self._live(), _version(version))
        if code == lib.QUIRE_E_NOTFOUND:
            raise NotFoundError(f"version {version} of the log is not known any more: load it from its payloads")
        check(code)


def _number(what: str, value: Any, none: float) -> float:
    if value is None:
        return none
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InvalidError(f"{what} {value!r}: give a number greater than 0")
    return float(value)


def _version(version: Any) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
        raise InvalidError(f"{version!r} is no version: give a number from 0 on")
    return version
