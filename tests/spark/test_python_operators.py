"""Operators in Python on real queries: the right state whatever is run again, restarted, moved or killed."""

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import functions as F
from spark import child, harness, processes, workloads
from spark.harness import QUIRE, SEED

import quire
from quire.statestore.repartition import repartition

# Spark's Python workers do not have the tests' folder on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QUIRE != harness.REAL, reason="QUIRE_TEST_PROVIDER stands in for the JVM's part alone"),
]


class Count(quire.Operator):
    """How often each key came, vectorised."""

    output = "key string, n bigint"

    def open(self, state):
        self.counts = state.map("counts", key="key string", value="n bigint")

    def process(self, batch):
        return self.counts.add_many(batch["key"], pa.array([1] * len(batch)))


class Latest(Count):
    """Of the counts that came in a batch the last, which are what each key has."""

    def process(self, batch):
        super().process(batch)
        keys = pa.compute.unique(batch["key"])
        return pa.table({"key": keys, "n": self.counts.get_many(keys)})


class Failing(Latest):
    """Fails on a word."""

    def process(self, batch):
        if "poison" in batch["key"].to_pylist():
            self.counts.put_many(["k1"], [1_000_000])
            raise ZeroDivisionError("there was poison in it")
        return super().process(batch)


SCHEMA = "key string"


def given(folder, *batches):
    harness.release(folder, [[{"key": key} for key in batch] for batch in batches])


def run(frame, checkpoint, write=None, mode="append"):
    """All batches there are; gives what came out of each."""
    output = {}

    def keep(batch, number):
        output[number] = Counter(tuple(row) for row in batch.collect())

    writer = frame.writeStream.foreachBatch(write or keep).outputMode(mode)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return output


def counted(checkpoint, **options):
    table = quire.read_state(str(checkpoint), "Latest", **options)
    return dict(zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True))


def latest(spark, folder, **options):
    return quire.stateful(harness.stream(spark, folder, SCHEMA), Latest(), by="key", **options)


def test_it_gives_what_sparks_own_operator_gives(spark, folder):
    """On random input, restarted in the middle, in every mode."""
    inputs = [harness.cuts("python", harness.rows("python"), 6)]
    results = {}
    for name, build in (("spark", workloads.tally), ("python", workloads.tally_in_python)):
        results[name] = {}
        for stage in harness.stages("python", 6, 3):
            harness.release(folder / name / "in", inputs[0][stage])
            frame = build(harness.stream(spark, folder / name / "in"))
            harness.finish(harness.start(frame, "update", folder / name / "checkpoint", results[name]))
    assert harness.total(results["spark"])
    assert not harness.difference(results["python"], results["spark"])


@pytest.mark.parametrize("mode", ["delta", "pages", "auto"])
def test_it_goes_on_where_it_was_without_the_hosts_arenas(spark, folder, mode):
    arenas = folder / "arenas"
    expected = Counter()
    for number in range(4):
        batch = [f"k{key}" for key in random.Random(f"{SEED} {number}").choices(range(20), k=50)]
        given(folder / "in", batch)
        found = run(latest(spark, folder / "in", mode=mode, arena_dir=str(arenas)), folder / "checkpoint")
        expected.update(batch)
        assert found == {number: Counter({(key, expected[key]): 1 for key in set(batch)})}
        if number % 2:
            shutil.rmtree(arenas)
    assert counted(folder / "checkpoint") == expected


def test_the_state_is_read_as_it_was_after_any_batch(spark, folder):
    given(folder / "in", ["a", "b"], ["b"], ["c"])
    run(latest(spark, folder / "in"), folder / "checkpoint")
    assert counted(folder / "checkpoint", version=1) == {"a": 1, "b": 1}
    assert counted(folder / "checkpoint", version=2) == {"a": 1, "b": 2}
    assert counted(folder / "checkpoint") == {"a": 1, "b": 2, "c": 1}
    frame = quire.read_state(str(folder / "checkpoint"), "Latest", spark=spark)
    assert {tuple(row) for row in frame.collect()} == {("a", 1), ("b", 2), ("c", 1)}
    assert quire.read_state(str(folder / "checkpoint"), "Latest").to_pandas()["n"].sum() == 4


