"""Deltas: any two states of one line, what lies between them as bytes, and those bytes applied to the older state."""

import hypothesis.strategies as st
import pytest
from families import FamiliesMachine, content, copy
from hypothesis import example, given
from hypothesis.stateful import initialize, precondition, rule
from models import KEYS, VALUES

import quire
from quire.checkpoint import delta
from quire.checkpoint.delta import Op, Record

MAPS = (Op.FAMILY, Op.DROP)
SEVERAL = (Op.PUT_ALL, Op.APPEND)
LISTS = ["default", "joins", "no such family"]


def all_records(payloads):
    """The records of a delta, after a look at what holds for every delta."""
    found = [list(delta.records(payload)) for payload in payloads]
    assert all(records and records[0].op in MAPS for records in found)
    records = [record for part in found for record in part]
    keys = [(record.family, record.key) for record in records if record.op not in MAPS]
    assert len(set(keys)) == len(keys)
    drops = [record.op == Op.DROP for record in records]
    assert drops == sorted(drops, reverse=True)
    for record in records:
        assert len(record.values) == 1 if record.op == Op.PUT else bool(record.values) == (record.op in SEVERAL)
    return records


def apply_to_model(model, records):
    """What a reader of records alone makes of a state."""
    for record in records:
        if record.op == Op.FAMILY:
            model.setdefault(record.family, (record.ordered, {}))
        elif record.op == Op.DROP:
            model.pop(record.family, None)
        elif record.op == Op.REMOVE:
            model[record.family][1].pop(record.key)
        elif record.op == Op.APPEND:
            assert record.family in LISTS
            model[record.family][1].setdefault(record.key, []).extend(record.values)
        else:
            model[record.family][1][record.key] = list(record.values)
    return model


