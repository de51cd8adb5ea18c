"""The commands that read checkpoints: what they print, how they end, and that no damage passes them by."""

import csv
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
import stores
from pyarrow import parquet

import quire
from quire.checkpoint import Checkpoint, Manager, StoreId, Version, container, io_service, storage, tools
from quire.checkpoint.codecs import compress, decompress
from quire.checkpoint.container import FileKind
from quire.cli import main


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with one store; see sample()."""
    stores.sample(tmp_path / "state/0/3")
    return tmp_path


@pytest.fixture
def run(capsys):
    """Exit code, stdout and stderr of a command."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def rewrite(path, **changes):
    """Writes a file again with other fields in its header, other frames or another number of keys."""
    with path.open("rb") as file:
        found = container.read(file, decompress)
    keys, frames = changes.pop("keys", found.keys), changes.pop("frames", found.frames)
    data = io.BytesIO()
    container.write(data, replace(found.header, **changes), frames, keys, compress)
    path.write_bytes(data.getvalue())


# ------------------------------------------------------------------------------------------------ inspect


def test_inspect(folder, run):
    code, out, err = run("inspect", folder)
    lines = [line.split() for line in out.splitlines()]
    size = sum(path.stat().st_size for path in (folder / "state/0/3").iterdir())
    assert (code, err) == (0, "")
    assert lines[0] == [str(folder)]
    assert lines[1][:3] == ["operator", "partition", "store"]
    assert lines[2][:7] == ["0", "3", "default", "1-7", "3", "6", "9"]
    assert out.splitlines()[2].endswith("zstd   1024  2 files, " + out.split("2 files, ")[1].splitlines()[0])
    assert lines[3] == ["1", "store,", "10", "keys,", *tools.as_size(size).split()]


def test_inspect_for_programs(folder, run):
    code, out, _ = run("inspect", folder, "--json")
    (found,) = json.loads(out)["stores"]
    files = {path.name: path.stat().st_size for path in (folder / "state/0/3").iterdir()}
    assert code == 0
    assert found == {
        "operator": 0,
        "partition": 3,
        "store": "default",
        "versions": [str(number) for number in range(1, 8)],
        "newest": "7",
        "bases": ["3", "6"],
        "files": 9,
        "bytes": sum(files.values()),
        "keys": 10,
        "kind": "delta",
        "codec": "zstd",
        "page_size": 1024,
        "extent": {"files": 2, "bytes": files["6.qbase"] + files["7.qdelta"]},
        "problems": [],
    }


def test_inspect_tells_what_it_cannot_tell(folder, run):
    (folder / "state/0/3/6.qbase").unlink()
    (folder / "state/0/3/5.qdelta").unlink()
    (folder / "state/0/3/7.qdelta").write_bytes(b"QUIRECKP")
    code, out, err = run("inspect", folder)
    assert code == 1
    assert out.splitlines()[2].split()[-5:] == ["?", "?", "?", "1024", "?"]
    assert "7.qdelta: it is truncated" in err and "5.qdelta is not there" in err


def test_inspect_of_versions_with_ids(tmp_path, run):
    writer = stores.sample(tmp_path / "state/0/3", ids=True)
    code, out, _ = run("inspect", tmp_path)
    assert code == 0 and f"1-7 ({writer.version})" in out
    with stores.Writer(tmp_path / "state/0/4", StoreId(0, 4)) as alone:
        alone.commit({("default", b"a"): [b"1"]}, alone=True)
    (_, found) = json.loads(run("inspect", tmp_path, "--json")[1])["stores"]
    assert (found["versions"], found["bases"], found["keys"]) == (["1"], ["1"], 1)


def test_inspect_tells_of_the_version_that_counts(tmp_path, run):
    """Of several newest ones that which is loaded; of parts, those that are."""
    with Manager(tmp_path, ids=True) as checkpoint, checkpoint.load() as pm:
        checkpoint.commit(pm)
    for count in range(1, 5):
        with Manager(tmp_path, ids=True) as checkpoint, checkpoint.load(1) as pm:
            pm.map("default").update({b"%d" % key: b"" for key in range(count)})
            checkpoint.commit(pm)
            newest = checkpoint.version_id
        (path,) = (tmp_path / "state/0/0").glob(f"{newest}.qdelta")
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + count * 10**9))
        (store,) = json.loads(run("inspect", "--json", tmp_path)[1])["stores"]
        assert (store["newest"], store["keys"]) == (str(newest), count)


