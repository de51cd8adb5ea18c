"""Arenas of pages with copy-on-write snapshots: the lowest layer of Quire.

Users meet it through ``quire.PageManager``; the layers above build on the names below.
"""

from quire.pagemgr.errors import (
    BusyError,
    ClosedError,
    CorruptError,
    ExistsError,
    FullError,
    InvalidError,
    IOFailedError,
    LimitError,
    MismatchError,
    NoMemoryError,
    NoSpaceError,
    NotFoundError,
    PositionError,
    QuireError,
    ReadOnlyError,
    VersionError,
)
from quire.pagemgr.page_manager import Arena, ArenaSnapshot, Stats

__all__ = [
    "Arena",
    "ArenaSnapshot",
    "BusyError",
    "ClosedError",
    "CorruptError",
    "ExistsError",
    "FullError",
    "IOFailedError",
    "InvalidError",
    "LimitError",
    "MismatchError",
    "NoMemoryError",
    "NoSpaceError",
    "NotFoundError",
    "PositionError",
    "QuireError",
    "ReadOnlyError",
    "Stats",
    "VersionError",
]
