"""Hypothesis machines that run random operations on a structure and on a plain Python model of it, side by side.

After every step the arena and every structure in it are checked. A machine covers what one writer can do to one
structure: changes, commit, abort, snapshots and iterators that outlive later changes, clones, images, and closing and
reopening a file.
"""

import itertools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import assume
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import quire

MANY = itertools.count()

# Few short keys, so that they are hit again; some long ones, which go to streams.
KEYS = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"key-%03d" % number for number in range(60)]),
    st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 3), st.sampled_from([100, 300, 1500, 9000])),
)
# Values of one length are changed in place.
VALUES = st.one_of(
    st.binary(max_size=20),
    st.binary(min_size=12, max_size=12),
    st.builds(
        lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.sampled_from([200, 900, 1100, 5000, 30000])
    ),
)
PAGE_SIZES = st.sampled_from([1024, 4096])
PLACES = st.sampled_from(["memory", "memory, in place", "file"])


def open_pages(place, folder, page_size):
    """A page manager in one of PLACES, and its path or None."""
    path = Path(folder) / "state.arena" if place == "file" else None
    return quire.PageManager(path, page_size=page_size, in_place=place == "memory, in place"), path


class Machine(RuleBasedStateMachine):
    """What is the same for maps and sequences; a subclass says how to open, read and copy."""

    @initialize(page_size=PAGE_SIZES, place=PLACES)
    def start(self, page_size, place):
        self.folder = tempfile.TemporaryDirectory()
        self.page_size = page_size
        self.pm, self.path = open_pages(place, self.folder.name, page_size)
        self.handle = self.open(self.pm)
        self.model = self.empty()
        self.pm.commit()
        self.committed = self.empty()
        self.snapshots = []
        self.iterators = []

    def teardown(self):
        if hasattr(self, "pm"):
            self.pm.close()
            self.folder.cleanup()

    @invariant()
    def sound(self):
        if hasattr(self, "pm"):
            self.pm.check()
            assert len(self.handle) == len(self.model)

    @rule()
    def same(self):
        assert self.content(self.handle) == self.expected(self.model)

    @rule()
    def commit(self):
        self.pm.commit()
        self.committed = self.copy(self.model)

    @rule()
    def abort(self):
        self.pm.abort()
        self.model = self.copy(self.committed)
        assert self.content(self.handle) == self.expected(self.model)

    @rule()
    def snapshot(self):
        if len(self.snapshots) < 4:
            self.snapshots.append((self.pm.snapshot(), self.copy(self.committed)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def read_snapshot(self, data):
        snapshot, model = data.draw(st.sampled_from(self.snapshots))
        old = self.open(snapshot)
        old.check()
        assert self.content(old) == self.expected(model)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def close_snapshot(self, data):
        pair = data.draw(st.sampled_from(self.snapshots))
        self.snapshots.remove(pair)
        pair[0].close()

    @rule()
    def iterate(self):
        if len(self.iterators) < 3:
            self.iterators.append((iter(self.handle), self.keys(self.model)))

    @precondition(lambda self: self.iterators)
    @rule(data=st.data(), to_end=st.booleans())
    def advance(self, data, to_end):
        pair = data.draw(st.sampled_from(self.iterators))
        iterator, rest = pair
        if to_end:
            self.iterators.remove(pair)
            assert self.sort_keys(list(iterator)) == self.sort_keys(rest)
            return
        key = next(iterator, None)
        if key is None:
            assert rest == []
        else:
            rest.remove(key)

    @rule()
    def clone(self):
        name = f"clone-{next(MANY)}"
        self.pm.clone("it", name)
        twin = self.open(self.pm, name)
        self.pm.check()
        assert self.content(twin) == self.expected(self.model)
        self.disturb(twin)
        self.pm.check()
        assert self.content(self.handle) == self.expected(self.model)
        self.pm.destroy(name)

    @rule()
    def save_and_load(self):
        image = Path(self.folder.name) / f"image-{next(MANY)}"
        with self.pm.snapshot(sets=["it"]) as snapshot:
            snapshot.save(image)
        with quire.PageManager(page_size=self.page_size) as other:
            other.load(image)
            other.check()
            copy = self.open(other)
            assert self.content(copy) == self.expected(self.committed)
            self.disturb(copy)
            other.check()

    @precondition(lambda self: self.path is not None)
    @rule()
    def reopen(self):
        self.pm.close()
        self.snapshots.clear()
        self.iterators.clear()
        self.pm = quire.PageManager(self.path)
        assert self.pm.page_size == self.page_size
        self.handle = self.open(self.pm)
        self.model = self.copy(self.committed)
        assert self.content(self.handle) == self.expected(self.model)

    @precondition(lambda self: self.path is not None)
    @rule()
    def read_elsewhere(self):
        with quire.PageManager(self.path, read_only=True) as reader, reader.snapshot() as snapshot:
            assert self.content(self.open(snapshot)) == self.expected(self.committed)


class MapMachine(Machine):
    """A map against a dict of lists of values."""

    ordered = False

    def open(self, owner, name="it"):
        return owner.ordered_map(name) if self.ordered else owner.map(name)

    def empty(self):
        return {}

    def copy(self, model):
        return {key: list(values) for key, values in model.items()}

    def keys(self, model):
        return list(model)

    def sort_keys(self, keys):
        return sorted(keys)

    def content(self, handle):
        pairs = list(handle.items())
        assert len({key for key, _ in pairs}) == len(pairs)
        return sorted(pairs)

    def expected(self, model):
        return sorted((key, values[0]) for key, values in model.items())

    def disturb(self, handle):
        handle.update({b"key-%03d" % number: b"x" * number * 9 for number in range(40)})
        handle.pop(b"key-005")
        handle.clear()

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        self.handle[key] = value
        self.model[key] = [value]
        assert self.handle[key] == value

    @rule(key=KEYS, value=VALUES)
    def append(self, key, value):
        self.handle.append(key, value)
        self.model.setdefault(key, []).append(value)
        assert self.handle.get_all(key) == self.model[key]

    @rule(key=KEYS)
    def look_up(self, key):
        values = self.model.get(key, [])
        assert self.handle.get(key) == (values[0] if values else None)
        assert self.handle.get_all(key) == values
        assert (key in self.handle) == (key in self.model)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_present(self, data):
        key = data.draw(st.sampled_from(sorted(self.model)))
        del self.handle[key]
        del self.model[key]

    @rule(key=KEYS)
    def remove_any(self, key):
        try:
            del self.handle[key]
        except KeyError:
            assert key not in self.model
        else:
            del self.model[key]

    @rule(keys=st.lists(KEYS, max_size=60), value=VALUES)
    def put_many(self, keys, value):
        values = [value + b"%d" % number for number in range(len(keys))]
        self.handle.put_many(keys, values)
        self.model.update((key, [each]) for key, each in zip(keys, values, strict=True))

    @rule(keys=st.lists(KEYS, max_size=20), value=VALUES)
    def append_many(self, keys, value):
        values = [value[:50] + b"%d" % number for number in range(len(keys))]
        self.handle.append_many(keys, values)
        for key, each in zip(keys, values, strict=True):
            self.model.setdefault(key, []).append(each)

    @rule(keys=st.lists(KEYS, max_size=30))
    def get_many(self, keys):
        found = [self.model[key][0] if key in self.model else None for key in keys]
        assert self.handle.get_many(keys).to_pylist() == found
        assert self.handle.contains_many(keys).to_pylist() == [key in self.model for key in keys]

    @rule(keys=st.lists(KEYS, max_size=30))
    def remove_many(self, keys):
        present = {key for key in keys if key in self.model}
        assert self.handle.remove_many(keys) == len(present)
        for key in present:
            del self.model[key]

    @rule()
    def clear(self):
        self.handle.clear()
        self.model.clear()

    @rule()
    def batches(self):
        found = [
            pair for batch in self.handle.to_batches(rows=7) for pair in zip(*batch.to_pydict().values(), strict=True)
        ]
        assert sorted(found) == self.expected(self.model)

    @precondition(lambda self: len(self.snapshots) >= 2)
    @rule(data=st.data())
    def changes(self, data):
        older = data.draw(st.integers(0, len(self.snapshots) - 2))
        newer = data.draw(st.integers(older + 1, len(self.snapshots) - 1))
        (old, before), (new, after) = self.snapshots[older], self.snapshots[newer]
        told = list(new.changes(old, "it"))
        assert len({key for key, _ in told}) == len(told)
        rebuilt = self.copy(before)
        for key, values in told:
            if values is None:
                del rebuilt[key]
            else:
                rebuilt[key] = values
        assert rebuilt == after


class OrderedMachine(MapMachine):
    """An ordered map against a dict that is sorted on every look."""

    ordered = True

    def sort_keys(self, keys):
        assert keys == sorted(keys)
        return keys

    def keys(self, model):
        return sorted(model)

    def content(self, handle):
        pairs = list(handle.items())
        assert pairs == sorted(pairs)
        return pairs

    @rule(lo=st.none() | KEYS, hi=st.none() | KEYS, reverse=st.booleans())
    def range(self, lo, hi, reverse):
        found = list(self.handle.range(lo, hi, reverse=reverse))
        wanted = [
            (key, values[0])
            for key, values in sorted(self.model.items(), reverse=reverse)
            if (lo is None or key >= lo) and (hi is None or key < hi)
        ]
        assert found == wanted

    @rule(
        prefix=st.binary(max_size=2) | st.sampled_from([b"key-", b"key-01", b"\xff", b"\x00" * 40]),
        reverse=st.booleans(),
    )
    def prefix(self, prefix, reverse):
        found = list(self.handle.prefix(prefix, reverse=reverse))
        assert found == [
            (key, values[0]) for key, values in sorted(self.model.items(), reverse=reverse) if key.startswith(prefix)
        ]

    @rule(lo=st.none() | KEYS, hi=st.none() | KEYS)
    def remove_range(self, lo, hi):
        assume(not (lo is None and hi is None))
        gone = [key for key in self.model if (lo is None or key >= lo) and (hi is None or key < hi)]
        assert self.handle.remove_range(lo, hi) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(last=st.booleans())
    def pop_end(self, last):
        if not self.model:
            return
        key = max(self.model) if last else min(self.model)
        assert (self.handle.last() if last else self.handle.first()) == (key, self.model[key][0])
        assert (self.handle.pop_last() if last else self.handle.pop_first()) == (key, self.model.pop(key)[0])


class SequenceMachine(Machine):
    """A deque against a list."""

    def open(self, owner, name="it"):
        return owner.deque(name)

    def empty(self):
        return []

    def copy(self, model):
        return list(model)

    def keys(self, model):
        return list(model)

    def sort_keys(self, keys):
        return keys

    def content(self, handle):
        forward = list(handle)
        assert list(reversed(handle)) == forward[::-1]
        return forward

    def expected(self, model):
        return model

    def disturb(self, handle):
        handle.extend([b"x" * number * 9 for number in range(40)])
        handle.insert(3, b"y")
        handle.clear()

    @rule(value=VALUES, left=st.booleans())
    def add(self, value, left):
        if left:
            self.handle.appendleft(value)
            self.model.insert(0, value)
        else:
            self.handle.append(value)
            self.model.append(value)

    @precondition(lambda self: self.model)
    @rule(left=st.booleans())
    def take(self, left):
        assert (self.handle.popleft() if left else self.handle.pop()) == self.model.pop(0 if left else -1)

    @rule(index=st.integers(-50, 50), value=VALUES)
    def insert(self, index, value):
        self.handle.insert(index, value)
        self.model.insert(index, value)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), value=VALUES)
    def replace(self, data, value):
        index = data.draw(st.integers(-len(self.model), len(self.model) - 1))
        self.handle[index] = value
        self.model[index] = value
        assert self.handle[index] == value

    @rule(
        start=st.none() | st.integers(-60, 60),
        stop=st.none() | st.integers(-60, 60),
        step=st.sampled_from([None, 1, 2, -1, -3]),
    )
    def read_slice(self, start, stop, step):
        assert self.handle[start:stop:step] == self.model[start:stop:step]

    @rule(
        start=st.none() | st.integers(-60, 60),
        stop=st.none() | st.integers(-60, 60),
        step=st.sampled_from([None, 1, 2, -1, -3]),
    )
    def delete_slice(self, start, stop, step):
        del self.handle[start:stop:step]
        del self.model[start:stop:step]

    @rule(start=st.integers(-60, 60), stop=st.integers(-60, 60), values=st.lists(VALUES, max_size=4))
    def assign_slice(self, start, stop, values):
        self.handle[start:stop] = values
        self.model[start:stop] = values

    @rule(values=st.lists(VALUES, max_size=80))
    def extend(self, values):
        self.handle.extend(values)
        self.model.extend(values)

    @rule(steps=st.integers(-5, 5))
    def rotate(self, steps):
        self.handle.rotate(steps)
        if self.model:
            steps %= len(self.model)
            self.model[:] = self.model[-steps:] + self.model[:-steps] if steps else self.model

    @rule()
    def clear(self):
        self.handle.clear()
        self.model.clear()

    @rule()
    def arrays(self):
        assert self.handle.to_array().to_pylist() == self.model
        assert [row for batch in self.handle.to_batches(rows=5) for row in batch.column(0).to_pylist()] == self.model
