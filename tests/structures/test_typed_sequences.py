"""Lists and deques of rows: as Python's own on objects, and as Arrow columns in bulk."""

import collections
import datetime

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import quire

TEXTS = st.builds(lambda letter, size: letter * size, st.sampled_from("xyé"), st.sampled_from([0, 1, 40, 1200, 6000]))
RECORDS = {
    "bigint": st.none() | st.integers(-(2**63), 2**63 - 1),
    "string": st.none() | TEXTS,
    "n int, s string, a array<int>": st.fixed_dictionaries(
        {"n": st.none() | st.integers(0, 9), "s": TEXTS, "a": st.none() | st.lists(st.integers(0, 9), max_size=3)}
    ),
}


def steps(record):
    place = st.integers(-7, 7)
    records = st.lists(record, max_size=5)
    return st.lists(
        st.one_of(
            *[st.tuples(st.just(name), record) for name in ("append", "appendleft", "remove", "count", "index")],
            *[st.tuples(st.just(name), records) for name in ("extend", "extendleft", "columns")],
            *[st.tuples(st.just(name), place) for name in ("pop", "rotate", "del", "get")],
            *[st.tuples(st.just(name), place, record) for name in ("insert", "set")],
            st.tuples(st.just("set slice"), place, place, records),
        ),
        max_size=25,
    )


def apply(target, name, *arguments):
    """One step on a deque, Quire's or Python's; what it gives or how it fails."""
    try:
        if name == "columns":
            rows = arguments[0]
            kind = pa.struct(list(target.schema)) if len(target.schema) > 1 else target.schema.field(0).type
            return target.extend(pa.array(rows, kind))
        if name == "del":
            del target[arguments[0]]
            return None
        if name == "get":
            return target[arguments[0]]
        if name == "set":
            target[arguments[0]] = arguments[1]
            return None
        if name == "set slice":
            target[arguments[0] : arguments[1]] = arguments[2]
            return None
        return getattr(target, name)(*arguments)
    except (IndexError, ValueError) as error:
        return IndexError if isinstance(error, IndexError) else ValueError


class Model(list):
    """What deques and lists can do, on a list."""

    def appendleft(self, value):
        self.insert(0, value)

    def extendleft(self, values):
        self[:0] = values[::-1]

    def rotate(self, count):
        turned = collections.deque(self)
        turned.rotate(count)
        self[:] = turned


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data(), page_size=st.sampled_from([1024, 4096]))
def test_it_behaves_as_a_list_of_objects(kind, data, page_size):
    with quire.PageManager(page_size=page_size) as pm:
        target, model = pm.deque("it", kind), Model()
        for name, *arguments in data.draw(steps(RECORDS[kind])):
            expected = apply(model, "extend" if name == "columns" else name, *arguments)
            assert apply(target, name, *arguments) == expected
            assert target == model
            pm.check()
        assert list(target) == target[:] == pm.list("it")[:] == model
        assert list(reversed(target)) == model[::-1]
        assert target[::2] == model[::2]
        assert target.to_array().to_pylist() == model
        table = target.to_table()
        table.validate(full=True)
        rows = table.to_pylist()
        assert (rows if len(target.schema) > 1 else [row["value"] for row in rows]) == model


def test_columns_in_every_way_they_come(pm):
    log = pm.list("log", {"user": pa.string(), "n": pa.int64()})
    batch = pa.record_batch({"n": pa.array([1, 2], pa.int32()), "user": ["a", "b"]})
    log.extend(batch)
    log.extend(pa.Table.from_batches([batch]))
    log.extend(batch.to_struct_array())
    log.extend({"user": ["a", "b"], "n": np.array([1, 2])})
    log.extend([{"user": "a", "n": 1}, ("b", 2)])
    log.extend(row for row in batch.to_pylist())
    log.extend(log)
    assert log[:] == [{"user": "a", "n": 1}, {"user": "b", "n": 2}] * 12
    assert [part.num_rows for part in log.to_batches(rows=20)] == [20, 4]
    assert log.to_table().schema.equals(log.schema)
    assert log.schema.equals(pa.schema([("user", pa.string()), ("n", pa.int64())]))
    numbers = pm.deque("numbers", "n bigint")
    for rows in (
        [1],
        (2,),
        pa.array([3]),
        np.array([4]),
        pa.chunked_array([[5], [6]]),
        {"n": [7]},
        pa.table({"n": [8]}),
    ):
        numbers.extend(rows)
    assert numbers[:] == list(range(1, 9))
    assert numbers.to_table().column_names == ["n"]


def test_an_empty_one_has_its_columns(pm):
    assert (
        pm.list("a", "user string, n int")
        .to_table()
        .schema.equals(pa.schema([("user", pa.string()), ("n", pa.int32())]))
    )
    assert pm.list("b", "date").to_table().schema.equals(pa.schema([("value", pa.date32())]))
    assert pm.list("a").to_array().type == pa.struct([("user", pa.string()), ("n", pa.int32())])
    assert pm.list("plain").to_table().schema.equals(pa.schema([("value", pa.binary())]))
    assert pm.list("plain").schema is None


