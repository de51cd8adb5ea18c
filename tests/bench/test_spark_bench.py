"""The benchmarks with Spark at a tiny size: that they run and check their results. No test looks at a time."""

import dataclasses
import subprocess

import pytest

from quire.bench import core, data, report, runner, spark

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

# Each benchmark on Quire; beside it, the peers whose code is not run by another benchmark here.
PEERS = {
    "spark.operations": ("quire", "rocksdb-untracked"),
    "spark.aggregation": ("quire", "hdfs", *spark.FOR_SCALE),
    "spark.commits": ("quire", "quire-cec"),
    "spark.few_changes": ("quire",),
    "spark.restart": ("quire", "rocksdb-changelog"),
    "spark.many_stores": ("quire",),
}
SIZES = {"spark.many_stores": 8}
ONCE = runner.Settings("quick", repetitions=1, seed=7, operations_max=1)


def tiny(benchmark):
    variants = dict.fromkeys(benchmark.variants, PEERS[benchmark.name])
    return dataclasses.replace(benchmark, quick=(SIZES.get(benchmark.name, 1000),), variants=variants)


@pytest.fixture(scope="module")
def document():
    return runner.run([tiny(each) for each in spark.BENCHMARKS], ONCE, None, isolate=False)


@pytest.mark.parametrize("benchmark", spark.BENCHMARKS, ids=lambda each: each.name)
def test_every_benchmark_gives_the_same_measures_for_all_peers(document, benchmark):
    assert document["failures"] == []
    found = [each for each in document["results"] if each["benchmark"] == benchmark.name]
    measures = {peer: [each["measure"] for each in found if each["peer"] == peer] for peer in PEERS[benchmark.name]}
    assert measures["quire"]
    assert all(each == measures["quire"] for each in measures.values())
    assert f"### {benchmark.name}" in report.markdown(document)


def test_operations_cover_what_spark_measures(document):
    found = [each["measure"] for each in document["results"] if each["benchmark"] == "spark.operations"]
    assert {measure.split(",")[0] for measure in found} == {"put", "get", "delete", "evict", "merge"}


def test_peers_for_scale_are_not_told_to_be_ahead(document):
    assert not [row for row in report.losses(document["results"]).rows if row[2] in spark.FOR_SCALE]


def case(tmp_path, peer):
    return core.Case("spark.operations", "provider", peer, 100, 100, 7, tmp_path)


def test_a_provider_that_forgets_is_refused(tmp_path):
    with pytest.raises(data.WrongResult, match="left 0 keys"):
        list(spark.operations(case(tmp_path, "limit")))


def test_a_provider_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(spark.PROVIDERS, "limit", {"providerClass": "io.quire.bench.NoSuchProvider"})
    with pytest.raises(RuntimeError, match="NoSuchProvider"):
        list(spark.operations(case(tmp_path, "limit")))


def test_the_jvm_ends_with_its_parent(tmp_path):
    command = spark.command(case(tmp_path, "hdfs"), "operations", seconds=1000, merges="false")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdin.close()
        assert process.wait(timeout=300) == 1
