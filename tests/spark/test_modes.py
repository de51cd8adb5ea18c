"""Checkpoint modes: the same output in each of them, restarts and changes of mode in the middle."""

import os
import random
import struct

import pytest
from spark import harness, workloads
from spark.harness import MODE, QUIRE, STORE

from quire.checkpoint import Checkpoint, container

MODES = ["pages", "cec", "auto"]
ALL = os.environ.get("QUIRE_OPERATORS") == "all"
ROW = struct.Struct("<qq")  # one LONG as an UnsafeRow: null bits, value
# Ids of versions, families that need order, several values a key.
CHOSEN = [
    next(w for w in workloads.AGGREGATIONS if w.name == "by key" and w.variant == "ids"),
    next(w for w in workloads.JOINS if w.name == "join full_outer"),
]
if ALL:
    CHOSEN = [*workloads.AGGREGATIONS, *workloads.OTHERS, *workloads.JOINS, *workloads.TRANSFORMS]


def commit_kinds(checkpoint):
    """The kinds of the commit files of each store, in the order of versions."""
    found = {}
    for path in checkpoint.glob("state/0/*/*.qdelta"):
        with path.open("rb") as file:
            kind = container.read_header(file).kind.name
        found.setdefault(path.parent.name, []).append((int(path.name.split(".")[0].split("_")[0]), kind))
    return {store: [kind for _, kind in sorted(kinds)] for store, kinds in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", CHOSEN, ids=str)
def test_every_mode_gives_the_output_of_sparks_own_store(spark, peer, folder, workload, mode):
    expected = peer(workload)
    with harness.settings(spark, {MODE: mode}):
        found = harness.run(spark, workload, QUIRE, folder)
    assert not harness.difference(found, expected)
    kinds = {kind for kinds in commit_kinds(folder / "checkpoint").values() for kind in kinds}
    assert kinds <= {"pages": {"PAGES"}, "cec": {"LOG"}, "auto": {"DELTA", "PAGES"}}[mode]


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["1", "2"] if ALL else [str(1 + harness.SEED % 2)])
def test_the_mode_may_change_with_every_start(spark, peer, folder, ids):
    workload = next(w for w in workloads.AGGREGATIONS if w.name == "by key" and not w.variant)
    expected = peer(workload)
    chance = random.Random(f"{harness.SEED} modes {ids}")
    batches, output = workload.input(), {}
    conf = {STORE + "providerClass": QUIRE, STORE + "checkpointFormatVersion": ids, STORE + "minDeltasForSnapshot": "2"}
    modes = ["delta", "cec", "pages", "cec", "auto", "delta", "pages", "auto"]
    edges = sorted(chance.sample(range(1, workload.files), min(len(modes), workload.files) - 1))
    used = set()
    with harness.settings(spark, conf):
        for low, high, mode in zip([0, *edges], [*edges, workload.files], modes, strict=False):
            harness.release(folder / "source0", batches[0][low:high])
            with harness.settings(spark, {MODE: mode}):
                frame = workload.build(harness.stream(spark, folder / "source0"))
                harness.finish(harness.start(frame, workload.mode, folder / "checkpoint", output))
            if chance.random() < 0.4:
                harness.wait_for_maintenance()
            used.update(kind for kinds in commit_kinds(folder / "checkpoint").values() for kind in kinds)
    assert not harness.difference(output, expected)
    assert {"DELTA", "LOG", "PAGES"} <= used


def by_python(checkpoint, version):
    """The state of a version as Python reads it: rows of one long."""
    found = {}
    for store in Checkpoint(checkpoint).stores():
        with store.load(version) as state:
            found |= {ROW.unpack(key)[1]: ROW.unpack(value)[1] for key, value in state.map("default").items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_versions_and_changes_can_be_read_in_every_mode(spark, folder, mode):
    """State, and what changed in it, batch by batch, through Spark's own reader and from Python."""
    rows = [{n % 7: n for n in range(7 * batch, 7 * batch + 5)} for batch in range(6)]
    state, states, changes = {}, [], []
    schema = "key LONG, value LONG"
    source = folder / "source"
    source.mkdir()
    conf = {STORE + "providerClass": QUIRE, MODE: mode, STORE + "minDeltasForSnapshot": "2"}
    with harness.settings(spark, {**conf, "spark.sql.shuffle.partitions": "2"}):
        for number, batch in enumerate(rows):
            (source / f"{number}.csv").write_text("".join(f"{k},{v}\n" for k, v in batch.items()))
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).csv(str(source))
            counted = frame.groupBy("key").sum("value")
            harness.finish(harness.start(counted, "update", folder / "checkpoint", {}))
            for key, value in batch.items():
                state[key] = state.get(key, 0) + value
            states.append(dict(state))
            changes += [(number, "update", key, state[key]) for key in batch]
            if number == 3:
                harness.wait_for_maintenance()
        for number, expected in enumerate(states):
            reader = spark.read.format("statestore").option("batchId", number)
            found = reader.load(str(folder / "checkpoint")).select("key.key", "value.*")
            assert dict(map(tuple, found.collect())) == expected
        for number, expected in enumerate(states):
            assert by_python(folder / "checkpoint", number + 1) == expected
        reader = spark.read.format("statestore").option("readChangeFeed", True).option("changeStartBatchId", 0)
        feed = reader.load(str(folder / "checkpoint"))
        found = feed.select("batch_id", "change_type", "key.key", "value.*").collect()
        assert sorted(map(tuple, found)) == sorted(changes)
