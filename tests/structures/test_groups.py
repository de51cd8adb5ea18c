"""Bulk calls on the values of each key: lists, updates, sums, what is kept. All against a dict, row by row."""

import datetime
import decimal
import struct

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given

import quire

KEYS = st.sampled_from(["", "a", "b", "ab", "é", "k" * 300, "k" * 2000])
KEY_LISTS = st.lists(KEYS, max_size=12)
LONG = st.builds(
    lambda letter, size: letter * size, st.sampled_from("xyz"), st.sampled_from([0, 1, 30, 300, 1100, 5000])
)
PAGE_SIZES = st.sampled_from([1024, 4096])
KINDS = st.sampled_from(["map", "ordered_map"])
INT64_MAX = 2**63 - 1


@pytest.fixture(params=["map", "ordered_map"])
def make(pm, request):
    def opened(value, key="k string"):
        return getattr(pm, request.param)("it", quire.Schema(key=key, value=value))

    return opened


def lists_of(target, keys):
    return {key: target.get_all(key) for key in keys if key in target}


# ------------------------------------------------------------------------------------------------ lists


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put_lists"), st.lists(st.tuples(KEYS, st.lists(LONG, max_size=6)), max_size=8)),
        st.tuples(st.just("append_many"), st.lists(st.tuples(KEYS, LONG), max_size=12)),
        st.tuples(st.just("put_many"), st.lists(st.tuples(KEYS, LONG), max_size=4)),
        st.tuples(st.just("keep_last"), KEY_LISTS, st.integers(0, 4)),
        st.tuples(st.just("expire_before"), KEY_LISTS, LONG),
    ),
    max_size=12,
)


def in_model(model, name, rows, *argument):
    """The same on a dict of lists; gives how many values were dropped."""
    before = sum(map(len, model.values()))
    for row in rows:
        if name == "put_lists":
            model[row[0]] = row[1]
        elif name == "append_many":
            model.setdefault(row[0], []).append(row[1])
        elif name == "put_many":
            model[row[0]] = [row[1]]
        elif name == "keep_last" and row in model:
            model[row] = model[row][-argument[0] :] if argument[0] else []
        elif name == "expire_before" and row in model:
            model[row] = [value for value in model[row] if not value < argument[0]]
    for key in [key for key, values in model.items() if not values]:
        del model[key]
    return before - sum(map(len, model.values()))


@given(STEPS, PAGE_SIZES, KINDS, st.booleans())
def test_lists_as_a_dict_of_lists(steps, page_size, kind, typed):
    def told(value):
        return value if typed else value.encode()

    with quire.PageManager(page_size=page_size) as pm:
        target = getattr(pm, kind)("it", quire.Schema("string", "string") if typed else None)
        model = {}
        for name, rows, *argument in steps:
            if name in ("keep_last", "expire_before"):
                bound = argument[0] if name == "keep_last" else told(argument[0])
                dropped = getattr(target, name)([told(row) for row in rows], bound)
                assert dropped == in_model(model, name, rows, *argument)
            else:
                values = [[told(v) for v in row[1]] if name == "put_lists" else told(row[1]) for row in rows]
                getattr(target, name)([told(row[0]) for row in rows], values)
                in_model(model, name, rows)
            pm.check()
            keys = [*model, "missing"]
            found = target.get_lists([told(key) for key in keys])
            found.validate(full=True)
            assert found.to_pylist() == [[told(value) for value in model[key]] for key in model] + [None]
            assert len(target) == len(model)


def test_lists_come_typed_and_go_typed(pm, make):
    target = make("n int, t array<string>")
    rows = [[{"n": 1, "t": ["x"]}, {"n": None, "t": []}], [{"n": 3, "t": None}]]
    target.put_lists(["a", "b"], rows)
    found = target.get_lists(["b", "none", "a"])
    assert found.type == pa.list_(pa.struct([("n", pa.int32()), ("t", pa.list_(pa.string()))]))
    assert found.to_pylist() == [rows[1], None, rows[0]]
    target.put_lists(["c", "d", "e"], found.fill_null([]))
    assert lists_of(target, "acde") == {"a": rows[0], "c": rows[1], "e": rows[0]}
    pm.check()


