"""Bulk access on Arrow arrays: every layout that holds bytes, in and out."""

import gc

import pyarrow as pa
import pytest

import quire

ROWS = [b"alpha", b"", b"c", b"delta-with-some-more-bytes", b"e"]
LAYOUTS = {
    "binary": pa.array(ROWS, pa.binary()),
    "large_binary": pa.array(ROWS, pa.large_binary()),
    "string": pa.array([row.decode() for row in ROWS], pa.string()),
    "large_string": pa.array([row.decode() for row in ROWS], pa.large_string()),
    "fixed": pa.array([row.ljust(32) for row in ROWS], pa.binary(32)),
    "chunked": pa.chunked_array([ROWS[:2], [], ROWS[2:]], pa.binary()),
    "chunked large": pa.chunked_array([ROWS[:4], ROWS[4:]], pa.large_binary()),
    "list": ROWS,
    "sliced": pa.array([b"before", *ROWS, b"after"], pa.binary())[1:-1],
    "sliced fixed": pa.array([b"x" * 32, *[row.ljust(32) for row in ROWS]], pa.binary(32))[1:],
    "sliced with a null outside": pa.array([None, *ROWS, None], pa.binary())[1:-1],
}


def plain(rows):
    found = rows if isinstance(rows, list) else rows.to_pylist()
    return [row.encode() if isinstance(row, str) else row for row in found]


@pytest.fixture(params=["map", "ordered_map"])
def target(pm, request):
    return getattr(pm, request.param)("it")


