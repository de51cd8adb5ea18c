"""Checkpoints read from Python: those written here for the purpose, damaged in all ways, and those of real queries."""

import contextlib
import io
import itertools
import json
import os
import random
import struct
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pyarrow import fs
from stores import CHANGES, Writer, frame_ends, loaded, sample

import quire
from quire.checkpoint import Checkpoint, Manager, Store, StoreId, Version, codecs, container, delta, reader, storage
from quire.checkpoint.container import FileKind, Frame, FrameKind

REFUSED = (quire.CorruptError, quire.VersionError)


# ------------------------------------------------------------------------------------------------ what is there


@given(
    steps=st.lists(st.tuples(CHANGES, st.sampled_from(["delta", "base too", "base alone"])), min_size=1, max_size=6),
    codec=st.sampled_from(["", "lz4", "zstd", "snappy"]),
    ids=st.booleans(),
)
def test_every_version_comes_back(steps, codec, ids):
    with tempfile.TemporaryDirectory() as folder, Writer(folder, codec=codec, ids=ids) as writer:
        store = Store(storage.LocalStorage(), folder)
        for changes, kind in steps:
            writer.commit(changes, alone=kind == "base alone")
            if kind == "base too":
                writer.base()
            assert loaded(store) == writer.states[writer.version]
        assert store.versions() == sorted(set(writer.states) - {Version(0)})
        for version, expected in writer.states.items():
            assert loaded(store, version.number) == expected
            assert loaded(store, version.number, version.id) == expected
            line = store.line(version.number)
            assert [file.version.number for file in line.deltas] == list(
                range((line.base.version.number if line.base else 0) + 1, version.number + 1)
            )


def test_changes_are_those_of_the_delta(tmp_path):
    sample(tmp_path)
    records = [r for r in Checkpoint(tmp_path).store().changes(4) if r.family == "default" and r.key]
    assert {r.key: r.values for r in records} == {
        **{b"key%d" % key: (b"4",) for key in range(4, 8)},
        b"key1": (),
    }


@pytest.mark.parametrize("ids", [False, True])
def test_changes_show_whole_values_where_the_delta_has_parts(tmp_path, ids):
    with Writer(tmp_path, ids=ids) as writer:
        for number in range(1, 7):
            rows = {
                (family, b"key%d" % key): [b"%0400d" % (number * 1000 + key)]
                for family in ("default", "sorted")
                for key in range(number % 3, 5)
            }
            writer.commit({**rows, ("default", b"new%d" % number): [b"x" * 400], ("default", b"key0"): [b"a", b"b"]})
            if number == 3:
                writer.base()
    store = Checkpoint(tmp_path).store()
    for version, expected in writer.states.items():
        if version.number == 0:
            continue
        file = store.listing().deltas[version]
        written = {(r.family, r.key): r for r in store.records(file, store.read(file)) if r.key}
        assert any(record.op == delta.Op.PATCH for record in written.values()) == (version.number > 1)
        found = {(r.family, r.key): r for r in store.changes(version.number) if r.key}
        assert found.keys() == written.keys()
        for (family, key), record in found.items():
            assert record.op in (delta.Op.PUT, delta.Op.PUT_ALL)
            assert list(record.values) == expected[family][key]


def test_the_newest_base_is_taken(tmp_path):
    writer = sample(tmp_path)
    store = Checkpoint(tmp_path).store()
    for version, base, deltas in [(7, 6, [7]), (6, 6, []), (5, 3, [4, 5]), (2, None, [1, 2]), (0, None, [])]:
        line = store.line(version)
        assert (line.base.version.number if line.base else None) == base
        assert [file.version.number for file in line.deltas] == deltas
    # Nothing older is needed.
    for name in ("1.qdelta", "2.qdelta", "3.qdelta"):
        (tmp_path / name).unlink()
    assert loaded(store, 5) == writer.states[Version(5)]
    assert [str(version) for version in store.versions()] == ["3", "4", "5", "6", "7"]


