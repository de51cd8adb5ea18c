"""Arguments outside what is allowed: each is refused with a class and a message that help, and changes nothing."""

import pyarrow as pa
import pytest

import quire


@pytest.fixture
def users(pm):
    made = pm.map("users")
    made[b"a"] = b"1"
    pm.commit()
    return made


@pytest.mark.parametrize("key", ["a", 1, None, 1.5, (b"a",), object()])
def test_keys_that_are_no_bytes(users, key):
    for call in (lambda: users[key], lambda: users.get(key), lambda: key in users, lambda: users.get_all(key)):
        with pytest.raises(quire.InvalidError, match=type(key).__name__):
            call()
    with pytest.raises(quire.InvalidError):
        users[key] = b"1"
    with pytest.raises(quire.InvalidError):
        del users[key]
    with pytest.raises(quire.InvalidError):
        users.append(key, b"1")
    assert dict(users) == {b"a": b"1"}


def test_text_keys_are_told_to_encode(users):
    with pytest.raises(quire.InvalidError, match=r"\.encode\(\)"):
        users["a"]
    with pytest.raises(ValueError, match="schema"):
        users[b"a"] = "text"


@pytest.mark.parametrize(
    "keys", ["abc", b"abc", 5, None, [1, 2], ["a", 1], pa.array([1, 2]), pa.array([1.5]), pa.nulls(2)]
)
def test_bulk_keys_that_hold_no_bytes(users, keys):
    for call in (users.get_many, users.contains_many, users.remove_many):
        with pytest.raises(quire.InvalidError):
            call(keys)
    with pytest.raises(quire.InvalidError):
        users.put_many(keys, [b"1", b"2"])
    assert dict(users) == {b"a": b"1"}


def test_arrow_types_that_hold_no_bytes_are_named(users):
    with pytest.raises(quire.InvalidError, match="int64"):
        users.get_many(pa.array([1]))
    with pytest.raises(quire.InvalidError, match="binary_view"):
        users.get_many(pa.array([b"a"], pa.binary_view()))
    with pytest.raises(quire.InvalidError, match="dictionary"):
        users.get_many(pa.array(["a"]).dictionary_encode())


def test_null_rows(users):
    nulls = pa.array([b"x", None])
    for call in (users.put_many, users.append_many):
        with pytest.raises(quire.InvalidError, match="null"):
            call(nulls, [b"1", b"2"])
        with pytest.raises(quire.InvalidError, match="null"):
            call([b"x", b"y"], nulls)
    assert dict(users) == {b"a": b"1"}


def test_as_many_keys_as_values(users):
    with pytest.raises(quire.InvalidError, match="2 keys but 1 values"):
        users.put_many([b"x", b"y"], [b"1"])
    with pytest.raises(quire.InvalidError, match="1 keys but 2 values"):
        users.append_many([b"x"], pa.chunked_array([[b"1"], [b"2"]]))
    assert dict(users) == {b"a": b"1"}


def test_bounds_that_are_no_bytes(pm):
    events = pm.ordered_map("events")
    for call in (
        lambda: events.range("a"),
        lambda: events.range(hi=5),
        lambda: events.prefix("a"),
        lambda: events.prefix(3),
    ):
        with pytest.raises(quire.InvalidError):
            call()
    with pytest.raises(quire.InvalidError):
        events.remove_range("a", "b")


def test_records_that_are_no_bytes(pm):
    log = pm.list("log")
    for call in (log.append, lambda value: log.insert(0, value), lambda value: log.extend([value])):
        for value in ("a", 1, None):
            with pytest.raises(quire.InvalidError):
                call(value)
    with pytest.raises(quire.InvalidError):
        log.extend("abc")
    with pytest.raises(quire.InvalidError):
        log[0:0] = ["a"]
    assert len(log) == 0


