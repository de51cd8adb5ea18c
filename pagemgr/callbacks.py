"""Collects what the core hands to its visit callbacks.

A Python exception must not cross C frames, so it is kept in the collector and raised when the call of the core is over.
"""

from collections.abc import Callable
from typing import Any

from quire._native import ffi, lib
from quire.pagemgr.errors import check

STOP = 1


class Collector:
    """A list that callbacks append to, and the exception that stopped them, if any."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.error: BaseException | None = None

    def add(self, make: Callable[[], Any]) -> int:
        """Appends what make() gives; never raises."""
        try:
            self.items.append(make())
        except BaseException as error:
            self.error = error
            return STOP
        return 0


def collect(call: Callable[[Any], int]) -> list[Any]:
    """Runs a call of the core with a collector as its context and gives what the callbacks collected."""
    collector = Collector()
    context = ffi.new_handle(collector)
    code = call(context)
    if collector.error is not None:
        raise collector.error
    check(code)
    return collector.items


@ffi.def_extern(name="quire_python_visit_set", error=STOP)  # type: ignore[untyped-decorator]
def visit_set(context: Any, name: Any, kind: int) -> int:
    """Collects (name, kind)."""
    return ffi.from_handle(context).add(lambda: (ffi.string(name).decode(), kind))  # type: ignore[no-any-return]


@ffi.def_extern(name="quire_python_visit_page", error=STOP)  # type: ignore[untyped-decorator]
def visit_page(context: Any, page: int, in_use: bool) -> int:
    """Collects (page id, in use)."""
    return ffi.from_handle(context).add(lambda: (page, bool(in_use)))  # type: ignore[no-any-return]


VISIT_SET = lib.quire_python_visit_set
VISIT_PAGE = lib.quire_python_visit_page
