"""Operators in Python as somebody uses them who has read the guide: sinks, looks at the state, odd values, mistakes."""

import datetime
import decimal
import importlib
import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from spark import harness
from spark.harness import QUIRE

import quire
from quire import cli
from quire.checkpoint import tools

# Spark's Python workers do not have the tests' folder on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QUIRE != harness.REAL, reason="QUIRE_TEST_PROVIDER stands in for the JVM's part alone"),
]

SCHEMA = "key string"
ROOT = Path(__file__).resolve().parents[2]


class Latest(quire.Operator):
    """How often each key of the batch came so far."""

    output = "key string, n bigint"

    def open(self, state):
        self.counts = state.map("counts", key="key string", value="n bigint")

    def process(self, batch):
        self.counts.add_many(batch["key"], pa.array([1] * len(batch)))
        keys = pc.unique(batch["key"])
        return pa.table({"key": keys, "n": self.counts.get_many(keys)})


def given(folder, *batches):
    harness.release(folder, [[{"key": key} for key in batch] for batch in batches])


def latest(spark, folder, **options):
    return quire.stateful(harness.stream(spark, folder, SCHEMA), Latest(), by="key", **options)


def begin(writer, checkpoint):
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def run(frame, checkpoint, write=None):
    """All batches there are; gives the rows of each."""
    output = {}

    def keep(batch, number):
        output[number] = Counter(tuple(row) for row in batch.collect())

    begin(frame.writeStream.foreachBatch(write or keep), checkpoint).awaitTermination()
    return output


def state(checkpoint, **options):
    table = quire.read_state(str(checkpoint), "Latest", **options)
    return dict(zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True))


# ------------------------------------------------------------------------------------------------ the guide