def test_positions_that_are_no_numbers(pm):
    log = pm.list("log")
    log.append(b"a")
    calls = [
        log.__getitem__,
        log.__delitem__,
        log.pop,
        pm.deque("log").rotate,
        lambda index: log.__setitem__(index, b"x"),
        lambda index: log.insert(index, b"x"),
        lambda index: log[index if index is not None else "0" :],
        lambda index: log.__delitem__(slice(0, 1, index if index is not None else 0)),
    ]
    for index in ("0", 1.0, None):
        for call in calls:
            with pytest.raises(quire.InvalidError):
                call(index)
    for records in (5, b"x", "x", ["x"]):
        with pytest.raises(quire.InvalidError):
            log[0:1] = records
        with pytest.raises(quire.InvalidError):
            pm.deque("log").extendleft(records)
    assert log[:] == [b"a"]


def test_batches_of_rows_that_are_no_number(pm):
    log, users, events = pm.list("log"), pm.map("users"), pm.ordered_map("events")
    for rows in (0, -1, 1 << 70, 1.5, "5", None, True):
        for call in (log.to_batches, users.to_batches, lambda rows: events.range_batches(rows=rows)):
            with pytest.raises(quire.InvalidError, match="rows"):
                call(rows)


def test_messages_say_what_to_do(users, pm):
    with pytest.raises(quire.InvalidError, match=r"not NoneType: give the map a schema$"):
        users[None]
    with pytest.raises(quire.InvalidError, match=r"not str: encode it first, e.g. with .encode\(\), or give the map a"):
        users["a"]
    with pytest.raises(quire.InvalidError, match=r"not int$"):
        pm.list("log").append(5)
    with pytest.raises(quire.MismatchError, match="'users' is of kind map, not ordered_map"):
        pm.ordered_map("users")
    for call in (pm.list, pm.raw):
        with pytest.raises(quire.MismatchError, match="'users' is of kind map, not"):
            call("users")
    with pm.snapshot() as last:
        with pytest.raises(quire.MismatchError, match="'users' is of kind map, not sequence"):
            last.deque("users")
        with pytest.raises(quire.MismatchError, match="'users' is of kind map, not ordered_map"):
            last.ordered_map("users")


@pytest.mark.parametrize("name", ["", "x" * 192, "a\0b", b"users", 5, None, "quire:mine", "é" * 96, "\ud800"])
def test_names_that_are_none(pm, name):
    for call in (
        pm.map,
        pm.ordered_map,
        pm.list,
        pm.deque,
        pm.raw,
        pm.exists,
        pm.destroy,
        lambda name: pm.clone(name, "x"),
    ):
        with pytest.raises(quire.InvalidError):
            call(name)
    pm.commit()
    with pm.snapshot() as last:
        for call in (last.map, last.ordered_map, last.list, last.deque, lambda name: last.changes(last, name)):
            with pytest.raises((quire.InvalidError, quire.NotFoundError)):
                call(name)
    assert pm.sets() == {}


def test_the_longest_name(pm):
    for name in ("x" * 191, "é" * 95):
        pm.map(name)[b"a"] = b"1"
    assert set(pm.sets()) == {"x" * 191, "é" * 95}
    schema = quire.Schema(key=pa.string(), value=pa.int64())
    with pytest.raises(quire.InvalidError, match="178"):
        pm.map("y" * 179, schema)
    assert not pm.exists("y" * 179)
    pm.map("y" * 178, schema)["a"] = 1
    pm.check()


def test_a_name_of_another_kind(pm):
    pm.map("it")
    for call in (pm.ordered_map, pm.list, pm.deque, pm.raw):
        with pytest.raises(quire.MismatchError, match="it"):
            call("it")
    pm.commit()
    with pm.snapshot() as snapshot:
        for call in (snapshot.ordered_map, snapshot.list, snapshot.deque):
            with pytest.raises(quire.MismatchError):
                call("it")
        for call in (snapshot.map, snapshot.ordered_map, snapshot.list, snapshot.deque):
            with pytest.raises(quire.NotFoundError, match="nothing"):
                call("nothing")