@pytest.mark.parametrize(
    "lists",
    [
        pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int64()))[1:],
        pa.array([[9], [1, 2], [], [3]], pa.large_list(pa.int16()))[1:],
        pa.chunked_array([[[1, 2]], [[], [3]]], pa.list_(pa.int64())),
        [np.array([1, 2]), (), [3]],
    ],
)
def test_lists_in_every_layout(make, lists):
    target = make("int")
    target.put_many(["b"], [0])
    target.put_lists(pa.chunked_array([["a"], ["b", "c"]]), lists)
    assert lists_of(target, "abc") == {"a": [1, 2], "c": [3]}


def test_lists_of_a_fixed_size(make):
    target = make("int")
    target.put_lists(["a", "b"], pa.array([[9, 9], [1, 2], [3, 4]], pa.list_(pa.int32(), 2))[1:])
    assert lists_of(target, "ab") == {"a": [1, 2], "b": [3, 4]}


def test_a_null_among_the_values_is_a_value(make):
    target = make("int")
    target.put_lists(["a"], [[None, 1]])
    assert target.get_lists(["a"]).to_pylist() == [[None, 1]]


def test_lists_of_a_snapshot(pm, make):
    target = make("int")
    target.put_lists(["a"], [[1, 2]])
    pm.commit()
    with pm.snapshot() as snapshot:
        target.clear()
        old = snapshot.map("it") if type(target) is quire.Map else snapshot.ordered_map("it")
        assert old.get_lists(["a", "b"]).to_pylist() == [[1, 2], None]
        for write in (
            lambda: old.put_lists(["a"], [[1]]),
            lambda: old.add_many(["a"], [1]),
            lambda: old.update_many(["a"], [1], lambda before, new: new),
            lambda: old.keep_last(["a"], 1),
        ):
            with pytest.raises(quire.ReadOnlyError):
                write()


def test_bad_lists_store_nothing(pm, make):
    target = make("int")
    for keys, lists, says in [
        (["a", "b"], [[1], None], "list 1 is null"),
        (["a", "b"], pa.array([[1], None]), "list 1 is null"),
        (["a", "b"], [[1]], "2 keys but 1 lists"),
        (["a"], [1], "a int among them"),
        (["a"], ["text"], "a str among them"),
        (["a"], [["text"]], "int32"),
        (["a"], pa.array([1]), "array of int64"),
        (["a"], pa.array([["text"]]), "int32"),
        (["a"], 7, "not int"),
        ([1], [[1]], "column 'k' of the key"),
    ]:
        with pytest.raises(quire.InvalidError, match=says):
            target.put_lists(keys, lists)
    plain = pm.map("plain")
    with pytest.raises(quire.InvalidError, match="row 1 of the keys is null"):
        plain.put_lists([b"a", None], [[b"1"], [b"2"]])
    with pytest.raises(quire.InvalidError, match="row 1 of the values is null"):
        plain.put_lists([b"a"], pa.array([[b"1", None]]))
    assert plain.get_lists([None, b"a"]).to_pylist() == [None, None]
    assert len(target) == len(plain) == 0


def test_offsets_that_lead_elsewhere_are_refused():
    from quire._native import ffi, lib
    from quire.structures.arrow import Rows

    with quire.PageManager() as pm:
        target, done = pm.map("it"), ffi.new("int64_t *")
        keys, values = Rows(pa.array([b"a", b"b"])), Rows(pa.array([b"1", b"2"]))
        for offsets in ([0, 1, 3], [0, 2, 1], [-1, 1, 2]):
            starts = ffi.new("int64_t[]", offsets)
            code = lib.quire_kv_put_lists(target._kv(), keys.pointer, starts, values.pointer, done)
            assert code == lib.QUIRE_E_INVALID
        assert len(target) == 0