def test_two_actions_on_a_batch_count_once(spark, folder):
    given(folder / "in", ["a", "b"], ["a"], ["a", "b"])
    found = []

    def twice(batch, number):
        found.append((batch.count(), sorted(tuple(row) for row in batch.collect())))

    run(latest(spark, folder / "in"), folder / "checkpoint", twice)
    assert found == [(2, [("a", 1), ("b", 1)]), (1, [("a", 2)]), (2, [("a", 3), ("b", 2)])]
    assert counted(folder / "checkpoint") == {"a": 3, "b": 2}


def test_a_batch_that_was_not_read_whole_is_told_by_the_next(spark, folder):
    given(folder / "in", [f"k{key}" for key in range(50)], ["a"])

    def some(batch, number):
        if number:
            batch.collect()
        else:
            batch.take(1)

    with pytest.raises(StreamingQueryException, match=r"has no version 1, which batch 0 should have left.*take\(\)"):
        run(latest(spark, folder / "in"), folder / "checkpoint", some)


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_batches_without_rows_leave_no_gap(spark, folder, adaptive):
    """A source that is silent while another is not: Spark would take the operator's input out of the plan."""
    with harness.settings(spark, {"spark.sql.adaptive.enabled": adaptive}):
        given(folder / "in", ["a"])
        given(folder / "other", ["x"], ["y"], ["z"])
        for more in ((), ("a", "b")):
            given(folder / "in", *([list(more)] if more else []))
            other = harness.stream(spark, folder / "other", SCHEMA).select("key", F.lit(-1).cast("long").alias("n"))
            run(latest(spark, folder / "in").union(other), folder / "checkpoint")
            given(folder / "other", ["w"])
        assert counted(folder / "checkpoint") == {"a": 2, "b": 1}
        assert counted(folder / "checkpoint", version=3) == {"a": 1}


def test_several_operators_in_a_query_keep_apart(spark, folder):
    given(folder / "in", ["a", "b"], ["a"])
    first = latest(spark, folder / "in")
    with pytest.raises(quire.InvalidError, match="operator 'Latest' already"):
        quire.stateful(first, Latest(), by="key")
    second = quire.stateful(first, Latest(), by="key", name="again", partitions=3)
    assert run(second, folder / "checkpoint") == {0: Counter([("a", 1), ("b", 1)]), 1: Counter([("a", 2)])}
    assert quire.read_state(str(folder / "checkpoint"), "again").num_rows == 2


def test_an_error_reaches_the_user_and_leaves_the_state(spark, folder):
    given(folder / "in", ["k1", "k2"], ["k1", "poison"])
    frame = quire.stateful(harness.stream(spark, folder / "in", SCHEMA), Failing(), by="key", name="Latest")
    with pytest.raises(StreamingQueryException, match=r"in process(?s:.*)ZeroDivisionError: there was poison in it"):
        run(frame, folder / "checkpoint")
    assert counted(folder / "checkpoint", version=1) == {"k1": 1, "k2": 1}
    # The operator is mended; the batch is run again from where it was.
    assert run(latest(spark, folder / "in"), folder / "checkpoint") == {1: Counter([("k1", 2), ("poison", 1)])}


class OtherSchema(Latest):
    output = "key string, n double"

    def open(self, state):
        self.counts = state.map("counts", key="key string", value="n double")


class WrongColumn(Latest):
    def process(self, batch):
        return pa.table({"key": batch["key"], "m": [1] * len(batch)})