@pytest.mark.parametrize("below", ["", "state", "state/1", "state/1/2", "state/1/2/left-keys"])
def test_any_folder_of_a_checkpoint_will_do(tmp_path, below):
    for place in (StoreId(0, 0), StoreId(1, 2), StoreId(1, 2, "left-keys")):
        folder = tmp_path / "state" / str(place.operator) / str(place.partition)
        with Writer(folder if place.name == "default" else folder / place.name, place) as writer:
            writer.commit({("default", b"who"): [str(place).encode()]})
    for noise in (
        "offsets/0",
        "state/0/_metadata/metadata",
        "state/0/_stateSchema/default/0",
        "state/0/0/.1.qdelta.crc",
    ):
        (tmp_path / noise).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / noise).write_bytes(b"{}")
    (tmp_path / "state/0/0/.2.qdelta.0b5e.tmp").write_bytes(b"half")
    (tmp_path / f"state/0/0/{10**18}.qdelta").write_bytes(b"nobody's")
    checkpoint = Checkpoint(tmp_path / below)
    stores = {store.id: store for store in checkpoint.stores()}
    if below in ("", "state"):
        assert sorted(stores) == [StoreId(0, 0), StoreId(1, 2), StoreId(1, 2, "left-keys")]
    assert loaded(checkpoint.store(1, 2, "left-keys")) == {
        "default": {b"who": [b"operator 1, partition 2, store left-keys"]}
    }
    assert all([str(version) for version in store.versions()] == ["1"] for store in stores.values())


def test_all_storages_read_the_same(tmp_path):
    writer = sample(tmp_path / "state/0/3")
    for checkpoint in (
        Checkpoint(str(tmp_path)),
        Checkpoint(tmp_path.as_uri()),
        Checkpoint(str(tmp_path), fs.LocalFileSystem()),
        Checkpoint("state", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())),
    ):
        assert loaded(checkpoint.store(0, 3)) == writer.states[writer.version]


def test_a_choice_of_stores_is_explained(tmp_path):
    for partition in (0, 1):
        sample(tmp_path / f"state/0/{partition}", id=StoreId(0, partition))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(quire.InvalidError, match="choose one of operator 0, partition 0, store default; operator 0, p"):
        checkpoint.store()
    with pytest.raises(quire.NotFoundError, match="no such store: there are operator 0, partition 0"):
        checkpoint.store(0, 7)
    assert checkpoint.store(partition=1).id == StoreId(0, 1)


def test_what_is_not_there(tmp_path):
    with pytest.raises(quire.NotFoundError, match="nowhere is not there"):
        Checkpoint(tmp_path / "nowhere").stores()
    with pytest.raises(quire.NotFoundError, match="holds no state that Quire wrote: give the checkpoint's folder"):
        Checkpoint(tmp_path).stores()
    (tmp_path / "state/0/0").mkdir(parents=True)
    (tmp_path / "state/0/0/1.changelog").write_bytes(b"")
    with pytest.raises(quire.NotFoundError, match="files are those of RocksDBStateStoreProvider"):
        Checkpoint(tmp_path).stores()
    sample(tmp_path / "state/0/3")
    store = Checkpoint(tmp_path).store(0, 3)
    with pytest.raises(quire.NotFoundError, match="no version 8: there are 1 to 7"):
        store.load(8)
    with pytest.raises(quire.NotFoundError, match="no version 7_of-old"):
        store.load(7, "of-old")
    with pytest.raises(quire.InvalidError, match="version -1: give a whole number"):
        store.load(-1)
    (tmp_path / "state/0/3/5.qdelta").unlink()
    assert loaded(store, 4) and loaded(store, 7)
    (tmp_path / "state/0/3/6.qbase").unlink()
    with pytest.raises(quire.NotFoundError, match=r"0/3/5\.qdelta is not there, and version 7 has no base newer"):
        store.load()
    with pytest.raises(quire.NotFoundError, match="no delta of version 3"):
        (tmp_path / "state/0/3/3.qdelta").unlink()
        store.changes(3)


# ------------------------------------------------------------------------------------------------ checkpoint format 2


def test_attempts_at_one_batch_are_told_apart(tmp_path):
    """Of two versions 2 the one that version 3 grew out of counts; of two newest ones the last."""
    with Writer(tmp_path, ids=True) as first, Writer(tmp_path, ids=True) as second:
        same = {("default", b"a"): [b"1"]}
        first.commit(same)
        second.commit(same)
        second.path(FileKind.DELTA).unlink()
        second.version = first.version
        second.states[first.version] = first.states[first.version]
        for writer, value in ((first, b"2"), (second, b"lost")):
            writer.commit({("default", b"a"): [value]})
        store = Checkpoint(tmp_path).store()
        lost = second.version
        assert loaded(store, 2, lost.id)["default"] == {b"a": [b"lost"]}
        assert loaded(store)["default"] == loaded(store, 2)["default"] == {b"a": [b"lost"]}
        first.commit({("default", b"b"): [b"3"]})
        assert loaded(store)["default"] == {b"a": [b"2"], b"b": [b"3"]}
        assert loaded(store, 2)["default"] == {b"a": [b"2"]}
        assert store.resolve(2) != lost


