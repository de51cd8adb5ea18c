"""Every benchmark that needs no Spark, with all its peers, at a tiny size: it runs and its results are right.

No test looks at a time. A new benchmark is found by itself. ``test_spark_bench.py`` and ``test_operator_bench.py`` do
the same for those on Spark, where a test says if one is left out.
"""

import collections
import dataclasses
from pathlib import Path

import pytest

from quire import CorruptError
from quire.bench import core, data, papers_cec, papers_ha, papers_sguard, report, runner

pytestmark = pytest.mark.slow

TINY = runner.Settings("full", repetitions=1, seed=7, operations_max=500)
LARGEST = {"MB": 1, "KB": 256, "records": 1000, "keys": 2000, "threads or clients": 2}
IN_PROCESS = [
    each for each in runner.BENCHMARKS if each.family in ("core", "papers", "checkpoint") and each.name != "papers.dfs"
]


def tiny(benchmark):
    size = min(min(benchmark.full), LARGEST.get(benchmark.size_unit, 1000))
    return dataclasses.replace(benchmark, full=(size, 4) if benchmark.size_unit == "operators" else (size,))


def check(benchmark, isolate=False):
    document = runner.run([tiny(benchmark)], TINY, None, isolate=isolate)
    assert [each for each in document["failures"] if not each["missing"]] == []
    found = document["results"]
    absent = {(each["variant"], each["peer"]) for each in document["failures"]}
    wanted = {(variant, peer) for variant, peers in benchmark.variants.items() for peer in peers}
    assert {(each["variant"], each["peer"].removesuffix(" compacted")) for each in found} | absent == wanted
    assert all(each["calls"] and all(each["calls"]) for each in found)
    measures = {each["measure"] for each in found}
    assert {place[3] for place in benchmark.paper.numbers} <= measures if benchmark.paper else True
    assert set(benchmark.unplotted) <= measures
    assert benchmark.reference in {each["peer"] for each in found}
    assert f"### {benchmark.name}" in report.markdown(document)


@pytest.mark.parametrize("benchmark", IN_PROCESS, ids=lambda each: each.name)
def test_a_benchmark_runs_and_its_results_are_right(benchmark):
    check(benchmark)


def test_hdfs_takes_and_gives_what_is_written():
    pytest.importorskip("pyspark")
    pytest.importorskip("hdfs")
    # Its clients are processes, which start from the benchmark's own.
    check(next(each for each in runner.BENCHMARKS if each.name == "papers.dfs"), isolate=True)


def test_numbers_of_papers_are_of_places_that_a_full_run_has():
    for benchmark in (each for each in runner.BENCHMARKS if each.paper):
        for variant, peer, size, _ in benchmark.paper.numbers:
            assert peer in benchmark.variants[variant]
            assert size in benchmark.full or benchmark.name == "papers.dfs"


def test_a_quick_run_of_everything_takes_a_quarter_of_an_hour():
    seconds = sum(runner.estimate(case) for _, case in runner.plan(runner.BENCHMARKS, runner.QUICK))
    assert seconds <= 15 * 60


@pytest.mark.parametrize("name", ["quick", "full"])
def test_estimates_are_near_what_the_saved_runs_took(name):
    saved = report.load(Path(__file__).parents[2] / f"bench/results/0.1.0/{name}.json")
    limit, known = saved["settings"]["operations_max"], {each.name: each for each in runner.BENCHMARKS}
    said, took = collections.Counter(), collections.Counter()
    for each in saved["cases"]:
        peers = known[each["benchmark"]].variants.get(each["variant"], ()) if each["benchmark"] in known else ()
        if each["peer"] in peers:
            place = (each[part] for part in ("benchmark", "variant", "peer", "size"))
            said[each["benchmark"]] += runner.estimate(core.Case(*place, limit, 7, Path()))
            took[each["benchmark"]] += each["seconds"]
    # The machine's speed drifts by a factor of two; what takes some seconds does not matter.
    ratios = {each: said[each] / took[each] for each in took if took[each] > 15}
    assert {each: times for each, times in ratios.items() if not 0.4 < times < 2} == {}
    assert 0.4 < said.total() / took.total() < 1.6


def test_every_family_is_in_a_quick_run_and_every_benchmark_in_a_full_one():
    quick = {case.benchmark for _, case in runner.plan(runner.BENCHMARKS, runner.QUICK)}
    assert {name.partition(".")[0] for name in quick} == set(runner.FAMILIES)
    full = list(runner.plan(runner.BENCHMARKS, runner.FULL))
    assert {case.benchmark for _, case in full} == {each.name for each in runner.BENCHMARKS}
    assert all(runner.estimate(case) > 0 for _, case in full)


