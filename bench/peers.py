"""Quire and the stores it is measured against, each with its best settings and fastest bulk calls.

A peer gives the same operations in its own way. Inputs are made in the form the peer likes best (``keys_in``,
``pairs_in``) before the clock starts. Where a peer has several ways to read, ``*_ways`` name them all and the benchmark
takes the fastest, by trying them.
What was tried and not taken:

* LMDB, sorting a batch first: costs more in Python than it saves.
* LMDB, ``getmulti(keyfixed=True)``: needs a table of duplicates (dupsort, dupfixed), in which a put adds a value and
  replaces none, so it is no map; it was not faster either.
* RocksDB, one ``multi_get`` of all keys: slower than in blocks of 1000.
"""

import importlib
import itertools
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from quire.bench.data import RECORD_BYTES, Bytes, to_list

SCAN_BLOCK_ROWS = 65536
READ_BLOCK_KEYS = 1000
SQL_VARIABLES = 500

Way = Callable[[Any], Any]
Bounds = list[tuple[bytes, bytes]]


class MissingPeer(Exception):
    """A peer that is not installed."""


def load(module: str) -> Any:
    """The module, or the reason why the peer cannot run."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeer(f"{module} is not installed ({error}); pip install {module}") from error


def blocks(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Pairs in lists of up to SCAN_BLOCK_ROWS."""
    rest = iter(pairs)
    return iter(lambda: list(itertools.islice(rest, SCAN_BLOCK_ROWS)), [])


def until(pairs: Iterable[tuple[bytes, bytes]], high: bytes) -> list[tuple[bytes, bytes]]:
    """The pairs before the bound."""
    found = []
    for pair in pairs:
        if pair[0] >= high:
            break
        found.append(pair)
    return found


def exhaust(calls: Iterator[Any]) -> None:
    """Runs an iterator to its end at the speed of C."""
    for _ in calls:
        pass


class Peer(ABC):
    """One store, open and empty. ``calls`` says which call each measurement times."""

    calls: ClassVar[dict[str, str]]
    for_scale: ClassVar[bool] = False  # no store: it keeps no committed states, and shows what Python itself costs

    def __init__(self, folder: Path, ordered: bool, capacity: int) -> None:
        self.folder, self.ordered, self.raw_bytes = folder, ordered, capacity * RECORD_BYTES
        self.open()

    @abstractmethod
    def open(self) -> None: ...

    def keys_in(self, keys: Bytes) -> Any:
        return to_list(keys)

    def pairs_in(self, keys: Bytes, values: Bytes) -> Any:
        return list(zip(to_list(keys), to_list(values), strict=True))

    def begin(self) -> None:  # noqa: B027
        """Starts a transaction, where the store has them."""

    def commit(self) -> None:  # noqa: B027
        """Ends it."""

    @abstractmethod
    def put(self, pairs: Any) -> None: ...

    def put_ascending(self, pairs: Any) -> None:
        """As ``put``, of keys in ascending order, each beyond all that are there."""
        self.put(pairs)

    @abstractmethod
    def remove(self, keys: Any) -> None: ...
    @abstractmethod
    def get_ways(self) -> dict[str, Way]: ...
    @abstractmethod
    def range_ways(self) -> dict[str, Way]: ...
    @abstractmethod
    def scan(self) -> Iterator[Any]: ...

    @abstractmethod
    def put_each(self, keys: list[bytes], values: list[bytes]) -> None: ...
    @abstractmethod
    def get_each(self, keys: list[bytes]) -> list[bytes]: ...
    @abstractmethod
    def remove_each(self, keys: list[bytes]) -> None: ...

    def settle(self) -> str:
        """Brings the store into the state it is in after a while, and names it; nothing for most."""
        return ""

    def held_bytes(self) -> int | None:
        """What the store itself says that it takes; None if it does not say."""
        return None

    def used_bytes(self) -> int | None:
        """What of that its present state needs, without room kept for the next change; None if it does not say."""
        return None

    def close(self) -> None:  # noqa: B027
        """Frees everything."""


