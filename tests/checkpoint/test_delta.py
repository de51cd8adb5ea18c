"""Deltas: any two states of one line, what lies between them as bytes, and those bytes applied to the older state."""

import hypothesis.strategies as st
import pytest
from families import FamiliesMachine, content, copy
from hypothesis import example, given
from hypothesis.stateful import initialize, precondition, rule
from models import KEYS, VALUES

import quire
from quire.checkpoint import delta
from quire.checkpoint.delta import Op, Patch, Record

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
        assert (record.patch is not None) == (record.op == Op.PATCH)
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
        elif record.op == Op.PATCH:
            (older,) = model[record.family][1][record.key]
            model[record.family][1][record.key] = [record.patch.apply(older)]
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


# ------------------------------------------------------------------------------------------------ patches


def row(words, tail=b""):
    """Like a row of Spark's: words of eight bytes, and what has no fixed length behind them."""
    return b"".join(word.to_bytes(8, "little") for word in words) + tail


WORDS = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
ROWS = st.builds(row, st.lists(WORDS, max_size=60), st.binary(max_size=30))


@st.composite
def updates(draw):
    """A value and what becomes of it: bytes here and there, a part cut out or put in, another length, all anew."""
    older = draw(st.one_of(ROWS, st.binary(max_size=200), st.integers(0, 5000).map(bytes)))
    newer = bytearray(older)
    for _ in range(draw(st.integers(0, 6))):
        at, piece = draw(st.integers(0, len(newer))), draw(st.binary(max_size=24))
        how = draw(st.sampled_from(["over", "over", "in", "out", "end"]))
        if how == "end":
            del newer[at:]
        else:
            newer[at : at + (0 if how == "in" else len(piece))] = b"" if how == "out" else piece
    return older, draw(st.one_of(st.just(bytes(newer)), ROWS))


def changed(pm, ordered, pairs):
    """The delta of updating a map's values, each pair from one to the other; None for a key without."""
    family = pm.ordered_map("users") if ordered else pm.map("users")
    family.update({b"%d" % number: older for number, (older, _) in enumerate(pairs) if older is not None})
    pm.commit()
    with pm.snapshot() as snapshot:
        before = content(snapshot)
        for number, (_, newer) in enumerate(pairs):
            if newer is not None:
                family[b"%d" % number] = newer
            else:
                family.pop(b"%d" % number, None)
        return before, delta.write(pm, snapshot)


@given(pairs=st.lists(updates(), max_size=12), ordered=st.booleans(), page_size=st.sampled_from([1024, 8192]))
def test_patches_lead_from_any_value_to_any_other(pairs, ordered, page_size):
    with quire.PageManager(page_size=page_size) as pm, quire.PageManager(page_size=1024) as other:
        before, payloads = changed(pm, ordered, pairs)
        records = [record for record in all_records(payloads) if record.op not in MAPS]
        assert len(records) == len(pairs)
        for record in records:
            older, newer = pairs[int(record.key)]
            assert record.op == (Op.PATCH if saves(older, newer) else Op.PUT), (older, newer)
        assert apply_to_model(copy(before), records) == content(pm)
        (other.ordered_map("users") if ordered else other.map("users")).update(
            {b"%d" % number: older for number, (older, _) in enumerate(pairs)}
        )
        for payload in payloads:
            delta.apply(other, payload)
        other.check()
        assert content(other) == content(pm)


def saves(older, newer):
    """Whether a patch is to be made: the value has 32 bytes or more, and it takes no more than three quarters of them.

    Words that differ count from the first byte that does to the last; runs with less than four bytes between are one.
    """
    common, runs = min(len(older), len(newer)), []
    for at in range(0, common, 8):
        places = [i for i in range(at, min(at + 8, common)) if older[i] != newer[i]]
        if at + 8 <= common and places:
            runs.append((places[0], places[-1] + 1))
        else:
            runs += [(i, i + 1) for i in places]
    runs += [(common, len(newer))] if len(newer) > common else []
    joined = []
    for start, end in runs:
        if joined and start - joined[-1][1] < 4:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    size, done = 2, 0
    for start, end in joined:
        size += varint_bytes(start - done) + varint_bytes(end - start) + end - start
        done = end
    return len(newer) >= 32 and size <= len(newer) - len(newer) // 4


