"""All modes, one after the other on the same folder: every version that can be loaded is what the model says it is."""

import contextlib
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from stores import FAMILIES, content, loaded

import quire
from quire.checkpoint import Checkpoint, Manager, io_service, manager, reader, storage, tools

MODES = sorted(manager.MODES)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(reader, "RELIST_WAITS_SECONDS", (0, 0, 0))
    monkeypatch.setattr(storage, "RETRY_WAITS_SECONDS", (0, 0, 0))


def change(pm, changes):
    for (family, key), values in changes.items():
        handle = pm.ordered_map(family) if FAMILIES[family] else pm.map(family)
        handle.pop(key, None)
        for value in values:
            handle.append(key, value)


def put(pm, **values):
    pm.map("default").update({key.encode(): value.encode() for key, value in values.items()})


def kinds(folder):
    """What the commit files are, by their headers; the oldest first."""
    store = Checkpoint(folder).store()
    listing = store.listing()
    return [store.header(listing.deltas[version]).kind for version in sorted(listing.deltas)]


def names(folder, suffix=""):
    return sorted(path.name for path in Path(folder, "state/0/0").iterdir() if path.name.endswith(suffix))


def sound(folder):
    verdict = tools.examine(Checkpoint(folder).store(0, 0), True, lambda count: None)
    assert verdict.problems == []


class Run:
    """A checkpoint that is worked on, and what each of its versions must hold."""

    RETAIN = 2

    def __init__(self, folder, stack):
        self.folder, self.stack = folder, stack
        self.states = [{}]
        self.newest = 0  # that was ever there: what is older than it by more than RETAIN may be gone
        self.checkpoint = self.pm = None

    def open(self, mode, version=None):
        self.stack.close()
        options = {"bases_every": 2, "retain": self.RETAIN, "extent_target": 1.5}
        self.checkpoint = self.stack.enter_context(Manager(self.folder, mode=mode, **options))
        self.pm = self.stack.enter_context(self.checkpoint.load(version))
        assert content(self.pm) == self.states[self.checkpoint.version]
        self.pm.check()

    def commit(self, changes):
        change(self.pm, changes)
        del self.states[self.checkpoint.version + 1 :]
        self.states.append(content(self.pm))
        assert self.checkpoint.commit(self.pm) == len(self.states) - 1
        self.newest = max(self.newest, len(self.states) - 1)

    def check(self):
        """All versions that are to be kept, and all others that can be loaded."""
        if self.newest == 0:
            return
        store = Checkpoint(self.folder).store(0, 0)
        # Going back changes nothing before the next commit.
        for version in store.versions():
            try:
                found = loaded(store, version.number)
            except quire.NotFoundError:
                assert version.number < self.newest - self.RETAIN
            else:
                assert found == self.states[version.number], f"version {version}"
        assert store.versions()[-1].number == len(self.states) - 1
        sound(self.folder)


# In a step: the mode of a new run (None: the old one goes on) and how far it goes back; batches, some of them empty;
# whether maintain() is called then (True: beside the next step); whether pages are fewer bytes than records.
SMALL = st.dictionaries(
    st.tuples(st.sampled_from(sorted(FAMILIES)), st.sampled_from([b"a", b"b", b"c", b"d"])),
    st.lists(st.sampled_from([b"", b"1", b"2" * 50, b"3" * 300]), max_size=2),
    max_size=4,
)
STEP = st.tuples(
    st.sampled_from([None, None, *MODES]),
    st.integers(0, 2),
    st.lists(SMALL, max_size=3),
    st.sampled_from([None, False, False, True]),
    st.booleans(),
)


@given(steps=st.lists(STEP, min_size=4, max_size=12), inline=st.booleans())
def test_modes_in_any_order(steps, inline):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if inline else 1)
        patch.setattr(io_service, "FRAME_BYTES", 8 << 10)
        with contextlib.ExitStack() as stack:
            run = Run(folder, stack)
            run.open(MODES[len(steps) % len(MODES)])
            for mode, back, batches, maintain, pages_are_less in steps:
                if mode is not None:
                    newest = len(run.states) - 1
                    run.open(mode, newest - min(back, newest, run.RETAIN) if run.newest == newest else None)
                patch.setattr(manager.pages, "size", lambda pm, since, less=pages_are_less: 0 if less else 1 << 60)
                for changes in batches:
                    run.commit(changes)
                if maintain is not None:
                    run.checkpoint.maintain(background=maintain)
                if not maintain:
                    run.check()
        run.check()


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_from_one_mode_to_another_and_back(tmp_path, first, second):
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.RETAIN = 50
        for turn, mode in enumerate([first, second, first, second]):
            run.open(mode)
            for number in range(5):
                many = {("default", b"%d" % key): [b"%d %d" % (turn, number)] for key in range(number, 40, 3)}
                run.commit({**many, ("sorted", b"gone%d" % turn): [b"x"] if number % 2 else []})
                if number == 2:
                    run.checkpoint.maintain()
    run.check()
    assert len(names(tmp_path, "qdelta")) == 20
