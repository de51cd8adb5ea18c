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
