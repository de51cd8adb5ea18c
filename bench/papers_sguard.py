"""What SGuard measured ("Fault-tolerant Stream Processing using a Distributed, Replicated File System", VLDB 2008).

    papers.join           Table 5: a join with its windows in plain objects and in pages
    papers.aggregate      Table 6: count, least and greatest by group in plain objects and in pages
    papers.prepare        Figure 6: what a program waits for before a checkpoint of its state can be written
    papers.interruption   Figures 7 and 8, Table 7: latency of an aggregate that is checkpointed while tuples come
    papers.recovery       Figure 9: a state from its file
    papers.dfs            Table 8: what HDFS takes and gives

The paper's "original" operators keep plain objects of their language, C++ there and Python here (``objects``). Ours in
pages are the same operators a tuple at a time, as the paper has them, with pages of 8 and 64 KB (``quire each:8192``,
``quire each:65536``), and on whole batches (``quire``, the way to use it). Where batches let a scan be done on columns,
``arrays`` is the same on columns in plain memory.
"""

import multiprocessing
import os
import pickle
import queue
import statistics
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quire.bench.checkpoint import put, rows
from quire.bench.core import Benchmark, Case, Measurement, Paper, PaperPlace, Watch
from quire.bench.data import RECORD_BYTES, Ids, WrongResult, arrow_bytes, keys_of, uniform, values_of
from quire.bench.peers import MissingPeer
from quire.checkpoint import delta
from quire.checkpoint.storage import storage_for
from quire.structures import PageManager

MICROSECONDS = 1e6
BATCH_ROWS = 1000


def page_size(peer: str) -> int | None:
    """The page size that a peer's name asks for."""
    _, _, size = peer.partition(":")
    return int(size) if size else None


def fixed(array: pa.Array, kind: str) -> Any:
    """The values of a binary array without nulls, as one row of numbers each."""
    return np.frombuffer(arrow_bytes(array), kind).reshape(len(array), -1)


# ------------------------------------------------------------------------------------------------ Table 5: join

TUPLE_BYTES = 100
JOIN_TUPLES = 4000
JOIN_BATCH_ROWS = 100
RECORD = struct.Struct(">q92s")
SCANNED, INDEXED = "window scanned, as in the paper", "window indexed by id"


class Side(ABC):
    """The window of one side of a join: the last tuples that came."""

    @abstractmethod
    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        """Takes tuples in, and drops the oldest, whose ids are given."""

    @abstractmethod
    def matches(self, ids: Ids) -> list[bytes]:
        """The tuples that have one of these ids."""


class ScannedObjects(Side):
    """A deque of pairs."""

    def __init__(self) -> None:
        self.window: deque[tuple[int, bytes]] = deque()

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        self.window.extend(zip(ids.tolist(), tuples, strict=True))
        for _ in expired:
            self.window.popleft()

    def matches(self, ids: Ids) -> list[bytes]:
        return [record for wanted in ids.tolist() for number, record in self.window if number == wanted]


class ScannedPages(Side):
    """A deque in pages, read as a whole for each call and compared with each tuple of it."""

    def __init__(self, pm: PageManager, name: str) -> None:
        self.window = pm.deque(name)

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        self.window.extend(tuples)
        del self.window[: len(expired)]

    def matches(self, ids: Ids) -> list[bytes]:
        records = fixed(self.window.to_array(), f"V{TUPLE_BYTES}")[:, 0]
        numbers = np.ndarray(len(records), ">i8", records, 0, (TUPLE_BYTES,))
        return [records[at].tobytes() for wanted in ids.tolist() for at in np.flatnonzero(numbers == wanted)]


class ScannedArrays(Side):
    """A column of ids and one of tuples, in plain memory."""

    def __init__(self) -> None:
        self.ids, self.tuples = np.zeros(0, np.int64), np.zeros(0, f"V{TUPLE_BYTES}")

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        records = np.frombuffer(b"".join(tuples), f"V{TUPLE_BYTES}")
        self.ids = np.concatenate([self.ids[len(expired) :], ids])
        self.tuples = np.concatenate([self.tuples[len(expired) :], records])

    def matches(self, ids: Ids) -> list[bytes]:
        return [self.tuples[at].tobytes() for wanted in ids.tolist() for at in np.flatnonzero(self.ids == wanted)]


