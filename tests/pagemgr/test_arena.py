"""Arenas: opening, limits, commit and abort, sets, snapshots, images, raw pages."""

import os
import random
import subprocess
import sys

import pytest

import quire
import quire.cli


def numbered(count, size=100):
    return {b"%d" % number: b"v" * size for number in range(count)}


# ------------------------------------------------------------------------------------------------ opening


@pytest.mark.parametrize("size", [1024, 2048, 4096, 8192, 16384, 32768, 65536])
def test_every_page_size(path, size):
    with quire.PageManager(path, page_size=size) as pm:
        assert pm.page_size == size
        pm.map("users").update(numbered(300))
        pm.ordered_map("events").update(numbered(300))
        pm.list("log").extend([b"x" * 3000] * 20)
        pm.commit()
        pm.check()
    with quire.PageManager(path) as pm:
        assert pm.page_size == size
        assert dict(pm.map("users")) == numbered(300)
        pm.check()
    with pytest.raises(quire.MismatchError):
        quire.PageManager(path, page_size=2048 if size != 2048 else 4096)


@pytest.mark.parametrize("size", [0, -1, 1000, 512, 131072, 1 << 40, 1 << 70, "4096", 4096.0, True])
def test_page_sizes_that_are_none(size):
    with pytest.raises(quire.InvalidError, match=f"page_size {size!r}: give a power of two"):
        quire.PageManager(page_size=size)


@pytest.mark.parametrize(
    "limit", [0, -5, "", "0", "0k", "lots", "5x", "-5m", 1.5, True, 1 << 70, b"5m", "99999999999g", "9" * 5000, [1]]
)
def test_limits_that_are_none(limit):
    with pytest.raises(quire.InvalidError):
        quire.PageManager(limit=limit)


@pytest.mark.parametrize(
    ("limit", "size"), [("8m", 8 << 20), ("8M", 8 << 20), (" 9000k ", 9000 << 10), ("1g", 1 << 30), (1 << 24, 1 << 24)]
)
def test_limits(limit, size):
    with quire.PageManager(limit=limit) as pm:
        assert pm.stats().bytes_limit == size


def test_path_may_be_text_bytes_or_a_path(path):
    for given in (str(path), path):
        with quire.PageManager(given) as pm:
            pm.map("users")
            pm.commit()


@pytest.mark.parametrize("wrong", [5, 1.5, [], True, "", b"", "a\0b", b"a\0b", "\ud800"])
def test_paths_that_are_none(pm, wrong):
    pm.commit()
    with pm.snapshot() as last:
        for call in (quire.PageManager, pm.load, last.save):
            with pytest.raises(quire.InvalidError, match="path"):
                call(wrong)


@pytest.mark.parametrize("wait", ["5", None, float("nan"), [], 1j, True])
def test_waits_that_are_none(path, wait):
    with pytest.raises(quire.InvalidError, match="wait"):
        quire.PageManager(path, wait=wait)
    with pytest.raises(quire.InvalidError, match="read_only"):
        quire.PageManager(path, read_only="yes")
    assert not path.exists()


def test_a_file_that_is_no_arena(path):
    path.write_bytes(b"something else entirely" * 5000)
    before = path.read_bytes()
    with pytest.raises(quire.QuireError):
        quire.PageManager(path)
    assert path.read_bytes() == before


def test_one_writer_at_a_time(path):
    with quire.PageManager(path) as pm:
        pm.commit()
        with pytest.raises(quire.BusyError):
            quire.PageManager(path)
        with pytest.raises(quire.BusyError):
            quire.PageManager(path, wait=0.15)
    quire.PageManager(path).close()


def test_read_only(path):
    with pytest.raises(quire.NotFoundError, match=path.name):
        quire.PageManager(path, read_only=True)
    with pytest.raises(quire.InvalidError):
        quire.PageManager(read_only=True)
    with quire.PageManager(path) as pm:
        users = pm.map("users")
        users.update(numbered(100))
        pm.commit()
        with quire.PageManager(path, read_only=True) as reader:
            assert reader.read_only
            with reader.snapshot() as snapshot:
                users.clear()
                pm.commit()
                assert dict(snapshot.map("users")) == numbered(100)
            with reader.snapshot() as snapshot:
                assert len(snapshot.map("users")) == 0
            for write in (
                lambda: reader.map("users"),
                reader.commit,
                reader.abort,
                lambda: reader.list("x"),
                reader.sync,
            ):
                with pytest.raises(quire.ReadOnlyError):
                    write()
            reader.check()
            pm.map("later")
            assert reader.sets() == {"users": "map"}
            assert reader.exists("users") and not reader.exists("later")
            stats = reader.stats()
            assert (stats.sets, stats.frames_used, stats.epoch_committed) == (1, 0, pm.epoch)
            pm.commit()
            assert reader.sets() == {"users": "map", "later": "map"} and reader.stats().sets == 2


