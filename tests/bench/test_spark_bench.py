"""The benchmarks with Spark at a tiny size: that they run and check their results. No test looks at a time.

QUIRE_BENCH  "all" for every benchmark on every peer; takes half an hour.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from quire.bench import core, data, report, runner, spark

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

ALL = os.environ.get("QUIRE_BENCH") == "all"
# Each benchmark on Quire, and one beside a store of Spark's.
PEERS = {
    "spark.operations": ("quire",),
    "spark.aggregation": ("quire", "hdfs"),
    "spark.few_changes": ("quire",),
    "spark.many_stores": ("quire",),
    "spark.bases": ("quire-bases",),
    f"spark.commits {spark.LOCAL}": ("quire-cec",),
    f"spark.commits {spark.HDFS}": ("quire",),
    f"spark.restart {spark.LOCAL}": ("quire",),
}
QUERIES = ("deduplication", "join", "sessions", "transform", *spark.NEXMARK)
QUERY_PEERS = {"quire": QUERIES} | (
    {"hdfs": tuple(name for name in QUERIES if name != "transform"), "rocksdb": QUERIES, "rocksdb-changelog": QUERIES}
    if ALL
    else {}
)
SIZES = {"spark.many_stores": 8}
ONCE = runner.Settings("full", repetitions=1, seed=7, operations_max=1)


@pytest.fixture(scope="module", autouse=True)
def direct():
    """HDFS on this machine is not behind a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "localhost,127.0.0.1")
        yield


def tiny(benchmark):
    variants = dict(benchmark.variants)
    if not ALL:
        named = {variant: (benchmark.name, f"{benchmark.name} {variant}") for variant in variants}
        found = {variant: [PEERS[name] for name in names if name in PEERS] for variant, names in named.items()}
        variants = {variant: peers[0] for variant, peers in found.items() if peers}
    return dataclasses.replace(benchmark, full=(SIZES.get(benchmark.name, 1000),), variants=variants)


TINY = [each for each in map(tiny, spark.BENCHMARKS) if each.variants]


@pytest.fixture(scope="module")
def document(direct):
    return runner.run(TINY, ONCE, None, isolate=False)


@pytest.mark.parametrize("benchmark", TINY, ids=lambda each: each.name)
def test_every_benchmark_gives_the_same_measures_for_all_peers(document, benchmark):
    assert document["failures"] == []
    found = [each for each in document["results"] if each["benchmark"] == benchmark.name]
    measures = {}
    for each in found:
        if each["measure"] not in ("plain read", "bytes read"):  # of Quire's files alone
            measures.setdefault((each["variant"], each["peer"]), []).append(each["measure"])
    assert set(measures) == {(variant, peer) for variant, peers in benchmark.variants.items() for peer in peers}
    # HDFSBacked has no merge.
    merges = {place: [each for each in named if "merge" not in each] for place, named in measures.items()}
    assert len(set(map(tuple, merges.values()))) == 1
    assert f"### {benchmark.name}" in report.markdown(document)


def test_operations_cover_what_spark_measures(document):
    found = [each["measure"] for each in document["results"] if each["benchmark"] == "spark.operations"]
    assert {measure.split(",")[0] for measure in found} == {"put", "get", "delete", "evict", "merge"}


def test_peers_for_scale_are_not_told_to_be_ahead(document):
    assert not [row for row in report.losses(document["results"]).rows if row[2] in spark.FOR_SCALE]


def case(tmp_path, peer, size=100):
    return core.Case("spark.operations", "provider", peer, size, 100, 7, tmp_path)


@pytest.mark.parametrize("peer", QUERY_PEERS)
def test_every_query_gives_what_it_must(tmp_path, peer):
    """In one JVM, to be quick; the JVM compares each query's output with that of another form of it, read at once."""
    names = QUERY_PEERS[peer]
    settings = {"rows": 1000, "batches": 4, "measured": 2, "checked": "true"}
    found = {}
    for each in spark.jvm(case(tmp_path, peer, 2000), ",".join(names), **settings):
        name, _, measure = each.measure.partition(": ")
        found.setdefault(name, []).append(measure)
    assert tuple(found) == names
    assert all(each == found[names[0]] for each in found.values())


def test_every_query_belongs_to_a_benchmark():
    benchmarks = {each.name: each for each in spark.BENCHMARKS}
    assert set(QUERIES) | {"aggregation"} == {
        *(name.removeprefix("spark.") for name, each in benchmarks.items() if each.function is spark.query),
        *benchmarks["spark.nexmark"].variants,
    }


