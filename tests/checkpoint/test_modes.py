"""All modes, one after the other on the same folder: every version that can be loaded is what the model says it is."""

import contextlib
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from stores import CHANGES, FAMILIES, content, loaded

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
        if len(self.states) == 1:
            return
        store = Checkpoint(self.folder).store(0, 0)
        assert loaded(store) == self.states[-1]
        for number in range(len(self.states)):
            try:
                found = loaded(store, number)
            except quire.NotFoundError:
                assert number < self.newest - self.RETAIN
            else:
                assert found == self.states[number], f"version {number}"
        sound(self.folder)


STEPS = st.one_of(
    st.tuples(st.just("commit"), CHANGES),
    st.tuples(st.just("commit"), CHANGES),
    st.tuples(st.just("maintain"), st.booleans()),
    st.tuples(st.just("open"), st.sampled_from(MODES)),
    st.tuples(st.just("back"), st.sampled_from(MODES)),
    st.tuples(st.just("abort"), CHANGES),
)


@settings(deadline=None)
@given(mode=st.sampled_from(MODES), steps=st.lists(STEPS, min_size=1, max_size=16), inline=st.booleans())
def test_modes_in_any_order(mode, steps, inline):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if inline else 1)
        patch.setattr(io_service, "FRAME_BYTES", 8 << 10)
        with contextlib.ExitStack() as stack:
            run = Run(folder, stack)
            run.open(mode)
            for step, argument in steps:
                if step == "commit":
                    run.commit(argument)
                elif step == "maintain":
                    run.checkpoint.maintain(background=argument)
                elif step == "abort":
                    change(run.pm, argument)
                    run.pm.abort()
                else:
                    # The newest, or the one before, whose successors then go.
                    newest = len(run.states) - 1
                    run.open(argument, newest - (step == "back" and newest > 0))
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