def test_inspect_counts_the_parts_that_a_restart_reads(tmp_path, run, monkeypatch):
    monkeypatch.setattr(io_service, "INLINE_BYTES", 1)
    with Manager(tmp_path, bases_every=1) as checkpoint, checkpoint.load() as pm:
        checkpoint.commit(pm)
        checkpoint.maintain()
    read = [path for path in (tmp_path / "state/0/0").iterdir() if path.suffix != ".qdelta"]
    (tmp_path / "state/0/0/1.0badcafe.0.qpart").write_bytes(b"left by one that was killed")
    (store,) = json.loads(run("inspect", "--json", tmp_path)[1])["stores"]
    assert store["extent"] == {"files": len(read), "bytes": sum(path.stat().st_size for path in read)}


# ------------------------------------------------------------------------------------------------ verify


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("more", [[], ["--all"]])
def test_verify_of_what_is_sound(tmp_path, run, more, ids):
    stores.sample(tmp_path / "state/0/3", ids=ids)
    code, out, err = run("verify", tmp_path, *more)
    assert (code, err) == (0, "")
    assert out.startswith(f"1 store, {9 if more else 2} files, ") and out.endswith("read: all sound\n")
    found = json.loads(run("verify", tmp_path, "--json", *more)[1])
    assert found["ok"] and found["stores"][0]["keys"] == 10


@pytest.mark.parametrize("name", ["6.qbase", "7.qdelta"])
def test_verify_finds_all_damage(folder, run, name):
    """Cut at every frame, one byte changed anywhere: in a file that the newest version needs."""
    path = folder / "state/0/3" / name
    data, rng = path.read_bytes(), random.Random(name)
    broken = [data[:end] for end in stores.frame_ends(data)[:-1]] + [b"", data + b"x"]
    for _ in range(60):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        broken.append(bytes(flipped))
    for content in broken:
        path.write_bytes(content)
        code, out, err = run("verify", folder)
        assert code == 1 and f"{name}: " in out.splitlines()[0] and err == ""
        assert out.endswith("read: 1 damaged or missing\n")


def test_verify_names_each_damaged_file(folder, run):
    for name in ("1.qdelta", "3.qbase", "5.qdelta"):
        path = folder / "state/0/3" / name
        path.write_bytes(path.read_bytes()[:-1])
    assert run("verify", folder)[0] == 0  # not needed by the newest version
    code, out, _ = run("verify", folder, "--all", "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"]
    problems = sorted(problem.split(":")[0].rsplit("/", 1)[1] for problem in found["stores"][0]["problems"])
    assert problems == ["1.qdelta", "3.qbase", "5.qdelta"]


def test_verify_misses_files(folder, run):
    (folder / "state/0/3/7.qdelta").rename(folder / "state/0/3/9.qdelta")
    code, out, _ = run("verify", folder)
    assert code == 1 and "8.qdelta is not there" in out
    code, out, _ = run("verify", folder, "--all")
    assert code == 1 and "8.qdelta is not there" in out and "9.qdelta: it holds the delta of version 7 of" in out


def test_verify_counts_keys(folder, run):
    """All checksums are right."""
    for name, keys, there in (("7.qdelta", 11, 10), ("6.qbase", 3, 9)):
        path = folder / "state/0/3" / name
        data = path.read_bytes()
        rewrite(path, keys=keys)
        code, out, _ = run("verify", folder)
        assert code == 1 and f"{name}: the state has {there} keys, the end of its file says {keys}" in out
        path.write_bytes(data)
    # For a base that does not count them, the delta of its version does.
    rewrite(folder / "state/0/3/6.qbase", keys=0)
    assert run("verify", folder)[0] == 0
    rewrite(folder / "state/0/3/6.qdelta", keys=3)
    assert "6.qbase: the state has 9 keys, the end of its file says 3" in run("verify", folder)[1]


