"""The family "checkpoint": how long a program stands still for one, how soon it is back, what a log costs.

    checkpoint.prepare    what a program waits for before a checkpoint of all its state can be written
    checkpoint.restart    a state from its file: mapped, read, or replayed record by record
    checkpoint.log        mode cec: what a commit costs with and without records written again, how long the log is,
                          and what recovery from it takes

The first two take sizes in MB of state, the last in keys. Keys of 16 bytes, values of 64.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quire.bench.core import Benchmark, Case, Measurement, Watch
from quire.bench.data import RECORD_BYTES, Ids, WrongResult, keys_of, uniform, values_of, zipf
from quire.checkpoint import cec, delta
from quire.structures import Map, PageManager

CHUNK_ROWS = 1 << 18
PREPARE_CALLS = 200
LOG_COMMITS = 60
LOG_SHARE = 20  # a commit changes one in so many keys
UNBOUNDED = 1e6  # a target that no log of these reaches
TARGETS = {"no checks": UNBOUNDED, "Q = 1.5": 1.5, "Q = 2": 2.0, "Q = 4": 4.0, "Q = 8": 8.0}


def rows(data: Any) -> pa.Array:
    """Rows of bytes as an Arrow array."""
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(data.shape[1]), len(data), [None, pa.py_buffer(np.ascontiguousarray(data))]
    )


def put(store: Map, ids: Ids, version: int) -> None:
    """Puts a version of some records."""
    for start in range(0, len(ids), CHUNK_ROWS):
        piece = ids[start : start + CHUNK_ROWS]
        store.put_many(rows(keys_of(piece)), rows(values_of(piece, np.full(len(piece), version))))


def filled(pm: PageManager, megabytes: int) -> int:
    """Fills a map until the arena holds so much; gives the number of records."""
    store, total = pm.map("bench"), 0
    while pm.stats().bytes_held < megabytes << 20 and total * RECORD_BYTES < megabytes << 20:
        put(store, np.arange(total, total + CHUNK_ROWS // 8), 0)
        total += CHUNK_ROWS // 8
        pm.commit()
    return total


def prepare(case: Case) -> Iterator[Measurement]:
    """checkpoint.prepare"""
    with PageManager() as pm:
        records = filled(pm, case.size)
        watch = Watch()
        if case.peer == "snapshot":
            for _ in range(PREPARE_CALLS):
                watch.time(lambda: pm.snapshot().close())
            yield Measurement("stand-still", watch.seconds / PREPARE_CALLS * 1e3, "ms", records, "pm.snapshot()")
        else:
            payloads = watch.time(delta.write, pm)
            if sum(map(len, payloads)) < records * RECORD_BYTES:
                raise WrongResult("what was serialised is less than what is there")
            yield Measurement("stand-still", watch.seconds * 1e3, "ms", records, "quire.checkpoint.delta.write(pm)")


def restart(case: Case) -> Iterator[Measurement]:
    """checkpoint.restart"""
    image = case.folder / "state.image"
    with PageManager() as pm:
        records = filled(pm, case.size)
        with pm.snapshot() as snapshot:
            snapshot.save(image)
        payloads = delta.write(pm) if case.peer == "replayed" else []
    ways: dict[str, Callable[[], PageManager]] = {
        "mapped": lambda: PageManager.from_image(image),
        "read": lambda: PageManager.from_image(Path(image).read_bytes()),
        "replayed": lambda: replayed(payloads),
    }
    watch, first, all_of_it = Watch(), Watch(), Watch()
    with watch.time(ways[case.peer]) as pm:
        store = pm.map("bench")
        ids = uniform(records, min(records, 100_000), case.random())
        first.time(store.get, bytes(keys_of(ids[:1])[0]))
        found = all_of_it.time(store.get_many, rows(keys_of(ids)))
        if found.null_count or len(store) != records:
            raise WrongResult("records are missing")
    yield Measurement("ready", watch.seconds * 1e3, "ms", records, "PageManager.from_image, or delta.apply")
    yield Measurement("first get", first.seconds * 1e3, "ms", 1, "get")
    yield Measurement("next 100,000 gets", all_of_it.seconds * 1e3, "ms", len(ids), "get_many")


def replayed(payloads: list[bytes]) -> PageManager:
    """A new state that payloads were applied to."""
    pm = PageManager()
    for payload in payloads:
        delta.apply(pm, payload)
    pm.commit()
    return pm


def drawn(case: Case, commit: int, random: np.random.Generator) -> Ids:
    """The keys that a commit changes, by the variant: uniform, Zipf, or a window that drifts over all keys."""
    count = max(case.size // LOG_SHARE, 1)
    if case.variant == "uniform":
        return uniform(case.size, count, random)
    if case.variant == "zipf":
        return np.unique(zipf(case.size, count, np.random.default_rng([case.seed, commit])))
    start = commit * count // 4
    return (start + np.arange(count)) % case.size


def log(case: Case) -> Iterator[Measurement]:
    """checkpoint.log"""
    random, writing = case.random(), Watch()
    target, versions, changed, checks, extent_max = TARGETS[case.peer], [], 0, 0, 0.0
    with PageManager() as pm, cec.Log(pm, target=target) as written:
        store = pm.map("bench")
        for version in range(1, LOG_COMMITS + 2):
            ids = np.arange(case.size) if version == 1 else drawn(case, version, random)
            with pm.snapshot() as older:
                watch = Watch() if version == 1 else writing
                watch.time(put, store, ids, version)
                payloads, summary = watch.time(written.write, older, version)
                watch.time(pm.commit)
                watch.time(written.committed)
            versions.append((version, payloads, summary))
            if version > 1:
                changed, checks = changed + len(ids), checks + summary.checks
                extent_max = max(extent_max, summary.extent / summary.keys)
        last = versions[-1][2]
    if case.peer != "no checks" and extent_max > target + 1 / LOG_SHARE * 2:
        raise WrongResult(f"the extent was {extent_max:.2f} times the live keys, its target {target}")
    recovery = Watch()
    with PageManager() as pm, cec.Log(pm, target=target) as read:
        for version, payloads, _ in versions[last.since - 1 :]:
            for payload in payloads:
                recovery.time(read.apply, payload)
            recovery.time(pm.commit)
            recovery.time(read.loaded, version)
        read.complete(last.keys)
    call = f"{LOG_COMMITS} commits that change one key in {LOG_SHARE}"
    yield Measurement("a changed record", writing.per(changed), "ns", changed, call)
    yield Measurement("written again per changed", checks / changed, "records", changed, call)
    yield Measurement("longest extent per live key", extent_max, "records", case.size, call)
    yield Measurement("recovery", recovery.seconds * 1e3, "ms", last.to_read, "from since on")
    yield Measurement("recovery per record read", recovery.per(last.to_read), "ns", last.to_read, "from since on")


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    return 2.0 + case.size * (40e-6 if case.benchmark == "checkpoint.log" else 12e-3)


BENCHMARKS = (
    Benchmark(
        "checkpoint.prepare",
        "what a program waits for before a checkpoint of its state can be written, by size in MB",
        prepare,
        {"all of the state": ("snapshot", "serialised")},
        (64,),
        (64, 512, 4096),
        size_unit="MB",
        reference="snapshot",
    ),
    Benchmark(
        "checkpoint.restart",
        "a state from its file: mapped, read, or replayed, by size in MB",
        restart,
        {"local disk": ("mapped", "read", "replayed")},
        (64,),
        (64, 512, 4096),
        size_unit="MB",
        reference="mapped",
    ),
    Benchmark(
        "checkpoint.log",
        "mode cec: commits, length of the log and recovery, by target",
        log,
        dict.fromkeys(("uniform", "zipf", "drifting"), tuple(TARGETS)),
        (100_000,),
        (1_000_000,),
        size_unit="keys",
        reference="no checks",
    ),
)
