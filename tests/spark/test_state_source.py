"""The state data source reads what Quire wrote, and finds in it what it finds in the state of Spark's own stores."""

from collections import Counter

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from spark import harness, workloads
from spark.harness import HDFS, QUIRE, ROCKSDB, STORE, Workload

from quire.checkpoint import Checkpoint
from quire.checkpoint.container import FileKind
from quire.checkpoint.delta import Op

pytestmark = pytest.mark.slow

AGGREGATION = Workload("source aggregation", workloads.by_window, "update")
UPDATES = Workload("source updates", workloads.by_key, "update")
WIDE = [
    Workload("source wide", workloads.wide, "update", conf=conf, peer_conf={}, files=5, variant=variant)
    for variant, conf in [("plain", {}), ("ids", workloads.IDS), ("checksums", workloads.CHECKSUMS)]
]
DEDUPLICATION = Workload("source deduplication", workloads.distinct)


def joined(version, peer):
    conf = {workloads.JOIN: version}
    return Workload(
        "source join", workloads.join("full_outer"), sources=2, conf=conf, peer=peer, variant=f"format {version}"
    )


# All kinds of state variables in one query: each start of Python costs seconds.
TRANSFORMED = Workload(
    "source transform",
    workloads.transform(workloads.Everything, workloads.RowFace, "EventTime"),
    "update",
    peer=ROCKSDB,
    files=2,
    keys=8,
)
VARIABLES = {
    "total": {},
    "flag": {},
    "words": {"flattenCollectionTypes": "true"},
    "counts": {"flattenCollectionTypes": "false"},
    "": {"readRegisteredTimers": "true"},
}


@pytest.fixture(scope="module")
def checkpoint(spark, tmp_path_factory):
    """The checkpoint of a workload run on a provider; each is made once."""
    made = {}

    def make(workload, provider):
        name = (str(workload), provider)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("source")
            harness.run(spark, workload, provider, made[name])
        return made[name] / "checkpoint"

    return make


def read(spark, path, kind="statestore", **options):
    frame = spark.read.format(kind)
    for name, value in options.items():
        frame = frame.option(name, value)
    return Counter(harness.shown(row) for row in frame.load(str(path)).collect())


def last_batch(path):
    return max(int(entry.name) for entry in (path / "commits").iterdir() if entry.name.isdigit())


@pytest.mark.parametrize("workload", [AGGREGATION, DEDUPLICATION], ids=str)
def test_the_state_of_every_batch_is_that_of_sparks_own_store(spark, checkpoint, workload):
    ours, theirs = checkpoint(workload, QUIRE), checkpoint(workload, workload.peer)
    last = last_batch(ours)
    assert last == last_batch(theirs)
    found = [read(spark, ours, batchId=batch) for batch in range(last + 1)]
    assert found == [read(spark, theirs, batchId=batch) for batch in range(last + 1)]
    assert found[-1] == read(spark, ours) and found[-1].total() > 0
    assert found[0] != found[-1]


@pytest.mark.parametrize("workload", [UPDATES, DEDUPLICATION], ids=str)
def test_the_change_feed_tells_the_changes_of_every_batch(spark, checkpoint, workload):
    ours, theirs = checkpoint(workload, QUIRE), checkpoint(workload, workload.peer)
    last = last_batch(ours)
    for begin, end in [(0, last), (1, 1), (2, last)]:
        options = {"readChangeFeed": "true", "changeStartBatchId": begin, "changeEndBatchId": end}
        found = read(spark, ours, **options)
        assert found == read(spark, theirs, **options)
    assert read(spark, ours, readChangeFeed="true", changeStartBatchId=0).total() > 0


@pytest.mark.parametrize("workload", WIDE, ids=str)
def test_the_change_feed_shows_rows_whole_of_which_a_part_was_written(spark, checkpoint, workload):
    ours, theirs = checkpoint(workload, QUIRE), checkpoint(WIDE[0], HDFS)
    patched = {
        record.key
        for store in Checkpoint(ours).stores()
        for file in store.files()
        if file.kind == FileKind.DELTA
        for record in store.records(file, store.read(file))
        if record.op == Op.PATCH
    }
    assert len(patched) > 10
    last = last_batch(ours)
    for begin, end in [(0, last), (1, 1), (2, last), (last, last)]:
        options = {"readChangeFeed": "true", "changeStartBatchId": begin, "changeEndBatchId": end}
        with harness.settings(spark, workload.conf):
            found = read(spark, ours, **options)
        assert found == read(spark, theirs, **options)
        assert found.total() > 0


