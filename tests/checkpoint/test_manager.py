"""The manager: what is committed comes back, failures leave the last version; bases, cleaning, two programs at once."""

import contextlib
import errno
import itertools
import json
import random
import struct
import tempfile
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import stores
from hypothesis import given
from stores import CHANGES, SPLICES, Writer, change, content, loaded, put, splice

import quire
from quire.checkpoint import (
    CancelledError,
    Checkpoint,
    IOService,
    Manager,
    StoreId,
    Version,
    codecs,
    container,
    io_service,
    manager,
    storage,
    tools,
)
from quire.checkpoint.container import FileKind, FrameKind, Parts


@pytest.fixture
def small(monkeypatch):
    """A few kilobytes have parts."""
    monkeypatch.setattr(io_service, "INLINE_BYTES", 40 << 10)
    monkeypatch.setattr(io_service, "FRAME_BYTES", 8 << 10)
    monkeypatch.setattr(io_service, "WINDOW_BYTES", 64 << 10)


def names(folder):
    return sorted(path.name for path in Path(folder, "state/0/0").iterdir())


def fill(pm, seed, count=400):
    """Enough for an image of 100 kilobytes."""
    rng = random.Random(seed)
    pm.map("default").update({b"key%d" % key: rng.randbytes(200) for key in range(count)})


# ------------------------------------------------------------------------------------------------ versions


@given(
    steps=st.lists(
        st.tuples(
            CHANGES,
            SPLICES,
            st.sampled_from(["commit", "abort", "maintain", "beside", "load again", "new manager", "back"]),
        ),
        min_size=1,
        max_size=8,
    ),
    mode=st.sampled_from(["delta", "pages", "auto"]),
    codec=st.sampled_from(sorted(codecs.COMPRESS)),
    inline=st.booleans(),
)
def test_what_is_committed_comes_back(steps, mode, codec, inline):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if inline else 1)
        patch.setattr(io_service, "FRAME_BYTES", 8 << 10)
        states = [{}]
        options = {"mode": mode, "codec": codec, "bases_every": 2, "retain": 3}
        with contextlib.ExitStack() as stack:
            checkpoint = stack.enter_context(Manager(folder, **options))
            pm = stack.enter_context(checkpoint.load())
            for changes, splices, step in steps:
                change(pm, changes)
                splice(pm, splices)
                if step == "abort":
                    pm.abort()
                elif step in ("commit", "maintain", "beside"):
                    states.append(content(pm))
                    assert checkpoint.commit(pm) == checkpoint.version == len(states) - 1
                    if step != "commit":
                        checkpoint.maintain(background=step == "beside")
                else:
                    stack.close()
                    checkpoint = stack.enter_context(Manager(folder, **options))
                    back = step == "back" and len(states) > 1
                    pm = stack.enter_context(checkpoint.load(len(states) - 2 if back else None))
                    assert checkpoint.version == len(states) - 1 - back
                    assert content(pm) == states[checkpoint.version]
                    if back:
                        del states[-1]
                        put(pm, other="line")
                        states.append(content(pm))
                        checkpoint.commit(pm)
                pm.check()
            assert content(pm) == states[-1] or step not in ("commit", "maintain", "beside", "abort")
        if len(states) > 1:
            store = Checkpoint(folder).store(0, 0)
            for version in store.versions():
                with contextlib.suppress(quire.NotFoundError):  # what is older than the oldest base is no line any more
                    assert loaded(store, version.number) == states[version.number]
            assert loaded(store) == states[-1]
            assert not tools.examine(store, False, lambda count: None).problems


def test_a_new_folder_is_made_as_spark_has_it(tmp_path):
    for store, place in (("default", "state/3/7"), ("left-keys", "state/3/7/left-keys")):
        with Manager(tmp_path, 3, 7, store) as checkpoint, checkpoint.load() as pm:
            assert (checkpoint.version, content(pm)) == (0, {})
            put(pm, a="1")
            assert checkpoint.commit(pm) == 1
        assert (tmp_path / place / "1.qdelta").is_file()
    assert [found.id for found in Checkpoint(tmp_path).stores()] == [StoreId(3, 7), StoreId(3, 7, "left-keys")]


def test_there_is_nothing_to_maintain_before_the_first_commit(tmp_path):
    with Manager(tmp_path, bases_every=1) as checkpoint, checkpoint.load():
        checkpoint.maintain()
        checkpoint.maintain(background=True).wait()
    assert list(tmp_path.iterdir()) == []


def test_typed_maps_keep_their_schema(tmp_path):
    schema = quire.Schema({"id": "int64"}, {"count": "int64"})
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm:
        pm.map("counts", schema)[7] = 3
        checkpoint.commit(pm)
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm:
        assert pm.map("counts").schema == schema and pm.map("counts")[7] == 3


def test_goes_on_where_spark_was(tmp_path):
    """Files as the provider writes them; with ids each version gets one, and names its parent's."""
    for ids in (False, True):
        folder = tmp_path / str(ids)
        with Writer(folder / "state/0/0", StoreId(0, 0), ids=ids) as writer:
            for number in range(3):
                writer.commit({("default", b"%d" % number): [b"x"]})
        with Manager(folder) as checkpoint, checkpoint.load() as pm:
            put(pm, more="y")
            assert checkpoint.commit(pm) == 4
            put(pm, more="z")
            assert checkpoint.commit(pm) == 5
        store = Checkpoint(folder).store()
        assert [bool(version.id) for version in store.versions()] == [ids] * 5
        assert loaded(store)["default"] == {b"0": [b"x"], b"1": [b"x"], b"2": [b"x"], b"more": [b"z"]}


def test_older_versions_and_going_back(tmp_path):
    with Manager(tmp_path, bases_every=2) as checkpoint:
        with checkpoint.load() as pm:
            for number in range(1, 6):
                put(pm, number=str(number))
                checkpoint.commit(pm)
                checkpoint.maintain()
        assert {"4.qbase", "5.qdelta"} <= set(names(tmp_path))
        with checkpoint.load(3) as pm:
            assert pm.map("default")[b"number"] == b"3"
            # Looking at it changes nothing.
            assert checkpoint.store.versions()[-1] == Version(5)
            put(pm, number="other")
            assert checkpoint.commit(pm) == 4
        assert checkpoint.store.versions()[-1] == Version(4)
        assert "4.qbase" not in names(tmp_path)
        with checkpoint.load() as pm:
            assert pm.map("default")[b"number"] == b"other"
        with checkpoint.load(0) as pm:
            assert content(pm) == {}
            put(pm, number="first")
            assert checkpoint.commit(pm) == 1
        assert names(tmp_path) == ["1.qdelta"]