def test_what_does_not_fit_the_checkpoint_is_refused(spark, folder):
    given(folder / "in", ["a", "b"])
    checkpoint = folder / "checkpoint"
    run(latest(spark, folder / "in"), checkpoint)
    given(folder / "in", ["a"])

    def fails(match, operator=None, **options):
        frame = harness.stream(spark, folder / "in", SCHEMA).withColumn("other", F.lit(1))
        with pytest.raises(StreamingQueryException, match=match):
            run(quire.stateful(frame, operator or Latest(), **{"by": "key", "name": "Latest", **options}), checkpoint)

    fails(r"state in 2 partitions and was given partitions=3: .*quire repartition", partitions=3)
    fails(r"state by key string, not by key string, other int", by=["key", "other"])
    fails(r"'counts' was made with .*int64.* not with .*double", OtherSchema())
    fails(r"WrongColumn.process\(\) gave no column 'n'", WrongColumn())
    assert run(latest(spark, folder / "in"), checkpoint) == {1: Counter([("a", 2)])}


class Windows(quire.Operator):
    """Something of each kind."""

    output = "key string, n bigint"

    def open(self, state):
        self.counts = state.map("counts", key="key string", value="n bigint")
        self.order = state.ordered_map("order", key="n bigint, key string", value="word string")
        self.timers = state.timers("timers", key="key string", time="bigint")
        self.watermark = state.watermark(delay=1)

    def process(self, batch):
        keys = batch["key"]
        found = self.counts.add_many(keys, pa.array([1] * len(keys)))
        for key, n in zip(found["key"].to_pylist(), found["n"].to_pylist(), strict=True):
            self.order.append((n, key), key * 2)
            self.order.append((n, key), key * 3)
            self.timers.set(key, n + 5)
        self.watermark.observe(found["n"])
        return found


def test_the_state_moves_to_other_partitions(spark, folder):
    checkpoint, keys = folder / "checkpoint", [f"k{number}" for number in range(60)]
    given(folder / "in", keys, keys[:20])

    def windows(partitions):
        return quire.stateful(harness.stream(spark, folder / "in", SCHEMA), Windows(), by="key", partitions=partitions)

    def states():
        sets = ("counts", "order", "timers.by_key", "timers.by_time")
        return [sorted(map(str, quire.read_state(str(checkpoint), "Windows", name).to_pylist())) for name in sets]

    run(windows(2), checkpoint)
    before = states()
    for partitions in (5, 1):
        with pytest.raises(quire.InvalidError, match="'watermark' of 'Windows' does not have key in its keys"):
            repartition(str(checkpoint), "Windows", partitions, spark=spark)
        repartition(str(checkpoint), "Windows", partitions, spark=spark, least=["watermark"])
        assert states() == before
        given(folder / "in", keys[:5])
        with pytest.raises(StreamingQueryException, match=f"state in {partitions} partitions and was given"):
            run(windows(2), checkpoint)
        found = run(windows(partitions), checkpoint)
        before = states()
        expected = 2 + (1 if partitions == 5 else 2)
        assert list(found.values()) == [Counter((key, expected) for key in keys[:5])]
    with pytest.raises(quire.NotFoundError, match="keeps no nothing"):
        repartition(str(checkpoint), "Windows", 2, spark=spark, drop=["nothing"])


def test_two_operators_of_a_name_in_two_branches_are_refused(spark, folder):
    given(folder / "in", ["a"])
    # Spark itself sees that what it is to observe has one name twice, when they meet or when they run.
    with pytest.raises(AnalysisException, match="The metric name is not unique: Latest"):
        run(latest(spark, folder / "in").union(latest(spark, folder / "in")), folder / "checkpoint")


def test_bad_arguments_are_named(spark, folder):
    given(folder / "in", ["a"])
    frame = harness.stream(spark, folder / "in", SCHEMA)
    for options, match in (
        ({"by": "user"}, "by user: give names of columns of the DataFrame, which has key"),
        ({"by": []}, "by nothing"),
        ({"by": "key", "partitions": 0}, "partitions 0"),
        ({"by": "key", "mode": "cec"}, "mode 'cec': give one of"),
        ({"by": "key", "name": "a/b"}, "name 'a/b'"),
        ({"by": "key", "limit": "much"}, "'much' is no size"),
    ):
        with pytest.raises(quire.InvalidError, match=match):
            quire.stateful(frame, Latest(), **options)
    with pytest.raises(quire.InvalidError, match=r"takes a quire.Operator, not the class Latest: write Latest\(\)"):
        quire.stateful(frame, Latest, by="key")


