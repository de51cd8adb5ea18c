"""Pages changed in place: whatever is done, commits, aborts and snapshots show what copied pages would have shown."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import quire
from quire.checkpoint import delta

KEYS = st.sampled_from([b"key-%03d" % number for number in range(300)])
VALUES = st.builds(lambda number: b"value %010d" % number, st.integers(0, 9_999_999_999))


def filled(number=300, page_size=1024):
    pm = quire.PageManager(page_size=page_size, in_place=True)
    pm.map("it").update({b"key-%03d" % i: b"value %010d" % i for i in range(number)})
    pm.commit()
    return pm


def rebuilt(before, payloads):
    """The state that a delta makes of an older one, in an arena with other pages."""
    with quire.PageManager() as other:
        other.map("it").update(before)
        for payload in payloads:
            delta.apply(other, payload)
        return dict(other.map("it").items())


class InPlaceMachine(RuleBasedStateMachine):
    """One map of equally long values in memory, with firm and weak snapshots of it."""

    @initialize(page_size=st.sampled_from([1024, 4096]), count=st.sampled_from([0, 3, 300]))
    def start(self, page_size, count):
        self.pm = filled(count, page_size)
        self.map = self.pm.map("it")
        self.model = dict(self.map.items())
        self.committed = dict(self.model)
        self.firm, self.weak = [], []

    def teardown(self):
        if hasattr(self, "pm"):
            self.pm.close()

    @invariant()
    def sound(self):
        if hasattr(self, "pm"):
            self.pm.check()
            self.map.check()

    @rule(keys=st.lists(KEYS, max_size=40), value=VALUES)
    def put(self, keys, value):
        for key in keys:
            self.map[key] = self.model[key] = value

    @rule(
        pairs=st.lists(
            st.tuples(KEYS, st.one_of(VALUES, st.sampled_from([b"", b"short", b"x" * 40, b"x" * 900]))), max_size=80
        )
    )
    def put_many(self, pairs):
        self.map.put_many([key for key, _ in pairs], [value for _, value in pairs])
        self.model.update(pairs)

    @rule(key=KEYS, size=st.sampled_from([0, 5, 16, 40, 900, 5000]))
    def put_other_size(self, key, size):
        self.map[key] = self.model[key] = b"x" * size

    @rule(keys=st.lists(KEYS, max_size=60))
    def remove(self, keys):
        for key in set(keys) & set(self.model):
            del self.map[key], self.model[key]

    @rule(first=st.integers(0, 200))
    def remove_many(self, first):
        keys = [b"key-%03d" % number for number in range(first, first + 90)]
        self.map.remove_many(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule()
    def same(self):
        assert dict(self.map.items()) == self.model

    @rule(keys=st.lists(KEYS, max_size=5))
    def get(self, keys):
        for key in keys:
            assert self.map.get(key) == self.model.get(key)

    @rule()
    def commit(self):
        self.pm.commit()
        self.committed = dict(self.model)

    @rule()
    def abort(self):
        self.pm.abort()
        self.model = dict(self.committed)
        assert dict(self.map.items()) == self.model

    @rule()
    def clone(self):
        self.pm.clone("it", "twin")
        twin = self.pm.map("twin")
        twin[b"key-001"] = b"value 000000000x"
        self.pm.check()
        assert self.map.get(b"key-001") == self.model.get(b"key-001")
        self.pm.destroy("twin")

    # -------------------------------------------------------------------------------------------- snapshots

    @precondition(lambda self: len(self.firm) < 3)
    @rule()
    def pin(self):
        self.firm.append((self.pm.snapshot(), dict(self.committed)))

    @precondition(lambda self: self.firm)
    @rule(data=st.data(), close=st.booleans())
    def read_firm(self, data, close):
        pair = data.draw(st.sampled_from(self.firm))
        pair[0].check()
        assert dict(pair[0].map("it").items()) == pair[1]
        if close:
            self.firm.remove(pair)
            pair[0].close()

    @precondition(lambda self: len(self.weak) < 3)
    @rule()
    def pin_weakly(self):
        self.weak.append((self.pm._weak_snapshot(), dict(self.committed)))

    @precondition(lambda self: self.weak)
    @rule(data=st.data(), keys=st.lists(KEYS, max_size=30), close=st.booleans())
    def read_weak(self, data, keys, close):
        pair = data.draw(st.sampled_from(self.weak))
        snapshot, model = pair
        try:
            handle = snapshot.map("it")
            for key in keys:
                assert handle.get(key) == model.get(key)
        except quire.QuireError as error:
            assert self.lost(snapshot), error
        if close:
            self.weak.remove(pair)
            snapshot.close()

    def lost(self, snapshot):
        """Whether a later snapshot may have taken what a weak one needs: never from one of the last commit."""
        return snapshot.epoch < self.pm.epoch

    @precondition(lambda self: self.weak)
    @rule(data=st.data())
    def changes(self, data):
        snapshot, model = data.draw(st.sampled_from(self.weak))
        try:
            payloads = delta.write(self.pm, snapshot)
        except quire.QuireError as error:
            assert self.lost(snapshot), error
        else:
            assert rebuilt(model, payloads) == self.model

    @precondition(lambda self: self.weak)
    @rule(data=st.data())
    def restore(self, data):
        snapshot, model = data.draw(st.sampled_from(self.weak))
        others = [each for each, _ in self.weak + self.firm if each.epoch > snapshot.epoch]
        try:
            self.pm.restore(snapshot)
        except quire.BusyError:
            assert others or self.lost(snapshot)
        else:
            assert not others
            self.model, self.committed = dict(model), dict(model)
            assert dict(self.map.items()) == self.model

    @precondition(lambda self: self.weak)
    @rule(data=st.data())
    def walk_weak(self, data):
        snapshot, model = data.draw(st.sampled_from(self.weak))
        try:
            assert dict(snapshot.map("it").items()) == model
        except quire.QuireError as error:
            assert self.lost(snapshot), error

    @rule(key=KEYS, value=VALUES)
    def change_while_iterating(self, key, value):
        before = dict(self.model)
        iterator = iter(self.map.items())
        found = [pair for pair in [next(iterator, None)] if pair]
        self.map[key] = self.model[key] = value
        assert dict(found + list(iterator)) == before


TestInPlace = InPlaceMachine.TestCase


def test_a_change_in_place_takes_no_page():
    with filled(300) as pm, pm._weak_snapshot():
        used = pm.stats().frames_retired
        for number in range(0, 300, 10):
            pm.map("it")[b"key-%03d" % number] = b"value 9999999999"
        stats = pm.stats()
        assert stats.frames_dirty >= 8  # pages that changed
        assert stats.frames_retired - used <= 8  # nodes of the page table, and the super page
        pm.check()


def test_a_snapshot_between_commits_makes_copies():
    with filled(300) as pm:
        it = pm.map("it")
        it[b"key-007"] = b"value 9999999999"
        with pm.snapshot() as snapshot:
            assert snapshot.map("it")[b"key-007"] == b"value 0000000007"
            it[b"key-008"] = b"value 9999999998"
            assert snapshot.map("it")[b"key-008"] == b"value 0000000008"
            assert it[b"key-007"] == b"value 9999999999"
            pm.commit()
            assert snapshot.map("it")[b"key-007"] == b"value 0000000007"
        pm.check()


def test_many_changes_of_one_key_are_noted_once():
    with filled(300) as pm, pm._weak_snapshot() as weak:
        it = pm.map("it")
        held = pm.stats().bytes_held
        for number in range(20_000):
            it[b"key-007"] = b"value %010d" % number
        assert pm.stats().bytes_held - held <= 64 << 10
        assert weak.map("it")[b"key-007"] == b"value 0000000007"
        pm.abort()
        assert it[b"key-007"] == b"value 0000000007"


def test_notes_are_charged_to_the_limit_and_given_back():
    pm = quire.PageManager(limit="8m", in_place=True)
    it = pm.map("it")
    keys = [b"key %06d" % number for number in range(20_000)]
    it.put_many(keys, [b"a" * 40] * len(keys))
    pm.commit()
    held = pm.stats().bytes_held
    weak = pm._weak_snapshot()
    it.put_many(keys, [b"b" * 40] * len(keys))
    assert held < pm.stats().bytes_held <= 8 << 20
    pm.commit()
    weak.close()
    it[keys[0]] = b"c" * 40
    pm.commit()
    assert pm.stats().bytes_held <= held + (128 << 10)
    pm.close()


def test_without_room_for_notes_pages_are_copied_and_then_the_limit_is_told():
    with quire.PageManager(limit="2m", in_place=True) as pm:
        it = pm.map("it")
        keys = [b"key %06d" % number for number in range(12_000)]
        it.put_many(keys, [b"a" * 40] * len(keys))
        pm.commit()
        try:
            for round_ in range(4):
                it.put_many(keys, [b"%d" % round_ * 40] * len(keys))
        except quire.LimitError:
            pass
        pm.check()
        pm.abort()
        assert set(it.get_many(keys).to_pylist()) == {b"a" * 40}


def test_a_weak_snapshot_cannot_be_saved(tmp_path):
    with filled() as pm, pm._weak_snapshot() as weak, pytest.raises(quire.InvalidError, match="weak"):
        weak.save(tmp_path / "image")


def test_files_are_never_changed_in_place(tmp_path):
    with pytest.raises(quire.InvalidError, match="in_place"):
        quire.PageManager(tmp_path / "state.arena", in_place=True)
    with pytest.raises(quire.InvalidError, match="in_place 'yes'"):
        quire.PageManager(in_place="yes")


def test_a_delta_is_the_same_as_that_of_copied_pages():
    told = []
    for in_place in (False, True):
        with quire.PageManager(in_place=in_place) as pm:
            it = pm.map("it")
            keys = [b"key %06d" % number for number in range(5000)]
            it.put_many(keys[:4000], [b"%040d" % number for number in range(4000)])
            pm.commit()
            with pm._weak_snapshot() as older:
                it.put_many(keys[1::3], [b"%040d" % (number * 7) for number in range(len(keys[1::3]))])
                told.append(sorted(delta.write(pm, older)))
    assert told[0] == told[1]


def test_what_changed_in_place_is_told_from_the_oldest_note_on():
    """Of a page with few changes only the notes are looked at; of one with many, or copied since, all of it is."""
    with filled(300, page_size=4096) as pm:
        it = pm.map("it")
        before = dict(it.items())
        model, keys = dict(before), list(before)
        with pm._weak_snapshot() as weak:

            def put(numbers, value):
                for number in numbers:
                    it[keys[number]] = model[keys[number]] = value
                assert rebuilt(before, delta.write(pm, weak)) == model

            for epoch in range(3):  # notes of several epochs, in another order than the records
                put((40, 7, 41, 7), b"value %010d" % epoch)
                put((60 + epoch,), b"another size")
                pm.commit()
            put(range(0, 100, 2), b"value 7777777777")
            del it[keys[41]], model[keys[41]]
            put((43,), b"value 4343434343")


def test_a_lost_weak_snapshot_is_told_also_after_its_notes_are_gone():
    """Once a crash: notes were asked for ahead that had been given back to the system."""
    with quire.PageManager(in_place=True) as pm:
        it = pm.map("it")
        keys = [b"key %06d" % number for number in range(30_000)]
        it.put_many(keys, [b"a" * 40] * len(keys))
        pm.commit()

        def change(value, commit=True):
            it.put_many(keys[::10], [value * 40] * len(keys[::10]))
            if commit:
                pm.commit()

        lost = pm._weak_snapshot()
        change(b"b")
        change(b"c", commit=False)
        pm.snapshot().close()  # the pages of the last commit are copied, and those before it not kept
        pm.commit()
        older = pm._weak_snapshot()
        change(b"d")
        with pm._weak_snapshot() as kept:
            change(b"e", commit=False)  # its notes lead on to those that the older snapshot needs
            older.close()
            pm.commit()  # which are given back now
            with pytest.raises(quire.ClosedError, match="weak snapshot"):
                delta.write(pm, lost)
            before = dict.fromkeys(keys, b"a" * 40) | dict.fromkeys(keys[::10], b"d" * 40)
            assert rebuilt(before, delta.write(pm, kept)) == dict(it.items())
        lost.close()