# ------------------------------------------------------------------------------------------------ two programs


def test_of_two_programs_the_first_one_wins(tmp_path):
    with Manager(tmp_path) as one, Manager(tmp_path) as other, one.load() as a, other.load() as b:
        put(a, who="one")
        put(b, who="other")
        assert one.commit(a) == 1
        with pytest.raises(
            quire.ExistsError, match=r"1\.qdelta is there already: another program has .* load\(\) again"
        ):
            other.commit(b)
        b.abort()
        assert content(b) == {} and other.version == 0
        with other.load() as again:
            assert content(again) == {"default": {b"who": [b"one"]}}
            assert other.commit(again) == 2
        # One does not know of 2, and has not gone back.
        put(a, who="one again")
        with pytest.raises(quire.ExistsError, match=r"2\.qdelta"):
            one.commit(a)
    assert loaded(Checkpoint(tmp_path).store()) == {"default": {b"who": [b"one"]}}


def test_the_same_content_is_no_quarrel(tmp_path):
    with Manager(tmp_path) as one, Manager(tmp_path) as other, one.load() as a, other.load() as b:
        for number in range(3):
            put(a, same=str(number))
            put(b, same=str(number))
            assert one.commit(a) == other.commit(b) == number + 1


def test_many_programs_at_once(tmp_path):
    """Each commits when it can; every version that one of them got is in the end state."""
    got, errors = [], []

    def program(who):
        try:
            with Manager(tmp_path, codec="zstd", bases_every=3) as checkpoint:
                while len(got) < 30:
                    with contextlib.suppress(quire.ExistsError), checkpoint.load() as pm:
                        key = f"{who}-{checkpoint.version}"
                        put(pm, **{key: who})
                        got.append((checkpoint.commit(pm), key.encode()))
                        checkpoint.maintain()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=program, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(number for number, _ in got) == list(range(1, len(got) + 1))
    assert set(loaded(Checkpoint(tmp_path).store())["default"]) == {key for _, key in got}


# ------------------------------------------------------------------------------------------------ failures


class Faulty(storage.LocalStorage):
    """Raises before or after the writing of files whose name ends so."""

    def __init__(self, suffix, *errors, after=False):
        self.suffix, self.errors, self.after = suffix, list(errors), after

    def write_atomic(self, path, data, *, replace=False):
        error = self.errors.pop(0) if path.endswith(self.suffix) and self.errors else None
        if error is not None and not self.after:
            raise error
        super().write_atomic(path, data, replace=replace)
        if error is not None:
            raise error


def test_a_commit_that_fails_leaves_the_last_version(tmp_path):
    faulty = Faulty("2.qdelta", quire.NoSpaceError("full"), quire.IOFailedError("broken"))
    with Manager(tmp_path, storage=faulty) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")
        checkpoint.commit(pm)
        put(pm, a="2")
        for error in (quire.NoSpaceError, quire.IOFailedError):
            with pytest.raises(error):
                checkpoint.commit(pm)
            assert checkpoint.version == 1
            assert loaded(checkpoint.store) == {"default": {b"a": [b"1"]}}
        pm.abort()
        assert content(pm) == {"default": {b"a": [b"1"]}}
        put(pm, a="3")
        assert checkpoint.commit(pm) == 2
    assert loaded(Checkpoint(tmp_path).store()) == {"default": {b"a": [b"3"]}}


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("again", ["as it was", "changed"])
def test_a_commit_that_failed_after_its_file_had_its_name(tmp_path, again, ids):
    """Such as when the folder could not be synced: what is there is known as one's own, and replaced."""
    with Writer(tmp_path / "state/0/0", StoreId(0, 0), ids=ids) as writer:
        writer.commit({("default", b"first"): [b"0"]})
    faulty = Faulty(".qdelta", *[quire.IOFailedError("no answer")] * 3, after=True)
    with Manager(tmp_path, storage=faulty) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")
        for number in range(2):
            with pytest.raises(quire.IOFailedError, match="no answer"):
                checkpoint.commit(pm)
            if again == "as it was":
                break
            pm.abort()
            put(pm, b=str(number))
        faulty.errors.clear()
        expected = content(pm)
        assert checkpoint.commit(pm) == 2
    assert loaded(Checkpoint(tmp_path).store()) == expected


@pytest.mark.parametrize("ids", [False, True])
def test_a_commit_that_failed_and_was_gone_on_from_stays(tmp_path, ids):
    """Else what the other program wrote would be put on a state that it was not made from."""
    faulty = Faulty(".qdelta", quire.IOFailedError("no answer"), after=True)
    with (
        Manager(tmp_path, storage=faulty, ids=ids) as one,
        Manager(tmp_path, ids=ids) as other,
        one.load() as a,
    ):
        put(a, a="one")
        with pytest.raises(quire.IOFailedError, match="no answer"):
            one.commit(a)
        a.abort()
        with other.load() as b:
            put(b, b="other")
            assert other.commit(b) == 2
            put(a, c="one")
            with pytest.raises(quire.ExistsError, match=r"has gone on from .* load\(\) again"):
                one.commit(a)
            assert loaded(Checkpoint(tmp_path).store()) == content(b) == {"default": {b"a": [b"one"], b"b": [b"other"]}}


def test_a_commit_that_is_durable_and_not_in_memory(tmp_path, monkeypatch):
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm:
        put(pm, a="1")

        def fail():
            raise quire.NoMemoryError("none left")

        monkeypatch.setattr(pm, "commit", fail)
        with pytest.raises(quire.QuireError, match=r"version 1 is durable, but not in memory \(none left\): load\(\)"):
            checkpoint.commit(pm)
        with pytest.raises(quire.InvalidError, match="no version is loaded"):
            checkpoint.commit(pm)
        with checkpoint.load() as again:
            assert content(again) == {"default": {b"a": [b"1"]}}


