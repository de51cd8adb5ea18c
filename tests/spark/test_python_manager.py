"""Versions that Python committed into a query's checkpoint: Spark reads them, and goes on from them."""

import struct

import pytest
from spark import harness
from spark.harness import QUIRE, REAL

from quire.checkpoint import Manager

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire"),
]

ROW = struct.Struct("<qq")  # one LONG as an UnsafeRow: null bits, value
MARK = 1000


def counted(state):
    return {ROW.unpack(key)[1]: ROW.unpack(value)[1] for key, value in state.map("default").items()}


@pytest.mark.parametrize(
    ("codec", "mode", "mode_of_spark"),
    [("lz4", "delta", "delta"), ("zstd", "cec", "pages"), ("snappy", "pages", "cec"), ("", "auto", "auto")],
)
def test_spark_goes_on_from_what_python_committed(spark, folder, codec, mode, mode_of_spark):
    """Of one partition as a delta, of the other as a base, in modes that have them."""
    checkpoint, source = folder / "checkpoint", folder / "source"
    unload = spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop

    def run(batches):
        output = {}
        harness.release(source, [[{"id": number} for number in batch] for batch in batches])
        frame = harness.stream(spark, source, "id LONG").groupBy("id").count()
        harness.finish(harness.start(frame, "update", checkpoint, output))
        return output

    with harness.settings(spark, {harness.STORE + "compression.codec": codec or "lz4", harness.MODE: mode_of_spark}):
        run([range(20), range(10, 30), range(5, 40)])
        # Else its maintenance may yet write a base of the version that is replaced here.
        unload()
        expected = {}
        for partition in (0, 1):
            with Manager(checkpoint, 0, partition, mode=mode, codec=codec, bases_every=1) as manager:
                with manager.load() as pm:
                    assert manager.version == 3
                    wanted = {number: count + MARK for number, count in counted(pm).items()}
                with manager.load(2) as pm:
                    pm.map("default").update(
                        {ROW.pack(0, number): ROW.pack(0, count) for number, count in wanted.items()}
                    )
                    assert manager.commit(pm) == 3
                    if partition:
                        manager.maintain()
                assert (manager.version_id in manager.store.listing().bases) == (partition == 1 and mode != "cec")
            expected |= wanted
        rows = spark.read.format("statestore").load(str(checkpoint)).collect()
        assert {row.key.id: row.value["count"] for row in rows} == expected
        # By executors that have nothing of the query in memory.
        unload()
        (batch,) = run([[0, 0, 39]]).values()
        assert sorted(batch) == [f"id=0, count={expected[0] + 2}", f"id=39, count={expected[39] + 1}"]
    for partition in (0, 1):
        with Manager(checkpoint, 0, partition) as manager, manager.load() as pm:
            assert manager.version == 4
            assert {number: count for number, count in expected.items() if number not in (0, 39)}.items() >= {
                number: count for number, count in counted(pm).items() if number not in (0, 39)
            }.items()


def test_spark_reads_bases_in_parts_and_passes_over_one_that_lacks_a_part(spark, folder):
    checkpoint, source = folder / "checkpoint", folder / "source"
    harness.release(source, [[{"id": number} for number in batch] for batch in (range(20), range(10, 30))])
    frame = harness.stream(spark, source, "id LONG").groupBy("id").count()
    harness.finish(harness.start(frame, "update", checkpoint, {}))
    spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()
    added = range(1000, 200_000)
    for partition in (0, 1):
        with Manager(checkpoint, 0, partition, bases_every=1) as manager, manager.load(1) as pm:
            pm.map("default").update({ROW.pack(0, number): ROW.pack(0, partition) for number in added})
            manager.commit(pm)
            manager.maintain()

    def rows():
        return spark.read.format("statestore").load(str(checkpoint)).where("value.count < 2 and key.id >= 1000").count()

    assert rows() == 2 * len(added)
    parts = sorted(checkpoint.glob("state/0/0/2_*.*.qpart"))
    assert len(parts) > 1
    # The version's delta is still there, on top of nothing.
    parts[1].unlink()
    assert rows() == 2 * len(added)
    strict = {harness.STORE + "autoSnapshotRepair.enabled": "false"}
    with harness.settings(spark, strict), pytest.raises(Exception, match=parts[1].name):
        rows()