def test_bytes_have_a_table_too(pm):
    log = pm.list("log")
    log.extend([b"a", b"b"])
    assert log.to_table().to_pylist() == [{"value": b"a"}, {"value": b"b"}]


def test_the_columns_are_stored(path):
    with quire.PageManager(path) as pm:
        pm.list("log", "user string, n bigint").append({"user": "bo", "n": 3})
        pm.deque("plain").append(b"x")
        pm.commit()
        assert pm.sets() == {"log": "sequence", "plain": "sequence"}
    with quire.PageManager(path) as pm:
        assert pm.deque("log")[0] == {"user": "bo", "n": 3}
        assert pm.list("log", [("user", pa.string()), ("n", pa.int64())])[0] == {"user": "bo", "n": 3}
        with pytest.raises(quire.MismatchError, match=r"made with \{'user': string, 'n': int64\}, not with int64"):
            pm.list("log", "bigint")
        with pytest.raises(quire.MismatchError, match="made with no schema, not with string"):
            pm.deque("plain", "string")
        with pytest.raises(quire.MismatchError, match="kind sequence, not map"):
            pm.map("log")
        with pytest.raises(quire.MismatchError, match="kind sequence, not map"):
            pm.map("log", quire.Schema("int", "int"))
        with pytest.raises(quire.MismatchError, match="kind map, not sequence"):
            pm.map("map", quire.Schema("int", "int"))
            pm.list("map", "int")
        pm.clone("log", "copy")
        pm.destroy("log")
        assert pm.list("copy")[:] == [{"user": "bo", "n": 3}]
        assert pm.list("log").schema is None
        pm.check()


def test_snapshots_and_images_keep_the_columns(pm, page_size, tmp_path):
    log = pm.list("log", "n bigint")
    log.extend([1, 2])
    pm.commit()
    with pm.snapshot(sets=["log"]) as snapshot:
        log.append(3)
        assert snapshot.list("log")[:] == [1, 2]
        assert snapshot.deque("log").to_table().to_pydict() == {"n": [1, 2]}
        with pytest.raises(quire.ReadOnlyError):
            snapshot.list("log").append(3)
        snapshot.check()
        snapshot.save(tmp_path / "image")
    with quire.PageManager(page_size=page_size) as other:
        other.load(tmp_path / "image")
        assert other.deque("log")[:] == [1, 2]


def test_what_does_not_fit_changes_nothing(pm):
    log = pm.deque("log", "n int, s string not null")
    log.append({"n": 1, "s": "x"})
    good = {"n": 2, "s": "y"}
    for bad, says in [
        ({"n": "1", "s": "x"}, "column 'n' of the value is int32"),
        ({"n": 1, "s": None}, "'s'"),
        ({"n": 1}, "missing here"),
        (7, "2 columns"),
        ((1,), "2 columns"),
        (b"x", "2 columns"),
    ]:
        for call in (
            log.append,
            log.appendleft,
            lambda value: log.insert(0, value),
            lambda value: log.__setitem__(0, value),
            lambda value: log.extend([good, value]),
            lambda value: log.extendleft([good, value]),
            lambda value: log.__setitem__(slice(0, 1), [good, value]),
        ):
            with pytest.raises(quire.InvalidError, match=says):
                call(bad)
    for call in (log.extend, log.extendleft, lambda value: log.__setitem__(slice(0, 1), value)):
        for bad in ("text", 7, b"x"):
            with pytest.raises(quire.InvalidError, match="give several records, not one"):
                call(bad)
    with pytest.raises(quire.InvalidError, match="not known"):
        log.extend(pa.table({"n": [1], "x": ["y"]}))
    assert log[:] == [{"n": 1, "s": "x"}]


def test_columns_that_are_none(pm):
    for value in ("strin", 7, [], "a int, a int"):
        with pytest.raises(quire.InvalidError, match="the value of a schema"):
            pm.list("log", value)
    with pytest.raises(quire.InvalidError, match="name of a structure with a schema"):
        pm.list("l" * 190, "int")
    assert pm.sets() == {}


def test_rows_done_says_how_far_it_came():
    with quire.PageManager(limit="1m") as pm:
        log = pm.list("log", "s string")
        pm.commit()
        with pytest.raises(quire.LimitError) as caught:
            log.extend(["v" * 1000] * 5000)
        assert 0 < caught.value.rows_done == len(log) < 5000
        pm.check()


def test_times_beyond_python_stay_where_they_are(pm):
    log = pm.deque("log", pa.timestamp("s"))
    log.extend(pa.array([10**12, 2], pa.timestamp("s")))
    with pytest.raises(quire.InvalidError, match="no Python object"):
        log.popleft()
    log.rotate(1)
    assert log[0] == datetime.datetime(1970, 1, 1, 0, 0, 2)
    assert log.to_array().cast(pa.int64()).to_pylist() == [2, 10**12]