class DeltaMachine(FamiliesMachine):
    """A follower, with pages of another size, is brought up to date by deltas alone; copies are made from images."""

    @initialize(page_size=st.sampled_from([1024, 8192]))
    def start_follower(self, page_size):
        self.follower = quire.PageManager(page_size=page_size)
        self.followed = None

    def teardown(self):
        super().teardown()
        if hasattr(self, "follower"):
            self.follower.close()

    def delta_since(self, pin):
        """None if the pin is not of the line that led to the state being written."""
        on_line = self.line[: len(pin.line)] == pin.line
        try:
            payloads = delta.write(self.pm, pin.snapshot, LISTS)
        except quire.InvalidError as error:
            assert not on_line and "a restore lies between" in str(error)
            return None
        assert apply_to_model(copy(pin.model), all_records(payloads)) == self.model
        return payloads

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def write_and_apply(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        payloads = self.delta_since(pin)
        if payloads is None:
            return
        with quire.PageManager(page_size=self.page_size) as other:
            other.load_bytes(self.image(pin.snapshot))
            assert content(other) == pin.model
            for payload in payloads:
                delta.apply(other, payload)
            other.check()
            assert content(other) == self.model
            other.abort()
            assert content(other) == {}

    @rule()
    def write_all(self):
        payloads = delta.write(self.pm, lists=LISTS)
        assert apply_to_model({}, all_records(payloads)) == self.model
        with quire.PageManager(page_size=1024) as other:
            for payload in payloads:
                delta.apply(other, payload)
            other.check()
            assert content(other) == self.model

    @rule()
    def follow(self):
        """The follower stays at the last state that it was brought to; from a state left behind it starts anew."""
        self.commit()
        payloads = None if self.followed is None else self.delta_since(self.followed)
        if payloads is None:
            for name in self.follower.sets():
                self.follower.destroy(name)
            payloads = delta.write(self.pm)
        for payload in payloads:
            delta.apply(self.follower, payload)
        self.follower.commit()
        self.follower.check()
        assert content(self.follower) == self.model
        if self.followed is not None:
            self.followed.snapshot.close()
        self.pin()
        self.followed = self.pins.pop()
        assert delta.write(self.pm, self.followed.snapshot) == []

    def reopen(self):
        if self.path is not None:
            super().reopen()
            self.followed = None

    # What hypothesis calls is the rule, not the method above.
    reopen = precondition(lambda self: self.path is not None)(rule()(reopen))


TestDeltaMachine = DeltaMachine.TestCase


def test_nothing_changed_gives_nothing(pm):
    assert delta.write(pm) == []
    pm.map("empty")
    assert [(record.op, record.family) for record in all_records(delta.write(pm))] == [(Op.FAMILY, "empty")]
    pm.map("users").update({b"%d" % number: b"x" for number in range(500)})
    pm.commit()
    with pm.snapshot() as older:
        assert delta.write(pm, older) == []
        pm.map("users")[b"7"] = b"y"
        pm.abort()
        assert delta.write(pm, older) == []


def test_what_records_say(pm):
    users, events = pm.map("users"), pm.ordered_map("events")
    users.update({b"a": b"1", b"b": b"2", b"": b"", b"same": b"s"})
    pm.map("dropped")
    pm.map("turned")[b"t"] = b"1"
    pm.commit()
    with pm.snapshot() as older:
        del users[b"a"]
        users[b"b"] = b"3"
        users.append(b"", b"more")
        events[b""] = b""
        pm.destroy("dropped")
        pm.destroy("turned")
        pm.ordered_map("turned")[b"t"] = b"2"
        (payload,) = delta.write(pm, older)
        records = list(delta.records(payload))
        assert sorted(record.family for record in records if record.op == Op.DROP) == ["dropped", "turned"]
        assert {record for record in records if record.op not in MAPS} == {
            Record(Op.REMOVE, "users", False, b"a"),
            Record(Op.PUT, "users", False, b"b", (b"3",)),
            Record(Op.PUT_ALL, "users", False, b"", (b"", b"more")),
            Record(Op.PUT, "events", True, b"", (b"",)),
            Record(Op.PUT, "turned", True, b"t", (b"2",)),
        }


def test_lists_are_written_from_where_they_grew(pm):
    names = pm.map("names")
    for value in (b"a", b"b"):
        names.append(b"grown", value)
    names[b"replaced"] = b"old"
    names[b"same"] = b"1"
    pm.commit()
    with pm.snapshot() as older:
        names.append(b"grown", b"c")
        names.append(b"new", b"x")
        names[b"replaced"] = b"other"
        del names[b"same"]
        names[b"same"] = b"1"
        found = all_records(delta.write(pm, older, ["names"]))
        assert {(r.op, r.key, r.values) for r in found if r.op != Op.FAMILY} == {
            (Op.APPEND, b"grown", (b"c",)),
            (Op.APPEND, b"new", (b"x",)),
            (Op.PUT, b"replaced", (b"other",)),
        }
        with pytest.raises(quire.InvalidError, match="names of maps"):
            delta.write(pm, older, "names")


def test_payloads_can_be_read_alone(pm):
    pm.map("users").update({b"%d" % number: b"x" * 100 for number in range(9000)})
    pm.ordered_map("events").update({b"%d" % number: b"y" * 300_000 for number in range(3)})
    payloads = delta.write(pm)
    assert len(payloads) > 5
    all_records(payloads)
    with quire.PageManager() as other:
        for payload in reversed(payloads):  # without removals any order will do
            delta.apply(other, payload)
        assert content(other) == content(pm)


def test_a_chain_of_deltas_on_an_image_and_back(pm, tmp_path, page_size):
    """As a store restarts: base, deltas, then a restore to the base and other deltas."""
    users = pm.map("users")
    users.update({b"%d" % number: b"x" * (number % 300) for number in range(2000)})
    pm.commit()
    base = pm.snapshot()
    base.save(tmp_path / "image")
    states, chain, older = [content(pm)], [], base
    for number in range(5):
        users.update({b"%d" % (number * key): b"%d" % number for key in range(50)})
        users.pop(b"%d" % (100 + number))
        pm.ordered_map(f"family-{number}")[b"a"] = b"b" * 5000
        chain.append(delta.write(pm, older))
        states.append(content(pm))
        pm.commit()
        older = pm.snapshot()
    with quire.PageManager(page_size=page_size) as other:
        other.load_bytes((tmp_path / "image").read_bytes())
        other.commit()
        at_base = other.snapshot()
        for _ in range(2):
            assert content(other) == states[0]
            for payloads, expected in zip(chain, states[1:], strict=True):
                for payload in payloads:
                    delta.apply(other, payload)
                other.commit()
                assert content(other) == expected
            other.check()
            other.restore(at_base)
    pm.restore(base)
    assert delta.write(pm, base) == []
    users[b"again"] = b"1"
    assert [record.key for record in all_records(delta.write(pm, base))][1:] == [b"again"]


def test_a_family_cloned_over_one_that_was_dropped(pm):
    """Its records are older than the snapshot, and differ all the same from those that the snapshot has."""
    pm.map("users").update({b"a": b"1", b"b": b"1"})
    pm.map("other").update({b"a": b"2", b"c": b"2"})
    pm.commit()
    with pm.snapshot() as older:
        pm.destroy("users")
        pm.clone("other", "users")
        assert apply_to_model(content(older), all_records(delta.write(pm, older))) == content(pm)


def test_a_family_loaded_over_one_that_was_dropped(pm, tmp_path):
    """Its records carry epochs of another arena, which say nothing about this one."""
    with quire.PageManager(page_size=pm.page_size) as other:
        other.map("users").update({b"a": b"loaded", b"c": b"loaded"})
        other.commit()
        with other.snapshot() as snapshot:
            snapshot.save(tmp_path / "image")
    users = pm.map("users")
    for number in range(20):
        users.update({b"a": b"%d" % number, b"b": b"1"})
        pm.commit()
    with pm.snapshot() as older:
        pm.destroy("users")
        pm.load(tmp_path / "image")
        records = all_records(delta.write(pm, older))
        assert apply_to_model(content(older), records) == content(pm)


def test_only_maps_have_deltas(pm):
    pm.list("lines").append(b"a")
    with pytest.raises(quire.InvalidError, match="'lines' is no map"):
        delta.write(pm)


def test_the_wrong_things(pm):
    users = pm.map("users")
    users[b"a"] = b"1"
    pm.commit()
    with pytest.raises(quire.InvalidError, match="not Map"):
        delta.write(pm, users)
    with pytest.raises(quire.InvalidError, match="not list"):
        delta.apply(pm, [b"a"])
    with quire.PageManager() as other, other.snapshot() as foreign:
        other.ordered_map("users")
        with pytest.raises(quire.MismatchError):
            delta.apply(other, delta.write(pm)[0])
        other.destroy("users")
        other.map("users")
        other.commit()
        with other.snapshot() as same_names, pytest.raises(quire.InvalidError, match="same kind and arena"):
            delta.write(pm, same_names)
        foreign.close()
        with pytest.raises(quire.ClosedError):
            delta.write(pm, foreign)
    pm.close()
    with pytest.raises(quire.ClosedError):
        delta.write(pm)


def test_an_interrupted_collector_stops_the_walk(pm, monkeypatch):
    pm.map("users")[b"a"] = b"1"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(delta, "bytes", stop, raising=False)
    with pytest.raises(KeyboardInterrupt):
        delta.write(pm)
    monkeypatch.undo()
    assert len(delta.write(pm)) == 1


# ------------------------------------------------------------------------------------------------ damaged payloads


def head(op, name, kind=1):
    return bytes([op, kind]) + len(name).to_bytes(2, "little") + name


FAMILY = head(1, b"f")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x03\x01\x01kv", "belongs to no family"),
        (b"\x05\x00", "belongs to no family"),
        (FAMILY + head(2, b"f") + b"\x05\x00", "belongs to no family"),
        (b"\x07", "kind is unknown"),
        (b"\x0a", "kind is unknown"),
        (b"\x08\x00\x05\x01\x01\0\0\0v", "belongs to no family"),
        (b"\x09\x00\x05\x01\x01\0\0\0v", "belongs to no family"),
        (FAMILY + b"\x08\x01\x05\x02k\x01\0\0\0v", "not as many"),
        (FAMILY + b"\x09\x01\x05\x01k\x02\0\0\0v", "values do not fit"),
        (FAMILY + b"\x09\x01\x00\x01k", "not as many"),
        (b"\x06\x00\x05\x01\x01\0\0\0v", "belongs to no family"),
        (FAMILY + b"\x06\x01\x05\x02k\x01\0\0\0v", "not as many"),
        (b"\x00", "kind is unknown"),
        (b"\x01", "within a family's name"),
        (b"\x01\x01\x00", "within a family's name"),
        (head(1, b""), "empty or too long"),
        (head(1, b"n" * 192), "empty or too long"),
        (head(1, b"name")[:-1], "longer than what is left"),
        (head(1, b"na\0e"), "zero in it"),
        (head(1, b"f", kind=3), "is no map"),
        (FAMILY + b"\x03", "length does not end"),
        (FAMILY + b"\x03" + b"\x80" * 11, "length does not end"),
        (FAMILY + b"\x03\x02\x00k", "longer than what is left"),
        (FAMILY + b"\x03\x01\x02kv", "longer than what is left"),
        (FAMILY + b"\x03\x01" + b"\xff" * 9 + b"\x01k", "longer than what is left"),
        (FAMILY + b"\x04\x01\x03\x01k\0\0\0", "values do not fit"),
        (FAMILY + b"\x04\x01\x05\x01k\x02\0\0\0v", "values do not fit"),
        (FAMILY + b"\x04\x01\x05\x02k\x01\0\0\0v", "not as many"),
        (FAMILY + b"\x04\x01\x00\x00k", "not as many"),
    ],
)
def test_records_that_make_no_sense(pm, payload, message):
    with pytest.raises(quire.CorruptError, match=message):
        list(delta.records(payload))
    with pytest.raises(quire.CorruptError, match=message):
        delta.apply(pm, payload)
    pm.abort()
    assert pm.sets() == {}