def test_schema_that_is_none(pm):
    with pytest.raises(quire.InvalidError, match="Schema"):
        pm.map("it", {"a": pa.string()})
    assert not pm.exists("it")


def test_writes_to_a_snapshot(pm):
    pm.map("map")[b"a"] = b"1"
    pm.ordered_map("ordered")[b"a"] = b"1"
    pm.list("log").append(b"a")
    pm.commit()
    with pm.snapshot() as snapshot:
        for target in (snapshot.map("map"), snapshot.ordered_map("ordered")):
            writes = [
                lambda t: t.update({b"a": b"2"}),
                lambda t: t.pop(b"a"),
                lambda t: t.clear(),
                lambda t: t.append(b"a", b"2"),
                lambda t: t.put_many([b"a"], [b"2"]),
                lambda t: t.append_many([b"a"], [b"2"]),
                lambda t: t.remove_many([b"a"]),
            ]
            for write in writes:
                with pytest.raises(quire.ReadOnlyError):
                    write(target)
        with pytest.raises(quire.ReadOnlyError):
            snapshot.ordered_map("ordered").remove_range()
        log, jobs = snapshot.list("log"), snapshot.deque("log")
        sequence_writes = [
            lambda: log.append(b"x"),
            lambda: log.insert(0, b"x"),
            lambda: log.extend([b"x"]),
            lambda: log.pop(),
            lambda: log.clear(),
            lambda: log.__setitem__(0, b"x"),
            lambda: log.__delitem__(0),
            lambda: jobs.appendleft(b"x"),
            lambda: jobs.popleft(),
        ]
        for write in sequence_writes:
            with pytest.raises(quire.ReadOnlyError):
                write()
        assert log[:] == [b"a"]
        assert dict(snapshot.map("map")) == {b"a": b"1"}
    pm.check()


def test_changes_of_what_has_none(pm):
    pm.list("log")
    pm.map("users")
    pm.commit()
    with pm.snapshot() as older, pm.snapshot() as newer:
        with pytest.raises(quire.MismatchError, match="sequence"):
            newer.changes(older, "log")
        with pytest.raises(quire.NotFoundError, match="nothing"):
            newer.changes(older, "nothing")
        assert list(newer.changes(older, "users")) == []
        for wrong in (None, pm, 5):
            with pytest.raises(quire.InvalidError, match="older Snapshot"):
                newer.changes(wrong, "users")


def test_sets_of_a_snapshot_that_are_none(pm):
    pm.map("users")
    pm.commit()
    for sets in ([], "users", b"users", 5, [5], [None], ["quire:x"]):
        with pytest.raises(quire.InvalidError):
            pm.snapshot(sets=sets)
    with pytest.raises(quire.NotFoundError, match=r"\['no'\]"):
        pm.snapshot(sets=["users", "no"])
    for name in (5, "", "\ud800"):
        with pytest.raises(quire.InvalidError):
            pm.snapshot(name)
    with pm.snapshot(sets=iter(["users"])) as last:
        assert last.sets() == {"users": "map"}


def test_unhashable_and_not_equal_to_other_things(pm):
    for made in (pm.map("a"), pm.list("b")):
        with pytest.raises(TypeError):
            hash(made)
        assert made != 5


def test_raw_pages_take_bytes_at_an_offset(pm):
    raw = pm.raw("raw")
    page = raw.alloc()
    for data, offset in (("abc", 0), (b"abc", "0"), (5, 0), (None, 0)):
        with pytest.raises(quire.InvalidError):
            raw.write(page, data, offset)
    raw.write(page, b"abc", 2)
    assert raw.read(page)[:5] == b"\0\0abc"


def test_names_that_cannot_be_encoded(pm):
    pm.map("users")
    pm.commit()
    with pytest.raises(quire.InvalidError):
        pm.changed_pages("\ud800", 0)
    with pm.snapshot() as snapshot, pytest.raises(quire.InvalidError):
        snapshot.page("\ud800", 0)
