"""What checkpoints are made of, and how to read them.

``delta`` is the changes between two states, ``cec`` a log of changes that needs no base, ``container`` the files they
lie in, ``codecs`` what packs these; ``storage`` is where the files are, ``reader`` finds and loads the states of a
query's checkpoint, and ``tools`` are the commands for it.
"""

from quire.checkpoint import cec, codecs, container, delta, reader, storage, tools
from quire.checkpoint.reader import Checkpoint, Line, Store, StoredFile, StoreId, Version
from quire.checkpoint.storage import Storage, storage_for

__all__ = [
    "Checkpoint",
    "Line",
    "Storage",
    "Store",
    "StoreId",
    "StoredFile",
    "Version",
    "cec",
    "codecs",
    "container",
    "delta",
    "reader",
    "storage",
    "storage_for",
    "tools",
]