class IndexedObjects(Side):
    """A dict by id; the oldest are dropped by the order in which they came."""

    def __init__(self) -> None:
        self.by_id: dict[int, bytes] = {}
        self.order: deque[int] = deque()

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        for number, record in zip(ids.tolist(), tuples, strict=True):
            self.by_id[number] = record
            self.order.append(number)
        for _ in expired:
            del self.by_id[self.order.popleft()]

    def matches(self, ids: Ids) -> list[bytes]:
        return [self.by_id[number] for number in ids.tolist() if number in self.by_id]


class IndexedEach(Side):
    """A map and a queue in pages, one call a tuple."""

    def __init__(self, pm: PageManager, name: str) -> None:
        self.by_id, self.order = pm.map(name), pm.deque(f"{name} order")

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        for number, record in zip(ids.tolist(), tuples, strict=True):
            key = number.to_bytes(8, "big")
            self.by_id[key] = record
            self.order.append(key)
        for _ in expired:
            del self.by_id[self.order.popleft()]

    def matches(self, ids: Ids) -> list[bytes]:
        found = (self.by_id.get(number.to_bytes(8, "big")) for number in ids.tolist())
        return [record for record in found if record is not None]


class IndexedPages(Side):
    """A map and a queue in pages, one call a batch."""

    def __init__(self, pm: PageManager, name: str) -> None:
        self.by_id, self.order = pm.map(name), pm.deque(f"{name} order")

    def add(self, ids: Ids, tuples: list[bytes], expired: Ids) -> None:
        keys = rows(ids.astype(">i8").view(np.uint8).reshape(-1, 8))
        self.by_id.put_many(keys, tuples)
        self.order.extend(keys)
        if len(expired):
            self.by_id.remove_many(rows(expired.astype(">i8").view(np.uint8).reshape(-1, 8)))
            del self.order[: len(expired)]

    def matches(self, ids: Ids) -> list[bytes]:
        found = self.by_id.get_many(rows(ids.astype(">i8").view(np.uint8).reshape(-1, 8)))
        partners: list[bytes] = found.drop_null().to_pylist()
        return partners