def test_keys_of_families_that_a_query_no_longer_has():
    with quire.PageManager() as state:
        for name, count in (("default", 0), ("a", 3), ("b", 5), ("$ttl_a", 7)):
            for number in range(count):
                state.map(name)[b"%d" % number] = b""
            state.map(name)
        assert sum(tools.counted_keys(state)) == 8
        assert [keys for keys in range(20) if tools.keys_fit(state, keys)] == [0, 3, 5, 8]
    with quire.PageManager() as state:
        state.map("default")[b"1"] = b""
        assert [keys for keys in range(20) if tools.keys_fit(state, keys)] == [1]


def test_keys_of_many_families_take_no_memory(monkeypatch):
    """There are 2 ** 40 choices of these families."""
    counts = [1000 * (number + 1) + number * number for number in range(40)]
    monkeypatch.setattr(tools, "counted_keys", lambda state: counts)
    tracemalloc.start()
    try:
        assert tools.keys_fit(None, sum(counts[::2])) and not tools.keys_fit(None, 999)
        assert not tools.keys_fit(None, sum(counts) + 1) and not tools.keys_fit(None, 1 << 63)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_verify_compares_bases_with_deltas(tmp_path, run):
    """A base that is sound, of another state."""
    stores.sample(tmp_path / "state/0/3")
    with stores.Writer(tmp_path / "other") as writer:
        for _ in range(6):
            writer.commit({("default", b"key%d" % number): [b"x"] for number in range(8)})
        writer.base()
    path = tmp_path / "state/0/3/6.qbase"
    path.write_bytes((tmp_path / "other/6.qbase").read_bytes())
    code, out, _ = run("verify", tmp_path, "--all")
    assert code == 1 and "6.qbase: the commit files up to its version lead to another state" in out


def test_verify_in_mid_cleaning(folder):
    """A file that is gone once the query has no use for it is none that is missing."""
    path = folder / "state/0/3"

    class Cleaned(storage.LocalStorage):
        def open(self, name):
            for old in ("1.qdelta", "2.qdelta"):
                (path / old).unlink(missing_ok=True)
            return super().open(name)

    assert tools.verify(str(folder), every_file=True, storage=Cleaned()) == 0


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("options", [[], ["--all"]])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_verify_while_the_query_removes_old_files(tmp_path, capsys, ids, options, every):
    """However often: what was cleaned away since it was listed is not missing."""
    with Manager(tmp_path, retain=8, bases_every=3, ids=ids) as checkpoint, checkpoint.load() as pm:

        def step():
            pm.map("default")[b"a"] = b"%d" % checkpoint.version
            checkpoint.commit(pm)
            checkpoint.maintain()

        for _ in range(15):
            step()

        class Busy(storage.LocalStorage):
            opened = 0

            def open(self, path):
                self.opened += 1
                if self.opened % every == 0:
                    step()
                return super().open(path)

        assert tools.verify(str(tmp_path), every_file=bool(options), storage=Busy()) == 0
        assert capsys.readouterr().out.endswith("all sound\n")


def test_verify_of_a_query_that_is_too_fast(tmp_path):
    with Manager(tmp_path, retain=1, bases_every=1) as checkpoint, checkpoint.load() as pm:
        checkpoint.commit(pm)

        class Busy(storage.LocalStorage):
            def open(self, path):
                for _ in range(3):
                    checkpoint.commit(pm)
                    checkpoint.maintain()
                return super().open(path)

        with pytest.raises(quire.NotFoundError, match="faster than they can be read"):
            tools.verify(str(tmp_path), storage=Busy())


@pytest.mark.parametrize("name", ["2.qdelta", "5.qdelta"])
def test_a_file_that_is_gone_while_it_is_verified_is_missing(folder, capsys, name):
    """Unlike what cleaning takes: older ones are still there."""
    (path,) = (folder / "state/0/3").glob(name)

    class Removing(storage.LocalStorage):
        def open(self, opened):
            if opened.endswith(name):
                path.unlink(missing_ok=True)
            return super().open(opened)

    assert tools.verify(str(folder), every_file=True, storage=Removing()) == 1
    assert name in capsys.readouterr().out