class Quire(Peer):
    """Anonymous memory, default page size unless told otherwise; Arrow arrays in bulk."""

    page_size: int | None = None
    calls: ClassVar[dict[str, str]] = {
        "put": "put_many of an Arrow array, pm.commit",
        "remove": "remove_many of an Arrow array, pm.commit",
        "scan": "to_batches",
        "put each": "map[key] = value, pm.commit",
        "get each": "map.get(key)",
        "remove each": "del map[key], pm.commit",
    }

    def open(self) -> None:
        import quire

        self.pm = quire.PageManager(self.path(), page_size=self.page_size)
        self.map = self.pm.ordered_map("bench") if self.ordered else self.pm.map("bench")

    def path(self) -> Path | None:
        return None

    def keys_in(self, keys: Bytes) -> Any:
        import pyarrow as pa

        # Offsets and bytes as a column of a Spark batch has them, not of fixed width.
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(keys.shape[1]), len(keys), [None, pa.py_buffer(keys.tobytes())]
        ).cast(pa.binary())

    def pairs_in(self, keys: Bytes, values: Bytes) -> Any:
        return self.keys_in(keys), self.keys_in(values)

    def commit(self) -> None:
        self.pm.commit()

    def put(self, pairs: Any) -> None:
        self.map.put_many(*pairs)

    def remove(self, keys: Any) -> None:
        self.map.remove_many(keys)

    def get_ways(self) -> dict[str, Way]:
        return {"get_many of an Arrow array": self.map.get_many}

    def range_ways(self) -> dict[str, Way]:
        ordered: Any = self.map

        def batches(bounds: Bounds) -> Any:
            return [batch for low, high in bounds for batch in ordered.range_batches(low, high)]

        return {
            "list(range(low, high))": lambda bounds: [list(ordered.range(low, high)) for low, high in bounds],
            "range_batches(low, high)": batches,
        }

    def scan(self) -> Iterator[Any]:
        return self.map.to_batches(SCAN_BLOCK_ROWS)

    def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        target = self.map
        for key, value in zip(keys, values, strict=True):
            target[key] = value
        self.pm.commit()

    def get_each(self, keys: list[bytes]) -> list[bytes]:
        return list(map(self.map.get, keys))

    def remove_each(self, keys: list[bytes]) -> None:
        target = self.map
        for key in keys:
            del target[key]
        self.pm.commit()

    def held_bytes(self) -> int | None:
        return self.pm.stats().bytes_held

    def used_bytes(self) -> int | None:
        stats = self.pm.stats()
        return stats.frames_used * stats.page_bytes

    def close(self) -> None:
        self.pm.close()


class QuireFromBytes(Quire):
    """Called as the other stores are, with lists of Python's bytes, and gives such lists: what that costs is timed."""

    calls: ClassVar[dict[str, str]] = {
        **Quire.calls,
        "put": "lists of keys and values from a list of pairs, put_many, pm.commit",
        "remove": "remove_many of a list of bytes, pm.commit",
        "scan": "to_batches, pairs of to_pylist",
    }

    def keys_in(self, keys: Bytes) -> Any:
        return to_list(keys)

    def pairs_in(self, keys: Bytes, values: Bytes) -> Any:
        return Peer.pairs_in(self, keys, values)

    def put(self, pairs: Any) -> None:
        self.map.put_many([key for key, _ in pairs], [value for _, value in pairs])

    def get_ways(self) -> dict[str, Way]:
        return {"get_many of a list of bytes, to_pylist": lambda keys: self.map.get_many(keys).to_pylist()}

    def range_ways(self) -> dict[str, Way]:
        ways = super().range_ways()
        batches = ways["range_batches(low, high)"]
        return {**ways, "range_batches(low, high)": lambda bounds: list(map(listed_pairs, batches(bounds)))}

    def scan(self) -> Iterator[Any]:
        return map(listed_pairs, super().scan())


def listed_pairs(batch: Any) -> list[tuple[bytes, bytes]]:
    """The records of an Arrow batch as other stores give them."""
    return list(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))