def test_a_queue_is_written_by_what_came_and_went(tmp_path):
    """However long it is."""
    with Manager(tmp_path, codec="") as checkpoint, checkpoint.load() as pm:
        queue = pm.deque("queue")
        queue.extend(b"%d" % number for number in range(100_000))
        checkpoint.commit(pm)
        for number in range(10):
            queue.popleft()
            queue.append(b"new %d" % number)
        checkpoint.commit(pm)
        expected = list(queue)
    folder = tmp_path / "state/0/0"
    assert (folder / "1.qdelta").stat().st_size > 400_000
    assert (folder / "2.qdelta").stat().st_size < 350
    store = Checkpoint(tmp_path).store()
    assert loaded(store) == {"queue": expected}
    assert tools.summary(store).keys == len(expected)


def test_bad_input(tmp_path):
    for options, message in (
        ({"mode": "page"}, r"mode 'page': give one of 'delta'"),
        ({"mode": None}, r"mode None: give one of 'delta'"),
        ({"codec": "lzf"}, r"codec 'lzf': give one of '', 'lz4', 'zstd', 'snappy'"),
        ({"bases_every": 0}, "bases_every 0: give a whole number from 1"),
        ({"retain": True}, "retain True: give a whole number from 1"),
        ({"operator": -1}, "operator -1: give a whole number from 0"),
        ({"partition": "0"}, "partition '0': give a whole number from 0"),
        ({"partition": 1 << 40}, "partition 1099511627776: give a whole number from 0 to 4294967295"),
        ({"operator": 1 << 63}, "operator 9223372036854775808: give a whole number from 0 to 9223372036854775807"),
        ({"ids": "no"}, "ids 'no': give True or False"),
        ({"store": "a/b"}, "store 'a/b': give a name that a folder can have"),
        ({"store": ""}, "store '': give a name"),
    ):
        with pytest.raises(quire.InvalidError, match=message):
            Manager(tmp_path, **options)
    with pytest.raises(quire.InvalidError, match="is no place of a checkpoint"):
        Manager("")
    with pytest.raises(quire.InvalidError, match="writers 0: give the number of threads"):
        IOService(0)
    with Manager(tmp_path) as checkpoint:
        with pytest.raises(quire.InvalidError, match=r"no version is loaded: load\(\) one"):
            checkpoint.maintain()
        with pytest.raises(quire.NotFoundError, match="has no version 7: it holds none"):
            checkpoint.load(7)
        with checkpoint.load() as pm, quire.PageManager() as other:
            with pytest.raises(quire.InvalidError, match=r"give the page manager that load\(\) gave last"):
                checkpoint.commit(other)
            put(pm, a="1")
            checkpoint.commit(pm)
        with pytest.raises(quire.ClosedError, match="the arena is closed"):
            checkpoint.commit(pm)
        with pytest.raises(quire.InvalidError, match="version -1"):
            checkpoint.load(-1)
    for call in (checkpoint.load, checkpoint.maintain, lambda: checkpoint.commit(pm), checkpoint.__enter__):
        with pytest.raises(quire.ClosedError, match=r"the manager of .* is closed"):
            call()
    checkpoint.close()


def test_folders_of_others_are_refused(tmp_path):
    folder = tmp_path / "state/0/0"
    folder.mkdir(parents=True)
    (folder / "1.changelog").write_bytes(b"")
    with (
        Manager(tmp_path) as checkpoint,
        pytest.raises(quire.InvalidError, match="was written by RocksDBStateStoreProv"),
    ):
        checkpoint.load()


def test_row_checksums_are_spark_s(tmp_path):
    with Writer(tmp_path / "state/0/0", StoreId(0, 0)) as writer:
        writer.version = Version(1)
        writer.write(writer.header(FileKind.DELTA, Version(0), flags=1), [], 0)
    message = r"rowChecksum\.enabled\), which Python does not write"
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm, pytest.raises(quire.InvalidError, match=message):
        checkpoint.commit(pm)


# ------------------------------------------------------------------------------------------------ bases


def test_a_base_is_due_every_so_many_versions(tmp_path):
    with Manager(tmp_path, bases_every=3) as checkpoint, checkpoint.load() as pm:
        for number in range(1, 8):
            put(pm, number=str(number))
            checkpoint.commit(pm)
            checkpoint.maintain()
    assert [name for name in names(tmp_path) if name.endswith("qbase")] == ["3.qbase", "6.qbase"]
    # The next one reckons from there.
    with Manager(tmp_path, bases_every=3) as checkpoint, checkpoint.load() as pm:
        checkpoint.commit(pm)
        checkpoint.maintain()
        checkpoint.commit(pm)
        checkpoint.maintain()
    assert "8.qbase" not in names(tmp_path) and "9.qbase" in names(tmp_path)
    with Path(tmp_path, "state/0/0/9.qbase").open("rb") as file:
        assert container.read(file, codecs.decompress).keys == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("codec", ["", "lz4", "zstd"])
def test_a_base_of_parts_byte_by_byte(tmp_path, codec):
    """As docs/format.md has it, read without the code that wrote it."""
    with Manager(tmp_path, bases_every=1, codec=codec) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        checkpoint.maintain()
        with pm.snapshot() as pinned:
            image = bytearray()
            pinned.write(image.extend)
        assert loaded(checkpoint.store) == content(pm)
    folder = tmp_path / "state/0/0"
    with (folder / "1.qbase").open("rb") as file:
        base = container.read(file, codecs.decompress)
    (frame,) = base.frames
    assert frame.kind == FrameKind.PARTS and base.header.kind == FileKind.BASE and base.keys == 400
    count, image_bytes, frame_bytes = struct.unpack_from("<IQI", frame.data)
    assert (count, image_bytes, frame_bytes) == (4, len(image), 8 << 10)
    at, parts = 16, []
    for number in range(count):
        (length,) = struct.unpack_from("<H", frame.data, at)
        name = frame.data[at + 2 : at + 2 + length].decode()
        (size,) = struct.unpack_from("<Q", frame.data, at + 2 + length)
        at += 10 + length
        token = name.split(".")[1]
        assert name == f"1.{token}.{number}.qpart" and len(token) == 16
        assert (folder / name).stat().st_size == size
        with (folder / name).open("rb") as file:
            parts.append(container.read(file, codecs.decompress))
    assert at == len(frame.data)
    for part in parts:
        assert part.header == base.header.__class__(**{**base.header.__dict__, "kind": FileKind.PART})
        assert {each.kind for each in part.frames} == {FrameKind.IMAGE}
    dealt = itertools.zip_longest(*(part.frames for part in parts))
    assert b"".join(each.data for row in dealt for each in row if each) == image


