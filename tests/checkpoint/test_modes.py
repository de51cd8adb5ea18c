"""All modes, one after the other on the same folder: every version that can be loaded is what the model says it is."""

import contextlib
import io
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pyarrow import fs
from stores import FAMILIES, SPLICES, Writer, change, content, loaded, put, splice

import quire
from quire.checkpoint import (
    Checkpoint,
    Manager,
    StoreId,
    codecs,
    container,
    io_service,
    manager,
    storage,
    tools,
)
from quire.checkpoint.container import FileKind
from quire.checkpoint.delta import Op, Splice

MODES = sorted(manager.MODES)


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
        self.mode = None
        self.states = [{}]
        self.newest = 0  # that was ever there: what is older than it by more than RETAIN may be gone
        self.checkpoint = self.pm = None

    def open(self, mode, version=None):
        self.stack.close()
        self.mode = mode
        options = {"bases_every": 2, "retain": self.RETAIN, "extent_target": 1.5}
        self.checkpoint = self.stack.enter_context(Manager(self.folder, mode=mode, **options))
        self.pm = self.stack.enter_context(self.checkpoint.load(version))
        assert content(self.pm) == self.states[self.checkpoint.version]
        self.pm.check()

    def commit(self, changes, splices=(), page=None):
        """page: what a raw page is to hold."""
        change(self.pm, changes)
        splice(self.pm, splices)
        if page is not None:
            raw = self.pm.raw("blocks")
            raw.write((raw.ids() or [raw.alloc()])[0], page)
        self.drop_others()
        del self.states[self.checkpoint.version + 1 :]
        self.states.append(content(self.pm))
        assert self.checkpoint.commit(self.pm) == len(self.states) - 1
        self.newest = max(self.newest, len(self.states) - 1)

    def drop_others(self):
        """What the mode does not take is refused, and goes."""
        refused = {"cec": {"sequence", "raw"}, "delta": {"raw"}}.get(self.mode, set())
        names = [name for name, kind in self.pm.sets().items() if kind in refused]
        if names:
            with pytest.raises(quire.InvalidError, match="|".join(f"'{name}' is" for name in names)):
                self.checkpoint.commit(self.pm)
        for name in names:
            self.pm.destroy(name)

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
    st.lists(st.tuples(SMALL, SPLICES, st.sampled_from([None, None, None, b"1", b"2"])), max_size=3),
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
                for batch in batches:
                    run.commit(*batch)
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


# ------------------------------------------------------------------------------------------------ pages


def test_pages_start_from_the_newest_that_is_there(tmp_path, monkeypatch):
    """Bases, pages, or nothing; in auto over the deltas between."""
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.RETAIN = 50
        run.open("auto")
        store = Checkpoint(tmp_path)
        since = []
        for less, maintain in [(0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 0), (1, 0)]:
            monkeypatch.setattr(manager.pages, "size", lambda pm, epoch, less=less: 0 if less else 1 << 60)
            run.commit({("default", b"%d" % len(since)): [b"x"]})
            if maintain:
                run.checkpoint.maintain()
            found = store.store()
            since.append(found.end(found.listing().deltas[found.versions()[-1]])[1])
    assert since == [0, 0, 0, 2, 0, 5, 6]
    assert kinds(tmp_path) == [FileKind.PAGES if less in (1, 3, 5, 6) else FileKind.DELTA for less in range(7)]
    run.check()
    lines = [[file.version.number for file in found.line(number).files] for number in range(1, 8)]
    assert lines == [[1], [2], [2, 3], [2, 4], [5], [5, 6], [5, 6, 7]]


def test_a_commit_that_changes_nothing_is_no_start(tmp_path):
    """After a load its pages have the name that they had before."""
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.RETAIN = 50
        for turn in range(3):
            run.open("pages")
            run.commit({})
            run.commit({("default", b"%d" % turn): [b"x"]})
            run.commit({})
            run.check()
            run.open("pages")
            run.commit({})
            run.checkpoint.maintain()
            run.commit({("default", b"again %d" % turn): [b"x"]})
            run.check()


