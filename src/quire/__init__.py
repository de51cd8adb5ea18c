"""Quire: a memory-managed state store for Spark Structured Streaming.

>>> import quire
>>> with quire.PageManager() as pm:
...     users = pm.map("users")
...     users[b"alice"] = b"1"
...     epoch = pm.commit()
...     with pm.snapshot() as s:
...         s.map("users")[b"alice"]
b'1'
"""

from quire.jvm_bridge.jar import BuildError, jar
from quire.pagemgr import (
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
    Stats,
    VersionError,
)
from quire.statestore import Operator, State, configure, read_state, stateful
from quire.structures import Deque, List, Map, OrderedMap, PageManager, Raw, Schema, Snapshot

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "BusyError",
    "ClosedError",
    "CorruptError",
    "Deque",
    "ExistsError",
    "FullError",
    "IOFailedError",
    "InvalidError",
    "LimitError",
    "List",
    "Map",
    "MismatchError",
    "NoMemoryError",
    "NoSpaceError",
    "NotFoundError",
    "Operator",
    "OrderedMap",
    "PageManager",
    "PositionError",
    "QuireError",
    "Raw",
    "ReadOnlyError",
    "Schema",
    "Snapshot",
    "State",
    "Stats",
    "VersionError",
    "__version__",
    "configure",
    "jar",
    "read_state",
    "stateful",
]