LETTERS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12)


@given(LETTERS, LETTERS, st.integers(0, 12), st.integers(0, 12))
def test_where_two_lists_differ(one, other, taken, size):
    for old, new in ((one, other), (one, one[taken:] + other[:size])):
        end = reader.overlap(old, new)
        assert end == max(n for n in range(min(len(old), len(new)) + 1) if old[len(old) - n :] == new[:n])
        found = list(reader.stretches(old, new))
        made, at = [], 0
        for start, stop, new_start, new_stop in found:
            assert at <= start and (start != stop or new_start != new_stop)
            made += old[at:start]
            assert len(made) == new_start
            made += new[new_start:new_stop]
            at = stop
        assert made + old[at:] == new


def test_a_long_queue_that_moved_on():
    """Records that are often there would have a search for matches look at all pairs of them."""
    rng = random.Random(1)
    old = [b"%d" % rng.randrange(1000) for _ in range(200_000)]
    new = old[1000:] + [b"%d" % rng.randrange(1000) for _ in range(500)]
    started = time.monotonic()
    assert list(reader.stretches(old, new)) == [(0, 1000, 0, 0), (200_000, 200_000, 199_000, 199_500)]
    assert time.monotonic() - started < 20


def test_damage_after_attempts_at_one_batch_hides_none_of_them(tmp_path):
    """It cannot tell which of them it grew out of; whoever goes back behind the damage gives a number."""
    folder = tmp_path / "state/0/0"
    with Manager(tmp_path, ids=True) as one, Manager(tmp_path, ids=True) as other:
        with one.load() as pm:
            one.commit(pm)
            with other.load() as pm_of_other:
                for _ in range(2):
                    one.commit(pm)
                    other.commit(pm_of_other)
            one.commit(pm)
        (damaged,) = folder.glob("4_*.qdelta")
        data = bytearray(damaged.read_bytes())
        data[40] ^= 1
        damaged.write_bytes(data)
        os.utime(damaged, ns=(0, 1 << 62))
        last = max(folder.glob("3_*.qdelta"), key=lambda path: path.stat().st_mtime_ns)
        assert f"{one.store.resolve(3)}.qdelta" == last.name
        one.store.load(3).close()
        with pytest.raises(quire.CorruptError, match=damaged.name):
            one.store.load()


def test_a_query_that_changed_to_format_2(tmp_path):
    with Writer(tmp_path) as writer:
        writer.commit({("default", b"a"): [b"1"]})
        writer.ids = True
        writer.commit({("default", b"b"): [b"2"]})
        store = Checkpoint(tmp_path).store()
        assert loaded(store) == writer.states[writer.version]
        assert [bool(version.id) for version in store.versions()] == [False, True]


def test_versions_in_text():
    assert str(Version.parse("7")) == "7" and str(Version.parse("7_a_b")) == "7_a_b"
    for wrong in ("", "newest", "-1", "_x"):
        with pytest.raises(quire.InvalidError, match="is no version"):
            Version.parse(wrong)


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("name", ["6.qbase", "7.qdelta"])
def test_a_truncated_file_is_refused(tmp_path, name):
    sample(tmp_path)
    store, path = Checkpoint(tmp_path).store(), tmp_path / name
    data = path.read_bytes()
    ends = frame_ends(data)
    assert len(ends) > 2
    for count in sorted({0, 1, *(end + more for end in ends[:-1] for more in (-1, 0, 1, 23, 24, 25))}):
        path.write_bytes(data[:count])
        with pytest.raises(quire.CorruptError, match=rf"{name}: .*truncated"):
            store.load()
    path.write_bytes(data + b"\0")
    with pytest.raises(quire.CorruptError, match=f"{name}: something follows its end"):
        store.load()


