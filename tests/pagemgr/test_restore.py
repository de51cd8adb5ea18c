"""Going back to a pinned state, and images that are loaded from memory."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from families import FamiliesMachine, content
from hypothesis import given

import quire
from quire._native import ffi, lib

TestRestoreMachine = FamiliesMachine.TestCase


def states(pm, count):
    """A snapshot of each of so many commits, with what it shows; each differs from the others in many pages."""
    found = []
    users, events = pm.map("users"), pm.ordered_map("events")
    for number in range(count):
        users.update({b"%d" % key: b"%d" % number * 50 for key in range(number, 300, number + 1)})
        events.append(b"all", b"%d" % number * 400)
        pm.commit()
        found.append((pm.snapshot(), content(pm)))
    return found


def test_restore_gives_the_state_and_a_later_epoch(pm):
    pinned = states(pm, 4)
    for snapshot, expected in [pinned[1], pinned[3], pinned[0], pinned[2], pinned[2]]:
        before = pm.epoch
        pm.map("users")[b"not committed"] = b"x"
        pm.map("also not")[b"a"] = b"b"
        assert pm.restore(snapshot) == pm.epoch > before
        pm.check()
        assert content(pm) == expected
        with pm.snapshot() as last:
            assert content(last) == expected
        pm.abort()
        assert content(pm) == expected
    for snapshot, expected in pinned:
        assert content(snapshot) == expected


@given(order=st.permutations(range(4)), target=st.integers(0, 3))
def test_pins_may_be_released_in_any_order_after_a_restore(order, target):
    with quire.PageManager(page_size=1024) as pm:
        pinned = states(pm, 4)
        expected = pinned[target][1]
        pm.restore(pinned[target][0])
        for number in order:
            pinned[number][0].close()
            pm.map("users")[b"another"] = b"%d" % number
            pm.commit()
            pm.check()
            for snapshot, shown in (pinned[later] for later in order[order.index(number) + 1 :]):
                assert content(snapshot) == shown
        expected["users"][1][b"another"] = [b"%d" % order[-1]]
        assert content(pm) == expected
        assert pm.stats().pinned == {}


def test_no_frames_are_lost_in_many_rounds(pm):
    users = pm.map("users")
    users.update({b"%d" % key: b"x" * 50 for key in range(2000)})
    pm.commit()
    with pm.snapshot() as first:
        held = set()
        for number in range(40):
            users.update({b"%d" % key: b"%d" % number for key in range(0, 2000, 7)})
            pm.commit()
            with pm.snapshot() as other:
                pm.restore(first)
                users[b"here"] = b"%d" % number
                pm.commit()
                pm.restore(other)
                users[b"there"] = b"%d" % number
            pm.restore(first)
            pm.check()
            stats = pm.stats()
            held.add((stats.frames_used, stats.frames_dirty, stats.frames_retired, stats.bytes_held))
    assert len(held) <= 2  # the first round may take memory that the others use again


def test_handles_opened_before_stay_usable(pm):
    users, events = pm.map("users"), pm.ordered_map("events")
    users[b"a"] = b"1"
    pm.commit()
    with pm.snapshot() as first:
        users[b"a"] = b"2"
        events[b"e"] = b"3"
        pm.commit()
        pm.restore(first)
        assert (users[b"a"], len(events)) == (b"1", 0)
        users[b"a"], events[b"f"] = b"4", b"5"
        pm.commit()
        assert (dict(users), dict(events)) == ({b"a": b"4"}, {b"f": b"5"})


def test_an_iterator_outlives_a_restore(pm):
    users = pm.map("users")
    pm.commit()
    with pm.snapshot() as empty:
        users.update({b"%d" % number: b"x" for number in range(3000)})
        keys = iter(users)
        pm.restore(empty)
        users[b"new"] = b"y"
        assert sorted(keys) == sorted(b"%d" % number for number in range(3000))


def test_a_map_made_after_a_restore_survives_an_abort(pm):
    """There was a map of that name already, in a commit that the restore left behind."""
    pm.commit()
    with pm.snapshot() as empty:
        lost = pm.map("users")
        lost[b"a"] = b"1"
        pm.commit()
        pm.restore(empty)
        users = pm.map("users")
        users[b"a"] = b"2"
        pm.commit()
        pm.abort()
        assert users[b"a"] == b"2"
        with pytest.raises(quire.ClosedError):
            lost[b"a"]


def test_a_handle_never_shows_another_map_of_its_name(pm):
    pm.map("users")[b"old"] = b"1"
    pm.commit()
    with pm.snapshot() as first:
        pm.destroy("users")
        pm.commit()
        users = pm.map("users")
        users[b"new"] = b"2"
        pm.commit()
        with pm.snapshot() as second:
            pm.restore(first)
            with pytest.raises(quire.ClosedError):
                users.get(b"old")
            assert dict(pm.map("users")) == {b"old": b"1"}
            pm.restore(second)
            assert dict(pm.map("users")) == {b"new": b"2"}


def test_changes_are_not_told_across_a_restore(pm):
    users = pm.map("users")
    users[b"a"] = b"1"
    pm.commit()
    with pm.snapshot() as first:
        users[b"a"] = b"2"
        pm.commit()
        with pm.snapshot() as left_behind:
            pm.restore(first)
            with pm.snapshot() as again:
                assert list(again.changes(first, "users")) == []
                with pytest.raises(quire.InvalidError, match="a restore lies between"):
                    again.changes(left_behind, "users")
            pm.restore(left_behind)
            users[b"b"] = b"3"
            pm.commit()
            with pm.snapshot() as last:
                assert list(last.changes(left_behind, "users")) == [(b"b", [b"3"])]
                assert sorted(last.changes(first, "users")) == [(b"a", [b"2"]), (b"b", [b"3"])]
                pm.restore(first)
                users[b"c"] = b"4"
                pm.commit()
                with pm.snapshot() as aside:
                    pm.restore(last)
                    users[b"d"] = b"5"
                    pm.commit()
                    with pm.snapshot() as newest:
                        assert list(newest.changes(last, "users")) == [(b"d", [b"5"])]
                        assert sorted(key for key, _ in newest.changes(first, "users")) == [b"a", b"b", b"d"]
                        with pytest.raises(quire.InvalidError, match="a restore lies between"):
                            newest.changes(aside, "users")


def test_what_cannot_be_restored(pm, path, page_size):
    pm.map("users")[b"a"] = b"1"
    pm.map("other")[b"a"] = b"1"
    pm.commit()
    with quire.PageManager(path, page_size=page_size) as other, pm.snapshot() as foreign:
        other.map("users")[b"a"] = b"2"
        other.commit()
        with pytest.raises(quire.InvalidError, match="another arena"):
            other.restore(foreign)
        with pytest.raises(quire.InvalidError, match="not int"):
            other.restore(7)
        assert dict(other.map("users")) == {b"a": b"2"}
        reader = quire.PageManager(path, read_only=True)
        with reader, reader.snapshot() as read, pytest.raises(quire.ReadOnlyError):
            reader.restore(read)
    with pm.snapshot(sets=["users"]) as part, pytest.raises(quire.InvalidError, match="some sets only"):
        pm.restore(part)
    closed = pm.snapshot()
    closed.close()
    with pytest.raises(quire.ClosedError):
        pm.restore(closed)
    named = pm.snapshot("monday")
    pm.map("users").clear()
    pm.commit()
    pm.restore(named)
    assert dict(pm.map("users")) == {b"a": b"1"}


def test_another_process_sees_the_restored_state(path):
    with quire.PageManager(path) as pm, quire.PageManager(path, read_only=True) as reader:
        users = pm.map("users")
        users[b"a"] = b"1"
        pm.commit()
        with pm.snapshot() as first:
            users[b"a"] = b"2"
            pm.commit()
            with reader.snapshot() as seen:
                pm.restore(first)
                with reader.snapshot() as now:
                    assert (seen.map("users")[b"a"], now.map("users")[b"a"]) == (b"2", b"1")
                users[b"a"] = b"3"
                pm.commit()
                assert seen.map("users")[b"a"] == b"2"


# ------------------------------------------------------------------------------------------------ images from memory


@pytest.fixture
def image(tmp_path, page_size):
    with quire.PageManager(page_size=page_size) as source:
        states(source, 3)
        with source.snapshot() as snapshot:
            snapshot.save(tmp_path / "image")
        expected = content(source)
    return (tmp_path / "image").read_bytes(), expected


def test_an_image_from_memory_is_as_one_from_a_file(pm, image, tmp_path, page_size):
    data, expected = image
    pm.load_bytes(data)
    pm.check()
    assert content(pm) == expected
    with quire.PageManager(page_size=page_size) as other:
        other.load(tmp_path / "image")
        assert content(other) == expected
    pm.map("users")[b"more"] = b"x"
    pm.commit()
    pm.check()
    with pytest.raises(quire.ExistsError, match="already: destroy it before loading a base"):
        pm.load_bytes(data, "a base")


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda data: memoryview(b"x" + data)[1:]])
def test_an_image_may_be_any_bytes(pm, image, kind):
    data, expected = image
    pm.load_bytes(kind(data))
    assert content(pm) == expected


def test_an_image_that_lies_askew_is_refused(pm, image):
    data = image[0]
    askew = ffi.from_buffer("char[]", b"x" + data)
    with pm._lock:
        assert lib.quire_arena_load(pm._live(), askew + 1, len(data), b"it") == lib.QUIRE_E_INVALID
    assert pm.sets() == {}


@given(data=st.data())
def test_a_damaged_image_changes_nothing(data):
    with quire.PageManager(page_size=1024) as source, quire.PageManager(page_size=1024) as pm:
        source.map("users").update({b"%d" % number: b"x" * number for number in range(50)})
        source.commit()
        image = image_of(source)
        pm.map("mine")[b"a"] = b"1"
        before = (content(pm), pm.stats())
        place = data.draw(st.integers(0, len(image) - 1))
        damaged = bytearray(image)
        if data.draw(st.booleans()):
            damaged[place] ^= data.draw(st.integers(1, 255))
        else:
            del damaged[place:]
        # Where the version is, another one reads as a format to come.
        expected = (quire.CorruptError, quire.VersionError) if place >= len(image) - 24 else quire.CorruptError
        with pytest.raises(expected, match="the image"):
            pm.load_bytes(damaged)
        pm.check()
        assert (content(pm), pm.stats().frames_used) == (before[0], before[1].frames_used)
        pm.load_bytes(image)


def image_of(pm):
    with tempfile.TemporaryDirectory() as folder, pm.snapshot() as snapshot:
        snapshot.save(Path(folder) / "image")
        return (Path(folder) / "image").read_bytes()


@pytest.mark.parametrize("wrong", [None, "path", 7, [b"a"]])
def test_what_is_no_image(pm, wrong):
    with pytest.raises(quire.InvalidError, match=type(wrong).__name__):
        pm.load_bytes(wrong)
    with pytest.raises(quire.CorruptError, match="it has 0 bytes"):
        pm.load_bytes(b"", "it")


def test_an_image_of_another_page_size(image, page_size):
    with quire.PageManager(page_size=page_size * 2) as other, pytest.raises(quire.MismatchError, match="pages of"):
        other.load_bytes(image[0])
