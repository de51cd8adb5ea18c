"""What operators declare: values, timers and watermarks against plain Python; names and types."""

import datetime

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

import quire

UTC = datetime.timezone.utc
START = datetime.datetime(2024, 1, 1, tzinfo=UTC)


def minutes(count):
    return START + datetime.timedelta(minutes=count)


@pytest.fixture
def state(pm):
    return quire.State(pm)


def test_a_value_has_its_default_until_it_is_set(pm, state):
    total = state.value("total", "bigint", default=7)
    assert total.get() == 7
    total.set(5)
    assert total.get() == 5
    pm.commit()
    total.set(None)
    assert total.get() is None
    pm.abort()
    assert total.get() == 5
    total.clear()
    total.clear()
    assert total.get() == 7
    row = state.value("row", "user string, at timestamp")
    assert row.get() is None
    row.set({"user": "bo", "at": START})
    assert row.get() == {"user": "bo", "at": START}
    with pytest.raises(quire.InvalidError, match="column 'user' of the value"):
        row.set({"user": 5, "at": START})
    long = state.value("long", "string")
    long.set("x" * 100_000)
    assert long.get() == "x" * 100_000


def test_all_that_can_be_declared_is_there_after_a_restart(path):
    with quire.PageManager(path) as pm:
        state = quire.State(pm)
        state.value("value", "int").set(1)
        state.map("map", "user string, day date", "n bigint").add_many({"user": ["a"], "day": [START.date()]}, [2])
        state.ordered_map("ordered", "int", "string")[3] = "three"
        state.list("list", "user string").append("a")
        state.queue("queue", "n int, s string").append({"n": 1, "s": "x"})
        state.timers("timers", "user string").set("a", minutes(1))
        state.watermark(delay=datetime.timedelta(minutes=1)).observe([minutes(5)])
        pm.commit()
    with quire.PageManager(path) as pm:
        state = quire.State(pm)
        assert state.value("value", "int").get() == 1
        assert dict(state.map("map", "user string, day date", "n bigint")) == {("a", START.date()): 2}
        assert state.ordered_map("ordered", pa.int32(), pa.string())[3] == "three"
        assert state.list("list", {"user": pa.string()})[:] == ["a"]
        assert state.queue("queue", "n int, s string").popleft() == {"n": 1, "s": "x"}
        assert state.timers("timers", "user string").due(minutes(2)).to_pylist() == [
            {"user": "a", "deadline": minutes(1)}
        ]
        assert state.watermark(delay=datetime.timedelta(minutes=2)).value == minutes(3)


def test_a_name_is_declared_once(state):
    state.value("a", "int")
    state.timers("t", "string")
    for declare in (
        lambda: state.value("a", "int"),
        lambda: state.map("a", "int", "int"),
        lambda: state.ordered_map("a", "int", "int"),
        lambda: state.list("a", "int"),
        lambda: state.queue("a", "int"),
        lambda: state.watermark("a"),
        lambda: state.timers("t", "string"),
        lambda: state.map("t.by_time", "int", "int"),
    ):
        with pytest.raises(quire.InvalidError, match="declared already"):
            declare()
    state.map("u.by_time", "int", "int")
    with pytest.raises(quire.InvalidError, match="declared already"):
        state.timers("u", "string")