@pytest.mark.parametrize("claimed", [0, 1, 3, 2**40])
def test_a_count_that_the_bytes_do_not_hold_is_corrupt(path, claimed):
    values = [b"v" * 3001, b"w" * 3001]
    with quire.PageManager(path) as pm:
        pm.map("it").put_lists([b"a"], [values])
        pm.commit()
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", 2 * (4 + 3001)))  # record.h: bytes, first and last page, count
    assert struct.unpack_from("<Q", data, at + 16) == (2,)
    struct.pack_into("<Q", data, at + 16, claimed)
    path.write_bytes(data)
    with quire.PageManager(path) as pm, pytest.raises(quire.CorruptError, match="row 1"):
        pm.map("it").get_lists([b"b", b"a"])


def test_rows_done_says_how_many_lists_were_stored():
    with quire.PageManager(limit="1m") as pm:
        target = pm.map("it")
        pm.commit()
        keys = [b"%d" % number for number in range(2000)]
        with pytest.raises(quire.LimitError) as caught:
            target.put_lists(keys, [[b"v" * 500, b"w" * 500]] * 2000)
        done = caught.value.rows_done
        assert 0 < done < 2000
        assert target.get_lists(keys[:done]).to_pylist() == [[b"v" * 500, b"w" * 500]] * done
        assert done <= len(target) <= done + 1
        pm.check()
        pm.abort()
        assert len(target) == 0


# ------------------------------------------------------------------------------------------------ updates


@given(st.lists(st.tuples(KEYS, LONG), max_size=20), st.lists(st.tuples(KEYS, LONG), max_size=4), PAGE_SIZES, KINDS)
def test_update_many_is_row_by_row(rows, there, page_size, kind):
    model = dict(there)
    with quire.PageManager(page_size=page_size) as pm:
        target = getattr(pm, kind)("it", quire.Schema("string", "string"))
        target.update(model)
        calls = []

        def function(old, new):
            assert len(old) == len(new)
            calls.append(len(old))
            return pc.binary_join_element_wise(pc.fill_null(pc.utf8_slice_codeunits(old, 0, 50), "-"), new, "+")

        target.update_many([row[0] for row in rows], [row[1] for row in rows], function)
        for key, value in rows:
            old = model.get(key)
            model[key] = ("-" if old is None else old[:50]) + "+" + value
        assert dict(target) == model
        keys = [row[0] for row in rows]
        assert len(calls) == max(map(keys.count, keys), default=0)
        assert sum(calls) == len(rows)
        pm.check()


def test_update_many_takes_what_the_function_understands(make):
    target = make("n bigint, top string")
    target["a"] = {"n": 5, "top": "x"}
    seen = []

    def function(old, new):
        seen.append(old.to_pylist())
        return {"n": pc.add(pc.fill_null(old["n"], 0), new["price"].cast(pa.int64())), "top": new["item"]}

    events = pa.table({"price": [1.0, 2.0, 3.0], "item": ["p", "q", "r"]})
    target.update_many(["a", "b", "a"], events, function)
    assert dict(target) == {"a": {"n": 9, "top": "r"}, "b": {"n": 2, "top": "q"}}
    assert seen == [[{"n": 5, "top": "x"}, {"n": None, "top": None}], [{"n": 6, "top": "p"}]]


def test_update_many_takes_arrays_of_numpy(make):
    target = make("n bigint")
    target.update_many(np.array(["a", "b"]), np.array([1, 2]), lambda old, new: new.to_numpy() * 10)
    assert dict(target) == {"a": 10, "b": 20}


def test_update_many_on_bytes(pm):
    target = pm.map("it")
    target.update_many([b"a", b"a"], [b"1", b"2"], lambda old, new: new if old.null_count else old)
    assert dict(target) == {b"a": b"1"}


