"""The family "checkpoint": what the modes of checkpoints cost.

    checkpoint.log        mode cec: what a commit costs with and without records written again, how long the log is,
                          and what recovery from it takes

Keys of 16 bytes, values of 64. What a program waits for before a checkpoint, and how soon it is back from one, are
``papers.prepare`` and ``papers.recovery``.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from quire.bench.core import Benchmark, Case, Measurement, Watch
from quire.bench.data import Ids, WrongResult, keys_of, uniform, values_of, zipf
from quire.checkpoint import cec
from quire.structures import Map, PageManager

CHUNK_ROWS = 1 << 18
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


def compare(store: Map, latest: Any) -> None:
    """That the map has of each record the version that was put last."""
    for start in range(0, len(latest), CHUNK_ROWS):
        ids = np.arange(start, min(start + CHUNK_ROWS, len(latest)))
        wanted = rows(values_of(ids, latest[ids])).cast(pa.binary())
        if not store.get_many(rows(keys_of(ids))).cast(pa.binary()).equals(wanted):
            raise WrongResult(f"a value among records {start} to {ids[-1]} is another one after recovery")


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
    latest = np.zeros(case.size, np.int64)
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
            latest[ids] = version
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
        compare(pm.map("bench"), latest)
    call = f"{LOG_COMMITS} commits that change one key in {LOG_SHARE}"
    yield Measurement("a changed record", writing.per(changed), "ns", changed, call)
    yield Measurement("written again per changed", checks / changed, "records", changed, call)
    yield Measurement("longest extent per live key", extent_max, "records", case.size, call)
    yield Measurement("recovery", recovery.seconds * 1e3, "ms", last.to_read, "from since on")
    yield Measurement("recovery per record read", recovery.per(last.to_read), "ns", last.to_read, "from since on")


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    return 0.5 + case.size * 5e-6


BENCHMARKS = (
    Benchmark(
        "checkpoint.log",
        "mode cec: commits, length of the log and recovery, by target",
        log,
        dict.fromkeys(("uniform", "zipf", "drifting"), tuple(TARGETS)),
        (100_000,),
        (1_000_000,),
        size_unit="keys",
        reference="no checks",
        unplotted=("recovery per record read",),
        rivals=(),
    ),
)
