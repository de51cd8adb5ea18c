"""The ordered map: random operations against a sorted dict, ranges and prefixes."""

import pytest
from models import OrderedMachine

import quire

TestOrderedMachine = OrderedMachine.TestCase


@pytest.fixture
def events(pm):
    made = pm.ordered_map("events")
    made.update({b"%03d" % number: b"v%d" % number for number in range(0, 1000, 10)})
    return made


def test_iterates_in_order_both_ways(events):
    keys = [b"%03d" % number for number in range(0, 1000, 10)]
    assert list(events) == keys
    assert list(reversed(events)) == keys[::-1]
    assert list(reversed(events.keys())) == keys[::-1]
    assert list(events.values()) == [b"v%d" % number for number in range(0, 1000, 10)]
    assert list(reversed(events.values())) == [b"v%d" % number for number in range(990, -1, -10)]
    assert next(reversed(events.items())) == (b"990", b"v990")


def test_range_is_half_open_and_bounds_need_not_be_keys(events):
    assert [key for key, _ in events.range(b"100", b"130")] == [b"100", b"110", b"120"]
    assert [key for key, _ in events.range(b"101", b"121")] == [b"110", b"120"]
    assert [key for key, _ in events.range(b"100", b"130", reverse=True)] == [b"120", b"110", b"100"]
    assert [key for key, _ in events.range(b"980")] == [b"980", b"990"]
    assert [key for key, _ in events.range(hi=b"015")] == [b"000", b"010"]
    assert list(events.range(b"5", b"5")) == []
    assert list(events.range(b"6", b"5")) == []
    assert list(events.range(hi=b"")) == []


def test_prefix_also_at_the_end_of_all_keys(events):
    assert [key for key, _ in events.prefix(b"12")] == [b"120"]
    assert len(list(events.prefix(b""))) == 100
    events[b"\xff\xff"] = b"1"
    events[b"\xff"] = b"2"
    assert [key for key, _ in events.prefix(b"\xff")] == [b"\xff", b"\xff\xff"]
    assert [key for key, _ in events.prefix(b"\xff", reverse=True)] == [b"\xff\xff", b"\xff"]


def test_ends(pm, events):
    assert events.first() == (b"000", b"v0")
    assert events.last() == (b"990", b"v990")
    assert events.pop_first() == (b"000", b"v0")
    assert events.pop_last() == (b"990", b"v990")
    assert events.popitem() == (b"980", b"v980")
    events.clear()
    for call in (events.first, events.last, events.pop_first, events.pop_last, events.popitem):
        with pytest.raises(quire.NotFoundError, match="empty"):
            call()
    pm.check()


def test_remove_range(pm, events):
    assert events.remove_range(b"100", b"200") == 10
    assert events.remove_range(b"100", b"200") == 0
    assert events.remove_range(lo=b"900") == 10
    assert events.remove_range(hi=b"050") == 5
    pm.check()
    assert len(events) == 75
    assert events.remove_range() == 75
    assert len(events) == 0
    pm.check()


def test_range_batches(events):
    batches = list(events.range_batches(b"100", b"200", rows=4))
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    assert batches[0].column("key").to_pylist() == [b"100", b"110", b"120", b"130"]


def test_shares_long_prefixes(pm):
    events = pm.ordered_map("events")
    keys = [b"p" * 2000 + b"%04d" % number for number in range(50)]
    for key in reversed(keys):
        events[key] = key[-4:]
    assert list(events) == keys
    assert [key for key, _ in events.range(keys[10], keys[12])] == keys[10:12]
    assert len(list(events.prefix(b"p" * 2000))) == 50
    pm.check()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_many_keys_in_any_order(pm, order):
    events = pm.ordered_map("events")
    count = 30_000
    numbers = list(range(count))
    if order == "down":
        numbers.reverse()
    elif order == "mixed":
        numbers = [number * 7919 % count for number in numbers]
    events.put_many([b"%06d" % number for number in numbers], [b"v"] * count)
    pm.check()
    assert list(events) == [b"%06d" % number for number in range(count)]
    pm.commit()
    for number in numbers[: count // 2]:
        del events[b"%06d" % number]
    pm.check()
    assert list(events) == sorted(b"%06d" % number for number in numbers[count // 2 :])