def test_the_guide_on_spark(spark, folder):
    """Its blocks as they stand, in other folders; and what both of its operators give is the reference."""
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("sessions")
    rows = example.generate(random.Random(3), 60)
    clicks = folder / "clicks"
    clicks.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, example.INPUT), clicks / "0.parquet")
    text = (ROOT / "docs" / "operators-guide.md").read_text().replace("/data/", f"{folder}/")
    module = sys.modules["__main__"]  # what is defined there is sent to the workers, as in a script
    names = {"__name__": module.__name__}
    for kind, source in re.findall(r"^```(python[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(source, "operators-guide.md", "exec"), names)
        if kind == "python spark" and "query" in names:
            names["query"].processAllAvailable()
    (metrics,) = (each["observedMetrics"]["Sessions"] for each in names["query"].recentProgress if each["numInputRows"])
    names["query"].stop()
    users = len({row["user"] for row in rows})
    assert names["table"].num_rows == names["frame"].count() == users  # the last of each is open
    assert metrics.rows_out == len(example.reference(rows)) and metrics.keys > users
    multiset = importlib.import_module("local_spark").multiset
    expected = multiset(example.reference(rows))
    assert multiset(spark.read.parquet(str(folder / "sessions")).toArrow().to_pylist()) == expected
    theirs = []
    run(names["sessions"], folder / "theirs", lambda batch, number: theirs.extend(batch.toArrow().to_pylist()))
    assert multiset(theirs) == expected


# ------------------------------------------------------------------------------------------------ what works


def test_several_sinks_at_once_get_the_same(spark, folder):
    """Files, a table in memory, and two places by foreachBatch; each query has a checkpoint and a state of its own."""
    given(folder / "in", ["a", "b"], ["a"], ["b", "b", "c"])
    frame = latest(spark, folder / "in")

    def twice(batch, number):
        batch.persist()
        for name in ("one", "two"):
            batch.write.mode("overwrite").parquet(str(folder / name / f"number={number}"))
        batch.unpersist()

    files = frame.writeStream.format("parquet").option("path", str(folder / "files"))
    memory = frame.writeStream.format("memory").queryName("several_sinks").outputMode("append")
    queries = [
        begin(writer, folder / f"checkpoint-{number}")
        for number, writer in enumerate((files, memory, frame.writeStream.foreachBatch(twice)))
    ]
    for query in queries:
        query.awaitTermination()
    expected = Counter([("a", 1), ("b", 1), ("a", 2), ("b", 3), ("c", 1)])
    found = [spark.table("several_sinks")] + [spark.read.parquet(str(folder / n)) for n in ("files", "one", "two")]
    for each in found:
        assert Counter(tuple(row) for row in each.select("key", "n").collect()) == expected
    assert all(state(folder / f"checkpoint-{number}") == {"a": 2, "b": 3, "c": 1} for number in range(3))


def test_a_step_among_others(spark, folder):
    """Filters and a join before it, another operator and one of Spark's own behind it."""
    given(folder / "in", ["a", "b", "no"], ["a", "c"], ["a", "b"])
    names = spark.createDataFrame([("a", "first"), ("b", "other"), ("c", "other")], "key string, kind string")
    before = harness.stream(spark, folder / "in", SCHEMA).where("key <> 'no'").join(names, "key")
    one = quire.stateful(before.select("key"), Latest(), by="key")
    two = quire.stateful(one.select("key"), Latest(), by="key", name="again", partitions=3)
    output = {}

    def keep(batch, number):
        output[number] = {row.n: row["count"] for row in batch.collect()}

    behind = two.groupBy("n").count().writeStream.outputMode("complete").foreachBatch(keep)
    begin(behind, folder / "checkpoint").awaitTermination()
    # Keys that came n times, added up over the batches: a, b; then a again and c; then a and b again.
    assert output == {0: {1: 2}, 1: {1: 3, 2: 1}, 2: {1: 3, 2: 2, 3: 1}}


def test_the_state_is_read_while_the_query_runs(spark, folder, capsys):
    """Within each batch, as Arrow, pandas and a DataFrame; and by the command line."""
    batches = [["a", "b"], ["b", "c", "c"], [], ["a"]]
    given(folder / "in", *batches)
    checkpoint, seen, printed = str(folder / "checkpoint"), [], []

    def look(batch, number):
        batch.collect()
        pandas = quire.read_state(checkpoint, "Latest").to_pandas()
        frame = quire.read_state(checkpoint, "Latest", spark=batch.sparkSession)
        assert [frame.schema[name].dataType.simpleString() for name in ("key", "n")] == ["string", "bigint"]
        seen.append((state(checkpoint), dict(zip(pandas["key"], pandas["n"], strict=True)), dict(frame.collect())))
        if number:
            assert state(checkpoint, version=number) == seen[number - 1][0]
        assert tools.verify(checkpoint) == 0
        for partition in "01":
            assert cli.main(["dump", checkpoint, "--partition", partition, "--format", "json"]) == 0
        dumped = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        printed.append({row["key"]: row["values"] for row in dumped})

    run(latest(spark, folder / "in"), checkpoint, look)
    so_far = Counter()
    for batch, found in zip(batches, seen, strict=True):
        so_far.update(batch)
        assert found == (so_far, so_far, so_far)
    assert printed == [{key: [n] for key, n in found[0].items()} for found in seen]
    assert tools.inspect(checkpoint) == 0
    assert "Latest" in capsys.readouterr().out


class Everything(quire.Operator):
    """Keeps a row of many types, and gives back what it had."""

    TYPES = (
        "flag boolean, tiny tinyint, real float, money decimal(20,2), day date, at timestamp, local timestamp_ntz, "
        "raw binary, words array<string>, place struct<x: int, y: array<double>>, tags map<string,bigint>, big string"
    )
    output = f"key string, {TYPES}"

    def open(self, state):
        self.rows = state.map("rows", key="key string", value=self.TYPES)

    def process(self, batch):
        values = batch.drop_columns(["key"])
        had = self.rows.get_many(batch["key"])
        self.rows.put_many(batch["key"], values)
        return pa.table({"key": batch["key"], **{name: had[name] for name in had.schema.names}})


def test_odd_keys_and_values_come_back_as_they_were(spark, folder):
    """Null and empty keys, nulls everywhere, nested types, ten megabytes in a value."""
    utc = datetime.timezone.utc
    full = {
        "key": "full", "flag": True, "tiny": -128, "real": 1.5, "money": "-12345678901234567.89", "day": "0001-01-02",
        "at": "2026-01-02T03:04:05.000006Z", "local": "1969-12-31T23:59:59.999999", "raw": "AP8=",
        "words": ["", None, "é"], "place": {"x": None, "y": [0.5, None]}, "tags": {"k": None, "": 7},
        "big": "x" * 10_000_000,
    }  # fmt: skip
    rows = [full, {"key": None, "tiny": 1}, {"key": "", "tiny": 2}, {"key": "nulls"}]
    harness.release(folder / "in", [rows, rows])
    frame = harness.stream(spark, folder / "in", Everything.output)
    output = {}

    def keep(batch, number):
        output[number] = {row["key"]: row for row in batch.toArrow().to_pylist()}

    run(quire.stateful(frame, Everything(), by="key"), folder / "checkpoint", keep)
    assert all(row[name] is None for row in output[0].values() for name in row if name != "key")
    found = output[1]
    assert found[None]["tiny"] == 1 and found[""]["tiny"] == 2
    assert set(found["nulls"].values()) == {"nulls", None}
    row = found["full"]
    assert row["money"] == decimal.Decimal("-12345678901234567.89") and row["day"] == datetime.date(1, 1, 2)
    assert row["at"].astimezone(utc) == datetime.datetime(2026, 1, 2, 3, 4, 5, 6, utc)
    assert row["local"] == datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)
    assert row["raw"] == b"\x00\xff" and row["words"] == ["", None, "é"]
    assert row["place"] == {"x": None, "y": [0.5, None]} and dict(row["tags"]) == {"k": None, "": 7}
    assert row["big"] == full["big"] and row["flag"] is True and row["tiny"] == -128 and row["real"] == 1.5


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_renamed_operator_does_not_begin_anew(spark, folder):
    """It would have lost its state and said nothing."""
    given(folder / "in", ["a"])
    run(latest(spark, folder / "in"), folder / "checkpoint")
    given(folder / "in", ["a"])
    renamed = latest(spark, folder / "in", name="Renamed")
    with pytest.raises(StreamingQueryException, match=r"at batch 1, and its .*There are 'Latest': give name= if"):
        run(renamed, folder / "checkpoint")
    manifest = folder / "checkpoint" / "quire" / "Latest" / "operator.json"
    manifest.rename(folder / "operator.json")
    with pytest.raises(StreamingQueryException, match=r"operator.json, which the first batch of operator 'Latest'"):
        run(latest(spark, folder / "in"), folder / "checkpoint")
    (folder / "operator.json").rename(manifest)
    assert run(latest(spark, folder / "in"), folder / "checkpoint") == {1: Counter([("a", 2)])}