class QuireFile(Quire):
    """A file that other processes can open, where the other stores have theirs."""

    def path(self) -> Path | None:
        return self.folder / "bench.arena"


class Lmdb(Peer):
    """No syncs, writable map, no lock file: nothing between the calls and the map's memory."""

    calls: ClassVar[dict[str, str]] = {
        "put": "cursor.putmulti in one write transaction",
        "put ascending": "cursor.putmulti(append=True) in one write transaction",
        "remove": "txn.delete per key in one write transaction",
        "scan": "list(cursor)",
        "put each": "txn.put in one write transaction",
        "get each": "txn.get in one read transaction",
        "remove each": "txn.delete in one write transaction",
    }

    def open(self) -> None:
        lmdb = load("lmdb")
        room = 16 * self.raw_bytes + (1 << 28)
        fast = {"writemap": True, "map_async": True, "sync": False, "metasync": False, "lock": False}
        self.env = lmdb.open(str(self.folder / "lmdb"), map_size=room, readahead=False, meminit=False, **fast)

    def begin(self) -> None:
        self.txn = self.env.begin(write=True)

    def commit(self) -> None:
        self.txn.commit()

    def put(self, pairs: Any) -> None:
        self.txn.cursor().putmulti(pairs)

    def put_ascending(self, pairs: Any) -> None:
        self.txn.cursor().putmulti(pairs, append=True)

    def remove(self, keys: Any) -> None:
        exhaust(map(self.txn.delete, keys))

    def get_ways(self) -> dict[str, Way]:
        def getmulti(keys: Any) -> Any:
            with self.env.begin() as txn, txn.cursor() as cursor:
                return cursor.getmulti(keys)

        return {"cursor.getmulti": getmulti, "txn.get per key": self.get_each}

    def range_ways(self) -> dict[str, Way]:
        def ranges(bounds: Bounds) -> Any:
            with self.env.begin() as txn, txn.cursor() as cursor:
                return [until(cursor if cursor.set_range(low) else (), high) for low, high in bounds]

        return {"cursor.set_range, then iterate": ranges}

    def scan(self) -> Iterator[Any]:
        with self.env.begin() as txn, txn.cursor() as cursor:
            yield from blocks(cursor)

    def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        with self.env.begin(write=True) as txn:
            exhaust(map(txn.put, keys, values))

    def get_each(self, keys: list[bytes]) -> list[bytes]:
        with self.env.begin() as txn:
            return list(map(txn.get, keys))

    def remove_each(self, keys: list[bytes]) -> None:
        with self.env.begin(write=True) as txn:
            exhaust(map(txn.delete, keys))

    def held_bytes(self) -> int | None:
        return int((self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"])

    def close(self) -> None:
        self.env.close()


class RocksDb(Peer):
    """Raw mode, no log, no compression, memtable and cache that hold everything, filters, hash index, mapped files.

    Flushes and compactions run on threads of its own, outside the clock unless a call waits for them.
    """

    calls: ClassVar[dict[str, str]] = {
        "put": "WriteBatch of put, db.write",
        "remove": "WriteBatch of delete, db.write",
        "scan": "list(db.items())",
        "put each": "db.put",
        "get each": "db.get",
        "remove each": "db.delete",
    }

    def open(self) -> None:
        self.rocks = load("rocksdict")
        room = 8 * self.raw_bytes + (1 << 26)
        table = self.rocks.BlockBasedOptions()
        table.set_block_cache(self.rocks.Cache(room))
        table.set_bloom_filter(10, False)
        table.set_data_block_index_type(self.rocks.DataBlockIndexType.binary_and_hash())
        options = self.rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(table)
        options.set_compression_type(self.rocks.DBCompressionType.none())
        options.set_write_buffer_size(room)
        options.set_allow_mmap_reads(True)
        self.db = self.rocks.Rdict(str(self.folder / "rocksdb"), options=options)
        unlogged = self.rocks.WriteOptions()
        unlogged.disable_wal = True
        self.db.set_write_options(unlogged)

    def put(self, pairs: Any) -> None:
        batch = self.rocks.WriteBatch(raw_mode=True)
        exhaust(itertools.starmap(batch.put, pairs))
        self.db.write(batch)

    def remove(self, keys: Any) -> None:
        batch = self.rocks.WriteBatch(raw_mode=True)
        exhaust(map(batch.delete, keys))
        self.db.write(batch)

    def get_ways(self) -> dict[str, Way]:
        def multi_get(keys: list[bytes]) -> Any:
            found: list[bytes] = []
            for start in range(0, len(keys), READ_BLOCK_KEYS):
                found += self.db[keys[start : start + READ_BLOCK_KEYS]]
            return found

        return {f"db[list of {READ_BLOCK_KEYS} keys] (multi_get)": multi_get, "db.get per key": self.get_each}

    def range_ways(self) -> dict[str, Way]:
        def bounded(bounds: Bounds) -> Any:
            found = []
            for low, high in bounds:
                limits = self.rocks.ReadOptions()
                limits.set_iterate_upper_bound(high)
                found.append(list(self.db.items(from_key=low, read_opt=limits)))
            return found

        def unbounded(bounds: Bounds) -> Any:
            return [until(self.db.items(from_key=low), high) for low, high in bounds]

        return {"items(from_key) with an upper bound": bounded, "items(from_key), then iterate": unbounded}

    def scan(self) -> Iterator[Any]:
        return blocks(self.db.items())

    def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        exhaust(map(self.db.put, keys, values))

    def get_each(self, keys: list[bytes]) -> list[bytes]:
        return list(map(self.db.get, keys))

    def remove_each(self, keys: list[bytes]) -> None:
        exhaust(map(self.db.delete, keys))

    def settle(self) -> str:
        self.db.flush()
        self.db.compact_range(None, None)
        return "compacted"

    def held_bytes(self) -> int | None:
        names = ("rocksdb.cur-size-all-mem-tables", "rocksdb.total-sst-files-size")
        return sum(int(self.db.property_int_value(name)) for name in names)

    def close(self) -> None:
        self.db.close()


class Sqlite(Peer):
    """A table without rowid; no journal, no syncs, exclusive, all of it in the page cache."""

    calls: ClassVar[dict[str, str]] = {
        "put": "executemany insert or replace in one transaction",
        "remove": "executemany delete in one transaction",
        "scan": "select ... order by key, fetchmany",
        "put each": "execute insert or replace in one transaction",
        "get each": "execute select per key in one transaction",
        "remove each": "execute delete in one transaction",
    }
    PUT = "insert or replace into bench values (?, ?)"
    GET = "select value from bench where key = ?"
    REMOVE = "delete from bench where key = ?"
    RANGE = "select key, value from bench where key >= ? and key < ? order by key"

    def open(self) -> None:
        self.db = sqlite3.connect(self.folder / "sqlite", isolation_level=None)
        cache_kilobytes = (8 * self.raw_bytes >> 10) + (1 << 16)
        for setting in (
            "journal_mode=off",
            "synchronous=off",
            "locking_mode=exclusive",
            f"cache_size=-{cache_kilobytes}",
        ):
            self.db.execute(f"pragma {setting}")
        self.db.execute("create table bench (key blob primary key, value blob) without rowid")

    def keys_in(self, keys: Bytes) -> Any:
        return [(key,) for key in to_list(keys)]

    def begin(self) -> None:
        self.db.execute("begin")

    def commit(self) -> None:
        self.db.execute("commit")

    def put(self, pairs: Any) -> None:
        self.db.executemany(self.PUT, pairs)

    def remove(self, keys: Any) -> None:
        self.db.executemany(self.REMOVE, keys)

    def get_ways(self) -> dict[str, Way]:
        def one_by_one(keys: Any) -> Any:
            self.begin()
            execute, query = self.db.execute, self.GET
            found = [execute(query, key).fetchone()[0] for key in keys]
            self.commit()
            return found

        def many(keys: Any) -> Any:
            self.begin()
            found: list[bytes] = []
            for start in range(0, len(keys), SQL_VARIABLES):
                wanted = [key for (key,) in keys[start : start + SQL_VARIABLES]]
                marks = ",".join("?" * len(wanted))
                values = dict(self.db.execute(f"select key, value from bench where key in ({marks})", wanted))
                found += [values[key] for key in wanted]
            self.commit()
            return found

        return {"select per key": one_by_one, f"select ... in ({SQL_VARIABLES} keys)": many}

    def range_ways(self) -> dict[str, Way]:
        execute, query = self.db.execute, self.RANGE
        return {"select ... order by key": lambda bounds: [execute(query, pair).fetchall() for pair in bounds]}

    def scan(self) -> Iterator[Any]:
        rows = self.db.execute("select key, value from bench order by key")
        return iter(lambda: rows.fetchmany(SCAN_BLOCK_ROWS), [])

    def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        self.begin()
        execute, query = self.db.execute, self.PUT
        for pair in zip(keys, values, strict=True):
            execute(query, pair)
        self.commit()

    def get_each(self, keys: list[bytes]) -> list[bytes]:
        execute, query = self.db.execute, self.GET
        self.begin()
        found = [execute(query, (key,)).fetchone()[0] for key in keys]
        self.commit()
        return found

    def remove_each(self, keys: list[bytes]) -> None:
        self.begin()
        execute, query = self.db.execute, self.REMOVE
        for key in keys:
            execute(query, (key,))
        self.commit()

    def held_bytes(self) -> int | None:
        (pages,), (page_bytes,) = (self.db.execute(f"pragma {name}").fetchone() for name in ("page_count", "page_size"))
        return int(pages) * int(page_bytes)

    def close(self) -> None:
        self.db.close()


class Dict(Peer):
    """A Python dict: no transactions, snapshots or files."""

    for_scale = True
    calls: ClassVar[dict[str, str]] = {
        "put": "dict.update of a list of pairs",
        "remove": "del dict[key] per key",
        "scan": "list(dict.items())",
        "put each": "dict[key] = value",
        "get each": "dict.get(key)",
        "remove each": "del dict[key]",
    }

    def open(self) -> None:
        self.items: Any = {}

    def put(self, pairs: Any) -> None:
        self.items.update(pairs)

    def remove(self, keys: Any) -> None:
        self.remove_each(keys)

    def get_ways(self) -> dict[str, Way]:
        return {self.calls["get each"]: self.get_each}

    def range_ways(self) -> dict[str, Way]:
        return {}

    def scan(self) -> Iterator[Any]:
        return blocks(self.items.items())

    def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        items = self.items
        for key, value in zip(keys, values, strict=True):
            items[key] = value

    def get_each(self, keys: list[bytes]) -> list[bytes]:
        return list(map(self.items.get, keys))

    def remove_each(self, keys: list[bytes]) -> None:
        items = self.items
        for key in keys:
            del items[key]


class SortedDict(Dict):
    """sortedcontainers.SortedDict, as ``Dict``."""

    calls: ClassVar[dict[str, str]] = {name: call.replace("dict", "SortedDict") for name, call in Dict.calls.items()}

    def open(self) -> None:
        self.items = load("sortedcontainers").SortedDict()

    def range_ways(self) -> dict[str, Way]:
        def ranges(bounds: Bounds) -> Any:
            items = self.items
            return [[(key, items[key]) for key in items.irange(low, high, (True, False))] for low, high in bounds]

        return {"irange(low, high)": ranges}


PEERS: dict[str, type[Peer]] = {
    "quire": Quire,
    "quire-from-bytes": QuireFromBytes,
    "quire-file": QuireFile,
    "lmdb": Lmdb,
    "rocksdb": RocksDb,
    "sqlite": Sqlite,
    "dict": Dict,
    "sorteddict": SortedDict,
}


def peer_class(name: str) -> type[Peer]:
    """The peer of that name; ``quire:8192`` has pages of 8192 bytes, ``rocksdb compacted`` is a state of RocksDB."""
    base, _, page_size = name.split(" ")[0].partition(":")
    found = PEERS[base]
    return type("QuirePages", (found,), {"page_size": int(page_size)}) if page_size else found