def test_another_type_is_a_mismatch_and_may_be_corrected(pm, state):
    state.map("a", "int", "int")
    state.list("b", "int")
    again = quire.State(pm)
    with pytest.raises(quire.MismatchError):
        again.map("a", "int", "string")
    with pytest.raises(quire.MismatchError):
        again.queue("b", "string")
    again.map("a", "int", "int")
    again.queue("b", "int")


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda state: state.list("a", None), "the value of a schema"),
        (lambda state: state.queue("a", None), "the value of a schema"),
        (lambda state: state.map("a", None, "int"), "the key of a schema"),
        (lambda state: state.map("a", "int", "strin"), "no type 'strin'"),
        (lambda state: state.value("a", None), "the value of a schema"),
        (lambda state: state.value(5, "int"), "name"),
        (lambda state: state.timers(5, "int"), "name"),
        (lambda state: state.timers("a", "user string", time="date"), "one of timestamp, bigint"),
        (lambda state: state.timers("a", "deadline bigint"), "rename"),
        (lambda state: state.timers("a", "m map<int,int>"), "column 'm'"),
        (lambda state: state.watermark(delay=-1), "0 or more"),
        (lambda state: state.watermark(delay=True), "0 or more"),
        (lambda state: state.watermark(delay=1.5), "timedelta"),
        (lambda state: state.watermark(delay=datetime.timedelta(-1)), "give 0 to"),
        (lambda state: state.watermark(delay=datetime.timedelta.max), "give 0 to"),
    ],
)
def test_bad_declarations_make_nothing(pm, state, declare, says):
    with pytest.raises(quire.InvalidError, match=says):
        declare(state)
    assert pm.sets() == {}


def test_a_state_needs_a_page_manager():
    with pytest.raises(quire.InvalidError, match="not in dict"):
        quire.State({})


# ------------------------------------------------------------------------------------------------ timers


NAMES = st.sampled_from(["", "a", "b", "ab", "long" * 400])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set_many"), st.lists(st.tuples(NAMES, st.integers(0, 20)), max_size=8)),
        st.tuples(st.just("set"), NAMES, st.integers(0, 20)),
        st.tuples(st.just("cancel_many"), st.lists(NAMES, max_size=4)),
        st.tuples(st.just("cancel"), NAMES),
        st.tuples(st.just("due"), st.integers(-1, 21)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("abort")),
    ),
    max_size=20,
)


@given(STEPS, st.sampled_from(["timestamp", "bigint"]), st.sampled_from([1024, 4096]))
def test_timers_as_a_dict_of_deadlines(steps, time, page_size):
    told = minutes if time == "timestamp" else int
    with quire.PageManager(page_size=page_size) as pm:
        timers, model = quire.State(pm).timers("timers", "user string", time), {}
        pm.commit()
        committed = {}
        for name, *arguments in steps:
            if name == "set_many":
                timers.set_many([key for key, _ in arguments[0]], [told(at) for _, at in arguments[0]])
                model.update(arguments[0])
            elif name == "set":
                timers.set(arguments[0], told(arguments[1]))
                model[arguments[0]] = arguments[1]
            elif name == "cancel_many":
                gone = set(arguments[0]) & model.keys()
                assert timers.cancel_many(arguments[0]) == len(gone)
                model = {key: at for key, at in model.items() if key not in gone}
            elif name == "cancel":
                assert timers.cancel(arguments[0]) == (model.pop(arguments[0], None) is not None)
            elif name == "due":
                due = sorted((at, key) for key, at in model.items() if at <= arguments[0])
                found = timers.due(told(arguments[0]))
                assert found.column_names == ["user", "deadline"]
                assert found.to_pylist() == [{"user": key, "deadline": told(at)} for at, key in due]
                model = {key: at for key, at in model.items() if at > arguments[0]}
            elif name == "commit":
                pm.commit()
                committed = dict(model)
            else:
                pm.abort()
                model = dict(committed)
            assert len(timers) == len(model)
            assert len(pm.ordered_map("timers.by_time")) == len(model)
            pm.check()


def test_keys_of_several_columns_and_of_none(state):
    timers = state.timers("several", "user string, n int")
    timers.set(("b", 1), minutes(2))
    timers.set({"n": 2, "user": "a"}, minutes(2))
    timers.set_many(pa.table({"n": [3], "user": [None]}), pa.array([minutes(1)]))
    assert timers.cancel(("x", 1)) is False
    assert timers.due(minutes(2)).to_pylist() == [
        {"user": None, "n": 3, "deadline": minutes(1)},
        {"user": "a", "n": 2, "deadline": minutes(2)},
        {"user": "b", "n": 1, "deadline": minutes(2)},
    ]
    plain = state.timers("plain", "string", time="bigint")
    plain.set_many(["a"], [2**63 - 1])
    plain.set("b", -(2**63))
    assert plain.due(-(2**63)).to_pylist() == [{"key": "b", "deadline": -(2**63)}]
    assert plain.due(2**63 - 2).num_rows == 0
    assert plain.due(2**63 - 1).to_pylist() == [{"key": "a", "deadline": 2**63 - 1}]
    assert plain.due(0).column_names == ["key", "deadline"]


