"""The edges of what the machine has: a full disk, a file-size limit, and a state larger than memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire

FILL = """
import resource, signal, sys, quire
path, bytes_max = sys.argv[1], int(sys.argv[2])
if bytes_max:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
with quire.PageManager(path) as pm:
    m = pm.map("m")
    m[b"first"] = b"kept"
    pm.commit()
    try:
        for i in range(1_000_000):
            m[b"%d" % i] = b"x" * 3000
    except quire.NoSpaceError as error:
        print("full", i)
        assert str(path) in str(error), error
    else:
        sys.exit("the disk never got full")
    pm.check()
    before = len(m)
    assert before > 100
    for _ in range(3):  # still full, still whole
        try:
            m[b"one more"] = b"x" * 500_000
        except quire.NoSpaceError:
            pass
    pm.check()
    pm.abort()
    assert dict(m.items()) == {b"first": b"kept"}
    m[b"second"] = b"also kept"  # there is room again
    pm.commit()
with quire.PageManager(path) as pm:
    pm.check()
    assert dict(pm.map("m").items()) == {b"first": b"kept", b"second": b"also kept"}
print("whole")
"""


def fill(path, bytes_max=0):
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(path), str(bytes_max)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "full" and done.stdout.split()[-1] == "whole"


def test_a_file_size_limit(path):
    fill(path, 4 << 20)


def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "quire-test", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can make a small disk; test_a_file_size_limit shows the same on any account")
    try:
        fill(disk / "arena")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


LARGER = """
import os, random, sys, pyarrow as pa, quire
path, group, rows, row_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with open(group, "w") as tasks:
    tasks.write(str(os.getpid()))
with quire.PageManager(path) as pm:
    m = pm.map("m")
    for start in range(0, rows, 1000):
        keys = [b"%d" % i for i in range(start, start + 1000)]
        m.put_many(pa.array(keys), pa.array([key.ljust(row_bytes, b".") for key in keys]))
        if start % 20_000 == 0:
            pm.commit()
    pm.commit()
    rng = random.Random(1)
    for _ in range(2000):
        key = b"%d" % rng.randrange(rows)
        assert m[key] == key.ljust(row_bytes, b".")
    print(pm.stats().bytes_held)
"""


def memory_group(limit_bytes):
    """A control group that gives its processes so much memory and no more; None where that cannot be had."""
    for root, limit_file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"quire-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_file).write_text(str(limit_bytes))
            return group
        except OSError:
            group.rmdir()
    return None


@pytest.mark.slow
def test_a_state_larger_than_memory(path):
    """A file arena of half a gigabyte in a process that may have 192 MB: the system pages it out and in."""
    group = memory_group(192 << 20)
    if group is None:
        pytest.skip("needs the right to make a memory control group")
    try:
        arguments = [str(path), str(group / "cgroup.procs"), "60000", "8000"]
        done = subprocess.run([sys.executable, "-c", LARGER, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert int(done.stdout) > 450 << 20
    finally:
        group.rmdir()
    with quire.PageManager(path) as pm:
        assert len(pm.map("m")) == 60000
        pm.check()