def test_a_base_stays_in_one_file_below_the_bound(tmp_path, monkeypatch):
    with quire.PageManager() as pm:
        fill(pm, 1)
        pm.commit()
        with pm.snapshot() as pinned:
            image = bytearray()
            pinned.write(image.extend)
    for bound, parts in ((len(image), True), (len(image) + 1, False)):
        monkeypatch.setattr(io_service, "INLINE_BYTES", bound)
        folder = tmp_path / str(bound)
        with Manager(folder, bases_every=1) as checkpoint, checkpoint.load() as pm:
            fill(pm, 1)
            checkpoint.commit(pm)
            checkpoint.maintain()
            assert bool(checkpoint.store.listing().parts) == parts
            assert bool(checkpoint.store.parts(checkpoint.store.listing().bases[Version(1)])) == parts
            assert loaded(checkpoint.store) == content(pm)


class Gated(storage.LocalStorage):
    """Writes files of a suffix only when it is let."""

    def __init__(self, suffix):
        self.suffix, self.gate, self.reached = suffix, threading.Event(), threading.Event()

    def write_atomic(self, path, data, *, replace=False):
        if path.endswith(self.suffix):
            self.reached.set()
            assert self.gate.wait(60)
        super().write_atomic(path, data, replace=replace)


@pytest.mark.usefixtures("small")
def test_the_program_goes_on_while_a_base_is_written(tmp_path):
    gated = Gated("qpart")
    with Manager(tmp_path, bases_every=1, storage=gated) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1, 2000)
        checkpoint.commit(pm)
        first = content(pm)
        job = checkpoint.maintain(background=True)
        assert gated.reached.wait(60) and not job.done
        for seed in (2, 3):
            fill(pm, seed, 2000)
            checkpoint.commit(pm)
        assert checkpoint.maintain(background=True) is job
        with pytest.raises(TimeoutError, match="bytes are written after 0 seconds"):
            job.wait(0)
        assert not job.done and "1.qbase" not in names(tmp_path)
        # No more of the image is on its way than the window lets.
        assert job.bytes_done == 0 and job.bytes_total > 4 * io_service.WINDOW_BYTES
        gated.gate.set()
        job.wait()
        assert job.bytes_done == job.bytes_total
        assert "1.qbase" in names(tmp_path)
        (tmp_path / "state/0/0/1.qdelta").unlink()
        assert loaded(checkpoint.store, 1) == first
        assert loaded(checkpoint.store) == content(pm)
        # The pages of the version are let go.
        assert pm.stats().snapshots == 1


@pytest.mark.usefixtures("small")
def test_closing_waits_for_the_base(tmp_path):
    gated = Gated("qpart")
    with Manager(tmp_path, bases_every=1, storage=gated) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        job = checkpoint.maintain(background=True)
        threading.Timer(0.05, gated.gate.set).start()
    assert job.done
    job.wait()
    assert "1.qbase" in names(tmp_path)


@pytest.mark.usefixtures("small")
def test_an_error_in_the_program_cancels_the_base(tmp_path):
    gated = Gated("qpart")
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(RuntimeError, match="program"),
        Manager(tmp_path, bases_every=1, storage=gated) as checkpoint,
    ):
        # Closed later: to close it is to wait for the image.
        pm = stack.enter_context(checkpoint.load())
        fill(pm, 1)
        checkpoint.commit(pm)
        job = checkpoint.maintain(background=True)
        opener = threading.Thread(target=lambda: job._stop.wait(60) and gated.gate.set())
        opener.start()
        raise RuntimeError("the program's own")
    opener.join()
    with pytest.raises(CancelledError):
        job.wait()
    assert names(tmp_path) == ["1.qdelta"]


@pytest.mark.usefixtures("small")
def test_progress(tmp_path):
    seen = []
    with Manager(tmp_path, bases_every=1) as checkpoint, checkpoint.load() as pm:
        for _ in range(2):
            fill(pm, 1)
            checkpoint.commit(pm)
            checkpoint.maintain(progress=lambda done, total: seen.append((done, total)))
            total = seen[-1][1]
            assert seen[-1] == (total, total) and len({total for _, total in seen}) == 1
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)
            assert len(seen) == -(-total // io_service.FRAME_BYTES)
            seen.clear()


@pytest.mark.usefixtures("small")
def test_a_base_is_cancelled(tmp_path):
    """Parts may stay, and are cleaned away with the next base."""
    with Manager(tmp_path, bases_every=1) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1, 2000)
        checkpoint.commit(pm)
        jobs = []

        def progress(done, total):
            if jobs and done > total // 2:
                jobs[0].cancel()

        gated = Gated("qpart")
        checkpoint._storage = gated
        jobs.append(checkpoint.maintain(background=True, progress=progress))
        gated.gate.set()
        with pytest.raises(CancelledError, match="removed by cleaning"):
            jobs[0].wait()
        checkpoint._storage = storage.LocalStorage()
        assert "1.qbase" not in names(tmp_path)
        assert loaded(checkpoint.store) == content(pm)
        checkpoint.commit(pm)
        checkpoint.maintain()
        assert {part.version for part in checkpoint.store.listing().parts} == {Version(2)}
        assert loaded(checkpoint.store) == content(pm)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("suffix", ["2.qpart", "1.qbase"])
def test_a_writer_that_fails_stops_the_base(tmp_path, suffix, background, caplog):
    faulty = Faulty(suffix, quire.NoSpaceError("the disk is full"))
    with Manager(tmp_path, bases_every=1, storage=faulty) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1, 2000)
        checkpoint.commit(pm)
        with pytest.raises(quire.NoSpaceError, match="the disk is full"):
            checkpoint.maintain(background=background).wait()
        assert ("will be tried again: the disk is full" in caplog.text) == background
        assert "1.qbase" not in names(tmp_path)
        assert loaded(checkpoint.store) == content(pm)
        checkpoint.maintain()
        assert "1.qbase" in names(tmp_path)
        assert loaded(checkpoint.store) == content(pm)


@pytest.mark.usefixtures("small")
def test_a_part_that_is_gone(tmp_path):
    with Manager(tmp_path, bases_every=1) as checkpoint:
        with checkpoint.load() as pm:
            fill(pm, 1)
            checkpoint.commit(pm)
            checkpoint.maintain()
            expected = content(pm)
        part = checkpoint.store.listing().parts[1]
        Path(part.path).unlink()
        with pytest.raises(quire.CorruptError, match=rf"1\.qbase: one of its parts is gone: .*{Path(part.path).name}"):
            checkpoint.load()
        with checkpoint.load(repair=True) as pm:
            assert content(pm) == expected
            # The base that was passed over is written again.
            checkpoint.maintain()
        assert loaded(checkpoint.store) == expected


