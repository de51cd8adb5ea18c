"""Collects what the core hands to its visit callbacks.

A Python exception must not cross C frames, so it is kept in the collector and raised when the call of the core is over.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from quire._native import ffi
from quire.pagemgr.errors import check

STOP = 1


def keep_error(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """For def_extern: keeps what was raised outside of add(), as a signal handler may, for collect() to raise."""
    ffi.from_handle(trace.tb_frame.f_locals["context"]).error = error


class Collector:
    """A list that callbacks append to, and the exception that stopped them, if any."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.error: BaseException | None = None

    def add(self, make: Callable[[], Any]) -> int:
        """Appends what make() gives; never raises."""
        return self.guard(lambda: self.items.append(make()))

    def guard(self, call: Callable[[], None]) -> int:
        """Runs what may raise, and keeps it."""
        try:
            call()
        except BaseException as error:
            self.error = error
            return STOP
        return 0


class Sink(Collector):
    """What takes the bytes that the core writes, piece by piece."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        super().__init__()
        self.take = take


@ffi.def_extern(name="quire_python_take_bytes", error=STOP, onerror=keep_error)  # type: ignore[untyped-decorator]
def take_bytes(context: Any, data: Any, count: int) -> int:
    """Hands one piece on."""
    sink = ffi.from_handle(context)
    return sink.guard(lambda: sink.take(ffi.buffer(data, count)))  # type: ignore[no-any-return]


def collect(call: Callable[[Any], int]) -> list[Any]:
    """Runs a call of the core with a collector as its context and gives what the callbacks collected."""
    return run(Collector(), call)


def run(collector: Collector, call: Callable[[Any], int]) -> list[Any]:
    """As collect(), with a collector of one's own."""
    context = ffi.new_handle(collector)
    code = call(context)
    if collector.error is not None:
        raise collector.error
    if code == STOP:  # a handler of a signal raised before the collector could keep it; cffi has printed what
        raise KeyboardInterrupt
    check(code)
    return collector.items