def join(case: Case) -> Iterator[Measurement]:
    """papers.join: the stream on the left, and the same stream on the right; size: KB of a window."""
    window = case.size * 1024 // TUPLE_BYTES
    count = min(JOIN_TUPLES, max(100, case.operations_max // 100))
    step = 1 if case.peer.startswith(("objects", "quire each")) else JOIN_BATCH_ROWS
    ids = np.arange(window + count)
    tuples = [RECORD.pack(number, b"%092d" % number) for number in ids.tolist()]
    nothing, matched, watch = np.zeros(0, np.int64), 0, Watch()
    with PageManager(page_size=page_size(case.peer)) as pm:
        kinds: dict[tuple[bool, str], Callable[[str], Side]] = {
            (False, "objects"): lambda name: ScannedObjects(),
            (False, "arrays"): lambda name: ScannedArrays(),
            (False, "quire each"): lambda name: ScannedPages(pm, name),
            (False, "quire"): lambda name: ScannedPages(pm, name),
            (True, "objects"): lambda name: IndexedObjects(),
            (True, "quire each"): lambda name: IndexedEach(pm, name),
            (True, "quire"): lambda name: IndexedPages(pm, name),
        }
        made = kinds[case.variant == INDEXED, case.peer.partition(":")[0]]
        left, right = made("left"), made("right")
        for side in (left, right):  # the windows are full when the clock starts
            side.add(ids[:window], tuples[:window], nothing)
        for start in range(window, window + count, step):
            end = min(start + step, window + count)
            new, old, records = ids[start:end], ids[start - window : end - window], tuples[start:end]
            early = watch.time(right.matches, new)
            watch.time(left.add, new, records, old)
            found = watch.time(left.matches, new)
            watch.time(right.add, new, records, old)
            if early or sorted(found) != records:
                raise WrongResult(f"tuples {start} to {end} found {len(early)} and {len(found)} partners")
            matched += len(found)
    if matched != count:
        raise WrongResult(f"{matched} pairs of {count} tuples")
    # A tuple of the stream comes on both sides, as in the paper's self-join.
    value = watch.seconds * MICROSECONDS / (2 * count)
    yield Measurement("a tuple", value, "µs", 2 * count, f"{step} at a time: add, expire, find partners")


# ------------------------------------------------------------------------------------------------ Table 6: aggregate

GROUP_BYTES = 1000  # of state, of which count, least and greatest change: the paper has 1 MB for 1,000 groups
AGGREGATE_TUPLES = 1_000_000
SUMMARY = struct.Struct("<qqq")


class Groups(ABC):
    """Count, least and greatest value by group."""

    @abstractmethod
    def fill(self, groups: int) -> None:
        """Makes all groups, of one tuple each: the value 0."""

    @abstractmethod
    def update(self, groups: Ids, values: Ids) -> None:
        """Takes a batch of tuples in."""

    @abstractmethod
    def result(self, groups: int) -> Any:
        """One row for each group: count, least, greatest."""

    def close(self) -> None:  # noqa: B027
        """Frees everything."""


class ObjectGroups(Groups):
    """A dict of lists."""

    def fill(self, groups: int) -> None:
        self.state: dict[int, list[Any]] = {group: [1, 0, 0, b"%976d" % group] for group in range(groups)}

    def update(self, groups: Ids, values: Ids) -> None:
        state = self.state
        for group, value in zip(groups.tolist(), values.tolist(), strict=True):
            summary = state[group]
            summary[0] += 1
            if value < summary[1]:
                summary[1] = value
            if value > summary[2]:
                summary[2] = value

    def result(self, groups: int) -> Any:
        return np.array([self.state[group][:3] for group in range(groups)])


def group_keys(groups: Ids) -> pa.Array:
    """Keys of 4 bytes, as in the paper."""
    return rows(groups.astype(">u4").view(np.uint8).reshape(-1, 4))


class PageGroups(Groups):
    """A map in pages."""

    def __init__(self, size: int | None = None) -> None:
        self.pm = PageManager(page_size=size)
        self.state = self.pm.map("groups")

    def fill(self, groups: int) -> None:
        for start in range(0, groups, 1 << 14):
            part = np.arange(start, min(start + (1 << 14), groups))
            values = np.zeros((len(part), GROUP_BYTES), np.uint8)
            values[:, 0] = 1
            self.state.put_many(group_keys(part), rows(values))

    def update(self, groups: Ids, values: Ids) -> None:
        order = np.argsort(groups, kind="stable")
        unique, first, counts = np.unique(groups[order], return_index=True, return_counts=True)
        keys = group_keys(unique)
        records = fixed(self.state.get_many(keys), "u1").copy()
        summaries = records[:, : SUMMARY.size].copy().view("<i8")
        summaries[:, 0] += counts
        summaries[:, 1] = np.minimum(summaries[:, 1], np.minimum.reduceat(values[order], first))
        summaries[:, 2] = np.maximum(summaries[:, 2], np.maximum.reduceat(values[order], first))
        records[:, : SUMMARY.size] = summaries.view(np.uint8)
        self.state.put_many(keys, rows(records))

    def result(self, groups: int) -> Any:
        return result_of(self.pm, groups)

    def close(self) -> None:
        self.pm.close()


def result_of(pm: PageManager, groups: int) -> Any:
    """Count, least and greatest by group, from pages."""
    if len(pm.map("groups")) != groups:
        raise WrongResult(f"{len(pm.map('groups'))} groups, not {groups}")
    records = fixed(pm.map("groups").get_many(group_keys(np.arange(groups))), "u1")
    return records[:, : SUMMARY.size].copy().view("<i8")


class EachGroups(PageGroups):
    """A map in pages, one get and one put a tuple."""

    def update(self, groups: Ids, values: Ids) -> None:
        state = self.state
        for group, value in zip(groups.tolist(), values.tolist(), strict=True):
            key = group.to_bytes(4, "big")
            record = state[key]
            count, least, greatest = SUMMARY.unpack_from(record)
            changed = SUMMARY.pack(count + 1, min(least, value), max(greatest, value))
            state[key] = changed + record[SUMMARY.size :]


def model_of(groups: int, drawn: Ids, values: Ids) -> Any:
    """What an aggregate must hold after these tuples."""
    model = np.zeros((groups, 3), np.int64)
    model[:, 0] = 1 + np.bincount(drawn, minlength=groups)
    np.minimum.at(model[:, 1], drawn, values)
    np.maximum.at(model[:, 2], drawn, values)
    return model


def aggregate(case: Case) -> Iterator[Measurement]:
    """papers.aggregate; size: MB of state."""
    groups, random = max(1, case.size * 1000), case.random()
    count = min(AGGREGATE_TUPLES, case.operations_max)
    drawn, values = random.integers(0, groups, count), random.integers(-1_000_000, 1_000_000, count)
    operator: Groups = ObjectGroups()
    if case.peer != "objects":
        kind = EachGroups if case.peer.startswith("quire each") else PageGroups
        operator = kind(page_size(case.peer))
    operator.fill(groups)
    watch = Watch()
    for start in range(0, count, BATCH_ROWS):
        watch.time(operator.update, drawn[start : start + BATCH_ROWS], values[start : start + BATCH_ROWS])
    if not np.array_equal(operator.result(groups), model_of(groups, drawn, values)):
        raise WrongResult("the groups are not those of the model")
    operator.close()
    yield Measurement("a tuple", watch.seconds * MICROSECONDS / count, "µs", count, f"batches of {BATCH_ROWS}")


# ------------------------------------------------------------------------------------------------ Figure 6: preparation

PREPARE_CALLS = 200


def filled(pm: PageManager, megabytes: int) -> int:
    """Fills a map with so many MB of records; gives their number."""
    store, total, step = pm.map("bench"), (megabytes << 20) // RECORD_BYTES, 1 << 18
    for start in range(0, total, step):
        put(store, np.arange(start, min(start + step, total)), 0)
    pm.commit()
    return total


def prepare(case: Case) -> Iterator[Measurement]:
    """papers.prepare"""
    records = (case.size << 20) // RECORD_BYTES
    watch = Watch()
    if case.peer == "pickled":
        ids = np.arange(records)
        keys, values = keys_of(ids), values_of(ids, np.zeros(records, np.int64))
        state = {keys[at].tobytes(): values[at].tobytes() for at in range(records)}
        if len(pickle.loads(watch.time(pickle.dumps, state, pickle.HIGHEST_PROTOCOL))) != records:
            raise WrongResult("what was pickled is not what is there")
        yield Measurement("stand-still", watch.seconds * 1e3, "ms", records, "pickle.dumps of a dict of bytes")
        return
    with PageManager() as pm:
        filled(pm, case.size)
        if case.peer == "quire":
            for _ in range(PREPARE_CALLS):
                watch.time(lambda: pm.snapshot().close())
            with pm.snapshot() as pinned:
                if len(pinned.map("bench")) != records:
                    raise WrongResult("the snapshot lacks records")
            yield Measurement("stand-still", watch.seconds / PREPARE_CALLS * 1e3, "ms", records, "pm.snapshot()")
            return
        payloads = watch.time(delta.write, pm)
        with PageManager() as other:
            for payload in payloads:
                delta.apply(other, payload)
            if len(other.map("bench")) != records:
                raise WrongResult("what was serialised is not what is there")
        yield Measurement("stand-still", watch.seconds * 1e3, "ms", records, "quire.checkpoint.delta.write(pm)")


# ------------------------------------------------------------------------------------------- Figures 7 and 8, Table 7

RATE = 2000  # tuples a second
TICK_SECONDS = 0.01
STATE_MEGABYTES = 128
RUN_TUPLES = 40_000
CHECKPOINTS = 3
FULL_OPERATIONS = 1_000_000


class Background:
    """One thread that writes, as an operator that goes on leaves it to."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self._error = error

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def finish(self) -> None:
        """Waits for all of it; raises what went wrong."""
        self._work.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error


def written(file: Path, payloads: list[bytes]) -> None:
    """Writes a file to the disk it lies on."""
    with file.open("wb") as out:
        out.writelines(payloads)
        out.flush()
        os.fsync(out.fileno())


def checkpoint(peer: str, operator: Groups, file: Path, background: Background) -> None:
    """What the operator stands still for."""
    if isinstance(operator, ObjectGroups):
        written(file, [pickle.dumps(operator.state, pickle.HIGHEST_PROTOCOL)])
        return
    assert isinstance(operator, PageGroups)
    pm = operator.pm
    pm.commit()
    if peer == "quire":
        snapshot = pm.snapshot()

        def save() -> None:
            with snapshot:
                snapshot.save(file)

        background.do(save)
        return
    payloads = delta.write(pm)
    if peer == "serialised, written while it stands":
        written(file, payloads)
    else:
        background.do(lambda: written(file, payloads))


def read_back(operator: Groups, peer: str, file: Path, groups: int) -> Any:
    """Count, least and greatest by group as a checkpoint has them."""
    if isinstance(operator, ObjectGroups):
        other = ObjectGroups()
        other.state = pickle.loads(file.read_bytes())
        return other.result(groups)
    if peer == "quire":
        with PageManager.from_image(file.read_bytes()) as pm:
            return result_of(pm, groups).copy()
    with PageManager() as pm:
        delta.apply(pm, file.read_bytes())
        return result_of(pm, groups).copy()


def interruption(case: Case) -> Iterator[Measurement]:
    """papers.interruption; size: operators that share the groups."""
    share = min(1.0, case.operations_max / FULL_OPERATIONS)
    megabytes = STATE_MEGABYTES if share == 1 else max(1, int(STATE_MEGABYTES * share))
    groups = megabytes * 1000 // case.size  # of each operator
    per_tick = int(RATE * TICK_SECONDS)
    ticks = max(2 * case.size, int(RUN_TUPLES * share / per_tick))
    rounds = max(1, round(CHECKPOINTS * share))
    random = case.random()
    drawn = random.integers(0, groups * case.size, (ticks, per_tick))
    values = random.integers(-1000, 1000, (ticks, per_tick))
    plain = case.peer.startswith("objects")
    operators: list[Groups] = [ObjectGroups() if plain else EachGroups() for _ in range(case.size)]
    for operator in operators:
        operator.fill(groups)
    saved = case.peer not in ("objects, no checkpoint", "quire, no checkpoint")
    # One operator after the other, evenly over the run; each at its own ticks.
    due = {int(ticks * (turn + 0.5) / (rounds * case.size)): turn % case.size for turn in range(rounds * case.size)}
    files = [case.folder / f"checkpoint-{number}" for number in range(case.size)]
    background, latencies, stood, taken = Background(), [], Watch(), {}
    try:
        for operator, file in zip(operators, files, strict=True):  # memory taken for the first time, outside the clock
            if saved:
                checkpoint(case.peer, operator, file, background)
        start = time.perf_counter() + 0.2
        for tick in range(ticks):
            arrival = start + tick * TICK_SECONDS
            if (early := arrival - time.perf_counter()) > 0:
                time.sleep(early)
            if saved and tick in due:
                number = due[tick]
                stood.time(checkpoint, case.peer, operators[number], files[number], background)
                taken[number] = tick
            owner = drawn[tick] % case.size
            for number in np.unique(owner).tolist():
                mine = owner == number
                operators[number].update(drawn[tick][mine] // case.size, values[tick][mine])
            latencies.append(time.perf_counter() - arrival)
        background.finish()
        for number, operator in enumerate(operators):
            mine = drawn % case.size == number
            model = model_of(groups, drawn[mine] // case.size, values[mine])
            if not np.array_equal(operator.result(groups), model):
                raise WrongResult(f"operator {number} is not what the model says")
            if saved:
                before = mine & (np.arange(ticks) < taken[number])[:, None]
                model = model_of(groups, drawn[before] // case.size, values[before])
                if not np.array_equal(read_back(operator, case.peer, files[number], groups), model):
                    raise WrongResult(f"the checkpoint of operator {number} is not its state of that moment")
    finally:
        for operator in operators:
            operator.close()
    milliseconds = np.array(latencies) * 1e3
    count = ticks * per_tick
    call = f"{count} tuples at {RATE} a second, {megabytes} MB of state, {rounds} checkpoints an operator"
    yield Measurement("mean latency", float(milliseconds.mean()), "ms", count, call)
    yield Measurement("deviation of latency", float(milliseconds.std()), "ms", count, call)
    yield Measurement("99th percentile of latency", float(np.percentile(milliseconds, 99)), "ms", count, call)
    yield Measurement("longest latency", float(milliseconds.max()), "ms", count, call)
    if saved:
        longest = stood.seconds / (rounds * case.size) * 1e3
        yield Measurement("stand-still of a checkpoint", longest, "ms", rounds * case.size, call)


# ------------------------------------------------------------------------------------------------ Figure 9: recovery


def recovery(case: Case) -> Iterator[Measurement]:
    """papers.recovery; size: MB of state."""
    image, pages = case.folder / "state.image", int(case.variant.split(" ")[2]) << 10
    with PageManager(page_size=pages) as pm:
        records = filled(pm, case.size)
        with pm.snapshot() as snapshot:
            snapshot.save(image)
        payloads = delta.write(pm) if case.peer == "replayed" else []

    def replayed() -> PageManager:
        pm = PageManager(page_size=pages)
        for payload in payloads:
            delta.apply(pm, payload)
        pm.commit()
        return pm

    ways: dict[str, Callable[[], PageManager]] = {
        "mapped": lambda: PageManager.from_image(image),
        "read": lambda: PageManager.from_image(image.read_bytes()),
        "replayed": replayed,
    }
    ready, first, more = Watch(), Watch(), Watch()
    with ready.time(ways[case.peer]) as pm:
        store = pm.map("bench")
        ids = uniform(records, min(records, 100_000), case.random())
        keys, values = keys_of(ids), values_of(ids, np.zeros(len(ids), np.int64))
        if first.time(store.get, keys[0].tobytes()) != values[0].tobytes():
            raise WrongResult("the first record that was asked for is not what was stored")
        found = more.time(store.get_many, rows(keys))
        if found.null_count or arrow_bytes(found) != values.tobytes() or len(store) != records:
            raise WrongResult("records are missing or others than were stored")
    yield Measurement("ready", ready.seconds * 1e3, "ms", records, "PageManager.from_image, or delta.apply")
    yield Measurement("first get", first.seconds * 1e3, "ms", 1, "get")
    yield Measurement("next 100,000 gets", more.seconds * 1e3, "ms", len(ids), "get_many")


# ------------------------------------------------------------------------------------------------ Table 8: HDFS

DFS_BYTES, DFS_CHUNK = 1 << 30, 64 << 20
DFS_PIECE = 1 << 20
THREADS = (1, 2, 4, 8, 16)


def dfs_pieces(name: str, count: int) -> list[bytes]:
    """A file's bytes, of one seed a file."""
    block = np.random.default_rng(list(name.encode())).bytes(min(DFS_PIECE, count))
    return [block[: min(len(block), count - at)] for at in range(0, count, len(block))]


def dfs_write(url: str, name: str, count: int) -> None:
    """Writes one file."""
    storage, folder = storage_for(url)
    storage.write_atomic(f"{folder}/{name}", dfs_pieces(name, count), replace=True)


def dfs_read(url: str, name: str, count: int) -> None:
    """Reads one file and compares it with what was written."""
    storage, folder = storage_for(url)
    with storage.open(f"{folder}/{name}") as file:
        for piece in dfs_pieces(name, count):
            if file.read(len(piece)) != piece:
                raise WrongResult(f"{name} is not what was written")


def dfs(case: Case) -> Iterator[Measurement]:
    """papers.dfs: one client with several threads, and several clients of one DataNode; goes through THREADS."""
    try:
        from quire.bench.hdfs_cluster import Cluster, ClusterError
    except ImportError as error:
        raise MissingPeer(f"no HDFS: {error}") from None
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = "localhost,127.0.0.1"
    total = min(DFS_BYTES, case.operations_max * 640)
    chunk = min(DFS_CHUNK, total // 2)
    try:
        cluster = Cluster(case.folder / "hdfs", data_nodes=1, replication=1)
    except ClusterError as error:
        raise MissingPeer(str(error)) from None
    with cluster:
        url = cluster.web_url("/bench")
        dfs_write(url, "first", DFS_PIECE)  # connections are made, classes loaded
        for threads in [each for each in THREADS if each <= case.size]:
            for label, work in (("write", dfs_write), ("read", dfs_read)):
                seconds = timed_threads(work, url, total // threads, threads)
                rate = total // threads * threads / (1 << 20) / seconds
                call = f"{total >> 20} MB, WebHDFS, one file a thread"
                yield Measurement(f"client: {label}", rate, "MB/s", total, call, size=threads)
            for label, work in (("write", dfs_write), ("read", dfs_read)):
                rates = client_rates(work, url, chunk, threads)
                call = f"each client a process with {chunk >> 20} MB; the mean of their rates"
                yield Measurement(f"DataNode: {label}", rates, "MB/s", chunk, call, size=threads)


def timed_threads(work: Callable[[str, str, int], None], url: str, count: int, threads: int) -> float:
    """Seconds for so many threads to do their part."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, url, f"thread-{number}", count) for number in range(threads)]:
            done.result()
    return time.perf_counter() - start


def client_rate(work: Callable[[str, str, int], None], url: str, name: str, count: int, gate: Any) -> float:
    """MB a second of one client, which begins with the others."""
    gate.wait()
    start = time.perf_counter()
    work(url, name, count)
    return count / (1 << 20) / (time.perf_counter() - start)


def client_rates(work: Callable[[str, str, int], None], url: str, count: int, clients: int) -> float:
    """The mean MB a second of several clients at once, each a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        gate = manager.Barrier(clients)
        with context.Pool(clients) as pool:
            names = [f"client-{number}" for number in range(clients)]
            return statistics.mean(pool.starmap(client_rate, [(work, url, name, count, gate) for name in names]))


# ------------------------------------------------------------------------------------------------ what the paper says

MACHINE = "2008: two quad-core processors of 2.66 GHz, 16 GB, C++"
PAGED = ("quire", "quire each:8192", "quire each:65536")
LATENCY = {
    "objects, no checkpoint": (23.1, 24.1, 25.0),
    "quire, no checkpoint": (21.6, 21.8, 22.7),
    "quire": (202.0, 22.2, 22.8),
    "serialised, written while it stands": (617.0, 157.0, 30.2),
    "serialised, written behind": (302.0, 100.0, 26.6),
}
DEVIATION = {
    "objects, no checkpoint": (1.85, 1.88, 1.81),
    "quire, no checkpoint": (1.63, 1.63, 1.58),
    "quire": (645.0, 1.91, 1.66),
    "serialised, written while it stands": (1530.0, 334.0, 3.58),
    "serialised, written behind": (862.0, 208.0, 5.49),
}
RATES = {  # by threads or clients
    "client: read": (60.5, 56.3, 95.3, 105.0, 110.0),
    "client: write": (63.7, 91.3, 102.0, 104.0, 105.0),
    "DataNode: read": (42.7, 6.16, 3.04, 1.29, 0.63),
    "DataNode: write": (30.0, 22.5, 9.90, 6.03, 2.57),
}


def by_size(
    variant: str, measure: str, sizes: tuple[int, ...], numbers: Mapping[str, tuple[float, ...]]
) -> dict[PaperPlace, float]:
    """Numbers of a paper's table, for each peer one by size."""
    return {
        (variant, peer, size, measure): value
        for peer, row in numbers.items()
        for size, value in zip(sizes, row, strict=True)
    }


JOIN_PAPER = Paper(
    "SGuard, Table 5",
    "the memory manager costs at most 3 %",
    f"{MACHINE}; a self-join on a unique id, 12,000 tuples (here 4,000), 100 runs",
    by_size(
        SCANNED,
        "a tuple",
        (256, 512, 1024),
        {
            "objects": (592.1, 1144, 2109),
            "quire each:8192": (605.0, 1175, 2158),
            "quire each:65536": (604.8, 1179, 2161),
        },
    ),
    base="objects",
)
AGGREGATE_PAPER = Paper(
    "SGuard, Table 6",
    "at 1 MB 6 to 13 % dearer than the original, at 100 MB a third cheaper",
    f"{MACHINE}; count, min and max by a group of 4 bytes, 1,000 to 100,000 groups, 1M tuples, 100 runs",
    by_size(
        "1 KB of state a group",
        "a tuple",
        (1, 10, 100),
        {
            "objects": (18.82, 24.93, 47.73),
            "quire each:8192": (21.25, 24.60, 31.54),
            "quire each:65536": (19.97, 23.18, 29.78),
        },
    ),
    base="objects",
)
PREPARE_PAPER = Paper(
    "SGuard, Figure 6",
    "linear in the state for all; up to two orders of magnitude below serialisation (no values in text)",
    f"{MACHINE}; the state of a join, 100 runs",
)
INTERRUPTION_PAPER = Paper(
    "SGuard, Figures 7 and 8, Table 7",
    "with one operator the interruption is 2.84 times smaller than the nearest rival's; split in 4 it disappears, "
    "serialisation needs 64",
    f"{MACHINE}; 128 MB of state, 2,000 tuples a second, 10 minutes, a checkpoint a minute to a disk",
    by_size("latency", "mean latency", (1, 4, 64), LATENCY)
    | by_size("latency", "deviation of latency", (1, 4, 64), DEVIATION),
    base="quire, no checkpoint",
    operations=RUN_TUPLES,
)
RECOVERY_PAPER = Paper(
    "SGuard, Figure 9",
    "linear in the state, below 60 ms at 512 MB; rebuilding structures doubles it (no other values in text)",
    f"{MACHINE}; the page table rebuilt from pages in memory, the reading from the DFS not counted; 100 runs",
    {(f"pages of {pages} KB", "mapped", 512, "ready"): 60.0 for pages in (8, 64)},
)
DFS_PAPER = Paper(
    "SGuard, Table 8",
    "a client needs more than one thread, since it makes checksums",
    "2008: 17 machines in two racks, gigabit network, disks, caches flushed; a client with 1 GB, and clients with a "
    "chunk of 64 MB each at one data node; 10 runs",
    {
        ("loopback", "WebHDFS", threads, measure): value
        for measure, values in RATES.items()
        for threads, value in zip(THREADS, values, strict=True)
    },
)
CHECKPOINTED = ("quire", "serialised, written behind", "serialised, written while it stands", "objects, pickled")

BENCHMARKS = (
    Benchmark(
        "papers.join",
        "a join with its windows in plain objects and in pages, by size of the window",
        join,
        {SCANNED: (*PAGED, "objects", "arrays"), INDEXED: (*PAGED, "objects")},
        (256,),
        (256, 512, 1024),
        size_unit="KB",
        axis="window, KB",
        paper=JOIN_PAPER,
    ),
    Benchmark(
        "papers.aggregate",
        "count, least and greatest by group in plain objects and in pages, by size of the state",
        aggregate,
        {"1 KB of state a group": (*PAGED, "objects")},
        (1, 100),
        (1, 10, 100),
        size_unit="MB",
        axis="state, MB",
        paper=AGGREGATE_PAPER,
    ),
    Benchmark(
        "papers.prepare",
        "what a program waits for before a checkpoint of its state can be written, by size",
        prepare,
        {"all of the state": ("quire", "serialised", "pickled")},
        (16, 64),
        (64, 128, 256, 512),
        size_unit="MB",
        axis="state, MB",
        paper=PREPARE_PAPER,
    ),
    Benchmark(
        "papers.interruption",
        "latency of an aggregate that is checkpointed while tuples come, by number of operators it is split into",
        interruption,
        {"latency": (*CHECKPOINTED, "quire, no checkpoint", "objects, no checkpoint")},
        (1, 4),
        (1, 4, 64),
        size_unit="operators",
        axis="operators that share the state",
        unplotted=("deviation of latency",),
        rivals=CHECKPOINTED[1:],
        paper=INTERRUPTION_PAPER,
    ),
    Benchmark(
        "papers.recovery",
        "a state from its file: mapped, read, or replayed, by size",
        recovery,
        dict.fromkeys(("pages of 8 KB", "pages of 64 KB"), ("mapped", "read", "replayed")),
        (64,),
        (64, 128, 256, 512),
        size_unit="MB",
        reference="mapped",
        axis="state, MB",
        rivals=(),
        paper=RECOVERY_PAPER,
    ),
    Benchmark(
        "papers.dfs",
        "what an HDFS on this machine takes and gives, by threads of a client and by clients of a DataNode",
        dfs,
        {"loopback": ("WebHDFS",)},
        (),
        (16,),
        size_unit="threads or clients",
        reference="WebHDFS",
        repetitions_max=1,
        axis="threads or clients",
        rivals=(),
        paper=DFS_PAPER,
    ),
)


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    full = case.operations_max >= FULL_OPERATIONS
    share = min(1.0, case.operations_max / FULL_OPERATIONS)
    if case.benchmark == "papers.join":
        each = case.variant == SCANNED and case.peer.startswith("quire each")
        return 0.5 + case.size * (4e-3 if each else 1e-3) * (1.0 if full else 0.5)
    if case.benchmark == "papers.aggregate":
        return 0.5 + (2.5 if case.peer.startswith("quire each") else 0.5) * share + case.size * 0.003
    if case.benchmark == "papers.interruption":
        return 0.7 + (RUN_TUPLES / RATE + 1.0) * share
    if case.benchmark == "papers.dfs":
        return 400.0
    return 0.5 + case.size * (0.016 if case.peer in ("pickled", "replayed") else 0.007)