def test_no_base_of_the_pages_that_were_loaded(tmp_path):
    """It would have other pages than those that later versions, which are there still, start from."""
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.open("pages")
        for number in range(4):
            run.commit({("default", b"%d" % number): [b"x"]})
        for mode in MODES:
            run.open(mode, 3)
            run.checkpoint.maintain()
            assert names(tmp_path, "qbase") == []
            run.check()


def test_cleaning_keeps_what_pages_leap_to(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.RETAIN = 1
        run.open("auto")
        monkeypatch.setattr(manager.pages, "size", lambda pm, epoch: 1 << 60)
        run.commit({("default", b"a"): [b"x"]})
        run.commit({("default", b"b"): [b"x"]})
        run.checkpoint.maintain()
        run.open("auto")
        # Nothing changes, so that a base of 4 has the pages of 2: where pages start from, 2 stays.
        for _ in range(4):
            run.commit({})
            run.checkpoint.maintain()
        assert "2.qbase" in names(tmp_path) and "4.qbase" in names(tmp_path)
        monkeypatch.setattr(manager.pages, "size", lambda pm, epoch: 0)
        run.commit({("default", b"c"): [b"x"]})
        for _ in range(2):
            run.checkpoint.maintain()
            run.check()
            run.commit({("default", b"d"): [b"y"]})
        run.check()


def test_a_base_of_pages_is_mapped(tmp_path, monkeypatch):
    images = []
    from_image = quire.PageManager.from_image
    monkeypatch.setattr(
        quire.PageManager, "from_image", lambda image, **options: images.append(image) or from_image(image, **options)
    )
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.open("pages")
        for number in range(4):
            run.commit({("default", b"%d" % number): [b"x" * 500]})
            run.checkpoint.maintain()
        older, image = names(tmp_path, "qimage")
        assert older.startswith("2.") and image.startswith("4.") and "1.qdelta" not in names(tmp_path)
        run.open("delta")
        assert images == [str(tmp_path / "state/0/0" / image)]
        # Elsewhere it is read like any other.
        elsewhere = Checkpoint(tmp_path, fs.LocalFileSystem()).store()
        images.clear()
        assert loaded(elsewhere) == run.states[-1] and isinstance(images[0], bytearray)
        # It goes when nothing needs it any more.
        run.open("pages")
        for number in range(6):
            run.commit({("default", b"%d" % number): [b"y"]})
            run.checkpoint.maintain()
        assert image not in names(tmp_path)
        # What a writer left that was killed, too.
        for left in ("3.5eed.qimage", ".3.5eed.qimage.1234.tmp"):
            (tmp_path / "state/0/0" / left).write_bytes(b"x")
        run.checkpoint.maintain()
        assert not any("5eed" in name for name in names(tmp_path))
        run.check()


# ------------------------------------------------------------------------------------------------ logs


def test_a_log_needs_no_base(tmp_path):
    """Files before the extent of the oldest version that is kept are gone, and the extent holds."""
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.open("cec")
        run.commit({("default", b"%d" % key): [b"first"] for key in range(100)})
        for number in range(60):
            if number % 7 == 3:
                run.open("cec")
            run.commit({("default", b"%d" % (key % 20)): [b"%d" % number] for key in range(number, number + 10)})
            run.checkpoint.maintain()
        run.check()
    assert names(tmp_path, "qbase") == [] and set(kinds(tmp_path)) == {FileKind.LOG}
    assert len(names(tmp_path, "qdelta")) < 25 and "1.qdelta" not in names(tmp_path)
    store = Checkpoint(tmp_path).store()
    line = store.line()
    assert line.base is None and line.logs and line.first == store.end(line.deltas[-1])[1]
    missing = line.deltas[0]
    Path(missing.path).unlink()
    with pytest.raises(quire.NotFoundError, match=rf"{missing.version}\.qdelta is not there"):
        store.load()


def test_a_log_on_a_state_from_elsewhere(tmp_path):
    """Where a base was made of a version of a log, the log that goes on has a delta between."""
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.RETAIN = 50
        run.open("cec")
        for number in range(3):
            run.commit({("default", b"%d" % number): [b"x"]})
        run.open("delta")
        run.checkpoint.maintain()
        assert names(tmp_path, "qbase") == ["3.qbase"]
        run.open("cec")
        for number in range(3, 6):
            run.commit({("default", b"%d" % number): [b"x"]})
            run.check()
    log, plain = FileKind.LOG, FileKind.DELTA
    assert kinds(tmp_path) == [log, log, log, plain, log, log]


def test_a_log_with_too_few_keys_is_refused(tmp_path):
    with Manager(tmp_path, mode="cec") as checkpoint, checkpoint.load() as pm:
        for number in range(2):
            put(pm, **{str(number): "x"})
            checkpoint.commit(pm)
    path = tmp_path / "state/0/0/2.qdelta"
    found = container.read(io.BytesIO(path.read_bytes()), codecs.decompress)
    for keys, since in ((3, 1), (2, 2)):
        file = io.BytesIO()
        container.write(file, found.header, found.frames, keys, codecs.compress, since)
        path.write_bytes(file.getvalue())
        with pytest.raises(quire.CorruptError, match=r"2\.qdelta: the log gave \d keys where its last version says"):
            Checkpoint(tmp_path).store().load()
        (problem,) = tools.examine(Checkpoint(tmp_path).store(), False, lambda count: None).problems
        assert "2.qdelta: the state has" in problem


# ------------------------------------------------------------------------------------------------ all modes


@pytest.mark.parametrize("mode", MODES)
def test_changes_are_told_whole(tmp_path, mode):
    with Manager(tmp_path, mode=mode, extent_target=1.1) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1", b="2" * 100, c="3", d="4")
        checkpoint.commit(pm)
        put(pm, b="2" * 99 + "x", e="5")
        del pm.map("default")[b"c"]
        pm.ordered_map("sorted").append(b"k", b"v")
        pm.ordered_map("sorted").append(b"k", b"w")
        checkpoint.commit(pm)
        found = {(r.family, r.key): r for r in checkpoint.store.changes() if r.key}
        assert {place: record.values for place, record in found.items()} == {
            ("default", b"b"): (b"2" * 99 + b"x",),
            ("default", b"c"): (),
            ("default", b"e"): (b"5",),
            ("sorted", b"k"): (b"v", b"w"),
        }
        assert found["default", b"c"].op == Op.REMOVE and found["sorted", b"k"].ordered


@pytest.mark.parametrize("mode", MODES)
def test_versions_with_ids(tmp_path, mode, monkeypatch):
    """Each has one once the first has, and names its parent's; pages find where they start through them."""
    monkeypatch.setattr(manager.pages, "size", lambda pm, epoch: (pm.epoch % 3) << 60)
    with Writer(tmp_path / "state/0/0", StoreId(0, 0), ids=True) as writer:
        writer.commit({("default", b"a"): [b"x"]})
    states = {1: {"default": {b"a": [b"x"]}}}
    for _ in range(3):
        with Manager(tmp_path, mode=mode, bases_every=3, retain=3) as checkpoint, checkpoint.load() as pm:
            for _ in range(4):
                put(pm, **{str(checkpoint.version): "y"})
                states[checkpoint.commit(pm)] = content(pm)
                checkpoint.maintain()
    store = Checkpoint(tmp_path).store()
    assert all(version.id for version in store.versions())
    for number in range(10, 14):
        assert loaded(store, number) == states[number]
    sound(tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_that_fails_is_made_again(tmp_path, mode):
    class Faulty(storage.LocalStorage):
        failing = 0

        def write_atomic(self, path, data, *, replace=False):
            if path.endswith("qdelta") and self.failing:
                self.failing -= 1
                raise quire.IOFailedError("broken")
            super().write_atomic(path, data, replace=replace)

    faulty = Faulty()
    states = {}
    with Manager(tmp_path, mode=mode, bases_every=3, storage=faulty) as checkpoint, checkpoint.load() as pm:
        for number in range(1, 9):
            put(pm, **{str(number % 3): str(number)})
            faulty.failing = number % 3
            for _ in range(number % 3):
                with pytest.raises(quire.IOFailedError):
                    checkpoint.commit(pm)
                if number % 2:
                    pm.abort()
                    put(pm, other=str(number))
            states[number] = content(pm)
            assert checkpoint.commit(pm) == number
            checkpoint.maintain()
    store = Checkpoint(tmp_path).store()
    assert {number: loaded(store, number) for number in states} == states
    sound(tmp_path)


ROOM = {"delta": ["list", "deque"], "pages": ["list", "deque", "raw"], "auto": ["list", "deque", "raw"], "cec": []}


@pytest.mark.parametrize("kind", ["list", "deque", "raw"])
@pytest.mark.parametrize("mode", MODES)
def test_what_each_mode_takes(tmp_path, mode, kind):
    with Manager(tmp_path, mode=mode) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")
        others = getattr(pm, kind)("others")
        others.alloc() if kind == "raw" else others.append(b"x")
        if kind not in ROOM[mode]:
            modes = "pages takes it" if mode == "delta" else "pages and auto take it"
            with pytest.raises(quire.InvalidError, match=f"'others' is .*: modes? .*{modes}"):
                checkpoint.commit(pm)
            pm.abort()
            put(pm, a="1")
        expected = content(pm)
        assert checkpoint.commit(pm) == 1
    assert ("others" in expected) == (kind in ROOM[mode])
    assert loaded(Checkpoint(tmp_path).store()) == expected
    sound(tmp_path)


def test_a_delta_between_logs_takes_no_lists(tmp_path):
    """Where a log cannot follow a log, a delta lies between; it takes what a log takes."""
    with Manager(tmp_path, mode="cec") as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")
        checkpoint.commit(pm)
    with Manager(tmp_path, mode="delta", bases_every=1) as checkpoint, checkpoint.load() as pm:
        checkpoint.maintain()
    with Manager(tmp_path, mode="cec") as checkpoint, checkpoint.load() as pm:
        pm.deque("queue")
        with pytest.raises(quire.InvalidError, match="'queue' is a list or deque, and mode cec takes maps alone"):
            checkpoint.commit(pm)
        pm.destroy("queue")
        checkpoint.commit(pm)
    assert kinds(tmp_path) == [FileKind.LOG, FileKind.DELTA]


@pytest.mark.parametrize("mode", ["delta", "pages", "auto"])
def test_changes_of_lists(tmp_path, mode):
    with Manager(tmp_path, mode=mode) as checkpoint, checkpoint.load() as pm:
        queue = pm.deque("queue")
        queue.extend([b"a", b"b", b"c"])
        pm.list("gone")
        checkpoint.commit(pm)
        queue.popleft()
        queue.append(b"d")
        pm.destroy("gone")
        put(pm, k="1")
        checkpoint.commit(pm)
    records = Checkpoint(tmp_path).store().changes(2)
    assert [record.family for record in records if record.op == Op.DROP] == ["gone"]
    assert [(record.splice, record.values) for record in records if record.op == Op.SPLICE] == [
        (Splice(0, 1, 2), ()),
        (Splice(2, 0, 0), (b"d",)),
    ]
    assert [record.key for record in records if record.op == Op.PUT] == [b"k"]


@pytest.mark.parametrize("mode", MODES)
def test_inspect_tells_the_kind(tmp_path, mode):
    with Manager(tmp_path, mode=mode) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")
        checkpoint.commit(pm)
    found = tools.summary(Checkpoint(tmp_path).store())
    assert found.kind == {"cec": "log", "auto": "delta"}.get(mode, mode) and found.keys == 1


def test_extent_targets_that_make_no_sense(tmp_path):
    for target in (1, 0.5, 0, -3, True, "2", float("nan"), float("inf"), 10**400, 1e10, None):
        with pytest.raises(quire.InvalidError, match=r"extent_target .*: give a number greater than 1.* in it once"):
            Manager(tmp_path, mode="cec", extent_target=target)
