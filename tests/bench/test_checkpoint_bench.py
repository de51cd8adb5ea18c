"""The benchmarks of checkpoints run, check what they read back, and give the same measures for all ways."""

import dataclasses

import pytest

from quire.bench import checkpoint, report, runner

ONCE = runner.Settings("quick", repetitions=1, seed=7, operations_max=1)


@pytest.fixture(scope="module")
def document():
    tiny = [dataclasses.replace(each, quick=(1 if each.size_unit == "MB" else 2000,)) for each in checkpoint.BENCHMARKS]
    return runner.run(tiny, ONCE, None, isolate=False)


@pytest.mark.parametrize("benchmark", checkpoint.BENCHMARKS, ids=lambda each: each.name)
def test_every_benchmark_gives_the_same_measures_for_all_ways(document, benchmark):
    assert document["failures"] == []
    found = [each for each in document["results"] if each["benchmark"] == benchmark.name]
    for variant, peers in benchmark.variants.items():
        measures = [[e["measure"] for e in found if (e["variant"], e["peer"]) == (variant, peer)] for peer in peers]
        assert measures[0] and all(each == measures[0] for each in measures)
    assert f"## {benchmark.name}" in report.markdown(document)