@pytest.mark.parametrize(
    ("values", "function", "says"),
    [
        ([1], lambda old, new: new, "2 keys but 1 values"),
        ([1, 2], lambda old, new: new[:1], "1 values for 2 keys"),
        ([1, 2], lambda old, new: None, "column 'n' of the value"),
        ([1, 2], lambda old, new: pa.array(["x", "y"]), "column 'n' of the value"),
        ([1, 2], lambda old, new: pa.array([0.5, 1.0]), "column 'n' of the value"),
        ([1, 2], lambda old, new: pa.array([1, None]), "'n'"),
        (object(), lambda old, new: new, "give Arrow or NumPy columns"),
    ],
)
def test_update_many_refuses(make, values, function, says):
    target = make(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    with pytest.raises(quire.InvalidError, match=says):
        target.update_many(["a", "b"], values, function)
    assert len(target) == 0


def test_an_error_of_the_function_passes_through(make):
    target = make("int")
    with pytest.raises(ZeroDivisionError):
        target.update_many(["a"], [1], lambda old, new: 1 // 0)
    target["b"] = 1  # and the lock is free again
    assert dict(target) == {"b": 1}


# ------------------------------------------------------------------------------------------------ sums and extremes


def rows_of(values):
    return st.tuples(st.dictionaries(KEYS, values, max_size=4), st.lists(st.tuples(KEYS, values), max_size=20))


DECIMALS = st.decimals(-1000, 1000, places=2)
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
NUMBERS = {
    "tinyint": st.integers(-9, 9),
    "bigint": st.one_of(st.integers(-5, 5), st.integers(-(2**58), 2**58)),
    "float": st.integers(-1000, 1000).map(float),
    "double": st.floats(-1e6, 1e6),
    "decimal(12,2)": DECIMALS,
}
OTHERS = {
    "date": st.dates(),
    "timestamp_ntz": TIMES,
    "timestamp": TIMES.map(lambda time: time.replace(tzinfo=datetime.timezone.utc)),
    "string": LONG,
    "binary": LONG.map(str.encode),
}


def batch_model(model, rows, combine):
    """The dict after all rows, and what a call must give back."""
    touched = {}
    for key, value in rows:
        model[key] = combine(model[key], value) if key in model else value
        touched[key] = None
    return [{"k": key, "v": model[key]} for key in touched]


@pytest.mark.parametrize("kind", NUMBERS)
@given(st.data(), KINDS)
def test_add_many_is_row_by_row(kind, data, face):
    model, rows = data.draw(rows_of(NUMBERS[kind]))
    with quire.PageManager(page_size=1024) as pm:
        target = getattr(pm, face)("it", quire.Schema("k string", f"v {kind}"))
        target.update(model)
        given = pa.array([row[1] for row in rows], target.schema.value.field(0).type)
        found = target.add_many([row[0] for row in rows], given)
        assert found.to_pylist() == batch_model(model, rows, lambda old, new: old + new)
        assert dict(target) == model
        pm.check()


@pytest.mark.parametrize("kind", NUMBERS | OTHERS)
@pytest.mark.parametrize(("name", "combine"), [("min_many", min), ("max_many", max)])
@given(st.data(), KINDS)
def test_min_many_and_max_many_are_row_by_row(kind, name, combine, data, face):
    model, rows = data.draw(rows_of((NUMBERS | OTHERS)[kind]))
    with quire.PageManager(page_size=1024) as pm:
        target = getattr(pm, face)("it", quire.Schema("k string", f"v {kind}"))
        target.update(model)
        given = pa.array([row[1] for row in rows], target.schema.value.field(0).type)
        found = getattr(target, name)([row[0] for row in rows], given)
        assert found.to_pylist() == batch_model(model, rows, combine)
        assert dict(target) == model
        pm.check()


@given(st.lists(st.integers(-(2**63), INT64_MAX), min_size=1, max_size=6), st.integers(-(2**63), INT64_MAX))
@example([1], INT64_MAX)
@example([INT64_MAX, INT64_MAX, 2], -(2**63))
def test_integers_never_wrap_around(values, there):
    with quire.PageManager() as pm:
        target = pm.map("it", quire.Schema("k string", "n bigint"))
        target["a"] = there
        total = there + sum(values)
        if -(2**63) <= total <= INT64_MAX:
            target.add_many(["a"] * len(values), values)
            assert target["a"] == total
        else:
            with pytest.raises(quire.InvalidError, match="column 'n' of the value is int64"):
                target.add_many(["a"] * len(values), values)
            assert dict(target) == {"a": there}


def test_narrow_numbers_never_wrap_around(make):
    target = make(pa.schema([("b", pa.uint8()), ("d", pa.decimal128(3, 1))]))
    target["a"] = {"b": 255, "d": decimal.Decimal("99.9")}
    for values, name in [
        ({"b": [1], "d": [decimal.Decimal("0.0")]}, "b"),
        ({"b": [0], "d": [decimal.Decimal("0.1")]}, "d"),
    ]:
        with pytest.raises(quire.InvalidError, match=f"column '{name}' of the value"):
            target.add_many(["a"], values)
    assert target.add_many(["a"], {"b": [0], "d": [decimal.Decimal("-0.9")]}).schema == pa.schema(
        [("k", pa.string()), ("b", pa.uint8()), ("d", pa.decimal128(3, 1))]
    )
    assert target["a"] == {"b": 255, "d": decimal.Decimal("99.0")}


def test_many_keys_at_once(make):
    target = make("v bigint")
    keys = [f"{number % 700}" for number in range(5000)]
    for _ in range(2):
        target.add_many(keys, np.arange(5000))
    assert dict(target) == {f"{key}": 2 * sum(range(key, 5000, 700)) for key in range(700)}


def test_nan_is_above_all_numbers(make):
    target = make("v double")
    nan = float("nan")
    assert target.min_many(["a", "a"], [nan, 1.0])["v"].to_pylist() == [1.0]
    assert np.isnan(target.max_many(["a", "a"], [nan, 1.0])["v"].to_pylist()[0])
    assert np.isnan(target.add_many(["b", "b"], [nan, 1.0])["v"].to_pylist()[0])


def test_a_null_that_is_there_is_as_none(make):
    target = make("v int, w int")
    target["a"] = {"v": None, "w": 1}
    assert target.add_many(["a"], {"v": [2], "w": [2]}).to_pylist() == [{"k": "a", "v": 2, "w": 3}]


def test_nothing_to_do(make):
    target = make("v int")
    for found in (target.add_many([], []), target.min_many([], []), target.max_many([], [])):
        assert found.num_rows == 0
        assert found.schema.names == ["k", "v"]
    target.update_many([], pa.array([], pa.int32()), lambda old, new: new)
    target.put_lists([], [])
    assert target.get_lists([]).to_pylist() == []
    assert target.keep_last([], 1) == target.expire_before([], 1) == 0


def test_keys_of_several_columns(pm):
    target = pm.ordered_map("it", quire.Schema("user string, day date", "n bigint"))
    day = datetime.date(2024, 2, 29)
    keys = pa.table({"user": ["b", "a", "b"], "day": [day, day, day]})
    assert target.add_many(keys, [1, 2, 4]).to_pylist() == [
        {"user": "b", "day": day, "n": 5},
        {"user": "a", "day": day, "n": 2},
    ]
    assert target.get_lists(keys).to_pylist() == [[5], [2], [5]]


@pytest.mark.parametrize(
    ("value", "values", "says"),
    [
        ("v int, w int", {"v": [1, 1], "w": [1, None]}, "column 'w' of the value: row 1 is null"),
        ("v int, w int", {"v": [1, 1], "w": ["x", "y"]}, "column 'w' of the value"),
        ("v int, w int", {"v": [1, 1]}, "missing here"),
        ("v int", [1], "2 keys but 1 values"),
        ("v int, s string", {"v": [1, 1], "s": ["x", "y"]}, "column 's' of the value is string, .* added"),
        ("t timestamp", [], "cannot be added"),
        ("b boolean", [], "cannot be added"),
        ("bigint", ["x", "y"], "the value is int64"),
    ],
)
def test_add_many_refuses(make, value, values, says):
    target = make(value)
    with pytest.raises(quire.InvalidError, match=says):
        target.add_many(["a", "b"], values)
    assert len(target) == 0


def test_what_has_no_order_and_what_has_no_columns(pm, make):
    for value in ("a array<int>", "struct<x: int>", "boolean"):
        with pytest.raises(quire.InvalidError, match="cannot be compared"):
            make(value).min_many(["a"], [None])
        pm.destroy("it")
    with pytest.raises(quire.InvalidError, match="give the map 'plain' a schema"):
        pm.map("plain").add_many([b"a"], [b"1"])
    with pytest.raises(quire.InvalidError, match="row 1 of the keys is null"):
        pm.map("plain").update_many([b"a", None], [b"1", b"2"], lambda old, new: new)


# ------------------------------------------------------------------------------------------------ what is kept


def test_expire_before_looks_at_one_column(make):
    target = make("t timestamp, x string")
    times = [datetime.datetime(2024, 1, day, tzinfo=datetime.timezone.utc) for day in (1, 2, 3)]
    target.append_many(["a", "a", "a", "b", "c"], {"t": [*times, times[0], None], "x": list("pqrst")})
    assert target.expire_before(["a", "b", "c", "a", "none"], times[1], "t") == 2
    assert target.get_all("a") == [{"t": times[1], "x": "q"}, {"t": times[2], "x": "r"}]
    assert "b" not in target
    assert target.get_all("c") == [{"t": None, "x": "t"}]


@pytest.mark.parametrize(
    ("bound", "column", "says"),
    [
        (5, None, r"column None: give one of the columns of the value, \['t', 'x', 'a'\]"),
        (5, "y", "column 'y'"),
        ("5", "t", "column 't' of the value is int64 and cannot hold '5'"),
        (None, "t", "column 't' of the value: give a bound that is not null"),
        ([5], "a", "column 'a' of the value is list.* no order"),
    ],
)
def test_expire_before_refuses(make, bound, column, says):
    target = make("t bigint, x string, a array<int>")
    with pytest.raises(quire.InvalidError, match=says):
        target.expire_before(["a"], bound, column)


@pytest.mark.parametrize("count", range(5))
def test_keep_last_keeps_exactly_so_many(pm, make, count):
    target = make("string")
    lists = {"a": ["1"], "b": ["1", "2", "3"], "c": ["x" * 3000, "y" * 3000, "z"], "d": list("pqrst")}
    target.put_lists(list(lists), list(lists.values()))
    dropped = target.keep_last(["a", "b", "c", "b", "none"], count)
    kept = {key: values[max(0, len(values) - count) :] for key, values in lists.items() if key != "d"}
    assert dropped == 7 - sum(map(len, kept.values()))
    assert lists_of(target, "abcd") == {key: values for key, values in kept.items() if values} | {"d": lists["d"]}
    pm.check()


def test_keep_last_refuses(pm, make):
    for count in (-1, 1.0, None, True):
        with pytest.raises(quire.InvalidError, match="n is"):
            make("int").keep_last(["a"], count)
    with pytest.raises(quire.InvalidError, match="has no column 't'"):
        pm.map("plain").expire_before([b"a"], b"1", "t")


# ------------------------------------------------------------------------------------------------ ranges


@given(st.dictionaries(st.integers(-20, 20), LONG), st.integers(-21, 21) | st.none(), st.integers(-21, 21) | st.none())
def test_pop_range_takes_out_what_it_gives(model, lo, hi):
    with quire.PageManager(page_size=1024) as pm:
        target = pm.ordered_map("it", quire.Schema("k int", "v string"))
        target.update(model)
        taken = {key for key in model if (lo is None or key >= lo) and (hi is None or key < hi)}
        table = target.pop_range(lo, hi)
        assert table.to_pylist() == [{"k": key, "v": model[key]} for key in sorted(taken)]
        assert table.schema.names == ["k", "v"]
        assert dict(target) == {key: model[key] for key in model.keys() - taken}
        pm.check()