def test_a_batch_frame_begins_empty(spark):
    frame = spark.createDataFrame([("a",), ("b",), ("a",)], SCHEMA)
    for _ in range(2):
        assert {tuple(row) for row in quire.stateful(frame, Latest(), by="key").collect()} == {("a", 2), ("b", 1)}


def test_each_batch_shows_what_happened(spark, folder):
    given(folder / "in", ["a", "b", "a"], ["a"])
    frame = latest(spark, folder / "in")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    query = query.trigger(availableNow=True).start()
    query.awaitTermination()
    shown = [progress["observedMetrics"] for progress in query.recentProgress if progress["numInputRows"]]
    assert [metrics["Latest.input"].rows for metrics in shown] == [3, 1]
    assert [metrics["Latest"].keys for metrics in shown] == [2, 2]
    assert [metrics["Latest"].rows_out for metrics in shown] == [2, 1]
    assert [metrics["Latest"].loaded for metrics in shown] == [2, 0]  # partitions that were not in memory
    assert all(metrics["Latest"].commit_ms > 0 and metrics["Latest"].written > 0 for metrics in shown)


def test_a_driver_killed_again_and_again_loses_and_repeats_nothing(undisturbed, folder):
    rng = random.Random(f"{SEED} python kills")
    killed, ended = 0, False
    while not ended:
        after, delay = rng.randrange(1, 3), rng.uniform(0, 0.5)
        with processes.Driver(folder, QUIRE, ["python"], conf={"slow": "4"}) as driver:
            for words in driver.lines():
                ended = words == ["end"]
                after -= words[0] == "python"
                if killed < child.KILLS and after <= 0 and not ended:
                    time.sleep(delay)
                    driver.kill()
                    killed += 1
                    break
            else:
                driver.process.wait()
                assert ended, driver.errors()
    assert not harness.difference(wanted(folder), undisturbed)


def test_executors_and_workers_killed_in_a_cluster_change_nothing(undisturbed, folder):
    """Partitions move between two executors, whose processes and whose Python workers are killed in the middle."""
    conf = {"slow": "10", "spark.executor.memory": "512m", "spark.executor.cores": "1"}
    killed = Counter()
    with processes.Driver(folder, QUIRE, ["python"], master="local-cluster[2,1,1024]", conf=conf) as driver:
        ended = False
        for words in driver.lines():
            ended = words == ["end"]
            if words[0] == "python" and int(words[1]) in (1, 3, 5, 7):
                time.sleep(0.2)
                running = processes.executors(driver.jvm)
                assert running, "no executor processes found below the driver"
                victim = running[int(words[1]) % len(running)]
                workers = processes.workers(victim)
                if int(words[1]) in (1, 5) and workers:
                    os.kill(workers[-1], signal.SIGKILL)
                    killed["worker"] += 1
                else:
                    os.kill(victim, signal.SIGKILL)
                    killed["executor"] += 1
        driver.process.wait()
        assert ended, driver.errors()
    assert killed["executor"] >= 2
    assert not harness.difference(wanted(folder), undisturbed)


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    """What Spark's own operator gives if nothing happens."""
    folder, output = tmp_path_factory.mktemp("undisturbed"), {}
    frame = child.frame_of(spark, folder, "tally")
    query = harness.start(frame, "update", folder / "checkpoint", output, forever=True)
    while query.isActive and len(output) < child.BATCHES:
        time.sleep(0.1)
    query.stop()
    harness.finish(query)
    return {number: rows for number, rows in output.items() if number < child.BATCHES}


def wanted(folder: Path):
    found = processes.written(folder, "python")
    return {number: rows for number, rows in found.items() if number < child.BATCHES}