def test_lists_of_parts_that_make_no_sense():
    good = Parts(3 << 20, 1 << 20, (("7.a.0.qpart", 100), ("7.a.1.qpart", 100)))
    data = good.encode()
    assert Parts.decode(data) == good
    for wrong in (
        *(data[:count] for count in range(len(data))),
        data + b"\0",
        Parts(1 << 60, 1 << 20, good.files).encode(),
        Parts(1, 0, good.files).encode(),
        Parts(0, 1, good.files).encode(),
        Parts(1, 1, ()).encode(),
        struct.pack("<IQIH", 1, 1, 1, 2) + b"\xff\xff" + bytes(8),
    ):
        with pytest.raises(quire.CorruptError, match="parts"):
            Parts.decode(wrong)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["../1.a.0.qpart", "2.a.0.qpart", "1.qdelta", "1.a.0.qpart/x", ""])
def test_a_base_names_nothing_but_parts_of_its_own(tmp_path, name):
    with Writer(tmp_path, StoreId(0, 3)) as writer:
        writer.version = Version(1)
        frame = container.Frame(FrameKind.PARTS, Parts(100, 100, ((name, 500),)).encode())
        writer.write(writer.header(FileKind.BASE, Version(1), page_bytes=1024), [frame], 0)
    with pytest.raises(quire.CorruptError, match=r"1\.qbase: it names .* which is no part of it"):
        Checkpoint(tmp_path).store().load()


@pytest.mark.parametrize("mode", ["pages", "auto"])
@pytest.mark.parametrize("parts", [False, True])
def test_a_base_that_another_program_wrote_stays(tmp_path, monkeypatch, mode, parts):
    """Pages may start from the very pages in it, and those in another of the same version are not the same."""
    if parts:
        monkeypatch.setattr(io_service, "INLINE_BYTES", 1)
    with Manager(tmp_path, mode="delta") as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        fill(pm, 2)
        checkpoint.commit(pm)
    with (
        Manager(tmp_path, mode=mode, bases_every=1) as one,
        Manager(tmp_path, mode=mode, bases_every=1) as other,
        one.load() as a,
        other.load() as b,
    ):
        one.maintain()
        base = (tmp_path / "state/0/0/2.qbase").read_bytes()
        for seed in range(3, 6):
            fill(a, seed)
            if mode == "auto":
                a.raw("pages")  # has it write pages
            one.commit(a)
        assert one.store.header(one.store.listing().deltas[Version(3)]).kind == FileKind.PAGES
        other.maintain()
        assert (tmp_path / "state/0/0/2.qbase").read_bytes() == base
        for number in range(3, 6):
            one.store.load(number).close()
        # It goes on from what it has, and starts from pages that are there.
        with other.load(2) as b:
            fill(b, 7)
            assert other.commit(b) == 3
            expected = content(b)
    assert loaded(Checkpoint(tmp_path).store()) == expected


def test_a_base_whose_answer_was_lost_is_one_s_own(tmp_path):
    class Lost(storage.LocalStorage):
        def _write(self, path, chunks, replace):
            super()._write(path, chunks, replace)
            if path.endswith("qbase") and not replace:
                raise TimeoutError("no answer")

    with Manager(tmp_path, mode="pages", bases_every=1, storage=Lost()) as checkpoint, checkpoint.load() as pm:
        for seed in range(3):
            fill(pm, seed)
            checkpoint.commit(pm)
            checkpoint.maintain()
            assert checkpoint.point[0] == checkpoint.version
        expected = content(pm)
    assert loaded(Checkpoint(tmp_path).store()) == expected


def test_two_beginnings_at_once(tmp_path):
    """As when two tasks run the first batch of an operator."""
    with (
        Manager(tmp_path, mode="pages", ids=True) as one,
        Manager(tmp_path, mode="pages", ids=True) as other,
        one.begin(5) as a,
        other.begin(5) as b,
    ):
        for checkpoint, pm in ((one, a), (other, b)):
            put(pm, a="1")
            checkpoint.commit(pm)
        for checkpoint in (one, other):
            assert loaded(checkpoint.store, 6, checkpoint.version_id.id) == {"default": {b"a": [b"1"]}}


# ------------------------------------------------------------------------------------------------ cleaning


@pytest.mark.usefixtures("small")
def test_cleaning_keeps_what_versions_need(tmp_path):
    with Manager(tmp_path, bases_every=3, retain=4) as checkpoint, checkpoint.load() as pm:
        states = [{}]
        for number in range(1, 15):
            fill(pm, number, 300)
            checkpoint.commit(pm)
            states.append(content(pm))
            checkpoint.maintain()
            for version in range(max(number - 4, 0), number + 1):
                assert loaded(checkpoint.store, version) == states[version]
        # 14 - 4 = 10: the base of 9 is the newest that is not newer.
        assert checkpoint.store.versions()[0] == Version(9)
        assert {part.version for part in checkpoint.store.listing().parts} == {Version(9), Version(12)}


@pytest.mark.usefixtures("small")
def test_cleaning_takes_what_nobody_needs(tmp_path):
    folder = tmp_path / "state/0/0"
    with Manager(tmp_path, bases_every=2) as checkpoint, checkpoint.load() as pm:
        for _ in range(2):
            fill(pm, 1)
            checkpoint.commit(pm)
        stays = ["5.ab.0.qpart", "4.ab.0.qpart", ".2.qdelta.x.tmp", ".4.ab.1.qpart.x.tmp", "notes.txt", "3.ab.qpart"]
        goes = ["1.ab.0.qpart", ".1.ab.0.qpart.x.tmp", "2_id.ab.0.qpart", "3.ab.12.qpart", ".2.ab.0.qpart.x.tmp"]
        goes += [".1.qdelta.x.tmp", ".1_id.qbase.x.tmp.crc"]
        for name in stays + goes:
            (folder / name).write_bytes(b"left")
        checkpoint.maintain()
        # 2 has a base now; what is of 2 or newer may be somebody's work.
        assert {name for name in goes if not (folder / name).exists()} == set(goes[:2])
        for _ in range(2):
            checkpoint.commit(pm)
        checkpoint._retain = 2
        checkpoint.maintain()
        assert not set(goes) & set(names(tmp_path)) and set(stays) <= set(names(tmp_path))
        assert {version.number for version in checkpoint.store.listing().bases} == {2, 4}
        assert loaded(checkpoint.store, 2) == loaded(checkpoint.store, 4) == content(pm)