def test_verify_of_several_newest_versions(tmp_path, run):
    """Both of two attempts are looked at."""
    with stores.Writer(tmp_path / "state/0/3", ids=True) as one, stores.Writer(tmp_path / "state/0/3", ids=True) as two:
        one.commit({("default", b"a"): [b"1"]})
        two.commit({("default", b"b"): [b"1"]})
        assert run("verify", tmp_path)[0] == 0
        two.path(FileKind.DELTA).write_bytes(b"")
        code, out, _ = run("verify", tmp_path)
        assert code == 1 and f"{two.version}.qdelta: it is truncated" in out


# ------------------------------------------------------------------------------------------------ dump


def test_dump(folder, run):
    code, out, err = run("dump", folder, "--operator", "0", "--partition", "3")
    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert len(lines) == 11
    assert ["default", "'key9'", "'7'"] in lines
    assert ["sorted", "'all'", "'a' 'b7'"] in lines
    assert ["$timers", "'t'", "''"] in lines
    assert len(run("dump", folder, "--limit", "3")[1].splitlines()) == 3
    assert run("dump", folder, "--limit", "0")[1] == ""
    assert run("dump", folder, "--family", "sorted", "--version", "2")[1] == "sorted\t'all'\t'a' 'b2'\n"


def test_dump_for_programs(folder, run):
    lines = [json.loads(line) for line in run("dump", folder, "--json", "--version", "1")[1].splitlines()]
    found = {(line["family"], bytes.fromhex(line["key"])): [bytes.fromhex(v) for v in line["values"]] for line in lines}
    assert found == {
        **{("default", b"key%d" % number): [b"1"] for number in range(1, 5)},
        ("sorted", b"all"): [b"a", b"b1"],
        ("$timers", b"t"): [b""],
    }


def test_dump_of_what_changed(folder, run):
    out = run("dump", folder, "--since", "3", "--version", "4", "--family", "default")[1]
    assert sorted(out.splitlines()) == [
        "added\tdefault\t'key7'\t'4'",
        "changed\tdefault\t'key4'\t'3' -> '4'",
        "changed\tdefault\t'key5'\t'3' -> '4'",
        "changed\tdefault\t'key6'\t'3' -> '4'",
        "removed\tdefault\t'key1'\t'1'",
    ]
    lines = [json.loads(line) for line in run("dump", folder, "--since", "6", "--format", "json")[1].splitlines()]
    found = {line["change"] for line in lines}
    assert found == {"added", "changed"} and all(line["before"] or line["change"] == "added" for line in lines)
    assert run("dump", folder, "--since", "7")[1] == ""
    # From nothing, and to nothing.
    assert len(run("dump", folder, "--since", "0")[1].splitlines()) == 11
    assert {line.split()[0] for line in run("dump", folder, "--version", "0", "--since", "7")[1].splitlines()} == {
        "removed"
    }


VALUES_OF_1 = sorted(
    [("default", b"key%d" % number, b"1") for number in range(1, 5)]
    + [("sorted", b"all", b"a"), ("sorted", b"all", b"b1"), ("$timers", b"t", b"")]
)


def test_dump_as_csv(folder, run):
    """One row for each value."""
    rows = list(csv.DictReader(io.StringIO(run("dump", folder, "--format", "csv", "--version", "1")[1])))
    found = [(row["family"], bytes.fromhex(row["key"]), bytes.fromhex(row["value"])) for row in rows]
    assert sorted(found) == VALUES_OF_1
    out = run("dump", folder, "--format", "csv", "--since", "3", "--version", "4")[1]
    rows = {bytes.fromhex(row["key"]): row for row in csv.DictReader(io.StringIO(out))}
    assert rows[b"key1"] == {
        "change": "removed",
        "family": "default",
        "key": b"key1".hex(),
        "before": b"1".hex(),
        "after": "",
    }
    assert rows[b"all"]["after"] == f"{b'a'.hex()} {b'b4'.hex()}"
    assert run("dump", folder, "--format", "csv", "--limit", "0")[1] == "family,key,value\n"