@pytest.mark.parametrize("codec", ["", "lz4", "zstd", "snappy"])
@pytest.mark.parametrize("name", ["6.qbase", "7.qdelta"])
def test_a_flipped_byte_is_refused(tmp_path, name, codec):
    sample(tmp_path, codec=codec)
    store, path = Checkpoint(tmp_path).store(), tmp_path / name
    data = path.read_bytes()
    rng = random.Random(f"{name} {codec}")
    for place in [*range(0, 100, 7), *rng.choices(range(len(data)), k=60), *range(len(data) - 56, len(data), 5)]:
        damaged = bytearray(data)
        damaged[place] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        with pytest.raises(REFUSED, match=f"{name}: "):
            store.load()


@given(data=st.data())
def test_frames_that_are_sound_and_make_no_sense(data):
    """Their checksums are right: what is inside is refused, or is a state that passes its checks."""
    kind = data.draw(st.sampled_from(list(reader.SUFFIXES)))
    raw = data.draw(st.binary(max_size=200))
    with tempfile.TemporaryDirectory() as folder, Writer(folder) as writer:
        writer.version = Version(1)
        page_bytes = data.draw(st.sampled_from([0, 1024, 3000, 1 << 31])) if kind == FileKind.BASE else 0
        frames = [Frame(data.draw(st.sampled_from(FrameKind)), raw)]
        writer.write(writer.header(kind, Version(int(kind == FileKind.BASE)), page_bytes=page_bytes), frames, 0)
        with contextlib.suppress(*REFUSED):
            loaded(Checkpoint(folder).store())


def test_a_damaged_base_is_passed_over_when_asked(tmp_path):
    writer = sample(tmp_path)
    store = Checkpoint(tmp_path).store()
    (tmp_path / "6.qbase").write_bytes((tmp_path / "6.qbase").read_bytes()[:-1])
    with pytest.raises(quire.CorruptError, match=r"6\.qbase"):
        store.load()
    assert loaded(store, repair=True) == writer.states[Version(7)]
    (tmp_path / "3.qbase").write_bytes(b"")
    assert loaded(store, repair=True) == writer.states[Version(7)]
    (tmp_path / "2.qdelta").unlink()
    with pytest.raises(quire.CorruptError, match=r"6\.qbase"):
        store.load(repair=True)


def test_a_file_must_be_what_its_name_and_place_say(tmp_path):
    sample(tmp_path / "state/0/3")
    folder = tmp_path / "state/0/3"
    store = Checkpoint(tmp_path).store()
    newest = (folder / "7.qdelta").read_bytes()
    for other in ("6.qdelta", "6.qbase"):
        (folder / "7.qdelta").write_bytes((folder / other).read_bytes())
        with pytest.raises(quire.CorruptError, match=r"7\.qdelta: it holds the .* of version 6 .* moved or renamed"):
            store.load()
    (folder / "7.qdelta").write_bytes(newest)
    for wrong in ("state/0/4", "state/1/3", "state/0/5/left"):
        (tmp_path / wrong).mkdir(parents=True)
        for file in folder.glob("*.q*"):
            (tmp_path / wrong / file.name).write_bytes(file.read_bytes())
        with pytest.raises(quire.CorruptError, match="is not what its name and place"):
            Checkpoint(tmp_path / wrong).store().load()
    # A folder whose name tells nothing may hold any one store.
    folder.rename(tmp_path / "copy")
    assert loaded(Checkpoint(tmp_path / "copy").store(0, 3))


def test_a_delta_that_skips_a_version(tmp_path):
    with Writer(tmp_path, ids=True) as writer:
        writer.version = Version(5, "five")
        writer.write(writer.header(FileKind.DELTA, Version(3, "three")), [], 0)
    with pytest.raises(quire.CorruptError, match=r"5_five\.qdelta: it says that version 5_five grew out of version 3"):
        Checkpoint(tmp_path).store().load()


def test_a_codec_that_python_does_not_know(tmp_path):
    with Writer(tmp_path) as writer:
        writer.version = Version(1)
        header = replace(writer.header(FileKind.DELTA, Version(0)), codec="brotli")
        with writer.path(FileKind.DELTA).open("wb") as file:
            container.write(file, header, [Frame(FrameKind.RECORDS, b"x")], 0, lambda codec, data: data)
    with pytest.raises(quire.InvalidError, match=r"1\.qdelta: Python cannot read the codec 'brotli', only 'lz4'"):
        Checkpoint(tmp_path).store().load()