def test_parts_of_the_checkpoint_that_are_gone_are_told(spark, folder):
    """The arenas alone are not believed."""
    given(folder / "in", ["a", "b"], ["a", "b"])
    run(latest(spark, folder / "in"), folder / "checkpoint")
    given(folder / "in", ["a", "b"])
    partition = folder / "checkpoint" / "quire" / "Latest" / "state" / "0" / "1"
    shutil.move(partition, folder / "kept")
    with pytest.raises(StreamingQueryException, match=r"partition 1 has no version 2, which batch 1 should have left"):
        run(latest(spark, folder / "in"), folder / "checkpoint")
    shutil.move(folder / "kept", partition)
    assert run(latest(spark, folder / "in"), folder / "checkpoint") == {2: Counter([("a", 3), ("b", 3)])}


def test_two_queries_cannot_have_one_state(spark, folder):
    """Spark itself keeps two queries from one checkpoint; given a place of its own, the state tells them apart."""
    given(folder / "in", ["a"])
    shared = latest(spark, folder / "in", checkpoint=str(folder / "shared"))
    run(shared, folder / "one")
    with pytest.raises(StreamingQueryException, match=r"keeps for another query, of id .*: give each query"):
        run(shared, folder / "two")
    given(folder / "in", ["a"])
    assert run(shared, folder / "one") == {1: Counter([("a", 2)])}


class Careless(Latest):
    """Does what its mistake says."""

    def __init__(self, mistake):
        self.mistake = mistake

    def process(self, batch):
        return self.mistake(self, batch)


MISTAKES = {
    r"Field \"user\" does not exist in schema": lambda self, batch: batch["user"],
    r"column 'n' of the value is int64 and cannot hold 'many'": lambda self, batch: self.counts.update(a="many"),
    r"column 'key' of the key is string.* int64 given": lambda self, batch: self.counts.get_many(pa.array([1])),
    r"no key 'nobody' in 'counts'": lambda self, batch: self.counts["nobody"],
    r"gave column 'n' as string, which does not fit int64": lambda self, batch: pa.table(
        {"key": batch["key"], "n": ["many"] * len(batch)}
    ),
}


