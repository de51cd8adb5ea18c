"""The unordered map: random operations against a dict, and what a dict promises besides."""

import pytest
from models import MapMachine

import quire

TestMapMachine = MapMachine.TestCase


def test_behaves_as_a_dict(pm):
    users = pm.map("users")
    plain = {}
    for target in (users, plain):
        target[b"a"] = b"1"
        target.update({b"b": b"2", b"c": b"3"})
        assert target.setdefault(b"a", b"x") == b"1"
        assert target.setdefault(b"d", b"4") == b"4"
        assert target.pop(b"b") == b"2"
        assert target.pop(b"b", None) is None
    assert dict(users) == plain
    assert users == plain
    assert users.keys() == plain.keys()
    assert sorted(users.values()) == sorted(plain.values())
    assert users.items() == plain.items()
    assert bool(users)
    key, value = users.popitem()
    assert plain.pop(key) == value
    users.clear()
    assert not users
    assert list(users) == []
    with pytest.raises(KeyError):
        users.popitem()


def test_missing_key_is_a_key_error_that_names_the_key(pm):
    users = pm.map("users")
    with pytest.raises(KeyError, match="alice") as caught:
        users[b"alice"]
    assert isinstance(caught.value, quire.NotFoundError)
    with pytest.raises(quire.NotFoundError, match="alice"):
        del users[b"alice"]
    assert users.get(b"alice") is None
    assert users.get(b"alice", b"x") == b"x"
    assert users.get_all(b"alice") == []


def test_popitem(pm):
    users = pm.map("users")
    users.update({b"a": b"1", b"b": b"2"})
    assert {users.popitem(), users.popitem()} == {(b"a", b"1"), (b"b", b"2")}
    with pytest.raises(quire.NotFoundError, match="'users' is empty"):
        users.popitem()


def test_empty_key_and_empty_value(pm):
    users = pm.map("users")
    users[b""] = b""
    assert users[b""] == b""
    assert b"" in users
    assert list(users.items()) == [(b"", b"")]
    users.append(b"", b"")
    assert users.get_all(b"") == [b"", b""]


def test_takes_bytes_like_keys_and_values(pm):
    users = pm.map("users")
    users[bytearray(b"a")] = memoryview(b"1")
    assert users[memoryview(b"a")] == b"1"


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1023, 1024, 1025, 4095, 4096, 100_000, 3_000_000])
def test_records_of_any_size(pm, size):
    users = pm.map("users")
    key, value = b"k" * min(size, 70_000), bytes(range(256)) * (size // 256) + b"v" * (size % 256)
    users[key] = value
    assert users[key] == value
    users.append(key, b"second")
    assert users.get_all(key) == [value, b"second"]
    pm.check()
    del users[key]
    assert len(users) == 0
    pm.check()


def test_a_put_replaces_several_values_by_one(pm):
    users = pm.map("users")
    users.append(b"a", b"1")
    users.append(b"a", b"2")
    assert users[b"a"] == b"1"
    users[b"a"] = b"3"
    assert users.get_all(b"a") == [b"3"]


def test_iteration_sees_the_map_as_it_was_when_it_began(pm):
    users = pm.map("users")
    users.update({b"%d" % number: b"x" for number in range(3000)})
    keys = iter(users)
    users.clear()
    users[b"new"] = b"y"
    assert sorted(keys) == sorted(b"%d" % number for number in range(3000))
    assert list(users) == [b"new"]


def test_two_handles_on_one_map_see_each_other(pm):
    one, two = pm.map("users"), pm.map("users")
    one[b"a"] = b"1"
    assert two[b"a"] == b"1"
    pm.commit()
    del two[b"a"]
    assert len(one) == 0


@pytest.mark.slow
def test_grows_and_shrinks_with_many_keys(pm):
    users = pm.map("users")
    count = 60_000
    keys = [b"key-%d" % number for number in range(count)]
    users.put_many(keys, keys)
    pm.check()
    pm.commit()
    assert len(users) == count
    assert users.get_many(keys).to_pylist() == keys
    assert users.remove_many(keys[: count // 2]) == count // 2
    pm.check()
    pm.abort()
    assert len(users) == count
    assert users.stats()["count"] == count
    users.clear()
    pm.commit()
    pm.check()
    assert pm.stats().frames_used < 60


def test_map_cannot_be_reversed(pm):
    with pytest.raises(TypeError):
        reversed(pm.map("users"))
    with pytest.raises(TypeError, match="ordered"):
        reversed(pm.map("users").items())


def test_repr_says_what_it_is(pm):
    users = pm.map("users")
    assert repr(users) == "<Map 'users'>"
    assert users.name == "users"
    assert users.schema is None