def test_what_the_end_of_a_file_says(tmp_path):
    writer = sample(tmp_path)
    store = Checkpoint(tmp_path).store()
    assert [store.keys(file) for file in store.files() if file.kind == FileKind.DELTA][-1] == writer.keys()
    path = tmp_path / "7.qdelta"
    for cut, message in ((-1, "frame is damaged"), (20, "truncated")):
        data = path.read_bytes()
        path.write_bytes(data[:cut])
        with pytest.raises(quire.CorruptError, match=message):
            store.keys(store.files()[-1])
        path.write_bytes(data)


# ------------------------------------------------------------------------------------------------ a query that runs on


class Restless(storage.LocalStorage):
    """Before the nth opening of a file something happens."""

    def __init__(self, *happens):
        self.happens = list(happens)

    def open(self, path):
        if self.happens:
            self.happens.pop(0)()
        return super().open(path)


def long_line(folder, last=20):
    """Versions that each change one key of all and have one of their own, without a base."""
    with Writer(folder) as writer:
        for number in range(1, last + 1):
            writer.commit({("default", b"all"): [b"%d" % number], ("default", b"own%d" % number): [b""]})
    return writer


def reading_ahead():
    return [thread for thread in threading.enumerate() if thread.name.startswith("quire-ahead")]


def test_files_that_are_read_ahead_are_applied_in_their_order(tmp_path):
    states = long_line(tmp_path).states
    store = Checkpoint(tmp_path).store()
    for number in (20, 1, 2, 5, 19):
        assert loaded(store, number) == states[Version(number)]
    assert not reading_ahead()


def test_of_several_damaged_files_the_first_is_named(tmp_path):
    long_line(tmp_path)
    store = Checkpoint(tmp_path).store()
    for number in (20, 9, 3, 2, 1):
        path = tmp_path / f"{number}.qdelta"
        data = bytearray(path.read_bytes())
        data[-60] ^= 1
        path.write_bytes(data)
        with pytest.raises(quire.CorruptError, match=rf"/{number}\.qdelta: "):
            store.load()
        assert not reading_ahead()


def test_what_is_read_ahead_is_bounded(tmp_path, monkeypatch):
    """Each file when it is wanted or before; never more bytes, or more files, than may wait."""
    long_line(tmp_path)
    store = Checkpoint(tmp_path).store()
    begun, most = [], []
    read, apply = store.read, store.apply

    def reading(file, **options):
        begun.append(file.version.number)
        return read(file, **options)

    def applying(state, file, found):
        most.append(max(begun) - file.version.number)
        return apply(state, file, found)

    monkeypatch.setattr(store, "read", reading)
    monkeypatch.setattr(store, "apply", applying)
    for room, ahead in ((1 << 20, reader.AHEAD_FILES), (max(file.size for file in store.files()), 1), (0, 0)):
        monkeypatch.setattr(reader, "AHEAD_BYTES", room)
        begun.clear()
        most.clear()
        store.load().close()
        assert sorted(begun) == list(range(1, 21))
        assert max(most) <= ahead
        if not ahead:
            assert begun == sorted(begun)


def test_files_that_are_cleaned_away_under_the_reader(tmp_path):
    """Between listing and opening, the base and what it is of are gone, and newer ones are there."""
    with Writer(tmp_path) as writer:
        for number in range(3):
            writer.commit({("default", b"a"): [b"%d" % number]})
        writer.base()

        def move_on():
            writer.commit({("default", b"b"): [b"new"]}, alone=True)
            for name in ("1.qdelta", "2.qdelta", "3.qdelta", "3.qbase"):
                (tmp_path / name).unlink()

        assert loaded(Store(Restless(move_on), str(tmp_path), writer.id)) == writer.states[Version(4)]


def test_a_reader_gives_up_on_files_that_never_stay(tmp_path):
    sample(tmp_path)
    asked = []

    class Gone(storage.LocalStorage):
        def open(self, path):
            asked.append(path)
            raise quire.NotFoundError(f"{path} is not there")

    with pytest.raises(quire.NotFoundError, match=r"7\.qdelta is not there"):
        Store(Gone(), str(tmp_path), StoreId(0, 3)).load()
    assert len(asked) == 4


def test_a_file_replaced_while_it_is_read(tmp_path):
    """Half of the bytes are those of the attempt before."""
    writer = sample(tmp_path)

    class Torn(storage.LocalStorage):
        opened = 0

        def open(self, path):
            self.opened += path.endswith("7.qdelta")
            # The first time for its header alone.
            if path.endswith("7.qdelta") and self.opened == 2:
                return io.BytesIO(Path(path).read_bytes()[:200] + bytes(500))
            return super().open(path)

    torn = Torn()
    assert loaded(Store(torn, str(tmp_path), writer.id)) == writer.states[Version(7)]
    assert torn.opened == 3


