"""Every stateful operator from Python: the same output on Quire as on Spark's own stores, restarts in the middle.

QUIRE_OPERATORS=all runs every one; without it the seed chooses one half of them or the other.
"""

import os

import pytest
from spark import harness, workloads

ALL = [*workloads.AGGREGATIONS, *workloads.OTHERS, *workloads.JOINS, *workloads.TRANSFORMS]
CHOSEN = ALL if os.environ.get("QUIRE_OPERATORS") == "all" else ALL[harness.SEED % 2 :: 2]


@pytest.mark.slow
@pytest.mark.parametrize("workload", CHOSEN, ids=str)
def test_an_operator_gives_the_output_of_sparks_own_store(spark, peer, folder, workload):
    expected = peer(workload)
    assert harness.total(expected) > 0, "this input shows nothing: give the workload other rows"
    found = harness.run(spark, workload, harness.QUIRE, folder)
    assert not harness.difference(found, expected)


@pytest.mark.slow
def test_an_inner_join_of_the_oldest_state_format(spark, peer, folder):
    expected = peer(workloads.OLD_JOIN)
    spark._jvm.System.setProperty("spark.testing", "1")
    try:
        found = harness.run(spark, workloads.OLD_JOIN, harness.QUIRE, folder)
    finally:
        spark._jvm.System.clearProperty("spark.testing")
    assert not harness.difference(found, expected)


def nodes(plan):
    """The classes of a physical plan's nodes."""
    children = plan.children()
    found = [plan.getClass().getSimpleName()]
    return found + [name for index in range(children.size()) for name in nodes(children.apply(index))]


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["quire", "spark"])
def test_aggregations_look_up_many_keys_at_once_where_their_state_is_quires(spark, folder, own):
    """The plan shows the nodes that it always has, and a query on another store keeps them."""
    with harness.settings(spark, {harness.STORE + "providerClass": harness.QUIRE if own else harness.HDFS}):
        harness.release(folder / "source", [[{"id": 1, "value": 2, "word": "w"}]])
        frame = workloads.by_many_keys(harness.stream(spark, folder / "source"))
        query = harness.finish(harness.start(frame, "update", folder / "checkpoint"))
        plan = query._jsq.streamingQuery().lastExecution().executedPlan()
    assert ("QuireStateStoreRestoreExec" in nodes(plan)) == (own and harness.QUIRE == harness.REAL)
    assert "StateStoreRestore [" in plan.toString() and "QuireStateStore" not in plan.toString()
