"""What a query's progress says about its state."""

import pytest
from spark import harness, workloads
from spark.harness import HDFS, QUIRE, REAL, STORE

pytestmark = pytest.mark.slow


def operators(spark, folder, provider):
    harness.release(folder / "source", harness.cuts("metrics", harness.rows("metrics"), 3))
    with harness.settings(spark, {STORE + "providerClass": provider}):
        frame = workloads.by_key(harness.stream(spark, folder / "source"))
        query = harness.finish(harness.start(frame, "update", folder / "checkpoint"))
    return [progress["stateOperators"][0] for progress in query.recentProgress if progress["stateOperators"]]


def test_progress_counts_rows_memory_and_what_commits_cost(spark, folder):
    ours, theirs = operators(spark, folder / "ours", QUIRE), operators(spark, folder / "theirs", HDFS)
    assert len(ours) == len(theirs) == 3
    for found, expected in zip(ours, theirs, strict=True):
        for name in (
            "operatorName",
            "numRowsTotal",
            "numRowsUpdated",
            "numShufflePartitions",
            "numStateStoreInstances",
        ):
            assert found[name] == expected[name], name
        assert found["numRowsTotal"] > 0
        assert found["memoryUsedBytes"] > 0
        assert found["customMetrics"]


@pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire")
def test_quires_own_metrics_are_there(spark, folder):
    last = operators(spark, folder, QUIRE)[-1]["customMetrics"]
    for word in ("pages", "pinned", "free", "dirty", "commit", "bytes", "load"):
        assert any(word in name.lower() for name in last), f"no metric for {word!r} among {sorted(last)}"
    assert all(value >= 0 for name, value in last.items() if name.startswith("quire")), last


@pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire")
def test_a_load_is_told_also_where_a_reader_did_it(spark, folder):
    """An aggregation reads its state before it writes it: the reader loads the version, the writer finds it there."""
    batches = harness.cuts("loads", harness.rows("loads"), 2)
    told = []
    with harness.settings(spark, {STORE + "providerClass": QUIRE}):
        for batch in batches:
            harness.release(folder / "source", [batch])
            frame = workloads.by_key(harness.stream(spark, folder / "source"))
            query = harness.finish(harness.start(frame, "update", folder / "checkpoint"))
            told.append([p["stateOperators"][0]["customMetrics"] for p in query.recentProgress if p["stateOperators"]])
    assert told[0][0]["quireLoadedFromCheckpoint"] == 0
    assert told[1][0]["quireLoadedFromCheckpoint"] == 2
    assert told[1][0]["quireDeltasReplayed"] > 0