# ------------------------------------------------------------------------------------------------ commit, abort, limit


def test_uncommitted_changes_are_dropped_on_close(path):
    with quire.PageManager(path) as pm:
        pm.map("users")[b"a"] = b"1"
        pm.commit()
        pm.map("users")[b"b"] = b"2"
        pm.map("other")
    with quire.PageManager(path) as pm:
        assert dict(pm.map("users")) == {b"a": b"1"}
        assert pm.sets() == {"users": "map"}


def test_epochs_grow(pm):
    epochs = [pm.commit()]
    for number in range(5):
        pm.map("users")[b"%d" % number] = b"x"
        epochs.append(pm.commit())
        assert pm.epoch == epochs[-1]
    assert epochs == sorted(set(epochs))


def test_abort_of_many_kinds_of_change(pm):
    pm.map("users").update(numbered(200))
    pm.list("log").extend([b"r"] * 50)
    pm.commit()
    pm.map("users").clear()
    pm.list("log").clear()
    pm.map("fresh")[b"a"] = b"1"
    pm.clone("users", "twin")
    pm.destroy("log")
    pm.check()
    pm.abort()
    pm.check()
    assert pm.sets() == {"users": "map", "log": "sequence"}
    assert dict(pm.map("users")) == numbered(200)
    assert len(pm.list("log")) == 50


def test_the_limit_leaves_the_last_commit_intact(page_size):
    with quire.PageManager(limit="1m", page_size=page_size) as pm:
        users = pm.map("users")
        users.update(numbered(100))
        pm.commit()
        with pytest.raises(quire.LimitError, match="limit"):
            for number in range(100_000):
                users[b"more%d" % number] = b"x" * 500
        pm.check()
        pm.abort()
        assert dict(users) == numbered(100)
        assert pm.stats().bytes_held <= 1 << 20
        users[b"again"] = b"works"
        pm.commit()
        pm.check()


def test_a_failed_put_changes_nothing(page_size):
    with quire.PageManager(limit="1m", page_size=page_size) as pm:
        users, log = pm.map("users"), pm.list("log")
        users[b"a"] = b"1"
        log.append(b"1")
        for attempt in (
            lambda: users.update({b"big": b"x" * (2 << 20)}),
            lambda: users.update({b"a": b"x" * (2 << 20)}),
            lambda: users.append(b"a", b"x" * (2 << 20)),
            lambda: log.append(b"x" * (2 << 20)),
            lambda: log.__setitem__(0, b"x" * (2 << 20)),
        ):
            with pytest.raises(quire.LimitError):
                attempt()
            pm.check()
            assert dict(users) == {b"a": b"1"}
            assert log[:] == [b"1"]


def test_memory_is_used_again_after_commits(pm):
    users = pm.map("users")
    users.update(numbered(500))
    held = []
    for _ in range(60):
        users.update(numbered(500))
        pm.commit()
        held.append(pm.stats().bytes_held)
    assert held[-1] == held[10]


def test_stats_tell_what_a_snapshot_keeps(pm):
    users = pm.map("users")
    users.update(numbered(2000))
    pm.commit()
    with pm.snapshot() as snapshot:
        users.clear()
        pm.commit()
        stats = pm.stats()
        assert stats.snapshots == 1
        assert stats.epoch_pinned_min == snapshot.epoch
        assert stats.pinned[snapshot.epoch] > 10
        assert stats.frames_retired > 10
    pm.map("users")[b"a"] = b"1"
    pm.commit()
    stats = pm.stats()
    assert stats.snapshots == 0
    assert stats.pinned == {}
    assert stats.page_bytes == pm.page_size
    assert stats.sets == 1


# ------------------------------------------------------------------------------------------------ sets