def test_reads_that_fail_are_tried_again(tmp_path):
    writer = sample(tmp_path)

    class Flaky(io.FileIO):
        failures = itertools.chain([OSError(5, "Input/output error"), ConnectionResetError()], itertools.repeat(None))

        def read(self, count=-1):
            error = next(Flaky.failures)
            if error:
                raise error
            return super().read(count)

    class Shaky(storage.LocalStorage):
        def open(self, path):
            return Flaky(path)

    store = Store(Shaky(), str(tmp_path), writer.id)
    assert loaded(store) == writer.states[Version(7)]
    Flaky.failures = itertools.repeat(OSError(5, "Input/output error"))
    with pytest.raises(quire.IOFailedError, match=r"7\.qdelta: Input/output error"):
        store.load()
    Flaky.failures = itertools.repeat(PermissionError(13, "Permission denied"))
    with pytest.raises(quire.IOFailedError, match=r"7\.qdelta: Permission denied"):
        store.load()


# ------------------------------------------------------------------------------------------------ files of real queries

CODECS = ["lz4", "zstd", "snappy", "lzf"]
ROW = struct.Struct("<qq")  # one LONG as an UnsafeRow: null bits, value


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of one query by codec (and of checkpoint format 2), the counts after each of its batches, what Spark
    itself reads from two of them, and what the JVM's codecs make of what Python has packed.
    """
    pytest.importorskip("pyspark")
    from spark import harness

    root = tmp_path_factory.mktemp("queries")
    rng = random.Random(harness.SEED)
    # Small and large numbers, few and many times: what packs well and what does not.
    batches = [[{"id": rng.choice([rng.randrange(40), rng.getrandbits(62)])} for _ in range(300)] for _ in range(4)]
    spark = harness.session(conf={"spark.sql.warehouse.dir": str(root / "warehouse")})
    try:
        queries = {}
        for name in [*CODECS, "ids"]:
            conf = {
                harness.STORE + "compression.codec": name if name in CODECS else "lz4",
                harness.STORE + "checkpointFormatVersion": "2" if name == "ids" else "1",
            }
            with harness.settings(spark, conf):
                (root / "source").mkdir(exist_ok=True)
                frame = harness.stream(spark, root / "source", "id LONG").groupBy("id").count()
                writer = frame.writeStream.outputMode("update").format("noop")
                queries[name] = writer.option("checkpointLocation", str(root / name)).start()
        with watched(root, queries) as seen:
            harness.release(root / "source", batches[:3])
            for query in queries.values():
                query.processAllAvailable()
            harness.wait_for_maintenance()  # which writes bases
            harness.release(root / "source", batches[3:])
            for query in queries.values():
                query.processAllAvailable()
        for query in queries.values():
            query.stop()
        source = {}
        for name, version in (("lz4", "1"), ("ids", "2")):
            with harness.settings(spark, {harness.STORE + "checkpointFormatVersion": version}):
                rows = spark.read.format("statestore").load(str(root / name)).collect()
            source[name] = Counter({(row.partition_id, row.key.id): row.value["count"] for row in rows})
        unpacked = {
            codec: in_the_jvm(spark, codec, codecs.compress(codec, PACKED)) for codec in codecs.COMPRESS if codec
        }
    finally:
        spark.stop()
    counts = list(itertools.accumulate((Counter(row["id"] for row in batch) for batch in batches), lambda a, b: a + b))
    return Written(root, counts, source, unpacked, seen)


@dataclass
class Written:
    """What the fixture of that name made; seen: what a reader saw while the queries ran."""

    root: Path
    counts: list
    source: dict
    unpacked: dict
    seen: list


@contextlib.contextmanager
def watched(root, queries):
    """Reads the checkpoints over and over while a block runs; gives partition and state of each look, or the error."""
    seen, started, done = [], set(), threading.Event()

    def watch():
        for name in itertools.cycle(queries):
            if done.wait(0.02):
                return
            try:
                for store in Checkpoint(root / name).stores():
                    started.add(name)
                    with store.load() as state:
                        seen.append((store.id.partition, counted(state)))
            except Exception as error:
                # Before the first commit there is nothing to read.
                if name in started or not isinstance(error, quire.NotFoundError):
                    seen.append((name, error))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


PACKED = b"some bytes " * 20_000 + random.Random(0).randbytes(50_000)


def in_the_jvm(spark, codec, data):
    """The bytes that Spark unpacks."""
    jvm = spark._jvm
    made = jvm.org.apache.spark.io.CompressionCodec.createCodec(spark._jsc.sc().conf(), codec)
    return bytes(made.compressedInputStream(jvm.java.io.ByteArrayInputStream(data)).readAllBytes())


def counted(state):
    """Key to count, from the rows that Spark wrote."""
    found = {}
    for key, value in state.map("default").items():
        (nulls, number), (value_nulls, count) = ROW.unpack(key), ROW.unpack(value)
        assert not nulls and not value_nulls
        found[number] = count
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*CODECS, "ids"])
def test_the_state_that_spark_wrote(written, name):
    root, counts, source = written.root, written.counts, written.source
    stores = Checkpoint(root / name).stores()
    assert [store.id for store in stores] == [StoreId(0, 0), StoreId(0, 1)]
    for store in stores:
        assert {store.header(file).codec for file in store.files()} == {name if name in CODECS else "lz4"}
        assert {file.kind for file in store.files()} == {FileKind.DELTA, FileKind.BASE}
        assert all(version.id for version in store.versions())
    oldest = max(store.versions()[0].number for store in stores)
    for number in range(oldest, len(counts) + 1):
        found = {}
        for store in stores:
            with store.load(number) as state:
                found.update(counted(state))
        assert found == counts[number - 1]
    newest = Counter()
    for store in stores:
        assert store.versions()[-1].number == len(counts)
        with store.load() as state:
            newest.update({(store.id.partition, number): count for number, count in counted(state).items()})
            assert store.keys(next(f for f in reversed(store.files()) if f.kind == FileKind.DELTA)) == len(
                state.map("default")
            )
    assert newest == source.get(name, newest)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_jvm_unpacks_what_python_packs(written):
    assert sorted(written.unpacked) == ["lz4", "snappy", "zstd"]
    assert all(data == PACKED for data in written.unpacked.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_reading_while_the_queries_run(written):
    """Each look saw the state after one of the batches."""
    places = {key: partition for partition, key in written.source["lz4"]}
    states = [
        [{key: count for key, count in after.items() if places[key] == partition} for after in written.counts]
        for partition in (0, 1)
    ]
    assert [error for _, error in written.seen if isinstance(error, Exception)] == []
    assert all(state in states[partition] for partition, state in written.seen)
    assert len({len(state) for _, state in written.seen}) > 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*CODECS, "ids"])
def test_tools_on_what_spark_wrote(written, name, capsys):
    from quire.cli import main

    root, counts = written.root, written.counts
    url = str(root / name)
    assert main(["verify", url, "--all", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] and sum(store["keys"] for store in verdict["stores"]) == len(counts[-1])
    assert main(["inspect", url, "--json"]) == 0
    stores = json.loads(capsys.readouterr().out)["stores"]
    assert sum(store["keys"] for store in stores) == len(counts[-1])
    assert all(store["page_size"] for store in stores)
    assert main(["dump", url, "--partition", "1", "--format", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {ROW.unpack(bytes.fromhex(line["key"]))[1]: line["values"] for line in lines}
    assert {number: ROW.unpack(bytes.fromhex(value))[1] for number, (value,) in found.items()}.items() <= counts[
        -1
    ].items()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*CODECS, "ids"])
def test_damage_to_what_spark_wrote(written, name, tmp_path):
    rng = random.Random(name)
    store = Checkpoint(written.root / name).store(0, 0)
    for kind in reader.SUFFIXES:
        file = [file for file in store.files() if file.kind == kind][-1]
        data = Path(file.path).read_bytes()
        copy = tmp_path / Path(file.path).name
        broken = [data[:end] for end in frame_ends(data)[:-1]]
        for _ in range(40):
            flipped = bytearray(data)
            flipped[rng.randrange(len(data))] ^= rng.randrange(1, 256)
            broken.append(bytes(flipped))
        for content_ in broken:
            copy.write_bytes(content_)
            with pytest.raises(REFUSED):
                Store(storage.LocalStorage(), str(tmp_path), store.id).read(replace(file, path=str(copy)))