def test_a_name_that_is_no_text():
    with pytest.raises(quire.CorruptError, match="no UTF-8"):
        list(delta.records(head(1, b"\xff")))


def try_payload(payload):
    """It is read and applied, or refused as damaged; in both cases the arena is as it was once it is aborted."""
    codes = (quire.CorruptError, quire.MismatchError, quire.InvalidError)
    with quire.PageManager(page_size=1024) as pm:
        pm.map("users").update({b"a": b"1", b"b": b"2" * 3000})
        pm.ordered_map("events")[b"c"] = b"3"
        pm.commit()
        before = content(pm)
        try:
            read = list(delta.records(payload))
        except quire.CorruptError:
            read = None
        try:
            delta.apply(pm, payload)
        except codes:
            pass
        else:
            if read is not None and not {record.family for record in read} & set(before):
                assert content(pm) == apply_to_model(copy(before), last_wins(read))
        pm.abort()
        pm.check()
        assert content(pm) == before


def last_wins(records):
    """Removals of keys that are not there left out: the model would trip on them."""
    there, kept = {}, []
    for record in records:
        keys = there.setdefault(record.family, set())
        if record.op == Op.DROP:
            keys.clear()
        elif record.op == Op.REMOVE:
            if record.key not in keys:
                continue
            keys.discard(record.key)
        elif record.op != Op.FAMILY:
            keys.add(record.key)
        kept.append(record)
    return kept


@given(payload=st.binary(max_size=200))
@example(payload=b"")
def test_any_bytes_are_refused_or_applied(payload):
    try_payload(payload)


@given(payload=st.binary(max_size=60).map(lambda rest: FAMILY + rest))
def test_any_bytes_behind_a_family_are_refused_or_applied(payload):
    try_payload(payload)


@given(data=st.data())
def test_damaged_payloads_are_refused_or_applied(data):
    with quire.PageManager(page_size=1024) as pm:
        users = pm.map("users")
        for key in data.draw(st.lists(KEYS, max_size=6)):
            users.append(key, data.draw(VALUES))
        pm.ordered_map("events")[b"d"] = b"4"
        pm.commit()
        (payload,) = delta.write(pm)
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged)))
        if data.draw(st.booleans()):
            del damaged[place:]
        elif place < len(damaged):
            damaged[place] = data.draw(st.integers(0, 255))
    try_payload(bytes(damaged))