def test_sets(pm):
    pm.map("m"), pm.ordered_map("o"), pm.list("l"), pm.raw("r")
    assert pm.sets() == {"m": "map", "o": "ordered_map", "l": "sequence", "r": "raw"}
    assert pm.exists("m")
    assert not pm.exists("x")
    pm.destroy("m")
    assert not pm.exists("m")
    with pytest.raises(quire.NotFoundError, match="'m'"):
        pm.destroy("m")
    with pytest.raises(quire.NotFoundError, match="'x'"):
        pm.clone("x", "y")
    with pytest.raises(quire.ExistsError, match="'o'"):
        pm.clone("l", "o")
    pm.check()


def test_clones_part_ways(pm):
    pm.map("users").update(numbered(500))
    pm.clone("users", "twin")
    pm.clone("twin", "third")
    pm.check()
    pm.map("twin").clear()
    pm.map("users")[b"1"] = b"changed"
    pm.check()
    assert dict(pm.map("third")) == numbered(500)
    pm.commit()
    pm.destroy("users")
    pm.check()
    pm.commit()
    pm.destroy("third")
    pm.check()
    pm.abort()
    assert dict(pm.map("third")) == numbered(500)


def test_a_clone_costs_no_pages(pm):
    pm.map("users").update(numbered(5000))
    pm.commit()
    before = pm.stats().frames_used
    pm.clone("users", "twin")
    assert pm.stats().frames_used <= before + 4


def test_many_sets(pm):
    for number in range(200):
        pm.map(f"set-{number}")[b"n"] = b"%d" % number
    pm.commit()
    pm.check()
    assert len(pm.sets()) == 200
    for number in range(0, 200, 2):
        pm.destroy(f"set-{number}")
    pm.commit()
    pm.check()
    assert all(pm.map(f"set-{number}")[b"n"] == b"%d" % number for number in range(1, 200, 2))


def test_changed_pages_follow_what_changed(pm):
    users = pm.map("users")
    users.update(numbered(3000))
    first = pm.commit()
    everything = pm.changed_pages("users", 0)
    assert pm.changed_pages("users", first) == {}
    users[b"7"] = b"changed"
    changed = [page for page, used in pm.changed_pages("users", first).items() if used]
    assert 1 <= len(changed) <= 4 < len(everything)
    with pytest.raises(quire.NotFoundError):
        pm.changed_pages("nothing", 0)
    with pytest.raises(quire.InvalidError):
        pm.changed_pages("users", -1)


# ------------------------------------------------------------------------------------------------ snapshots


def test_a_snapshot_sees_the_last_commit_only(pm):
    users = pm.map("users")
    users[b"a"] = b"1"
    pm.commit()
    users[b"a"] = b"2"
    with pm.snapshot() as snapshot:
        assert snapshot.map("users")[b"a"] == b"1"
        assert snapshot.epoch == pm.epoch
        assert snapshot.sets() == {"users": "map"}
        pm.commit()
        assert snapshot.map("users")[b"a"] == b"1"


def test_many_snapshots_at_once(pm):
    users, snapshots = pm.map("users"), []
    for number in range(40):
        users[b"n"] = b"%d" % number
        users[b"%d" % number] = b"x" * 500
        pm.commit()
        snapshots.append(pm.snapshot())
    order = list(range(40))
    random.Random(1).shuffle(order)
    for number in order:
        old = snapshots[number].map("users")
        assert old[b"n"] == b"%d" % number
        assert len(old) == number + 2
        old.check()
        snapshots[number].close()
        pm.check()
    assert pm.stats().snapshots == 0


def test_a_snapshot_of_chosen_sets(pm):
    pm.map("a"), pm.list("b"), pm.map("c")
    pm.commit()
    with pm.snapshot(sets=["a", "b"]) as snapshot:
        assert snapshot.sets() == {"a": "map", "b": "sequence"}
        with pytest.raises(quire.NotFoundError):
            snapshot.map("c")
    with pytest.raises(quire.NotFoundError, match="nothing"):
        pm.snapshot(sets=["a", "nothing"])
    for wrong in ("a", [], ["quire:x"]):
        with pytest.raises(quire.InvalidError):
            pm.snapshot(sets=wrong)
    assert pm.stats().snapshots == 0


