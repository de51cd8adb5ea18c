"""What checkpoints are made of, and how to read them.

``delta`` is the changes between two states, ``pages`` the same as pages, ``cec`` a log of changes that needs no base;
``container`` is the files they lie in, ``codecs`` what packs these; ``storage`` is where the files are, ``reader``
finds and loads the states of a query's checkpoint, and ``tools`` are the commands for it. ``manager`` writes
checkpoints from Python, bases with the threads of ``io_service``.
"""

from quire.checkpoint import cec, codecs, container, delta, io_service, manager, pages, reader, storage, tools
from quire.checkpoint.io_service import CancelledError, IOService, Job
from quire.checkpoint.manager import Manager
from quire.checkpoint.reader import Checkpoint, Line, Store, StoredFile, StoreId, Version
from quire.checkpoint.storage import Storage, storage_for

__all__ = [
    "CancelledError",
    "Checkpoint",
    "IOService",
    "Job",
    "Line",
    "Manager",
    "Storage",
    "Store",
    "StoreId",
    "StoredFile",
    "Version",
    "cec",
    "codecs",
    "container",
    "delta",
    "io_service",
    "manager",
    "pages",
    "reader",
    "storage",
    "storage_for",
    "tools",
]