def test_no_peer_always_comes_first_and_the_order_is_that_of_the_seed():
    benchmark = next(each for each in runner.BENCHMARKS if each.name == "core.map")
    settings = dataclasses.replace(runner.QUICK, repetitions=3, seconds_max=float("inf"))

    def orders(settings):
        ran = [(repetition, case.peer) for repetition, case in runner.plan([benchmark], settings)]
        return [[peer for place, peer in ran if place == repetition] for repetition in range(3)]

    found = orders(settings)
    assert found == orders(settings)
    assert all(sorted(order) == sorted(benchmark.variants["map"]) for order in found)
    assert all(len({order[place] for order in found}) == 3 for place in range(len(found[0])))
    firsts = {orders(dataclasses.replace(settings, seed=seed))[0][0] for seed in range(20)}
    assert len(firsts) > 3


PLACES = [
    {"benchmark": "core.map-each", "variant": "map", "size": 1000},
    {"benchmark": "core.curve", "variant": "map", "size": 500},
    {"benchmark": "core.curve", "variant": "map", "size": 1000},
]


def test_a_report_has_the_peers_in_the_same_order_however_they_ran():
    settings = dataclasses.replace(TINY, repetitions=2, seed=3)
    benchmark = tiny(next(each for each in runner.BENCHMARKS if each.name == "core.map-each"))
    document = runner.run([benchmark], settings, None, isolate=False)
    ran = [case["peer"] for case in document["cases"] if case["repetition"] == 0]
    named = [peer for peer in benchmark.variants["map"] if peer in ran]
    assert ran != named and sorted(ran) == sorted(named)
    # Benchmarks, variants and sizes stand as they ran.
    two = [{**each, **place} for place in PLACES for each in document["results"]]
    parts = ("benchmark", "variant", "size")
    assert list(dict.fromkeys(tuple(each[part] for part in parts) for each in report.in_order(two))) == [
        tuple(place[part] for part in parts) for place in PLACES
    ]
    columns = report.benchmark_part(benchmark.name, report.in_order(document["results"]), []).tables[0].header[1:]
    assert [peer for peer in columns if " " not in peer] == named


def test_what_a_quick_run_leaves_out_is_there():
    peers = {each.name: {peer for group in each.variants.values() for peer in group} for each in runner.BENCHMARKS}
    peers |= {
        f"{each.name} {variant}": set(group) for each in runner.BENCHMARKS for variant, group in each.variants.items()
    }
    assert all(set(kept) <= peers[name] for name, kept in runner.QUICK_PEERS.items())


def test_what_has_no_case_is_not_said_to_be_repeated():
    told = runner.repetitions(runner.BENCHMARKS, runner.QUICK)
    assert set(told) == {case.benchmark for _, case in runner.plan(runner.BENCHMARKS, runner.QUICK)}
    assert len(told) < len(runner.BENCHMARKS)


def test_short_benchmarks_are_repeated_more_often_when_time_is_short():
    names = ("core.map-each", "core.map")
    each, whole = (next(b for b in runner.BENCHMARKS if b.name == name) for name in names)
    once = sum(runner.seconds_once(benchmark, runner.QUICK) for benchmark in (each, whole))
    short = dataclasses.replace(runner.QUICK, seconds_max=once + runner.seconds_once(each, runner.QUICK) + 1)
    assert runner.repetitions([whole, each], short) == {"core.map": 1, "core.map-each": 2}


# ------------------------------------------------------------------------------------- that wrong results are noticed


def case(name, variant, peer, size, tmp_path):
    return core.Case(name, variant, peer, size, 500, 7, tmp_path)


def test_a_join_that_forgets_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(papers_sguard.IndexedPages, "matches", lambda self, ids: [])
    with pytest.raises(data.WrongResult, match="partners"):
        list(papers_sguard.join(case("papers.join", papers_sguard.INDEXED, "quire", 16, tmp_path)))


def test_an_aggregate_that_counts_wrong_is_refused(tmp_path, monkeypatch):
    update = papers_sguard.PageGroups.update
    monkeypatch.setattr(
        papers_sguard.PageGroups, "update", lambda self, groups, values: update(self, groups, values + 1)
    )
    with pytest.raises(data.WrongResult, match="model"):
        list(papers_sguard.aggregate(case("papers.aggregate", "", "quire", 1, tmp_path)))


def test_a_checkpoint_of_another_moment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(papers_sguard, "read_back", lambda operator, peer, file, groups: operator.result(groups))
    with pytest.raises(data.WrongResult, match="its state of that moment"):
        list(papers_sguard.interruption(case("papers.interruption", "latency", "quire", 1, tmp_path)))


def test_a_log_that_lacks_a_version_is_refused(tmp_path, monkeypatch):
    apply, calls = papers_cec.cec.Log.apply, []

    def forgetful(self, payload):
        calls.append(payload)
        if len(calls) != 2:
            apply(self, payload)

    monkeypatch.setattr(papers_cec.cec.Log, "apply", forgetful)
    with pytest.raises(CorruptError, match="its last version says"):
        list(papers_cec.extent(case("papers.cec-extent", papers_cec.COUNTED, "quire", 2, tmp_path)))


def test_an_image_that_missed_a_capture_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(papers_ha.delta, "apply", lambda pm, payload: None)
    with pytest.raises(data.WrongResult, match="image"):
        variant = next(iter(papers_ha.INPUTS))
        list(papers_ha.capture(case("papers.capture", variant, "quire", 1, tmp_path)))
