"""The family "core": maps in memory, by themselves and beside other stores. Keys of 16 bytes, values of 64.

    core.map              bulk put, get, update, remove on the unordered map
    core.ordered          bulk put in random and ascending order, get, full scan, short ranges on the ordered map
    core.map-each         one Python call per record, unordered map
    core.ordered-each     one Python call per record, ordered map
    core.snapshot         opening a snapshot, and what updates cost while one is open, by size of the state
    core.memory           bytes held per byte stored after sequential load, random load, and churn
    core.curve            cost per operation by number of records, both maps
    core.page-size        everything again by page size, unordered map

Times are wall clock on one thread and include the commit. Every result is compared with what it should be before its
time counts; that and the making of inputs happen outside the clock, with Python's garbage collector off.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.data import (
    RECORD_BYTES,
    Ids,
    Model,
    WrongResult,
    in_key_order,
    joined,
    joined_pairs,
    keys_of,
    pieces,
    to_list,
    uniform,
    zipf,
)
from quire.bench.machine import resident_bytes
from quire.bench.peers import Peer, Quire, Way, peer_class

CHUNK_ROWS = 1 << 20  # how many records one bulk call gets at most
SMALL_CHUNK_ROWS = 1 << 14  # for the memory benchmark, where inputs would disturb
PROBE_KEYS = 10_000
PROBES = 4  # of each way, where there are several
RANGE_ROWS = 100
CURVE_OPERATIONS = 100_000
SNAPSHOT_CALLS = 2000
NANOSECONDS = 1e9

STORES = ("quire", "lmdb", "rocksdb", "sqlite")
ALIKE = "quire-from-bytes"
BULK_STORES = ("quire", ALIKE, *STORES[1:], "quire-file")


@dataclass(frozen=True)
class Case:
    """What one process measures: one benchmark, one peer, one size, once."""

    benchmark: str
    variant: str
    peer: str
    size: int
    operations_max: int
    seed: int
    folder: Path

    @property
    def operations(self) -> int:
        """How many records gets, updates and removes touch."""
        return min(self.size, self.operations_max)

    def random(self) -> np.random.Generator:
        """Random numbers that are the same for every peer."""
        return np.random.default_rng([self.seed, self.size])


@dataclass(frozen=True)
class Measurement:
    """One number; less is better, but of a rate (a unit by the second).

    ``state`` tells apart what is measured on one peer in several states; ``size`` is for a case that goes through
    several sizes by itself.
    """

    measure: str
    value: float
    unit: str
    operations: int
    call: str
    state: str = ""
    size: int | None = None


Function = Callable[[Case], Iterator[Measurement]]


# Which number of a paper is meant: variant, peer, size, measure, as the benchmark has them.
PaperPlace = tuple[str, str, int, str]


@dataclass(frozen=True)
class Paper:
    """What a paper measured of the same thing. ``finding`` is in its words, or says that there are none.

    ``numbers`` are shown beside results of at least so many ``operations``: a quick run may be a smaller one.
    """

    source: str
    finding: str
    set_up: str
    numbers: dict[PaperPlace, float] = field(default_factory=dict)
    base: str = ""  # the peer that the others are compared with
    operations: int = 0


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: for each variant its peers, and the sizes for a quick and a full run.

    ``axis`` is what the size is, for a plot over several. Measures of ``unplotted`` are in the tables only. ``rivals``
    are the peers that Quire loses to where they are better; by default all that are not Quire themselves. ``alike`` is
    Quire called as its rivals are, where the reference is not. ``at`` has the peers of a size, where they are not all.
    """

    name: str
    summary: str
    function: Function
    variants: dict[str, tuple[str, ...]]
    quick: tuple[int, ...]
    full: tuple[int, ...]
    size_unit: str = "records"
    reference: str = "quire"
    repetitions_max: int = 1000
    axis: str = ""
    unplotted: tuple[str, ...] = ()
    rivals: tuple[str, ...] | None = None
    alike: str = ""
    at: dict[int, tuple[str, ...]] = field(default_factory=dict)
    paper: Paper | None = None

    @property
    def family(self) -> str:
        """What stands before the point."""
        return self.name.partition(".")[0]

    def of_paper(self, result: Mapping[str, Any]) -> float | None:
        """The number that the paper has for what a result is of."""
        if self.paper is None or result["operations"] < self.paper.operations:
            return None
        return self.paper.numbers.get((result["variant"], result["peer"], result["size"], result["measure"]))