@pytest.mark.usefixtures("small")
def test_parts_of_a_damaged_base_stay(tmp_path):
    with Manager(tmp_path, bases_every=1) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        checkpoint.maintain()
        base = tmp_path / "state/0/0/1.qbase"
        base.write_bytes(base.read_bytes()[:-1])
        checkpoint.commit(pm)
        checkpoint.maintain()
        assert {part.version for part in checkpoint.store.listing().parts} == {Version(1), Version(2)}


@pytest.mark.usefixtures("small")
def test_no_base_names_parts_that_are_gone(tmp_path):
    """As when another program has a newer base, and cleans."""

    class Cleaned(storage.LocalStorage):
        def write_atomic(self, path, data, *, replace=False):
            super().write_atomic(path, data, replace=replace)
            if path.endswith("1.qpart"):
                Path(path).unlink()

    with Manager(tmp_path, bases_every=1, storage=Cleaned()) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        with pytest.raises(quire.NotFoundError, match=r"\.1\.qpart was removed before its base was written"):
            checkpoint.maintain()
        assert "1.qbase" not in names(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_base_whose_parts_went_as_it_got_its_name_goes(tmp_path):
    class Cleaned(storage.LocalStorage):
        def write_atomic(self, path, data, *, replace=False):
            super().write_atomic(path, data, replace=replace)
            if path.endswith("qbase"):
                next(Path(path).parent.glob("*.qpart")).unlink()

    with Manager(tmp_path, bases_every=1, storage=Cleaned()) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        with pytest.raises(quire.NotFoundError, match="was removed before its base was written"):
            checkpoint.maintain()
        assert "1.qbase" not in names(tmp_path)
        assert loaded(checkpoint.store) == content(pm)


@pytest.mark.usefixtures("small")
def test_parts_whose_base_comes_while_others_clean_stay(tmp_path):
    """The one who cleans has listed the parts without it."""
    folder, aside = tmp_path / "state/0/0", tmp_path / "aside"

    class Late(storage.LocalStorage):
        def list(self, path):
            found = super().list(path)
            if path == str(folder) and aside.exists():
                aside.rename(folder / "1.qbase")
            return found

    with Manager(tmp_path, bases_every=1, storage=Late()) as checkpoint, checkpoint.load() as pm:
        fill(pm, 1)
        checkpoint.commit(pm)
        checkpoint.maintain()
        checkpoint.commit(pm)
        checkpoint.maintain()
        checkpoint._bases_every = 100
        (folder / "1.qbase").rename(aside)
        checkpoint.maintain()
        assert not aside.exists()
        checkpoint.maintain()
        assert loaded(checkpoint.store, 1) == content(pm)


def test_checksums_of_hadoop_go_with_their_files(tmp_path):
    folder = tmp_path / "state/0/0"
    with Manager(tmp_path, bases_every=1, retain=1) as checkpoint:
        with checkpoint.load() as pm:
            for _ in range(4):
                checkpoint.commit(pm)
            for name in ("1.qdelta", "2.qdelta", "4.qdelta"):
                (folder / f".{name}.crc").write_bytes(b"crc")
            checkpoint.maintain()
            checkpoint.commit(pm)
            checkpoint.maintain()
        assert names(tmp_path) == [".4.qdelta.crc", "4.qbase", "4.qdelta", "5.qbase", "5.qdelta"]
        (folder / ".5.qdelta.crc").write_bytes(b"crc")
        with checkpoint.load(4) as pm:
            checkpoint.commit(pm)
        assert ".5.qdelta.crc" not in names(tmp_path)


def test_a_base_of_another_line_is_not_cleaned_behind(tmp_path):
    """With ids: an attempt that came to nothing may have left a base, which no version of ours can be loaded from."""
    folder = tmp_path / "state/0/0"
    with Writer(folder, StoreId(0, 0), ids=True) as writer:
        writer.commit({("default", b"a"): [b"1"]})
    with Manager(tmp_path, bases_every=100, retain=1) as checkpoint, checkpoint.load() as pm:
        put(pm, a="2")
        checkpoint.commit(pm)
        with Writer(folder, StoreId(0, 0), ids=True) as other:
            other.version = Version(1, "other")
            other.states[other.version] = {}
            other.commit({("default", b"lost"): [b"1"]}, alone=True)
        for _ in range(4):
            checkpoint.commit(pm)
            checkpoint.maintain()
        assert loaded(checkpoint.store) == content(pm)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("at", [40, -1])
def test_cleaning_takes_nothing_where_damage_hides_what_is_needed(tmp_path, ids, at):
    folder = tmp_path / "state/0/0"
    with Manager(tmp_path, ids=ids, retain=1) as checkpoint, checkpoint.load() as pm:
        for number in range(10):
            put(pm, a=str(number))
            checkpoint.commit(pm)
        (damaged,) = folder.glob("5*.qdelta")
        data = bytearray(damaged.read_bytes())
        data[at] ^= 1
        damaged.write_bytes(data)
        checkpoint._bases_every = 100
        checkpoint.maintain()
        for number in range(1, 5):
            assert loaded(checkpoint.store, number) == {"default": {b"a": [b"%d" % (number - 1)]}}
        # Behind a base nobody needs it.
        checkpoint._bases_every = 1
        for _ in range(3):
            checkpoint.maintain()
            checkpoint.commit(pm)
        checkpoint.maintain()
        assert checkpoint.store.versions()[0].number == 12
        assert loaded(checkpoint.store) == content(pm)


def test_versions_before_one_that_begins_a_line_of_its_own_are_kept(tmp_path):
    """As after Spark's offline repartitioning, or ``write_version``."""
    with Manager(tmp_path, retain=4) as checkpoint:
        with checkpoint.load() as pm:
            for number in range(1, 6):
                put(pm, a=str(number))
                checkpoint.commit(pm)
        with quire.PageManager() as pm:
            put(pm, b="1")
            checkpoint.write_version(pm, 6)
            checkpoint.commit(pm)
            checkpoint.maintain()
            for number in range(3, 6):
                assert loaded(checkpoint.store, number) == {"default": {b"a": [str(number).encode()]}}
            for _ in range(3):
                checkpoint.commit(pm)
            checkpoint.maintain()
            assert checkpoint.store.versions()[0] == Version(6)
            assert loaded(checkpoint.store) == content(pm)


def test_nothing_is_kept_in_memory_of_files_that_are_gone(tmp_path):
    with Manager(tmp_path, retain=1, bases_every=2) as checkpoint, checkpoint.load() as pm:
        for number in range(40):
            put(pm, a=str(number))
            checkpoint.commit(pm)
            checkpoint.maintain()
        assert len(checkpoint._needs) < 4


def test_maintenance_of_an_arena_that_was_closed_leaves_no_pin(tmp_path):
    with Manager(tmp_path, bases_every=1) as checkpoint:
        with checkpoint.load() as pm:
            put(pm, a="1")
            checkpoint.commit(pm)
        with pytest.raises(quire.ClosedError):
            checkpoint.maintain()
        assert checkpoint._state.pin._users == 1


def test_commands_on_what_the_manager_wrote(tmp_path, monkeypatch, capsys):
    from quire.cli import main

    monkeypatch.setattr(io_service, "INLINE_BYTES", 1 << 16)
    monkeypatch.setattr(io_service, "FRAME_BYTES", 1 << 14)
    with Manager(tmp_path, bases_every=2) as checkpoint, checkpoint.load() as pm:
        for seed in range(5):
            fill(pm, seed)
            checkpoint.commit(pm)
            checkpoint.maintain()
    files = [path.stat().st_size for path in (tmp_path / "state/0/0").iterdir()]
    assert main(["verify", str(tmp_path), "--all", "--json"]) == 0
    (store,) = json.loads(capsys.readouterr().out)["stores"]
    assert (store["files"], store["bytes"], store["keys"]) == (len(files), sum(files), 400)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    (store,) = json.loads(capsys.readouterr().out)["stores"]
    assert (store["files"], store["bytes"], store["keys"]) == (len(files), sum(files), 400)
    assert store["extent"]["files"] == 6
    stores.frame_ends((tmp_path / "state/0/0/4.qbase").read_bytes())


def test_the_mode_is_told_what_became_of_it(tmp_path, monkeypatch):
    told = []

    class Telling(manager.DeltaMode):
        def write(self, pm, older, version):
            told.append("write")
            return super().write(pm, older, version)

        def committed(self):
            told.append("committed")

        def forget(self):
            told.append("forget")

    monkeypatch.setitem(manager.MODES, "telling", Telling)
    faulty = Faulty("qdelta", OSError(errno.EACCES, "no"))
    with Manager(tmp_path, mode="telling", storage=faulty) as checkpoint, checkpoint.load() as pm:
        with pytest.raises(OSError):
            checkpoint.commit(pm)
        checkpoint.commit(pm)
    assert told == ["write", "forget", "write", "committed"]


@pytest.mark.parametrize("restart", [100, 10, 4, 1])
def test_a_log_that_began_on_a_base_stands_by_itself_whatever_restarts(tmp_path, restart):
    rng, model = random.Random(restart), {}
    with Manager(str(tmp_path), bases_every=1) as checkpoint, checkpoint.load() as pm:
        model |= {b"%d" % number: b"v" * 30 for number in range(500)}
        pm.map("users").update(model)
        checkpoint.commit(pm)
        checkpoint.maintain().wait()
    for _ in range(100 // restart):
        with Manager(str(tmp_path), mode="cec", retain=2) as checkpoint, checkpoint.load() as pm:
            for _ in range(restart):
                changed = {b"%d" % (10 * rng.randrange(50)): b"%d" % rng.randrange(100) for _ in range(30)}
                model |= changed
                pm.map("users").update(changed)
                checkpoint.commit(pm)
            checkpoint.maintain().wait()
    line = checkpoint.store.line()
    assert line.base is None and line.logs and len(line.files) < 40
    assert len(checkpoint.store.files()) < 45
    with checkpoint.store.load() as state:
        assert dict(state.map("users").items()) == model


def test_a_commit_is_not_told_durable_while_its_folder_cannot_be_synced(tmp_path, monkeypatch):
    real, broken = storage.sync_folder, True

    def sync(folder):
        if broken:
            raise OSError(errno.EIO, "I/O error")
        synced.append(folder)
        real(folder)

    synced = []
    with Manager(str(tmp_path)) as checkpoint, checkpoint.load() as pm:
        pm.map("users")[b"a"] = b"1"
        checkpoint.commit(pm)
        monkeypatch.setattr(storage, "sync_folder", sync)
        pm.map("users")[b"a"] = b"2"
        for _ in range(2):
            with pytest.raises(quire.QuireError, match="I/O error"):
                checkpoint.commit(pm)
        broken = False
        assert checkpoint.commit(pm) == 2
        assert synced
    with checkpoint.store.load() as state:
        assert dict(state.map("users").items()) == {b"a": b"2"}


def test_new_folders_survive_a_loss_of_power(tmp_path, monkeypatch):
    synced, real = [], storage.sync_folder
    monkeypatch.setattr(storage, "sync_folder", lambda folder: (synced.append(folder), real(folder)))
    with Manager(str(tmp_path / "deep" / "down")) as checkpoint, checkpoint.load() as pm:
        checkpoint.commit(pm)
    new = [tmp_path / path for path in ("deep", "deep/down", "deep/down/state", "deep/down/state/0")]
    assert {tmp_path, *new, *(tmp_path / "deep/down/state/0").iterdir()} == set(synced)


def test_maintenance_that_is_cancelled_before_it_begins_leaves_no_pin(tmp_path):
    gate = threading.Event()
    with Manager(str(tmp_path), bases_every=100) as checkpoint:
        pm = checkpoint.load()
        pm.map("users")[b"a"] = b"1"
        checkpoint.commit(pm)
        checkpoint._service._jobs.submit(gate.wait)
        job = checkpoint.maintain(background=True)
        assert pm.stats().snapshots == 1
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        checkpoint.load().close()
        timer.join()
        with pytest.raises(CancelledError):
            job.wait()
        assert pm.stats().snapshots == 0
        pm.close()


@pytest.mark.parametrize("restart", [1, 3])
def test_a_log_behind_a_delta_behind_logs_knows_what_was_before(tmp_path, restart):
    """The first logs stand by themselves, the delta ends that: what only they hold is not in the logs after it."""
    model = {b"%d" % number: b"v" * 30 for number in range(300)}
    with Manager(str(tmp_path), mode="cec") as checkpoint, checkpoint.load() as pm:
        pm.map("users").update(model)
        checkpoint.commit(pm)
    with Manager(str(tmp_path), mode="delta", bases_every=1000) as checkpoint, checkpoint.load() as pm:
        pm.map("users")[b"0"] = model[b"0"] = b"delta"
        checkpoint.commit(pm)
    for number in range(30):
        with Manager(str(tmp_path), mode="cec", retain=2) as checkpoint, checkpoint.load() as pm:
            for _ in range(restart):
                pm.map("users")[b"%d" % (number % 7)] = model[b"%d" % (number % 7)] = b"%d" % number
                checkpoint.commit(pm)
            checkpoint.maintain().wait()
        with checkpoint.store.load() as state:
            assert dict(state.map("users").items()) == model


@pytest.mark.parametrize("mode", ["delta", "pages", "cec", "auto"])
def test_a_state_moved_to_an_arena_of_its_own_is_gone_on_from_like_any(tmp_path, mode):
    """load(limit=) copies what was loaded; the log of mode cec does not come along, and must not be taken to."""
    model = {}
    for number in range(12):
        with (
            Manager(str(tmp_path), mode=mode, retain=1, bases_every=3) as checkpoint,
            checkpoint.load(limit="64m") as pm,
        ):
            pm.map("users")[b"%d" % number] = model[b"%d" % number] = b"x" * number
            checkpoint.commit(pm)
            checkpoint.maintain().wait()
        with checkpoint.store.load() as state:
            assert dict(state.map("users").items()) == model


def test_going_back_into_an_arena_of_its_own_removes_what_came_after(tmp_path):
    with Manager(str(tmp_path)) as checkpoint:
        with checkpoint.load() as pm:
            for number in range(5):
                pm.map("users")[b"%d" % number] = b""
                checkpoint.commit(pm)
        with checkpoint.load(3, limit="64m") as pm:
            assert checkpoint.commit(pm) == 4
        with checkpoint.load() as pm:
            assert checkpoint.version == 4 and set(pm.map("users")) == {b"0", b"1", b"2"}


@pytest.mark.parametrize("later", [{"bases_every": 10}, {"mode": "cec"}, {"bases_every": 50}], ids=str)
def test_what_lies_behind_a_damaged_base_is_kept(tmp_path, later):
    with Manager(str(tmp_path), bases_every=10) as checkpoint, checkpoint.load() as pm:
        for number in range(1, 26):
            pm.map("users")[b"%d" % number] = b"x" * number
            checkpoint.commit(pm)
            checkpoint.maintain().wait()
    base = tmp_path / "state/0/0/20.qbase"
    data = bytearray(base.read_bytes())
    data[len(data) // 2] ^= 1
    base.write_bytes(data)
    with Manager(str(tmp_path), retain=1, **later) as checkpoint, checkpoint.load(repair=True) as pm:
        checkpoint.maintain().wait()
        pm.map("users")[b"26"] = b""
        checkpoint.commit(pm)
        checkpoint.maintain().wait()
    for version in (25, 26):
        with Manager(str(tmp_path)) as checkpoint, checkpoint.load(version, repair=True) as pm:
            assert len(pm.map("users")) == version


@pytest.mark.parametrize("mode", ["pages", "auto"])
def test_cleaning_keeps_what_a_commit_beside_the_base_starts_from(tmp_path, mode):
    """Versions that changed nothing have bases, but pages go on to start from the last that did."""
    going, written = threading.Event(), threading.Event()

    def progress(done, total):
        written.set()
        going.wait()

    with Manager(str(tmp_path), mode=mode, bases_every=1, retain=1) as checkpoint, checkpoint.load() as pm:
        for number in range(10):
            pm.map("users")[b"%d" % number] = b"x" * number
            checkpoint.commit(pm)
            checkpoint.maintain().wait()
        for _ in range(5):
            checkpoint.commit(pm)
            checkpoint.maintain().wait()
        checkpoint.commit(pm)
        job = checkpoint.maintain(background=True, progress=progress)
        try:
            assert written.wait(60)
            pm.map("users")[b"new"] = b""
            checkpoint.commit(pm)
        finally:
            going.set()
        job.wait()
    with checkpoint.store.load() as state:
        assert len(state.map("users")) == 11


@pytest.mark.parametrize("mode", ["pages", "auto"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_raw_pages_that_were_freed_stay_free(tmp_path, mode, count):
    """The only page of a set is the root of its table, which has no node to tell that it is free."""
    with Manager(str(tmp_path), mode=mode) as checkpoint, checkpoint.load() as pm:
        raw = pm.raw("r")
        pages = [raw.alloc() for _ in range(count)]
        checkpoint.commit(pm)
        for page in pages:
            raw.free(page)
        checkpoint.commit(pm)
    with checkpoint.store.load() as state:
        assert list(state.raw("r").ids()) == []
        state.check()
        assert state.raw("r").alloc() in pages


@pytest.mark.parametrize("start", ["load", "begin"])
def test_an_arena_that_holds_something_is_refused(tmp_path, start):
    path = tmp_path / "there.arena"
    with quire.PageManager(path) as pm:
        pm.map("users")[b"old"] = b"1"
        pm.commit()
    refused = pytest.raises(quire.InvalidError, match=r"there\.arena.* holds users: give a new file")
    with Manager(str(tmp_path / "checkpoint")) as checkpoint, refused:
        checkpoint.load(path=path) if start == "load" else checkpoint.begin(0, path=path)
    with quire.PageManager(path) as pm:
        assert pm.map("users")[b"old"] == b"1"


def test_going_back_where_versions_have_ids(tmp_path):
    with Manager(str(tmp_path), ids=True) as checkpoint, checkpoint.load() as pm:
        for number in range(4):
            pm.map("users")[b"k"] = b"%d" % number
            checkpoint.commit(pm)
    with Manager(str(tmp_path)) as checkpoint, checkpoint.load(1) as pm:
        pm.map("users")[b"k"] = b"corrected"
        assert checkpoint.commit(pm) == 2
    with Manager(str(tmp_path)) as checkpoint, checkpoint.load() as pm:
        assert (checkpoint.version, pm.map("users")[b"k"]) == (2, b"corrected")


@pytest.mark.parametrize("number", ["x", None, -1, 1.5])
def test_a_beginning_has_a_whole_number(tmp_path, number):
    with Manager(str(tmp_path)) as checkpoint, pytest.raises(quire.InvalidError, match="number"):
        checkpoint.begin(number)