@pytest.mark.parametrize("keys", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_in_and_out(pm, target, keys, values):
    target.put_many(keys, values)
    assert dict(target) == dict(zip(plain(keys), plain(values), strict=True))
    assert target.get_many(keys).to_pylist() == plain(values)
    assert target.contains_many(keys).to_pylist() == [True] * len(ROWS)
    target.append_many(keys, values)
    assert target.get_all(plain(keys)[0]) == [plain(values)[0]] * 2
    assert target.remove_many(keys) == len(ROWS)
    assert target.contains_many(keys).to_pylist() == [False] * len(ROWS)
    pm.check()


def test_results_keep_the_shape_of_the_question(target):
    target.put_many([b"a"], [b"1"])
    found = target.get_many(pa.array([b"a", b"b", b"a"]))
    assert isinstance(found, pa.Array)
    assert found.type == pa.binary()
    assert found.null_count == 1
    found.validate(full=True)
    chunked = target.get_many(pa.chunked_array([[b"a"], [b"b"]]))
    assert isinstance(chunked, pa.ChunkedArray)
    assert chunked.to_pylist() == [b"1", None]
    assert target.get_many(pa.chunked_array([], pa.binary())).to_pylist() == []
    assert target.get_many([]).to_pylist() == []
    assert target.contains_many([]).to_pylist() == []
    assert target.remove_many([]) == 0
    target.put_many([], [])


def test_of_equal_keys_the_last_counts(target):
    target.put_many([b"a", b"b", b"a"], [b"1", b"2", b"3"])
    assert dict(target) == {b"a": b"3", b"b": b"2"}


def test_empty_values_are_not_missing(target):
    target.put_many([b"a"], [b""])
    assert target.get_many([b"a", b"b"]).to_pylist() == [b"", None]


def test_arrays_outlive_the_map_they_came_from():
    with quire.PageManager() as pm:
        target = pm.map("it")
        target.put_many([b"%d" % number for number in range(1000)], [b"v%d" % number for number in range(1000)])
        found = target.get_many([b"7", b"none"])
        table = target.to_table()
        record = pm.list("log")
        record.extend([b"x", b"y"])
        array = record.to_array()
    gc.collect()
    assert found.to_pylist() == [b"v7", None]
    assert sorted(table.column("key").to_pylist()) == sorted(b"%d" % number for number in range(1000))
    table.validate(full=True)
    assert array.to_pylist() == [b"x", b"y"]


def test_batches_have_the_rows_asked_for(target):
    target.put_many([b"%04d" % number for number in range(1000)], [b"v"] * 1000)
    assert [batch.num_rows for batch in target.to_batches(rows=300)] == [300, 300, 300, 100]
    assert target.to_table().num_rows == 1000
    assert next(target.to_batches()).schema.names == ["key", "value"]
    with pytest.raises(quire.InvalidError, match="rows"):
        target.to_batches(rows=0)


def test_table_of_an_empty_map(target):
    assert target.to_table().num_rows == 0
    assert target.to_table().schema.names == ["key", "value"]
    assert list(target.to_batches()) == []


def test_scans_of_a_snapshot_in_bulk(pm, target):
    target.put_many([b"a", b"b"], [b"1", b"2"])
    pm.commit()
    with pm.snapshot() as snapshot:
        target.clear()
        old = snapshot.map("it") if type(target) is quire.Map else snapshot.ordered_map("it")
        assert sorted(old.get_many([b"a", b"b"]).to_pylist()) == [b"1", b"2"]
        assert old.to_table().num_rows == 2


@pytest.mark.slow
def test_large_rows_in_one_call(pm, target):
    keys = [b"%d" % number for number in range(200)]
    values = [bytes([number]) * 50_000 for number in range(200)]
    target.put_many(keys, values)
    pm.check()
    assert target.get_many(keys).to_pylist() == values
    assert sum(batch.num_rows for batch in target.to_batches()) == 200
    assert dict(target) == dict(zip(keys, values, strict=True))


def test_rows_done_says_how_far_a_bulk_put_came():
    with quire.PageManager(limit="1m") as pm:
        target = pm.map("it")
        pm.commit()
        values = [b"v" * 1000] * 5000
        with pytest.raises(quire.LimitError) as caught:
            target.put_many([b"%d" % number for number in range(5000)], values)
        assert 0 < caught.value.rows_done < 5000
        assert len(target) == caught.value.rows_done
        pm.check()
        pm.abort()
        assert len(target) == 0
        pm.check()


def test_schema_columns_in_bulk(pm):
    schema = quire.Schema(
        key={"user": pa.string(), "day": pa.int32()}, value={"views": pa.int64(), "name": pa.string()}
    )
    for opener in (pm.map, pm.ordered_map):
        target = opener(opener.__name__, schema)
        keys = pa.record_batch({"user": ["bo", "al", "al"], "day": pa.array([1, 2, 1], pa.int32())})
        values = pa.record_batch({"views": [10, 20, 30], "name": ["x", None, "z"]})
        target.put_many(keys, values)
        assert target[("al", 2)] == {"views": 20, "name": None}
        assert target.get_many(keys).to_pylist() == values.to_pylist()
        table = target.to_table()
        assert table.schema.names == ["user", "day", "views", "name"]
        assert sorted(table.column("views").to_pylist()) == [10, 20, 30]
        assert len(list(target.to_batches(rows=2))) == 2
        assert target.remove_many(keys.slice(0, 1)) == 1
        assert sorted(target) == [("al", 1), ("al", 2)]
        target.clear()
        assert target.to_table().schema.names == ["user", "day", "views", "name"]
    pm.check()


def test_schema_bounds_and_prefixes(pm):
    schema = quire.Schema(key={"user": pa.string(), "day": pa.int32()}, value=pa.int64())
    events = pm.ordered_map("events", schema)
    for user in ("al", "anna", "bo"):
        for day in (-1, 2, 30):
            events[(user, day)] = day
    assert [key for key, _ in events.prefix(("al",))] == [("al", -1), ("al", 2), ("al", 30)]
    assert [key for key, _ in events.range(("al", 2), ("anna", 2))] == [("al", 2), ("al", 30), ("anna", -1)]
    assert [key for key, _ in events.range(("bo",))] == [("bo", -1), ("bo", 2), ("bo", 30)]
    assert [key for key, _ in events.range(hi=("anna",))] == [("al", -1), ("al", 2), ("al", 30)]
    assert events.first() == (("al", -1), -1)
    assert events.remove_range(("anna",), ("bo",)) == 3
    assert next(reversed(events)) == ("bo", 30)
    # A text alone is what the first column starts with; a tuple gives whole columns.
    assert [key for key, _ in events.prefix("b")] == [("bo", -1), ("bo", 2), ("bo", 30)]
    assert list(events.prefix(("b",))) == []
    with pytest.raises(quire.InvalidError, match="user"):
        events.prefix(5)
    names = pm.ordered_map("names", quire.Schema(key=pa.string(), value=pa.int64()))
    names.update({"anna": 1, "anton": 2, "bo": 3})
    assert list(names.prefix("an")) == [("anna", 1), ("anton", 2)]
    assert list(names.range("anton", "c")) == [("anton", 2), ("bo", 3)]


def test_schema_is_stored_with_the_map(path):
    schema = quire.Schema(key=pa.string(), value={"views": pa.int64()})
    other = quire.Schema(key=pa.string(), value={"views": pa.int32()})
    with quire.PageManager(path) as pm:
        pm.map("users", schema)["al"] = 1
        pm.map("bytes")[b"a"] = b"1"
        pm.commit()
    with quire.PageManager(path) as pm:
        assert pm.map("users").schema == schema
        assert pm.map("users")["al"] == pm.map("users", schema)["al"] == 1
        with pytest.raises(quire.MismatchError, match="users"):
            pm.map("users", other)
        with pytest.raises(quire.MismatchError, match="no schema"):
            pm.map("bytes", schema)
        assert set(pm.sets()) == {"users", "bytes"}
        with pm.snapshot() as snapshot:
            assert snapshot.map("users")["al"] == 1
            assert set(snapshot.sets()) == {"users", "bytes"}
        pm.clone("users", "twin")
        assert pm.map("twin").schema == schema
        pm.destroy("users")
        pm.map("users", other)
        assert pm.map("users").schema == other
        pm.check()


def test_images_carry_schemas(pm, tmp_path, page_size):
    schema = quire.Schema(key=pa.string(), value=pa.int64())
    for name in ("one", "two"):
        pm.map(name, schema)[name] = 7
    pm.commit()
    with pm.snapshot(sets=["one"]) as snapshot:
        assert snapshot.sets() == {"one": "map"}
        snapshot.save(tmp_path / "one.image")
    with quire.PageManager(page_size=page_size) as other:
        other.map("two", schema)["x"] = 1
        other.load(tmp_path / "one.image")
        assert other.map("one")["one"] == 7
        assert other.map("one").schema == schema
        other.check()
        with pytest.raises(quire.ExistsError):
            other.load(tmp_path / "one.image")
        other.check()


def test_schema_of_an_aborted_map_is_gone(pm):
    schema = quire.Schema(key=pa.string(), value=pa.int64())
    pm.commit()
    pm.map("users", schema)
    pm.abort()
    assert pm.sets() == {}
    assert pm.map("users").schema is None


def test_changes_with_a_schema(pm):
    users = pm.map("users", quire.Schema(key=pa.string(), value=pa.int64()))
    pm.commit()
    with pm.snapshot() as empty:
        users["al"] = 1
        users["bo"] = 2
        pm.commit()
        with pm.snapshot() as full:
            assert sorted(full.changes(empty, "users")) == [("al", [1]), ("bo", [2])]


@pytest.mark.parametrize("again", [None, quire.Schema(pa.int64(), pa.int64())])
def test_changes_of_a_map_made_again_with_another_schema(pm, again):
    pm.map("users", quire.Schema(pa.string(), pa.int64()))["al"] = 1
    pm.commit()
    with pm.snapshot() as older:
        pm.destroy("users")
        pm.map("users", again)
        pm.commit()
        with pm.snapshot() as newer, pytest.raises(quire.MismatchError, match="users"):
            newer.changes(older, "users")


def test_batches_have_a_row_for_each_key_with_its_first_value(pm):
    for visits in (pm.map("any"), pm.ordered_map("ordered")):
        for page in (b"home", b"cart"):
            visits.append(b"al", page)
        assert visits.to_table().to_pylist() == [{"key": b"al", "value": b"home"}]
        assert visits.get_all(b"al") == [b"home", b"cart"]
        assert "first value" in visits.to_batches.__doc__ and "first value" in visits.to_table.__doc__