def test_changes_between_snapshots_also_of_a_new_map(pm):
    pm.commit()
    with pm.snapshot() as nothing:
        users = pm.map("users")
        users.update(numbered(100))
        users.append(b"1", b"second")
        pm.commit()
        with pm.snapshot() as full:
            told = dict(full.changes(nothing, "users"))
            assert told.pop(b"1") == [b"v" * 100, b"second"]
            assert told == {key: [value] for key, value in numbered(100).items() if key != b"1"}


# ------------------------------------------------------------------------------------------------ images


def test_images(pm, tmp_path, page_size):
    pm.map("users").update(numbered(1000))
    pm.ordered_map("events").update(numbered(1000))
    pm.list("log").extend([b"x" * 5000] * 10)
    pages = pm.raw("raw")
    page = pages.alloc()
    pages.write(page, b"hello")
    pm.commit()
    image = tmp_path / "all.image"
    with pm.snapshot() as snapshot:
        pm.map("users").clear()
        snapshot.save(image)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.image"]
    with quire.PageManager(page_size=page_size) as other:
        other.load(image)
        other.check()
        assert dict(other.map("users")) == dict(other.ordered_map("events")) == numbered(1000)
        assert len(other.list("log")) == 10
        assert other.raw("raw").read(page)[:5] == b"hello"
        other.abort()
        assert other.sets() == {}
        other.load(image)
        other.commit()
        with pytest.raises(quire.ExistsError):
            other.load(image)
        other.check()
    with quire.PageManager(page_size=page_size * 2) as other, pytest.raises(quire.MismatchError):
        other.load(image)


def test_an_image_that_is_not_there_or_cannot_be_written(pm, tmp_path):
    with pytest.raises((quire.NotFoundError, quire.IOFailedError)):
        pm.load(tmp_path / "nothing")
    pm.commit()
    with pm.snapshot() as snapshot, pytest.raises(quire.IOFailedError):
        snapshot.save(tmp_path / "no" / "folder")
    pm.check()