def test_a_provider_that_forgets_is_refused(tmp_path):
    with pytest.raises(data.WrongResult, match="left 0 keys"):
        list(spark.operations(case(tmp_path, "limit")))


def test_a_query_on_a_provider_that_forgets_is_refused(tmp_path):
    settings = {"rows": 1000, "batches": 3, "measured": 2, "checked": "true"}
    with pytest.raises(data.WrongResult, match="the query gave"):
        list(spark.jvm(case(tmp_path, "limit"), "aggregation", **settings))


def test_a_provider_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(spark.PROVIDERS, "limit", {"providerClass": "io.quire.bench.NoSuchProvider"})
    with pytest.raises(RuntimeError, match="NoSuchProvider"):
        list(spark.operations(case(tmp_path, "limit")))


def test_the_jvm_ends_with_its_parent(tmp_path):
    command = spark.command(case(tmp_path, "hdfs"), "operations", seconds=1000, merges="false")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdin.close()
        assert process.wait(timeout=300) == 1


# ---------------------------------------------------------------------------------------------------- Nexmark's events

# A Spark of its own, so in a process of its own.
EVENTS = """
import json, sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from quire.bench.spark import bench_jar
jar = str(bench_jar())
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.jars", jar)
spark = builder.config("spark.driver.extraClassPath", jar).getOrCreate()
def read(kind, seed=7):
    options = {"rows": kind, "rate": 1000, "last": 50_000, "seed": seed}
    return spark.read.format("io.quire.bench.GeneratedSource").options(**options).load()
def rows(frame, *columns):
    times = {name for name, kind in frame.dtypes if kind == "timestamp"}
    found = frame.select(*(F.unix_micros(name) if name in times else name for name in columns or frame.columns))
    return [list(row) for row in found.collect()]
print(json.dumps({
    "persons": rows(read("persons")),
    "auctions": rows(read("auctions"), "auction", "seller", "category", "opened", "expires"),
    "bids": rows(read("bids"), "on", "bidder", "price", "bid", "arrived"),
    "again": rows(read("bids"), "on", "bidder", "price", "bid", "arrived"),
    "other": rows(read("bids", 8), "on", "bidder", "price", "bid", "arrived"),
}))
spark.stop()
"""


@pytest.fixture(scope="module")
def events():
    done = subprocess.run([sys.executable, "-c", EVENTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_events_come_in_the_published_proportions(events):
    assert [len(events[kind]) for kind in ("persons", "auctions", "bids")] == [1000, 3000, 46_000]


def test_events_are_those_of_their_seed(events):
    assert events["bids"] == events["again"]
    assert events["bids"] != events["other"]


def test_few_people_and_auctions_are_in_most_events(events):
    assert 0.70 < sum(seller % 100 == 0 for _, seller, *_ in events["auctions"]) / 3000 < 0.80
    assert 0.70 < sum(bidder % 100 == 1 for _, bidder, *_ in events["bids"]) / 46_000 < 0.80
    assert 0.45 < sum(on % 100 == 0 for on, *_ in events["bids"]) / 46_000 < 0.55


def test_events_refer_to_people_and_auctions_that_there_are(events):
    people = [each[0] for each in events["persons"]]
    auctions = [each[0] for each in events["auctions"]]
    assert people == list(range(1000, 2000))
    assert auctions == list(range(1000, 4000))
    assert {seller for _, seller, *_ in events["auctions"]} <= set(people)
    assert {bidder for _, bidder, *_ in events["bids"]} <= set(people)
    assert {on for on, *_ in events["bids"]} <= set(auctions)


def test_events_are_in_order_but_for_a_tenth_that_is_up_to_two_seconds_late(events):
    arrived = [each[-1] for each in events["bids"]]
    assert arrived == sorted(arrived)
    late = [came - made for *_, made, came in events["bids"]]
    assert min(late) == 0
    assert 1_500_000 < max(late) < 2_000_000
    assert 0.08 < sum(each > 0 for each in late) / len(late) < 0.12


def test_auctions_end(events):
    lengths = [expires - opened for *_, opened, expires in events["auctions"]]
    assert min(lengths) > 0
    assert max(lengths) < 4_000_000  # what the queries let an auction last
    assert 1_500_000 < sum(lengths) / len(lengths) < 1_900_000


def test_half_of_the_prices_are_below_a_thousand_dollars(events):
    prices = [each[2] for each in events["bids"]]
    assert min(prices) >= 100 and max(prices) <= 100_000_000
    assert 0.48 < sum(price < 100_000 for price in prices) / len(prices) < 0.52
