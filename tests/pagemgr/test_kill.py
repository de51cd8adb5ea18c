"""Kills at random instants: whatever the writer was doing, its last commit is whole and nothing is lost or leaked.

The writer applies batches, each a function of its number alone, and commits after each; the first thing a batch
writes is its number. So after a kill the arena itself says how many batches it claims to hold, and a model that applied
as many must equal it in every structure. Times to live are drawn so that writers die while opening, growing, writing
and committing; `SIGALRM` kills as `SIGKILL` does (no handler runs), to the microsecond.
"""

import collections
import os
import random
import signal
import time
import traceback

import quire

KILLS = int(os.environ.get("QUIRE_TEST_KILLS", "250"))


class Model:
    """What the arena must hold after some number of batches."""

    def __init__(self) -> None:
        self.batches = 0
        self.map: dict[bytes, bytes] = {}
        self.ordered: dict[bytes, bytes] = {}
        self.deque: collections.deque[bytes] = collections.deque()

    def advance(self, batches: int) -> None:
        while self.batches < batches:
            self.batches += 1
            apply(self.batches, self.map, self.ordered, self.deque)


def apply(batch, users, times, queue):
    """One batch on anything like a dict, a dict and a deque: grows for a while, then shrinks, and so on."""
    rng = random.Random(batch)
    users[b"batch"] = times[b"batch"] = str(batch).encode()
    growing = batch // 40 % 2 == 0
    for _ in range(rng.randrange(1, 60)):
        key = b"user-%d" % rng.randrange(2000)
        if rng.random() < (0.9 if growing else 0.4):
            size = rng.choice([0, 8, 64, 300, 5000])
            users[key] = rng.randbytes(size)
            times[rng.randbytes(4) + key] = key
            queue.append(key * rng.randrange(30))
        else:
            users.pop(key, None)
            if queue:
                queue.popleft()
    if not growing:
        for key in sorted(times)[: rng.randrange(200)]:
            if key != b"batch":
                del times[key]


def write_until_killed(path, page_size, seconds, count_opening):
    """In a child process; never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if count_opening:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        with quire.PageManager(path, page_size=page_size) as pm:
            if not count_opening:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            users, times, queue = pm.map("users"), pm.ordered_map("times"), pm.deque("queue")
            batch = int(users.get(b"batch", b"0"))
            while True:
                batch += 1
                apply(batch, users, times, queue)
                pm.commit()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def check(path, page_size, model):
    with quire.PageManager(path, page_size=page_size) as pm:
        pm.check()
        users, times, queue = pm.map("users"), pm.ordered_map("times"), pm.deque("queue")
        model.advance(int(users.get(b"batch", b"0")))
        assert dict(users.items()) == model.map
        assert list(times.items()) == sorted(model.ordered.items())
        assert list(queue) == list(model.deque)
        stats = pm.stats()
        assert stats.frames_retired == 0 and stats.snapshots == 0  # nothing of the lost epoch is left


def seconds_of_a_batch(path, page_size):
    """How long a batch takes on this machine now, so that kills come in the middle of the work on any machine."""
    started = time.monotonic()
    with quire.PageManager(path, page_size=page_size) as pm:
        users, times, queue = pm.map("users"), pm.ordered_map("times"), pm.deque("queue")
        for batch in range(1, 31):
            apply(batch, users, times, queue)
            pm.commit()
    return (time.monotonic() - started) / 30


def test_random_kills(tmp_path, page_size):
    """At least 200 kills over both page sizes; the arena is never made anew, so damage would add up."""
    path, model, rng = tmp_path / "arena", Model(), random.Random(page_size)
    pace = seconds_of_a_batch(tmp_path / "other", page_size)
    died_at = set()
    for kill in range(KILLS // 2):
        seconds = max(0.0005, pace * rng.choice([2, 10, 40, 120]) * rng.uniform(0.1, 2))
        child = os.fork()
        if child == 0:
            write_until_killed(path, page_size, seconds, count_opening=kill % 4 == 0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        assert killed, f"kill {kill}: the writer ended by itself"
        check(path, page_size, model)
        died_at.add(model.batches)
    assert len(died_at) > KILLS // 10, "the writers hardly wrote: the test shows nothing"