def test_dump_as_parquet(folder, capfdbinary, monkeypatch):
    """To a pipe, in several batches."""
    monkeypatch.setattr(tools, "PARQUET_ROWS", 2)
    command = ["dump", str(folder), "--format", "parquet"]

    def table(*more):
        # With a buffer of bytes, as a real one has.
        with open(1, "w", closefd=False) as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert main([*command, *more]) == 0
            assert not stdout.closed
        return parquet.read_table(io.BytesIO(capfdbinary.readouterr().out))

    found = table("--version", "1")
    assert [str(column.type) for column in found.columns] == ["string", "binary", "binary"]
    assert sorted(tuple(row.values()) for row in found.to_pylist()) == VALUES_OF_1
    changes = {row["key"]: row for row in table("--since", "3", "--version", "4").to_pylist()}
    assert changes[b"key1"] == {"change": "removed", "family": "default", "key": b"key1", "before": [b"1"], "after": []}
    assert changes[b"all"]["after"] == [b"a", b"b4"]
    assert table("--limit", "0").num_rows == 0
    assert table("--limit", "3", "--family", "default").num_rows == 3


@pytest.fixture
def lists(tmp_path):
    """A checkpoint of two versions, written from Python: a map, a queue that moves on, and in the second raw pages."""
    with Manager(tmp_path, mode="auto") as checkpoint, checkpoint.load() as pm:
        pm.map("default")[b"k"] = b"1"
        pm.deque("queue").extend([b"a", b"b", b"c"])
        checkpoint.commit(pm)
        pm.deque("queue").popleft()
        pm.deque("queue")[1] = b"C"
        pm.deque("queue").append(b"d")
        pm.raw("blocks").write(pm.raw("blocks").alloc(), b"\1")
        checkpoint.commit(pm)
    return tmp_path


def test_dump_of_lists(lists, run):
    assert run("dump", lists, "--version", 1)[1].splitlines() == [
        "default\t'k'\t'1'",
        "queue\t0\t'a'",
        "queue\t1\t'b'",
        "queue\t2\t'c'",
    ]
    page = "01" + "00" * 4095
    assert run("dump", lists)[1].splitlines()[1:] == [
        *("queue\t0\t'b'", "queue\t1\t'C'", "queue\t2\t'd'"),
        f"blocks\t0\t{page}",
    ]
    changes = run("dump", lists, "--since", 1)[1].splitlines()
    assert changes == [
        *("removed\tqueue\t0\t'a'", "changed\tqueue\t1\t'c' -> 'C'", "added\tqueue\t2\t'd'"),
        f"added\tblocks\t0\t{page}",
    ]
    lines = run("dump", lists, "--family", "queue", "--since", 1, "--format", "json")[1].splitlines()
    assert json.loads(lines[1]) == {
        "change": "changed",
        "family": "queue",
        "position": 1,
        "before": ["63"],
        "after": ["43"],
    }
    rows = run("dump", lists, "--version", 1, "--format", "csv")[1].splitlines()
    assert rows[:3] == ["family,key,position,value", "default,6b,,31", "queue,,0,61"]
    assert run("dump", lists, "--family", "default", "--format", "csv")[1].splitlines()[0] == "family,key,value"
    code, _, err = run("dump", lists, "--family", "queues")
    assert code != 0 and "there are blocks, default, queue" in err