def test_mistakes_are_named_with_the_users_own_lines(spark, folder):
    given(folder / "in", ["a"])
    run(quire.stateful(harness.stream(spark, folder / "in", SCHEMA), Latest(), by="key"), folder / "checkpoint")
    given(folder / "in", ["a"])
    for message, mistake in MISTAKES.items():
        frame = harness.stream(spark, folder / "in", SCHEMA)
        step = quire.stateful(frame, Careless(mistake), by="key", name="Latest")
        with pytest.raises(StreamingQueryException, match=message) as error:
            run(step, folder / "checkpoint")
        if "gave" not in message:
            assert "return self.mistake(self, batch)" in str(error.value) or "in process" in str(error.value)
        assert state(folder / "checkpoint") == {"a": 1}


def test_bad_arguments_are_named_before_anything_runs(spark, folder):
    given(folder / "in", ["a"])
    frame = harness.stream(spark, folder / "in", SCHEMA)
    for options, match in (
        ({"by": F.col("key")}, "by .*key.*: give names of columns"),
        ({"by": ["key", None]}, "by None: give names of columns"),
        ({"by": "key", "bases_every": 0}, "bases_every 0: give a whole number from 1"),
        ({"by": "key", "retain": "all"}, "retain 'all': give a whole number from 1"),
        ({"by": "key", "partitions": "2"}, "partitions '2'"),
    ):
        with pytest.raises(quire.InvalidError, match=match):
            quire.stateful(frame, Latest(), **options)
    for name in ("the.key", "the`key"):
        with pytest.raises(quire.InvalidError, match=f"column '{name}': Spark hands no names with"):
            quire.stateful(frame.withColumnRenamed("key", name), Latest(), by=name)
    with pytest.raises(quire.InvalidError, match="not DataFrame of pandas"):
        quire.stateful(pa.table({"key": ["a"]}).to_pandas(), Latest(), by="key")


@pytest.mark.parametrize("keys", ["abcdef", "a"], ids=["rows everywhere", "an empty partition"])
def test_partitions_that_meet_in_one_stage_keep_their_state(spark, folder, keys):
    """Behind coalesce a task has several of them, behind union tasks have other numbers than they."""
    other = [("z", 0)]
    ways = [
        lambda batch: batch,
        lambda batch: batch.coalesce(1),
        lambda batch: batch.sparkSession.createDataFrame(other, batch.schema).union(batch),
        lambda batch: batch.union(batch),
        lambda batch: batch.union(batch.coalesce(1)).coalesce(1),
    ]
    expected = {}
    for number in range(len(ways)):
        given(folder / "in", keys)
        counted = [(key, number + 1) for key in keys]
        expected[number] = Counter([counted, counted, other + counted, counted * 2, counted * 2][number])
    output = {}

    def keep(batch, number):
        output[number] = Counter(tuple(row) for row in ways[number](batch).collect())

    run(latest(spark, folder / "in"), folder / "checkpoint", keep)
    assert output == expected
    assert state(folder / "checkpoint") == dict.fromkeys(keys, len(ways))
    partitions = {path.name for path in (folder / "checkpoint/quire/Latest/state/0").iterdir()}
    assert partitions == {"0", "1"}
    # In the query's own plan, too.
    assert run(latest(spark, folder / "in").coalesce(1), folder / "coalesced") == {
        number: Counter((key, number + 1) for key in keys) for number in range(len(ways))
    }
    assert state(folder / "coalesced") == dict.fromkeys(keys, len(ways))


def test_an_operator_that_has_run_is_refused(spark, folder):
    given(folder / "in", ["a"])
    used = Latest()
    used.run([pa.record_batch({"key": ["a"]})])
    with pytest.raises(quire.InvalidError, match=r"'Latest' cannot be sent to Spark's workers: .*a new Latest\(\)"):
        quire.stateful(harness.stream(spark, folder / "in", SCHEMA), used, by="key")


def test_the_arenas_may_be_nowhere(spark, folder):
    given(folder / "in", ["a"])
    (folder / "file").write_text("")
    with pytest.raises(StreamingQueryException, match=r"cannot be made for arenas .*: give another arena_dir"):
        run(latest(spark, folder / "in", arena_dir=str(folder / "file" / "below")), folder / "checkpoint")
    with pytest.raises(StreamingQueryException, match="LimitError"):
        run(latest(spark, folder / "in", limit="1k"), folder / "checkpoint")
    assert run(latest(spark, folder / "in"), folder / "checkpoint") == {0: Counter([("a", 1)])}
