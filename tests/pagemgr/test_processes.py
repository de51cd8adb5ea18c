"""Several processes on one arena file: kills in the middle of everything, readers and waiters beside the writer."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import quire

WRITER = """
import sys, quire
path, seed = sys.argv[1], int(sys.argv[2])
with quire.PageManager(path, page_size=1024, wait=20) as pm:
    users, events, log, state = pm.map("users"), pm.ordered_map("events"), pm.list("log"), pm.map("state")
    batch = int(state.get(b"batch", b"0"))
    while True:
        batch += 1
        for number in range(40):
            key = b"key-%d" % ((batch * 7919 + number * 31) % 500)
            users[key] = b"%d " % batch * (number * 5)
            events[key] = b"%d" % batch
        users.pop(b"key-%d" % (batch % 500), None)
        log.append(b"%d" % batch)
        if batch % 3 == 0:
            with pm.snapshot() as snapshot:
                len(snapshot.map("users"))
        state[b"batch"] = b"%d" % batch
        pm.commit()
        print(batch, flush=True)
"""


def expected(batches):
    users, events = {}, {}
    for batch in range(1, batches + 1):
        for number in range(40):
            key = b"key-%d" % ((batch * 7919 + number * 31) % 500)
            users[key] = b"%d " % batch * (number * 5)
            events[key] = b"%d" % batch
        users.pop(b"key-%d" % (batch % 500), None)
    return users, events, [b"%d" % batch for batch in range(1, batches + 1)]


@pytest.mark.slow
def test_a_killed_writer_leaves_exactly_its_last_commit(path):
    """Kills a writer at random moments, ten times over on one file; it holds the last commit told, or the next."""
    generator = random.Random(9)
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "1"], stdout=subprocess.PIPE, text=True)
        told = int(writer.stdout.readline())
        time.sleep(generator.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
        told = int(rest[-1]) if rest else told
        with quire.PageManager(path) as pm:
            pm.check()
            found = int(pm.map("state")[b"batch"])
            assert found in (told, told + 1)
            users, events, log = expected(found)
            assert dict(pm.map("users")) == users
            assert dict(pm.ordered_map("events")) == events
            assert pm.list("log")[:] == log


@pytest.mark.slow
def test_readers_in_this_process_beside_a_writer_in_another(path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "1"], stdout=subprocess.PIPE, text=True)
    try:
        writer.stdout.readline()
        with quire.PageManager(path, read_only=True) as reader:
            seen = set()
            for _ in range(60):
                with reader.snapshot() as snapshot:
                    batch = int(snapshot.map("state")[b"batch"])
                    seen.add(batch)
                    time.sleep(0.003)
                    users, events, log = expected(batch)
                    assert dict(snapshot.map("users")) == users
                    assert dict(snapshot.ordered_map("events")) == events
                    assert snapshot.list("log")[:] == log
            assert len(seen) > 3
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


HOLDER = """
import sys, time, quire
pm = quire.PageManager(sys.argv[1])
pm.map("x")[b"a"] = b"1"
pm.commit()
print("open", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(path, seconds):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "open\n"
    holder.stdout.close()
    return holder


def test_wait_for_another_process_to_let_go(path):
    holder = hold(path, 0.4)
    with pytest.raises(quire.BusyError):
        quire.PageManager(path)
    with quire.PageManager(path, wait=20) as pm:
        assert pm.map("x")[b"a"] == b"1"
    holder.wait()


def test_a_killed_process_holds_nothing(path):
    holder = hold(path, 60)
    holder.kill()
    holder.wait()
    with quire.PageManager(path) as pm:
        assert pm.map("x")[b"a"] == b"1"
        pm.check()


READER = """
import sys, time, quire
reader = quire.PageManager(sys.argv[1], read_only=True)
snapshot = reader.snapshot()
print("pinned", flush=True)
time.sleep(60)
"""


def test_the_pins_of_a_killed_reader_go_with_it(path):
    with quire.PageManager(path) as pm:
        users = pm.map("users")
        users.update({b"%d" % number: b"x" * 100 for number in range(2000)})
        pm.commit()
        reader = subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True)
        assert reader.stdout.readline() == "pinned\n"
        reader.stdout.close()
        users.clear()
        pm.commit()
        assert pm.stats().snapshots == 1
        reader.kill()
        reader.wait()
        for number in range(5):
            users[b"%d" % number] = b"y"
            pm.commit()
        stats = pm.stats()
        assert stats.snapshots == 0
        assert stats.frames_retired < 20
        pm.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_does_not_keep_the_writer_lock(path):
    pm = quire.PageManager(path)
    pm.map("users")[b"a"] = b"1"
    pm.commit()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        os.write(ready[1], b"x")
        os.read(go[0], 1)  # ends when the parent closes its end, or dies
        os._exit(0)
    try:
        os.read(ready[0], 1)
        pm.close()
        with quire.PageManager(path) as again:
            assert again.map("users")[b"a"] == b"1"
    finally:
        for end in (*ready, *go):
            os.close(end)
        os.waitpid(child, 0)
