"""A Hypothesis machine that changes several maps of one arena and plain dicts of them, side by side.

It commits, aborts, pins states and restores them, in memory and in a file. What is checked after which step, and what
is done with the pinned states, is up to the subclasses.
"""

import itertools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import KEYS, PAGE_SIZES, PLACES, VALUES, open_pages

import quire

NAMES = st.sampled_from(["default", "joins", "timers", "quire"])
COUNTER = itertools.count()


def open_map(owner, name, ordered):
    return owner.ordered_map(name) if ordered else owner.map(name)


def content(owner):
    """Every map of an arena or snapshot: name to whether it is ordered, and a dict of lists of values."""
    found = {}
    for name, kind in owner.sets().items():
        ordered = kind == "ordered_map"
        handle = open_map(owner, name, ordered)
        found[name] = (ordered, {key: handle.get_all(key) for key in handle})
    return found


def copy(model):
    return {
        name: (ordered, {key: list(all_) for key, all_ in values.items()}) for name, (ordered, values) in model.items()
    }


class Pin:
    """A snapshot with what it must show. line: the commits that led to it, oldest first."""

    def __init__(self, snapshot, model, line):
        self.snapshot = snapshot
        self.model = copy(model)
        self.line = list(line)


class FamiliesMachine(RuleBasedStateMachine):
    """The model is name to (ordered, key to list of values), as content() gives it."""

    @initialize(page_size=PAGE_SIZES, place=PLACES)
    def start(self, page_size, place):
        self.folder = tempfile.TemporaryDirectory()
        self.page_size = page_size
        self.pm, self.path = open_pages(place, self.folder.name, page_size)
        self.model, self.committed = {}, {}
        # A handle on each map, made once, with the epoch it stands for a set from; it must survive what it is said to.
        self.handles, self.committed_handles = {}, {}
        self.pins, self.line = [], []
        self.epoch = self.pm.commit()

    def teardown(self):
        if hasattr(self, "pm"):
            self.pm.close()
            self.folder.cleanup()

    @invariant()
    def sound(self):
        if hasattr(self, "pm"):
            self.pm.check()
            assert self.pm.epoch >= self.epoch
            self.epoch = self.pm.epoch

    def handle(self, name, ordered):
        if name not in self.model:
            self.model[name] = (ordered, {})
            self.handles[name] = (open_map(self.pm, name, ordered), self.pm.epoch + 1)
        return self.handles[name][0], self.model[name][1]

    def image(self, snapshot):
        path = Path(self.folder.name) / f"image-{next(COUNTER)}"
        snapshot.save(path)
        return path.read_bytes()

    # -------------------------------------------------------------------------------------------- changes

    @rule(name=NAMES, ordered=st.booleans())
    def create(self, name, ordered):
        self.handle(name, ordered)

    @rule(name=NAMES, ordered=st.booleans(), key=KEYS, value=VALUES)
    def put(self, name, ordered, key, value):
        handle, values = self.handle(name, ordered)
        handle[key] = value
        values[key] = [value]

    @rule(name=NAMES, ordered=st.booleans(), keys=st.lists(KEYS, max_size=60), value=VALUES)
    def put_many(self, name, ordered, keys, value):
        handle, values = self.handle(name, ordered)
        handle.put_many(keys, [value] * len(keys))
        values.update((key, [value]) for key in keys)

    @rule(name=NAMES, ordered=st.booleans(), key=KEYS, added=st.lists(VALUES, min_size=1, max_size=4))
    def append(self, name, ordered, key, added):
        handle, values = self.handle(name, ordered)
        for value in added:
            handle.append(key, value)
            values.setdefault(key, []).append(value)

    @precondition(lambda self: any(values for _, values in self.model.values()))
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(name for name, (_, values) in self.model.items() if values)))
        handle, values = self.handles[name][0], self.model[name][1]
        key = data.draw(st.sampled_from(sorted(values)))
        del handle[key]
        del values[key]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def clear(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.handles[name][0].clear()
        self.model[name][1].clear()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.pm.destroy(name)
        del self.model[name], self.handles[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), name=NAMES)
    def clone_over(self, data, name):
        """A map dropped, and another of the same name made that has all of its records from before."""
        source = data.draw(st.sampled_from(sorted(self.model)))
        if source == name:
            return
        if name in self.model:
            self.pm.destroy(name)
        self.pm.clone(source, name)
        self.model[name] = copy(self.model)[source]
        self.handles[name] = (open_map(self.pm, name, self.model[name][0]), self.pm.epoch + 1)

    # -------------------------------------------------------------------------------------------- states

    @rule()
    def same(self):
        assert content(self.pm) == self.model
        for name, (handle, _) in self.handles.items():
            assert {key: handle.get_all(key) for key in handle} == self.model[name][1]

    @rule()
    def commit(self):
        self.pm.commit()
        self.committed, self.committed_handles = copy(self.model), dict(self.handles)
        self.line.append(next(COUNTER))

    @rule()
    def abort(self):
        self.pm.abort()
        self.model, self.handles = copy(self.committed), dict(self.committed_handles)
        self.same()

    @precondition(lambda self: len(self.pins) < 5)
    @rule()
    def pin(self):
        self.pins.append(Pin(self.pm.snapshot(), self.committed, self.line))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        pin.snapshot.close()

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def read_pin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        pin.snapshot.check()
        assert content(pin.snapshot) == pin.model

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def restore(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        before = self.pm.stats().epoch_writing
        epoch = self.pm.restore(pin.snapshot)
        assert epoch == self.pm.epoch >= before
        self.model, self.committed, self.line = copy(pin.model), copy(pin.model), list(pin.line)
        for name, (ordered, _) in self.model.items():
            if name not in self.handles or self.handles[name][1] > pin.snapshot.epoch:
                self.handles[name] = (open_map(self.pm, name, ordered), epoch)
        for name in set(self.handles) - set(self.model):
            del self.handles[name]
        self.committed_handles = dict(self.handles)
        self.same()

    @precondition(lambda self: self.path is not None)
    @rule()
    def reopen(self):
        self.pm.close()
        self.pins.clear()
        self.pm = quire.PageManager(self.path)
        self.model = copy(self.committed)
        self.handles = {name: (open_map(self.pm, name, ordered), 0) for name, (ordered, _) in self.model.items()}
        self.committed_handles = dict(self.handles)
        self.same()