def test_dump_of_lists_as_parquet(lists, capfdbinary, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert main(["dump", str(lists), "--version", "1", "--format", "parquet"]) == 0
    table = parquet.read_table(io.BytesIO(capfdbinary.readouterr().out))
    assert table.to_pylist()[:2] == [
        {"family": "default", "key": b"k", "position": None, "value": b"1"},
        {"family": "queue", "key": None, "position": 0, "value": b"a"},
    ]


def test_inspect_and_verify_of_lists(lists, run):
    (store,) = json.loads(run("inspect", lists, "--json")[1])["stores"]
    assert (store["keys"], store["kind"]) == (4, "pages")
    assert run("verify", lists, "--all")[0] == 0
    # A record too few is seen.
    rewrite(lists / "state/0/0/1.qdelta", keys=2)
    code, out, _ = run("verify", lists, "--all")
    assert code != 0 and "1.qdelta: the state has 4 keys, the end of its file says 2" in out


@pytest.mark.parametrize(("since", "version"), [(1, 2), (2, 1)])
def test_dump_of_a_name_that_was_another_structure_s(tmp_path, run, since, version):
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm:
        pm.list("x").append(b"record")
        checkpoint.commit(pm)
        pm.destroy("x")
        pm.map("x")[b"key"] = b"value"
        checkpoint.commit(pm)
    choice = ["--since", since, "--version", version]
    code, out, err = run("dump", tmp_path, *choice, "--format", "csv")
    assert (code, err, out.splitlines()[0]) == (0, "", "change,family,key,position,before,after")
    found = {row["change"]: row for row in csv.DictReader(io.StringIO(out))}
    of_list, of_map = (found[change] for change in (("removed", "added") if since == 1 else ("added", "removed")))
    assert (of_list["position"], of_list["key"], of_map["position"], of_map["key"]) == ("0", "", "", b"key".hex())


def test_parquet_is_nothing_for_a_terminal(folder, run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = run("dump", folder, "--format", "parquet")
    assert (code, out) == (2, "") and "send it to a file, as in > state.parquet" in err


def test_dump_of_a_version_with_an_id(tmp_path, run):
    writer = stores.sample(tmp_path / "state/0/3", ids=True)
    first = min(version for version in writer.states if version.number == 1)
    for wanted in ("1", first):
        assert len(run("dump", tmp_path, "--version", wanted, "--family", "default")[1].splitlines()) == 4


def test_rows_of_spark_are_shown_in_hex():
    row = struct.pack("<qq", 0, 7)
    assert tools.as_text(row) == row.hex()
    assert tools.as_text(b"it's") == '"it\'s"'
    assert tools.as_text("ä".encode()) == "c3a4"


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{}/nowhere"], "quire inspect: {}/nowhere is not there"),
        (["verify", "{}/state/0/3/7.qdelta"], "quire verify: .*7.qdelta: Not a directory"),
        (["verify", "{}/empty"], "holds no state that Quire wrote"),
        (["verify", "nosuch://x"], "no file system for it can be had"),
        (["dump", "{}", "--partition", "9"], "no such store: there are operator 0, partition 3"),
        (["dump", "{}", "--version", "99"], "no version 99: there are 1 to 7"),
        (["dump", "{}", "--version", "last"], "'last' is no version"),
        (["dump", "{}", "--family", "none"], r"no family 'none': there are \$timers, default, sorted"),
    ],
)
def test_what_cannot_be_read(folder, run, arguments, message):
    (folder / "empty").mkdir()
    code, out, err = run(*(argument.format(folder) for argument in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message.format(folder), err)


def test_a_damaged_file_on_the_way(folder, run):
    (folder / "state/0/3/7.qdelta").write_bytes(b"x" * 200)
    code, out, err = run("dump", folder)
    assert (code, out) == (1, "")
    assert err.startswith(f"quire dump: {folder}/state/0/3/7.qdelta: ")


@pytest.mark.parametrize("arguments", [["verify"], ["dump", "x", "--limit", "-1"], ["dump", "x", "--partition", "one"]])
def test_wrong_use(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: quire" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_trace(folder, run, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tools, "examine", interrupt)
    code, out, err = run("verify", folder)
    assert (code, out, err) == (2, "", "quire verify: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal(folder, monkeypatch, capsys):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert tools.verify(str(folder)) == 0
    assert "verifying" in terminal.getvalue()
    assert capsys.readouterr().out.endswith("all sound\n")


def test_no_progress_without_rich(folder, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert tools.verify(str(folder)) == 0
    assert terminal.getvalue() == ""


def test_tools_on_a_file_system_of_pyarrow(folder, capsys):
    from pyarrow import fs

    local = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    assert tools.verify("/", every_file=True, storage=local) == 0
    assert tools.inspect("/", storage=local) == 0
    assert tools.dump("/", version="1", storage=local, limit=2) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 2
    assert Checkpoint("/", local).store().resolve() == Version(7)


# ------------------------------------------------------------------------------------------------ once wrong


def committed(folder, count, **options):
    with Manager(str(folder), **options) as checkpoint, checkpoint.load() as pm:
        for _ in range(count):
            pm.map("users")[b"%d" % checkpoint.version] = b"x"
            checkpoint.commit(pm)
            checkpoint.maintain().wait()


def test_verify_of_all_names_a_hole_between_files(tmp_path, run):
    committed(tmp_path, 7, bases_every=6)
    (tmp_path / "state/0/0/4.qdelta").unlink()
    assert run("verify", tmp_path)[0] == 0  # the newest version needs none of them
    code, out, _ = run("verify", "--all", tmp_path)
    assert code == 1 and "4.qdelta is not there" in out


@pytest.mark.parametrize("ids", [False, True])
def test_verify_of_all_names_a_hole_before_a_base(tmp_path, run, ids):
    """No version that is there needs what is missing, but it was to be kept."""
    committed(tmp_path, 7, bases_every=6, ids=ids)
    (missing,) = (tmp_path / "state/0/0").glob("5*.qdelta")
    missing.unlink()
    code, out, _ = run("verify", "--all", tmp_path)
    assert (code, out.count("is not there")) == (1, 1) and f"{missing} is not there" in out


def test_verify_of_all_takes_pages_whose_start_is_gone_where_a_base_serves(tmp_path, run):
    for mode, count in (("delta", 3), ("pages", 2)):
        committed(tmp_path, count, mode=mode, ids=True, retain=1, bases_every=2)
    assert run("verify", tmp_path)[0] == 0
    assert run("verify", "--all", tmp_path)[0] == 0


def test_a_folder_that_is_no_store_hides_nothing_of_the_others(tmp_path, run):
    committed(tmp_path, 3)
    (tmp_path / "state/0/backup").mkdir()
    (tmp_path / "state/0/backup/1.qdelta").write_bytes(b"rubbish")
    damaged = tmp_path / "state/0/0/2.qdelta"
    damaged.write_bytes(damaged.read_bytes()[:50])
    code, out, _ = run("verify", "--all", tmp_path)
    assert code == 1 and "0/0/2.qdelta" in out and "backup/1.qdelta" in out
    assert json.loads(run("inspect", "--json", tmp_path)[1])
    assert run("dump", tmp_path, "--operator", 0, "--partition", 0, "--version", 1)[0] == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "dump"])
def test_output_that_cannot_be_written_is_not_damage(folder, command):
    start = f"{sys.executable} -m quire {command} {folder}"
    for redirected, code in (("> /dev/full", 2), (">&-", 0)):
        done = subprocess.run(f"{start} {redirected}", shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_number_of_too_many_digits_is_no_version(folder, run):
    code, _, err = run("dump", folder, "--version", "1" * 5000)
    assert code == 2 and "is no version" in err and len(err) < 300


@pytest.mark.parametrize("metadata", ["metadata", "v2/0"])
def test_verify_names_what_the_query_says_is_there(tmp_path, capsys, metadata):
    for partition in range(3):
        with Manager(tmp_path, partition=partition) as checkpoint, checkpoint.load() as pm:
            for version in range(2):
                pm.map("default")[b"key"] = str(version).encode()
                checkpoint.commit(pm)
    assert tools.verify(str(tmp_path)) == tools.FINE  # nobody says anything
    notes = tmp_path / "state/0/_metadata" / metadata
    notes.parent.mkdir(parents=True)
    notes.write_text('v1\n{"stateStoreInfo": [{"storeName": "default", "numPartitions": 3}]}')
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits/0").touch()
    assert tools.verify(str(tmp_path)) == tools.FINE  # the batch after the last is under way
    (tmp_path / "commits/1").touch()
    assert tools.verify(str(tmp_path)) == tools.FINE
    shutil.rmtree(tmp_path / "state/0/1")
    (tmp_path / "state/0/2/2.qdelta").unlink()
    capsys.readouterr()
    assert tools.verify(str(tmp_path)) == tools.DAMAGED
    out = capsys.readouterr().out
    assert f"{tmp_path}/state/0/1 has no files, and is a store of the query's" in out
    assert f"{tmp_path}/state/0/2 ends with version 1: batch 1 made version 2" in out
    assert "2 damaged or missing" in out
    assert tools.verify(str(tmp_path), as_json=True) == tools.DAMAGED
    assert len(json.loads(capsys.readouterr().out)["missing"]) == 2
    notes.write_text("v1\nnot what Spark writes")
    assert tools.verify(str(tmp_path)) == tools.DAMAGED
    assert "1 damaged or missing" in capsys.readouterr().out