def varint_bytes(number):
    return max(1, (number.bit_length() + 6) // 7)


@pytest.mark.parametrize("ordered", [False, True])
def test_updates_of_wide_rows_take_few_bytes(pm, ordered):
    """One word of fifty changes, in more keys than are applied at once."""
    wide = [row([number * 50 + word for word in range(50)]) for number in range(3000)]
    pairs = [(value, value[:80] + row([number]) + value[88:]) for number, value in enumerate(wide)]
    before, payloads = changed(pm, ordered, pairs)
    records = [record for record in all_records(payloads) if record.op not in MAPS]
    assert {record.op for record in records} == {Op.PATCH}
    whole = sum(len(newer) for _, newer in pairs)
    assert sum(map(len, payloads)) < whole / 10
    assert apply_to_model(before, records) == content(pm)
    with quire.PageManager() as other:
        changed(other, ordered, [(older, older) for older, _ in pairs])
        for payload in payloads:
            delta.apply(other, payload)
        assert content(other) == content(pm)


def test_patches_among_all_other_records(pm):
    """New, removed and grown keys between patches; values that moved because their size changed."""
    value = row(range(40))
    pairs = [
        (None if number % 5 == 0 else value, None if number % 7 == 0 else value[: 300 - number % 9] + b"%d" % number)
        for number in range(2000)
    ]
    before, payloads = changed(pm, False, pairs)
    records = all_records(payloads)
    assert {Op.PATCH, Op.PUT, Op.REMOVE} <= {record.op for record in records}
    assert apply_to_model(before, records) == content(pm)
    with quire.PageManager(page_size=2048) as other:
        changed(other, False, [(older, older) for older, _ in pairs])
        for payload in payloads:
            delta.apply(other, payload)
        other.check()
        assert content(other) == content(pm)


@pytest.mark.parametrize("ordered", [False, True])
def test_new_keys_do_not_keep_updates_from_being_patches(pm, ordered):
    """Old values of keys that are not in their place are no longer looked for where most are new."""
    value = row(range(20))
    pairs = [(value if number % 4 == 0 else None, row([number]) + value[8:]) for number in range(4000)]
    before, payloads = changed(pm, ordered, pairs)
    records = all_records(payloads)
    patched = sum(record.op == Op.PATCH for record in records)
    # Keys come in between, and nodes of an ordered map split: a key may be found in another place, or not looked for.
    assert patched == 1000 if not ordered else patched > 100
    assert apply_to_model(before, records) == content(pm)


def test_what_patches_say(pm):
    value = row(range(20))
    longer = value + b"more"
    pairs = [
        (value, value),
        (value, row([7]) + value[8:-3]),
        (value, longer),
        (value, b"\xff" * 160),
        (b"a" * 31, b"b"),
    ]
    _, payloads = changed(pm, False, pairs)
    records = {record.key: record for record in all_records(payloads)}
    assert records[b"0"].patch == Patch(160, ())
    assert records[b"1"].patch == Patch(157, ((0, b"\x07"),))
    assert records[b"2"].patch == Patch(164, ((160, b"more"),))
    assert records[b"3"] == Record(Op.PUT, "users", False, b"3", (b"\xff" * 160,))
    assert records[b"4"].op == Op.PUT
    with pytest.raises(quire.CorruptError, match="more bytes than the old value has"):
        records[b"2"].patch.apply(value[:-1])


def test_the_patch_shown_in_the_format_page(pm, source_root):
    value = bytearray(40)
    value[8], value[24] = 1, 2
    family = pm.map("f")
    family[b"k"] = bytes(40)
    pm.commit()
    with pm.snapshot() as older:
        family[b"k"] = bytes(value)
        (payload,) = delta.write(pm, older)
    shown = payload[len(FAMILY) :].hex(" ")
    assert f"\n{shown}\n" in (source_root / "docs/format.md").read_text()


def test_several_values_are_written_whole(pm):
    users = pm.map("users")
    for key in (b"one", b"two"):
        users.append(key, b"x" * 400)
    users.append(b"two", b"x" * 400)
    pm.commit()
    with pm.snapshot() as older:
        users.append(b"one", b"x" * 400)
        users[b"two"] = b"x" * 400
        found = {record.key: record.op for record in all_records(delta.write(pm, older))}
        assert (found[b"one"], found[b"two"]) == (Op.PUT_ALL, Op.PUT)


def test_a_value_that_looks_like_a_record_of_another_key(pm):
    """A key's old value is found by its key, not by what the bytes in its place look like."""
    users = pm.map("users")
    fake = b"\x02\x00\xa0\x00\x01\x00\x00\x00k2" + b"\xee" * 160
    users[b"k1"] = b"\0" * 6 + fake * 3
    pm.commit()
    with pm.snapshot() as older:
        del users[b"k1"]
        for number in range(40):
            users[b"k%d" % number] = b"\xee" * 150 + b"%010d" % number
        assert apply_to_model(content(older), all_records(delta.write(pm, older))) == content(pm)


# ------------------------------------------------------------------------------------------------ damaged payloads


def head(op, name, kind=1):
    return bytes([op, kind]) + len(name).to_bytes(2, "little") + name


def check_of(older):
    """What a patch says of the value that it was made from; by docs/format.md."""
    words = older + bytes(-len(older) % 8)
    total = sum(int.from_bytes(words[at : at + 8], "little") for at in range(0, len(words), 8))
    return ((total + len(older)) * 0x9E3779B97F4A7C15 % 2**64 >> 48).to_bytes(2, "little")


def patch(count, runs, check=None):
    patch = (check or check_of(b"abc")) + runs
    return bytes([7, 1, count, len(patch)]) + b"k" + patch


FAMILY = head(1, b"f")
OLD = b"\x03\x01\x03kabc"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x03\x01\x01kv", "belongs to no family"),
        (b"\x05\x00", "belongs to no family"),
        (FAMILY + head(2, b"f") + b"\x05\x00", "belongs to no family"),
        (patch(1, b""), "belongs to no family"),
        (FAMILY + patch(1, b""), "not there"),
        (FAMILY + OLD + patch(3, b"", check_of(b"abd")), "another value than the key has"),
        (FAMILY + OLD + patch(4, b""), "more bytes than the old value has"),
        (FAMILY + OLD + patch(5, b"\x04\x01x"), "more bytes than the old value has"),
        (FAMILY + OLD + patch(6, b"\x03\x01x"), "more bytes than the old value has"),
        (
            FAMILY + OLD + b"\x07\x01" + b"\xff" * 9 + b"\x01\x05k" + check_of(b"abc") + b"\x03\x01x",
            "the old value has",
        ),
        (b"\x0b", "kind is unknown"),
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
        (head(1, b"f", kind=4), "the family's kind is unknown"),
        (FAMILY + b"\x03", "length does not end"),
        (FAMILY + b"\x03" + b"\x80" * 11, "length does not end"),
        (FAMILY + b"\x03\x02\x00k", "longer than what is left"),
        (FAMILY + b"\x03\x01\x02kv", "longer than what is left"),
        (FAMILY + b"\x03\x01" + b"\xff" * 9 + b"\x01k", "longer than what is left"),
        (FAMILY + b"\x04\x01\x03\x01k\0\0\0", "values do not fit"),
        (FAMILY + b"\x04\x01\x05\x01k\x02\0\0\0v", "values do not fit"),
        (FAMILY + b"\x04\x01\x05\x02k\x01\0\0\0v", "not as many"),
        (FAMILY + b"\x04\x01\x00\x00k", "not as many"),
        (FAMILY + b"\x07\x01\x05", "length does not end"),
        (FAMILY + patch(5, b"\x00\x01x")[:-1], "longer than what is left"),
        (FAMILY + b"\x07\x01\x05\x01k\x00", "no check"),
        (FAMILY + patch(5, b"\x00"), "length does not end"),
        (FAMILY + patch(5, b"\x00\x02x"), "longer than what is left"),
        (FAMILY + patch(5, b"\x01\x00"), "run of its patch is empty"),
        (FAMILY + patch(5, b"\x05\x01x"), "over the end of the value"),
        (FAMILY + patch(4, b"\x00\x05abcde"), "over the end of the value"),
        (FAMILY + patch(5, b"\xff" * 9 + b"\x01\x01x"), "over the end of the value"),
    ],
)
def test_records_that_make_no_sense(pm, payload, message):
    # What the arena holds is not known to a reader of records.
    if "not there" not in message and "value has" not in message and "key has" not in message:
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
        pm.ordered_map("events").update({b"c": b"3", b"d": bytes(200)})
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
            patched = read is not None and any(record.op == Op.PATCH for record in read)
            if read is not None and not patched and not {record.family for record in read} & set(before):
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


def test_every_damage_to_patches_is_refused_or_applied():
    """Each byte of a payload with patches changed in turn, and the payload cut off at each place."""
    with quire.PageManager(page_size=1024) as pm:
        users, events = pm.map("users"), pm.ordered_map("events")
        users[b"b"] = b"2" * 3000
        events[b"d"] = bytes(200)
        pm.commit()
        with pm.snapshot() as older:
            users[b"b"] = b"2" * 1000 + b"3" * 9 + b"2" * 1900
            events[b"d"] = bytes(64) + row([1, 0, 2, 3]) + bytes(120)
            (payload,) = delta.write(pm, older)
        assert [record.op for record in delta.records(payload)].count(Op.PATCH) == 2
    for at in range(len(payload)):
        try_payload(payload[:at])
        for byte in {payload[at] ^ 1 << bit for bit in range(8)} | {0, 255}:
            try_payload(payload[:at] + bytes([byte]) + payload[at + 1 :])