def test_every_flipped_or_missing_byte_of_an_image_is_noticed(pm, tmp_path, page_size):
    pm.map("users").update(numbered(50))
    pm.commit()
    image = tmp_path / "image"
    with pm.snapshot() as snapshot:
        snapshot.save(image)
    good = image.read_bytes()
    generator = random.Random(5)
    places = [0, 7, len(good) - 1, len(good) - 30, *(generator.randrange(len(good)) for _ in range(60))]
    with quire.PageManager(page_size=page_size) as other:
        for place in places:
            image.write_bytes(good[:place] + bytes([good[place] ^ 1 << generator.randrange(8)]) + good[place + 1 :])
            with pytest.raises((quire.CorruptError, quire.VersionError, quire.MismatchError)):
                other.load(image)
        for size in (0, 1, 100, len(good) // 2, len(good) - 1):
            image.write_bytes(good[:size])
            with pytest.raises((quire.CorruptError, quire.VersionError)):
                other.load(image)
        assert other.sets() == {}
        other.check()
        image.write_bytes(good)
        other.load(image)
        assert dict(other.map("users")) == numbered(50)


# ------------------------------------------------------------------------------------------------ raw pages


def test_raw_pages(pm):
    pages = pm.raw("pages")
    first, second = pages.alloc(), pages.alloc()
    assert pages.ids() == sorted([first, second])
    assert pages.read(first) == bytes(pm.page_size)
    pages.write(first, b"abc")
    pages.write(first, b"d" * (pm.page_size - 10), offset=10)
    epoch = pm.commit()
    with pm.snapshot() as snapshot:
        pages.write(first, b"xyz")
        pages.free(second)
        assert list(pm.changed_pages("pages", epoch))
        assert snapshot.page("pages", first)[:3] == b"abc"
        assert snapshot.page("pages", second) == bytes(pm.page_size)
        assert pages.read(first)[:3] == b"xyz"
        for wrong in (second, 99, 0xFFFFFFFF):
            with pytest.raises(quire.NotFoundError):
                pages.read(wrong)
            with pytest.raises(quire.NotFoundError):
                pages.write(wrong, b"x")
            with pytest.raises(quire.NotFoundError):
                pages.free(wrong)
        with pytest.raises(quire.NotFoundError):
            snapshot.page("pages", 99)
        with pytest.raises(quire.NotFoundError):
            snapshot.page("nothing", 0)
    pm.check()
    pm.abort()
    assert pages.read(first)[:3] == b"abc"
    for call in (
        lambda: pages.read(-1),
        lambda: pages.read("0"),
        lambda: pages.write(first, b"xx", offset=pm.page_size - 1),
    ):
        with pytest.raises(quire.InvalidError):
            call()
    with pytest.raises(quire.InvalidError):
        pages.write(first, b"x", offset=-1)
    pm.check()


# ------------------------------------------------------------------------------------------------ damage


def test_canary_a_flipped_byte_in_a_page_is_found(path):
    """Proves that check() looks: of damage planted in the middle of an arena file, much is reported."""
    with quire.PageManager(path, page_size=1024) as pm:
        pm.map("users").update({b"key-%d" % number: b"v%d" % number for number in range(3000)})
        pm.ordered_map("events").update({b"key-%d" % number: b"v%d" % number for number in range(3000)})
        pm.list("log").extend([b"record"] * 1000)
        pm.commit()
        pm.sync()
    good = path.read_bytes()
    generator, found = random.Random(11), 0
    for _ in range(60):
        # Past the header; structure bytes are a part of what is hit, payload the rest.
        place = generator.randrange(32768, len(good))
        size = generator.choice([1, 8, 200])
        path.write_bytes(good[:place] + os.urandom(size) + good[place + size :])
        try:
            with quire.PageManager(path) as pm:
                pm.check()
                for structure in (pm.map("users"), pm.ordered_map("events")):
                    list(structure.items())
                list(pm.list("log"))
        except (quire.CorruptError, quire.VersionError, quire.NotFoundError, quire.MismatchError):
            found += 1
    assert found > 10
    path.write_bytes(good)
    with quire.PageManager(path) as pm:
        pm.check()
        assert len(pm.map("users")) == 3000


def test_damaged_files_never_crash(path):
    """Random damage anywhere, then reads and writes: any error of Quire will do, a crash or endless loop will not."""
    with quire.PageManager(path, page_size=1024) as pm:
        pm.map("users").update({b"key-%d" % number: b"v" * (number % 300) for number in range(400)})
        pm.ordered_map("events").update({b"key-%d" % number: b"v" * (number % 300) for number in range(400)})
        pm.list("log").extend([b"r" * (number % 300) for number in range(400)])
        pm.commit()
        pm.sync()
    good = path.read_bytes()
    generator = random.Random(3)
    for _ in range(80):
        damaged = bytearray(good)
        for _ in range(generator.choice([1, 3, 20])):
            place = (
                generator.randrange(len(good)) if generator.random() < 0.2 else generator.randrange(32768, len(good))
            )
            damaged[place : place + 4] = generator.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", generator.randbytes(4)])
        path.write_bytes(damaged)
        try:
            with quire.PageManager(path, limit="64m") as pm:
                uses = [
                    pm.check,
                    lambda pm=pm: list(pm.map("users").items()),
                    lambda pm=pm: list(reversed(pm.ordered_map("events"))),
                    lambda pm=pm: list(pm.list("log")),
                    lambda pm=pm: pm.map("users").update(
                        {b"key-%d" % number: b"w" * 40 for number in range(0, 400, 3)}
                    ),
                    lambda pm=pm: pm.ordered_map("events").update({b"new-%d" % number: b"w" for number in range(100)}),
                    lambda pm=pm: pm.ordered_map("events").remove_range(b"key-1", b"key-2"),
                    lambda pm=pm: pm.map("users").remove_many([b"key-%d" % number for number in range(200)]),
                    lambda pm=pm: pm.list("log").insert(100, b"x"),
                    lambda pm=pm: pm.list("log").clear(),
                    lambda pm=pm: pm.map("users").clear(),
                    pm.commit,
                    pm.stats,
                    lambda pm=pm: pm.snapshot().save(path.with_suffix(".image")),
                ]
                for use in uses:
                    try:
                        use()
                    except quire.QuireError:
                        pass
        except quire.QuireError:
            pass


# ------------------------------------------------------------------------------------------------ the command line


def test_bench_alone_says_what_there_is(capsys):
    assert quire.cli.main(["bench"]) == 2
    assert "usage: quire bench" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quire", "bench", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