class Bench:
    """A peer and the model of what it should hold; methods check their result and give nanoseconds per record."""

    def __init__(self, case: Case, ordered: bool, capacity: int, chunk_rows: int = CHUNK_ROWS) -> None:
        self.chunk_rows, self.ordered = chunk_rows, ordered
        self.model = Model(capacity)
        self.peer: Peer = peer_class(case.peer)(case.folder, ordered, capacity)

    def put(self, ids: Ids, commit: bool = True, ascending: bool = False) -> float:
        """Puts records in one transaction; checked by the reads that follow. ascending: as a store may be told."""
        watch, put = Watch(), self.peer.put_ascending if ascending else self.peer.put
        if commit:
            watch.time(self.peer.begin)
        for piece in pieces(ids, self.chunk_rows):
            pairs = self.peer.pairs_in(keys_of(piece), self.model.put(piece))
            watch.time(put, pairs)
        if commit:
            watch.time(self.peer.commit)
        return watch.per(len(ids))

    def remove(self, ids: Ids) -> float:
        """Removes records in one transaction; checked by the scan that follows."""
        watch = Watch()
        watch.time(self.peer.begin)
        for piece in pieces(ids, self.chunk_rows):
            keys = self.peer.keys_in(keys_of(piece))
            watch.time(self.peer.remove, keys)
            self.model.remove(piece)
        watch.time(self.peer.commit)
        return watch.per(len(ids))

    def get(self, ids: Ids) -> tuple[float, str]:
        """Reads records by the fastest way that the peer has, and names it."""
        name, way = fastest(self.peer.get_ways(), self.peer.keys_in(keys_of(ids[:PROBE_KEYS])))
        watch = Watch()
        for piece in pieces(ids, self.chunk_rows):
            found = watch.time(way, self.peer.keys_in(keys_of(piece)))
            self.model.check_values(piece, joined(found))
        return watch.per(len(ids)), name

    def scan(self) -> float:
        """Reads everything."""
        watch = Watch()
        scanned = watch.time(self.peer.scan)

        def read() -> Iterator[tuple[bytes, bytes]]:
            while (block := watch.time(next, scanned, None)) is not None:
                yield joined_pairs(block)

        self.model.check_all(read(), self.ordered)
        return watch.per(max(1, self.model.count))

    def ranges(self, count: int, random: np.random.Generator) -> tuple[float, str]:
        """Reads ranges of RANGE_ROWS records that lie side by side."""
        in_order = in_key_order(np.flatnonzero(self.model.versions >= 0))
        starts = random.integers(0, max(1, len(in_order) - RANGE_ROWS), count)
        ends = np.minimum(starts + RANGE_ROWS, len(in_order) - 1)
        lows, highs = to_list(keys_of(in_order[starts])), to_list(keys_of(in_order[ends]))
        bounds = list(zip(lows, highs, strict=True))
        name, way = fastest(self.peer.range_ways(), bounds[: max(1, PROBE_KEYS // RANGE_ROWS)])
        watch = Watch()
        found = watch.time(way, bounds)
        parts = [joined_pairs(block) for block in found]
        ids = self.model.check_records(b"".join(keys for keys, _ in parts), b"".join(values for _, values in parts))
        expected = np.concatenate([in_order[start:end] for start, end in zip(starts, ends, strict=True)])
        if not np.array_equal(ids, expected):
            raise WrongResult("ranges gave other records than lie in them")
        return watch.per(len(ids)), name

    def put_each(self, ids: Ids) -> float:
        """Puts records by one call each."""
        keys, values = to_list(keys_of(ids)), to_list(self.model.put(ids))
        watch = Watch()
        watch.time(self.peer.put_each, keys, values)
        return watch.per(len(ids))

    def get_each(self, ids: Ids) -> float:
        """Reads records by one call each."""
        watch = Watch()
        found = watch.time(self.peer.get_each, to_list(keys_of(ids)))
        self.model.check_values(ids, joined(found))
        return watch.per(len(ids))

    def remove_each(self, ids: Ids) -> float:
        """Removes records by one call each."""
        watch = Watch()
        watch.time(self.peer.remove_each, to_list(keys_of(ids)))
        self.model.remove(ids)
        return watch.per(len(ids))

    def check(self) -> None:
        """Compares everything in the store with the model."""
        self.scan()

    def calls(self, name: str) -> str:
        """The call that a measurement times."""
        return self.peer.calls.get(name) or self.peer.calls[name.partition(" ")[0]]


class Watch:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Calls, and counts the time that it takes."""
        start = time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - start
        return result

    def per(self, operations: int) -> float:
        """Nanoseconds per operation."""
        return self.seconds * NANOSECONDS / operations


@contextlib.contextmanager
def opened(case: Case, ordered: bool, capacity: int, chunk_rows: int = CHUNK_ROWS) -> Iterator[Bench]:
    """A fresh store, closed at the end; the garbage collector is off meanwhile."""
    folder = case.folder / f"store-{len(list(case.folder.iterdir()))}"
    folder.mkdir()
    store = Bench(replace(case, folder=folder), ordered, capacity, chunk_rows)
    gc.collect()
    gc.disable()
    try:
        yield store
    finally:
        gc.enable()
        store.peer.close()


def fastest(ways: dict[str, Way], sample: Any) -> tuple[str, Way]:
    """Tries all ways on a sample and gives the fastest, with its name and those that it beat.

    Each is tried several times, in one order and the other by turns, and its best time counts: the first call of all
    finds the sample in no cache.
    """
    if len(ways) == 1:
        return next(iter(ways.items()))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for probe in range(PROBES):
        for name in reversed(ways) if probe % 2 else ways:
            watch = Watch()
            watch.time(ways[name], sample)
            seconds[name].append(watch.seconds)
    best = min(ways, key=lambda name: min(seconds[name]))
    return f"{best}, faster than {', '.join(name for name in ways if name != best)}", ways[best]


# ------------------------------------------------------------------------------------------------ maps beside peers


def bulk_map(case: Case) -> Iterator[Measurement]:
    """core.map"""
    random, count = case.random(), case.operations
    with opened(case, False, case.size) as store:
        draws = {"uniform": uniform(case.size, count, random), "zipf": zipf(case.size, count, random)}
        yield timed("put new keys", store.put(uniform(case.size, case.size, random)), case.size, store.calls("put"))
        for draw, ids in draws.items():
            yield timed(f"get {draw}", *counted(store.get(ids), count))
        # The first update takes new memory for the pages it writes, later ones reuse what earlier ones left.
        yield timed("first update", store.put(draws["uniform"]), count, store.calls("put"))
        for draw, ids in draws.items():
            yield timed(f"update {draw}", store.put(ids), count, store.calls("put"))
        store.check()
        if state := store.peer.settle():
            for draw, ids in draws.items():
                yield timed(f"get {draw}", *counted(store.get(ids), count), state)
        yield timed("remove", store.remove(draws["uniform"]), count, store.calls("remove"))
        store.check()


def bulk_ordered(case: Case) -> Iterator[Measurement]:
    """core.ordered"""
    random, count = case.random(), case.operations
    with opened(case, True, case.size) as store:
        ids, ranges = uniform(case.size, count, random), max(1, count // RANGE_ROWS)
        yield timed(
            "put in random order", store.put(uniform(case.size, case.size, random)), case.size, store.calls("put")
        )
        yield from reads(store, ids, ranges, random)
        if state := store.peer.settle():
            yield from reads(store, ids, ranges, random, state)
        yield timed("remove", store.remove(ids), count, store.calls("remove"))
        store.check()
    with opened(case, True, case.size) as store:
        ascending = in_key_order(np.arange(case.size))
        nanoseconds = store.put(ascending, ascending=True)
        yield timed("put in ascending order", nanoseconds, case.size, store.calls("put ascending"))
        store.check()


def reads(store: Bench, ids: Ids, ranges: int, random: np.random.Generator, state: str = "") -> Iterator[Measurement]:
    """The reads of core.ordered"""
    yield timed("get uniform", *counted(store.get(ids), len(ids)), state)
    yield timed("full scan", store.scan(), store.model.count, store.calls("scan"), state)
    yield timed(f"ranges of {RANGE_ROWS}", *counted(store.ranges(ranges, random), ranges * RANGE_ROWS), state)


def each(case: Case, ordered: bool) -> Iterator[Measurement]:
    """core.map-each and core.ordered-each"""
    random, count = case.random(), case.operations
    with opened(case, ordered, case.size) as store:
        ids = uniform(case.size, count, random)
        everything = uniform(case.size, case.size, random)
        yield timed("put new keys", store.put_each(everything), case.size, store.calls("put each"))
        yield timed("get", store.get_each(ids), count, store.calls("get each"))
        yield timed("update", store.put_each(ids), count, store.calls("put each"))
        store.check()
        if state := store.peer.settle():
            yield timed("get", store.get_each(ids), count, store.calls("get each"), state)
        yield timed("remove", store.remove_each(ids), count, store.calls("remove each"))
        store.check()


def timed(measure: str, value: float, operations: int, call: str, state: str = "") -> Measurement:
    """A time per operation."""
    return Measurement(measure, value, "ns/op", operations, call, state)


def counted(result: tuple[float, str], operations: int) -> tuple[float, int, str]:
    """A time and a call with the number of operations between them."""
    return result[0], operations, result[1]


# ------------------------------------------------------------------------------------------------ Quire by itself


def snapshot(case: Case) -> Iterator[Measurement]:
    """core.snapshot; the size is the state's, in MB"""
    random, wanted = case.random(), case.size << 20
    capacity = wanted // RECORD_BYTES
    with opened(case, False, capacity) as store:
        assert isinstance(store.peer, Quire)
        pm, total = store.peer.pm, 0
        while pm.stats().bytes_held < wanted and total < capacity:
            added = min(CHUNK_ROWS // 8, capacity - total)
            store.put(np.arange(total, total + added))
            total += added
        pm.snapshot().close()
        watches = [Watch() for _ in range(SNAPSHOT_CALLS)]
        for watch in watches:
            watch.time(lambda: pm.snapshot().close())
        seconds = statistics.median(watch.seconds for watch in watches)
        yield Measurement("open and close", seconds * 1e6, "µs", SNAPSHOT_CALLS, "pm.snapshot().close()")

        ids = uniform(total, min(total, case.operations_max) // 10 + 1, random)
        before = Model(capacity)
        with pm.snapshot():  # memory that is touched for the first time costs extra: once around outside the clock
            store.put(ids)
            store.put(ids)
        before.versions[:] = store.model.versions
        epoch = pm.epoch
        with pm.snapshot() as pinned:
            yield timed("update while a snapshot is open", store.put(ids), len(ids), store.calls("put"))
            touched = sum(pm.changed_pages("bench", epoch).values())
            copies = pm.stats().frames_retired
            yield Measurement(
                "copies per touched page", copies / touched, "pages", touched, "pm.stats(), frames_retired"
            )
            yield timed("update again while it is open", store.put(ids), len(ids), store.calls("put"))
            more = pm.stats().frames_retired - copies
            yield Measurement("more copies on updating again", more / touched, "pages", touched, "as above")
            keys = store.peer.keys_in(keys_of(ids))
            before.check_values(ids, joined(pinned.map("bench").get_many(keys)))
            store.model.check_values(ids, joined(store.peer.map.get_many(keys)))
        yield timed("update without a snapshot", store.put(ids), len(ids), store.calls("put"))
        store.model.check_values(ids, joined(store.peer.map.get_many(keys)))


def memory(case: Case) -> Iterator[Measurement]:
    """core.memory"""
    ordered, load = case.variant.startswith("ordered"), case.variant.rpartition(" ")[2]
    random, size, raw = case.random(), case.size, case.size * RECORD_BYTES
    with opened(case, ordered, 3 * size, SMALL_CHUNK_ROWS) as store:

        def measured(after: str, state: str = "") -> Iterator[Measurement]:
            resident = resident_bytes(case.folder) - base
            held, used = store.peer.held_bytes(), store.peer.used_bytes()
            store.check()
            if used is not None:
                yield Measurement(
                    f"in use after {after}", used / raw, "bytes/byte", size, "pm.stats(), frames_used", state
                )
            if held is not None:
                ratio = held / raw
                yield Measurement(f"held after {after}", ratio, "bytes/byte", size, "the store's own count", state)
            ratio = resident / raw
            yield Measurement(
                f"resident after {after}", ratio, "bytes/byte", size, "memory of process and files", state
            )

        live = in_key_order(np.arange(size)) if load == "sequential" else uniform(size, size, random)
        base = resident_bytes(case.folder)
        store.put(live, ascending=load == "sequential")
        after = "load"
        yield from measured(after)
        if load == "random":
            step = max(1, size // 10)
            for start in range(size, 3 * size, step):
                new = np.arange(start, min(start + step, 3 * size))
                random.shuffle(live)
                store.remove(live[: len(new)])
                store.put(new)
                live[: len(new)] = new
            after = "churn of twice the size"
            yield from measured(after)
        if state := store.peer.settle():
            yield from measured(after, state)


def curve(case: Case) -> Iterator[Measurement]:
    """core.curve; small sizes are repeated, so that there is something to time"""
    random, ordered = case.random(), case.variant == "ordered"
    rounds = max(1, min(CURVE_OPERATIONS, case.operations_max) // case.size)
    times: dict[str, list[float]] = {"put": [], "get": [], "update": []}
    for _ in range(rounds):
        with opened(case, ordered, case.size) as store:
            times["put"].append(store.put(uniform(case.size, case.size, random)))
            ids = uniform(case.size, case.operations, random)
            nanoseconds, way = store.get(ids)
            times["get"].append(nanoseconds)
            store.put(ids)  # the first update takes new memory, which is another cost
            times["update"].append(store.put(ids))
            store.check()
            calls = {"put": store.calls("put"), "get": way, "update": store.calls("put")}
    for measure, values in times.items():
        records = case.size if measure == "put" else case.operations
        yield timed(measure, statistics.median(values), records * rounds, calls[measure])


def page_size(case: Case) -> Iterator[Measurement]:
    """core.page-size; the peers are page sizes"""
    random, count = case.random(), case.operations
    with opened(case, False, case.size) as store:
        assert isinstance(store.peer, Quire)
        pm = store.peer.pm

        def held(measure: str) -> Measurement:
            ratio = pm.stats().bytes_held / (case.size * RECORD_BYTES)
            return Measurement(measure, ratio, "bytes/byte", case.size, "pm.stats(), bytes_held")

        ids = uniform(case.size, count, random)
        yield timed("put new keys", store.put(uniform(case.size, case.size, random)), case.size, store.calls("put"))
        yield held("held after the put")
        yield timed("get", *counted(store.get(ids), count))
        yield timed("first update", store.put(ids), count, store.calls("put"))
        yield timed("update after a commit", store.put(ids), count, store.calls("put"))
        store.put(ids, commit=False)
        yield timed("update again before the commit", store.put(ids, commit=False), count, "put_many")
        store.peer.commit()
        batches = [uniform(case.size, max(1, case.size // 100), random) for _ in range(10)]
        small = statistics.median(store.put(batch) for batch in batches)
        yield timed("update of 1 % and commit", small, 10 * len(batches[0]), store.calls("put"))
        yield timed("full scan", store.scan(), case.size, store.calls("scan"))
        yield held("held after all that")
        pm.check()


START_SECONDS = 0.6  # of one process, imports included
# Roughly what one record costs in one case.
MICROSECONDS = {
    "quire": 1.3,
    "quire-from-bytes": 2.5,
    "quire-file": 1.8,
    "lmdb": 4.0,
    "rocksdb": 7.5,
    "sqlite": 8.5,
    "dict": 2.3,
    "sorteddict": 5.0,
}


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    records = (case.size << 20) // RECORD_BYTES if case.benchmark == "core.snapshot" else case.size
    return START_SECONDS + records * MICROSECONDS[case.peer.partition(":")[0]] / 1e6


SIZES_FULL = (100_000, 1_000_000, 10_000_000)

BENCHMARKS = (
    Benchmark(
        "core.map",
        "bulk put, get, update, remove on the unordered map",
        bulk_map,
        {"map": (*BULK_STORES, "dict")},
        (1_000_000,),
        SIZES_FULL,
        alike=ALIKE,
    ),
    Benchmark(
        "core.ordered",
        "bulk put, get, scan, ranges, remove on the ordered map",
        bulk_ordered,
        {"ordered": (*BULK_STORES, "sorteddict")},
        (1_000_000,),
        SIZES_FULL,
        alike=ALIKE,
    ),
    Benchmark(
        "core.map-each",
        "one Python call per record, unordered map",
        lambda case: each(case, ordered=False),
        {"map": (*STORES, "dict")},
        (100_000,),
        (100_000, 1_000_000),
    ),
    Benchmark(
        "core.ordered-each",
        "one Python call per record, ordered map",
        lambda case: each(case, ordered=True),
        {"ordered": (*STORES, "sorteddict")},
        (100_000,),
        (100_000, 1_000_000),
    ),
    Benchmark(
        "core.snapshot",
        "opening a snapshot, and updates while one is open, by size of the state",
        snapshot,
        {"map": ("quire",)},
        (64, 256),
        (64, 256, 1024, 4096),
        size_unit="MB",
        axis="state, MB",
    ),
    Benchmark(
        "core.memory",
        "bytes held per byte stored after load and after churn",
        memory,
        {
            "map random": STORES,
            "map sequential": STORES,
            "ordered random": ("quire",),
            "ordered sequential": ("quire",),
        },
        (300_000,),
        SIZES_FULL,
        repetitions_max=1,
        at={SIZES_FULL[-1]: ("quire", "dict", "lmdb")},  # the others take two minutes each
    ),
    Benchmark(
        "core.curve",
        "cost per operation by number of records, both maps",
        curve,
        {"map": ("quire", ALIKE, "dict"), "ordered": ("quire", ALIKE, "lmdb")},
        (10_000, 30_000, 100_000, 300_000),
        (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000),
        axis="records",
        alike=ALIKE,
    ),
    Benchmark(
        "core.page-size",
        "time and memory by page size, unordered map; quire:4096 has pages of 4,096 bytes",
        page_size,
        {"map": tuple(f"quire:{1024 << power}" for power in range(7))},
        (300_000,),
        (1_000_000,),
        reference="quire:4096",
    ),
)