def test_the_changes_replayed_one_by_one_give_the_state_of_every_batch(spark, checkpoint):
    """With keys that expire: a key that came and went within a batch may be told as two changes or as none."""
    ours = checkpoint(AGGREGATION, QUIRE)
    frame = spark.read.format("statestore").option("readChangeFeed", "true").option("changeStartBatchId", "0")
    changes = frame.load(str(ours)).collect()
    assert {change.change_type for change in changes} == {"update", "delete"}
    state = {}
    for batch in range(last_batch(ours) + 1):
        for change in changes:
            place = (change.partition_id, harness.shown(change.key))
            if change.batch_id == batch and change.change_type == "delete":
                state.pop(place, None)
            elif change.batch_id == batch:
                state[place] = harness.shown(change.value)
        rows = spark.read.format("statestore").option("batchId", batch).load(str(ours)).collect()
        found = {(row.partition_id, harness.shown(row.key)): harness.shown(row.value) for row in rows}
        assert state == found, f"after batch {batch}"


@pytest.mark.parametrize("version", workloads.JOIN_FORMATS)
def test_both_sides_of_a_join_can_be_read(spark, checkpoint, version):
    peer = HDFS if version == "2" else ROCKSDB
    workload = joined(version, peer)
    ours, theirs = checkpoint(workload, QUIRE), checkpoint(workload, peer)
    for side in ("left", "right"):
        batch = 1
        found = read(spark, ours, joinSide=side, batchId=batch)
        assert found == read(spark, theirs, joinSide=side, batchId=batch)
        assert found.total() > 0


@pytest.mark.parametrize(("variable", "options"), VARIABLES.items())
def test_state_variables_and_timers_can_be_read(spark, checkpoint, variable, options):
    ours, theirs = checkpoint(TRANSFORMED, QUIRE), checkpoint(TRANSFORMED, ROCKSDB)
    chosen = {**options, **({"stateVarName": variable} if variable else {})}
    found = read(spark, ours, **chosen)
    assert found == read(spark, theirs, **chosen)
    assert found.total() > 0


def test_the_change_feed_of_a_state_variable(spark, checkpoint):
    ours, theirs = checkpoint(TRANSFORMED, QUIRE), checkpoint(TRANSFORMED, ROCKSDB)
    options = {"stateVarName": "total", "readChangeFeed": "true", "changeStartBatchId": 0}
    found = read(spark, ours, **options)
    assert found == read(spark, theirs, **options)
    assert found.total() > 0


@pytest.mark.parametrize("workload", [AGGREGATION, joined("2", HDFS), TRANSFORMED], ids=str)
def test_state_metadata_is_that_of_sparks_own_store(spark, checkpoint, workload):
    ours, theirs = checkpoint(workload, QUIRE), checkpoint(workload, workload.peer)
    found = read(spark, ours, kind="state-metadata")
    assert found == read(spark, theirs, kind="state-metadata")
    assert found.total() > 0


@pytest.mark.parametrize("conf", [{}, workloads.IDS], ids=["plain", "ids"])
def test_a_snapshot_with_the_changes_after_it_gives_the_same_state(spark, folder, conf):
    """A query is left running, so that maintenance writes bases; from each base the state of the end is rebuilt."""
    rows = harness.rows("snapshots", count=300)
    batches = harness.cuts("snapshots", rows, 10)
    source, checkpoint = folder / "source", folder / "checkpoint"
    with harness.settings(spark, {**conf, STORE + "providerClass": QUIRE, STORE + "minDeltasForSnapshot": "2"}):
        source.mkdir()
        frame = workloads.by_key(harness.stream(spark, source))
        query = harness.start(frame, "update", checkpoint, None, forever=True)
        try:
            for half in (batches[:5], batches[5:8]):
                harness.release(source, half)
                query.processAllAvailable()
                harness.wait_for_maintenance()
            harness.release(source, batches[8:])
            query.processAllAvailable()
        finally:
            query.stop()
    with harness.settings(spark, conf):
        check_snapshots(spark, checkpoint)


def check_snapshots(spark, checkpoint):
    """Reads the newest state from each base that there is."""
    last = last_batch(checkpoint)
    for partition in (0, 1):
        whole = spark.read.format("statestore").load(str(checkpoint)).where(f"partition_id = {partition}").collect()
        expected = Counter(harness.shown(row) for row in whole)
        starts = []
        for batch in range(last + 1):
            options = {"snapshotStartBatchId": batch, "snapshotPartitionId": partition, "batchId": last}
            try:
                found = read(spark, checkpoint, **options)
            except (PySparkException, Py4JJavaError) as error:
                # No base of that version: Spark says which one it looked for.
                assert "CANNOT_LOAD_STATE_STORE" in str(error) or "does not exist" in str(error), str(error)[:500]
                continue
            assert found == expected, f"from the base of batch {batch} in partition {partition}"
            starts.append(batch)
        assert starts, "no batch had a base to start from"
        assert expected.total() > 0
