"""Who may close what, and when: the rules that keep Python from touching freed memory of the core.

The core releases Python's global lock while it works, so another thread may call ``close()`` in the middle of a read.
Four small classes make that safe:

* ``Gate`` counts the calls running on something that is read without a lock (a snapshot, a cursor); closing it lets
  nobody in and waits for those inside.
* ``Handle`` is one open object of the core. It is closed once, by whoever comes first: its user, the garbage
  collector, or its parent, which keeps a set of its open handles and closes them before itself.
* ``Scope`` says where a handle was opened, and so what guards the calls on it.
* ``Face`` is the base of everything users hold. Faces point at handles, handles never at faces, so that the order in
  which the garbage collector or the end of the program takes them does not matter.

A signal handler may raise between any two bytecodes (Ctrl-C does). One call of the core cannot be interrupted so, nor
can ``with`` on a lock of Python's; everything else is written such that what an interrupt leaves undone is found and
done by whoever closes next.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

from quire.pagemgr.errors import BusyError, ClosedError

POLL_SECONDS = 0.0005
PACKAGE = __name__.partition(".")[0]


def in_package(frame: FrameType) -> bool:
    """True for a frame of Quire's own code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == PACKAGE


def calls_package(frame: FrameType | None) -> bool:
    """True if the frame, or one that waits for it, is of Quire's own code."""
    while frame is not None and not in_package(frame):
        frame = frame.f_back
    return frame is not None


class Gate:
    """Lets calls in until it is closed, without a lock between them.

    It leans on list.append and list.remove being atomic: a call first puts itself on the list and then looks whether
    the gate is closed; close() first closes and then looks at the list. So one of the two always sees the other.

    An interrupt may leave a thread on the list that is not inside. It counts only while its stack shows a call of ours.
    """

    __slots__ = ("_inside", "reason")

    def __init__(self) -> None:
        self._inside: list[int] = []
        self.reason: str | None = None

    def __enter__(self) -> None:
        thread = get_ident()
        self._inside.append(thread)
        if self.reason is not None:
            self._inside.remove(thread)
            raise ClosedError(self.reason)

    def __exit__(self, *exception: object) -> None:
        self._inside.remove(get_ident())

    def refuse_own_thread(self) -> None:
        """Raises if the calling thread is itself inside: it would wait for itself (a signal handler can get there)."""
        if get_ident() not in self._inside:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and in_package(frame):  # those that led here; below a handler's lie the interrupted
            frame = frame.f_back
        if calls_package(frame):
            raise BusyError(
                "close() was called from inside a running call of the same thread; call it after that returns"
            )

    def close(self, reason: str) -> None:
        """Lets nobody in any more and waits until nobody else is inside."""
        self.reason = reason
        while self._others():
            time.sleep(POLL_SECONDS)

    def _others(self) -> bool:
        others = set(self._inside) - {get_ident()}
        if not others:
            return False
        stacks = sys._current_frames()
        return any(calls_package(stacks.get(thread)) for thread in others)

    def abandon(self, reason: str) -> None:
        """After a fork: the threads that were inside do not exist here."""
        self.reason = reason
        self._inside = []


def in_cell(release: Callable[[Any], object]) -> Callable[[Any], None]:
    """Releases what the core has written into a cell, if it came to that."""

    def release_cell(cell: Any) -> None:
        if cell[0]:
            release(cell[0])

    return release_cell


class Handle:
    """One open object of the core: ``pointer`` is None once it is closed.

    Made with a cell (``ffi.new("quire_snap **")``) it is there before the object, which open() lets the core write into
    the cell: so no interrupt can come between an object and its owner.
    """

    __slots__ = ("_guard", "_owned", "_release", "_siblings", "pointer")

    def __init__(
        self,
        pointer: Any,
        release: Callable[[Any], object],
        siblings: "set[Handle]",
        guard: AbstractContextManager[Any],
    ) -> None:
        self.pointer: Any = pointer
        self._owned = [pointer]
        self._release = release
        self._siblings = siblings
        self._guard = guard
        siblings.add(self)

    def open(self, call: Callable[[Any], None]) -> None:
        """Lets the call write the pointer into the cell; if it fails, the handle is closed."""
        try:
            call(self.pointer)
            self.pointer = self.pointer[0]
        except BaseException:
            self.close_unguarded()
            raise

    def close(self) -> None:
        """Closes it unless somebody has. A parent that is closing at this moment closes it itself."""
        with contextlib.suppress(ClosedError), self._guard:
            self.close_unguarded()

    def close_unguarded(self) -> None:
        """As close(), for a parent that has made sure that no call is running."""
        self.pointer = None
        try:
            owned = self._owned.pop()  # whoever gets it releases it
        except IndexError:
            owned = None
        self._siblings.discard(self)
        if owned:
            self._release(owned)

    def abandon(self, reason: str) -> None:
        """After a fork: forgets the pointer without calling the core, which would refuse."""
        self.pointer = None


class Scope:
    """Where handles are opened: on an arena's state being written, or on a snapshot.

    guard  around every call on a structure: the arena's lock, or the snapshot's gate.
    gate   around every call on a cursor.
    open   the structures' handles; pinned: those of cursors. Whoever opens a handle holds guard, for a cursor gate too.
    """

    __slots__ = ("gate", "guard", "open", "pinned")

    def __init__(
        self, guard: AbstractContextManager[Any], gate: Gate, open_handles: set[Handle], pinned: set[Handle]
    ) -> None:
        self.guard = guard
        self.gate = gate
        self.open = open_handles
        self.pinned = pinned

    def closed(self) -> NoReturn:
        """For a handle whose pointer is None."""
        raise ClosedError(self.gate.reason or "closed")


class Face:
    """Base of what users hold: cannot be pickled or copied, since it stands for memory of this process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it stands for memory of this process. "
            "Pass the arena's path and open it there, or save a snapshot to a file"
        )