def test_bad_timers_change_nothing(state):
    timers = state.timers("timers", "user string not null")
    timers.set("a", minutes(1))
    for call, says in [
        (lambda: timers.set_many(["a", "b"], [minutes(2)]), "2 keys but 1 deadlines"),
        (lambda: timers.set_many(["a", "b"], [minutes(2), None]), "column 'deadline'"),
        (lambda: timers.set("a", None), "column 'deadline'"),
        (lambda: timers.set("a", 5), "column 'deadline'"),
        (lambda: timers.set("a", datetime.datetime(2024, 1, 1)), "column 'deadline'"),
        (lambda: timers.set_many([5], [minutes(2)]), "column 'user'"),
        (lambda: timers.set_many([None], [minutes(2)]), "'user'"),
        (lambda: timers.cancel_many([5]), "column 'user'"),
        (lambda: timers.due(5), "column 'deadline'"),
        (lambda: timers.due(None), "column 'deadline'"),
    ]:
        with pytest.raises(quire.InvalidError, match=says):
            call()
    assert timers.due(minutes(9)).to_pylist() == [{"user": "a", "deadline": minutes(1)}]


def test_deadlines_beyond_python(state):
    timers = state.timers("timers", "user string")
    timers.set_many(["a"], pa.array([2**62], pa.timestamp("us", "UTC")))
    timers.set("a", minutes(1))
    assert timers.due(minutes(1)).num_rows == 1
    timers.set_many(["a"], pa.array([2**62], pa.timestamp("us", "UTC")))
    assert timers.cancel("a")
    assert len(timers) == 0


# ------------------------------------------------------------------------------------------------ watermarks


@given(st.lists(st.lists(st.none() | st.integers(-1000, 1000), max_size=5), max_size=6), st.integers(0, 50))
def test_a_watermark_is_the_greatest_less_the_delay(columns, delay):
    with quire.PageManager() as pm:
        numbers = quire.State(pm).watermark("numbers", delay=delay)
        times = quire.State(pm).watermark("times", delay=datetime.timedelta(minutes=delay))
        seen = []
        for column in columns:
            numbers.observe(pa.array(column, pa.int64()))
            times.observe([None if value is None else minutes(value) for value in column])
            seen += [value for value in column if value is not None]
            assert numbers.value == (max(seen) - delay if seen else None)
            assert times.value == (minutes(max(seen) - delay) if seen else None)


def test_columns_that_a_watermark_takes(state):
    watermark = state.watermark(delay=datetime.timedelta(seconds=1))
    watermark.observe(pa.chunked_array([], pa.timestamp("us", "UTC")))
    assert watermark.value is None
    watermark.observe(pa.array([0], pa.timestamp("us", "UTC")).cast(pa.timestamp("ms", "Europe/Berlin")))
    assert watermark.value == datetime.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    for column in ([5], pa.array([5]), pa.array([5], pa.timestamp("us")), ["x"]):
        with pytest.raises(quire.InvalidError, match="the value is timestamp"):
            watermark.observe(column)
    with pytest.raises(quire.InvalidError, match="no Python object"):
        watermark.observe(pa.array([2**62], pa.timestamp("us", "UTC")))
    assert watermark.value == datetime.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_a_watermark_of_the_year_one_stays_a_time(state):
    watermark = state.watermark(delay=datetime.timedelta(days=1))
    first = datetime.datetime(1, 1, 1, tzinfo=UTC)
    watermark.observe([first])
    assert watermark.value == first
