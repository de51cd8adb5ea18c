"""Kills at every step of committing, writing bases, cleaning, going back and loading: no committed version is lost.

A child process makes versions, each a function of the seed, a generation and its number, and tells before and after
each commit. It is killed when it passes a given point (``quire.checkpoint.fault``) for the nth time. Another child then
loads the newest version, which must be the last one committed or, where the kill came after its file had its name, the
one being committed. It holds exactly what the model holds, and so do the older versions that are to be kept; all files
verify, and the program goes on. Children are forks of this process, which opens nothing itself.

QUIRE_CRASHES=all  every passing of every point, from several seeds, and a second kill in the run that recovers.
"""

import copy
import json
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from pathlib import Path

import pytest
import stores

from quire.checkpoint import Checkpoint, Manager, Version, fault, io_service, manager, reader, storage, tools

ALL = os.environ.get("QUIRE_CRASHES") == "all"
MODES = ["delta", "pages", "auto", "cec"]
SEEDS = range(1, 6) if ALL else [1]
RETAIN, BASES_EVERY = 4, 3
VERSIONS_BEFORE, VERSIONS_MORE = 5, 7

# Passed in a commit: the file is under its name from here on.
AFTER = {"write.published", "write.done", "commit.durable", "commit.done"}
POINTS = {
    *("commit.start", "commit.packed", "commit.durable", "commit.done", "drop.delete"),
    *("write.start", "write.chunk", "write.written", "write.synced", "write.published", "write.done"),
    *("base.start", "part.frame", "part.done", "base.parts", "base.done"),
    *("clean.delete", "clean.done", "load.file", "load.done"),
}
OF_BASES = {"base.start", "part.frame", "part.done", "base.parts", "base.done"}


# ------------------------------------------------------------------------------------------------ what is written


def batch(seed, generation, number):
    """The changes of a version: family, key and values; no values: removed. Later ones grow less.

    Of the queue: in place of the key, how many go at the front; the values come at the back.
    """
    rng = random.Random(f"{seed} {generation} {number}")
    for _ in range(rng.randrange(1, 40)):
        family = rng.choice(["default", "default", "sorted", "$timers"])
        key = b"key-%d" % rng.randrange(150)
        count = rng.choices([0, 1, 2], [2, 7, 1 if family == "sorted" else 0])[0]
        yield family, key, [rng.randbytes(rng.choice([0, 8, 60, 400])) for _ in range(count)]
    yield "default", b"number", [b"%d" % number]
    yield "queue", rng.randrange(4), [rng.randbytes(rng.choice([0, 8, 60, 400])) for _ in range(rng.randrange(6))]


def advance(state, mode, seed, generation, number):
    """The model's next state; family to key to values. A log has no queue."""
    state = copy.deepcopy(state)
    for family, key, values in batch(seed, generation, number):
        if family == "queue":
            if mode != "cec":
                state["queue"] = state.get("queue", [])[key:] + values
            continue
        keys = state.setdefault(family, {})
        keys.pop(key, None)
        if values:
            keys[key] = values
    return {family: keys for family, keys in state.items() if keys}


def write(pm, mode, seed, generation, number):
    for family, key, values in batch(seed, generation, number):
        if family == "queue":
            if mode != "cec":
                del pm.deque("queue")[:key]
                pm.deque("queue").extend(values)
            continue
        handle = pm.ordered_map(family) if stores.FAMILIES[family] else pm.map(family)
        handle.pop(key, None)
        for value in values:
            handle.append(key, value)


def opened(folder, mode, seed):
    codec = ["lz4", "zstd", ""][seed % 3]
    return Manager(folder, mode=mode, codec=codec, bases_every=BASES_EVERY, retain=RETAIN, extent_target=1.2)


def work(folder, mode, seed, generation, versions, tell):
    """Makes so many versions, with bases in the foreground and beside commits, and goes back once in the middle."""
    with opened(folder, mode, seed) as checkpoint:
        pm = checkpoint.load()
        tell("loaded", checkpoint.version)
        job = None
        for step in range(versions):
            if step == versions // 2 and checkpoint.version > 3:
                pm.close()
                pm = checkpoint.load(checkpoint.version - 2)
                generation += 1
                tell("back", checkpoint.version)
            number = checkpoint.version + 1
            write(pm, mode, seed, generation, number)
            tell("try beside" if job else "try", number)
            assert checkpoint.commit(pm) == number
            tell("done", number)
            if job is not None:
                job.wait()
            job = checkpoint.maintain(background=True) if step % 2 else checkpoint.maintain() and None
        pm.close()


# ------------------------------------------------------------------------------------------------ children


class Child:
    """A fork that runs a function. told: what it said; killed: by a fault; result: what the function gave."""

    def __init__(self, function, hook=None):
        read, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._run(function, hook, write_end)
        os.close(write_end)
        with os.fdopen(read) as lines:
            self.told = [json.loads(line) for line in lines]
        _, status = os.waitpid(pid, 0)
        self.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        assert self.killed or ended, f"the child ended with status {status}; its traceback is above"
        self.result = self.told.pop()[1] if ended else None

    def _run(self, function, hook, pipe):
        code = 1
        try:
            # Small ones, so that a few kilobytes have all there is: frames, parts, several writes for a file.
            io_service.INLINE_BYTES, io_service.FRAME_BYTES, io_service.WINDOW_BYTES = 60 << 10, 8 << 10, 32 << 10
            storage.LOCAL_WRITE_BYTES = 700
            reader.RELIST_WAITS_SECONDS = (0, 0, 0)

            def tell(*what):
                os.write(pipe, json.dumps(what).encode() + b"\n")

            fault.hook = hook
            tell("result", function(tell))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class Counting:
    """A hook that counts."""

    def __init__(self):
        self.passed = Counter()

    def __call__(self, name):
        self.passed[name] += 1


# ------------------------------------------------------------------------------------------------ the model's side


class History:
    """The versions there are: states holds the content of each by its number. highest: the newest there ever was."""

    def __init__(self, mode, seed):
        self.mode = mode
        self.seed = seed
        self.generation = 0
        self.states = [{}]
        self.highest = 0

    def next(self, states):
        """The history with one version more."""
        return [*states, advance(states[-1], self.mode, self.seed, self.generation, len(states))]

    def extend(self, states):
        """Takes a history over."""
        self.states = states
        self.highest = max(self.highest, len(states) - 1)

    def replay(self, told, point):
        """Takes in what a child told until it was killed at a point; gives the histories that may be true now."""
        dropped = []
        allowed = [self.states]
        for what, number in told:
            if what == "loaded":
                assert number == len(self.states) - 1
            elif what == "back":
                # What is gone back from goes with the next commit, one by one.
                dropped = [self.states[: count + 1] for count in range(number, len(self.states))]
                self.states = self.states[: number + 1]
                self.generation += 1
            elif what == "done":
                self.extend(self.next(self.states))
                dropped, allowed = [], [self.states]
            else:
                before, after = dropped or [self.states], [self.next(self.states)]
                # Beside a commit a base is written, which passes some of the same points.
                unclear = what == "try beside" and not point.startswith("commit.")
                allowed = before + after if unclear else after if point in AFTER else before
        return {len(states) - 1: states for states in allowed}


def recover(folder, mode, history, allowed, tell):
    """Loads what a killed child left, checks it against the model, and goes on for a few versions."""
    with opened(folder, mode, history.seed) as checkpoint, checkpoint.load() as pm:
        number = checkpoint.version
        assert number in allowed, f"version {number} came back, not one of {sorted(allowed)}"
        pm.check()
        history.extend(allowed[number])
        assert stores.content(pm) == history.states[-1], f"version {number}"
        check_older(checkpoint.store, history, number)
        for _ in range(BASES_EVERY + 1):
            history.generation += 1
            write(pm, mode, history.seed, history.generation, checkpoint.version + 1)
            history.extend(history.next(history.states))
            checkpoint.commit(pm)
            checkpoint.maintain()
        assert stores.content(pm) == history.states[-1]
        check_older(checkpoint.store, history, checkpoint.version)
        check_clean(checkpoint.store, folder)
    verdict = tools.examine(Checkpoint(folder).store(), True, lambda count: None)
    assert not verdict.problems
    return number


def check_older(store, history, newest):
    for number in range(max(0, history.highest - RETAIN), newest + 1):
        assert stores.loaded(store, number) == history.states[number], f"version {number} of {newest}"


def check_clean(store, folder):
    """Nothing is left that is older than the newest base and belongs to no version."""
    listing = store.listing()
    newest = max(listing.bases, default=Version(0))
    named = {name for base in listing.bases.values() for name in store.parts(base)}
    for part in listing.parts:
        assert part.version >= newest or Path(part.path).name in named
    for path in Path(folder, "state/0/0").iterdir():
        match = manager.LEFTOVER.fullmatch(path.name)
        assert match is None or match[2] not in ("qpart", "qimage") or int(match[1]) >= newest.number, path.name


# ------------------------------------------------------------------------------------------------ cases


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def prepared(mode, tmp_path_factory):
    """For each seed a folder with some versions, what is in it, and how often each point is passed from there on."""
    found = {}
    for seed in SEEDS:
        folder = tmp_path_factory.mktemp(f"{mode}-{seed}") / "before"
        history = History(mode, seed)
        first = Child(lambda tell, seed=seed, folder=folder: work(folder, mode, seed, 0, VERSIONS_BEFORE, tell))
        history.replay(first.told, "none")
        trial = folder.with_name("trial")
        shutil.copytree(folder, trial)
        hook = Counting()

        def count(tell, seed=seed, trial=trial, hook=hook, generation=history.generation):
            work(trial, mode, seed, generation, VERSIONS_MORE, tell)
            return dict(hook.passed)

        found[seed] = (folder, history, Child(count, hook).result)
    return found


def cases(counts):
    """Points with the passings at which to kill: all of them, or the last and one between."""
    for point, count in sorted(counts.items()):
        yield from ((point, nth) for nth in (range(1, count + 1) if ALL else sorted({(count + 1) // 2, count})))


def points(mode):
    """The points that a mode passes: a log needs no bases."""
    return POINTS - OF_BASES if mode == "cec" else POINTS


def test_every_point_is_passed(prepared, mode):
    """Else a kill there would prove nothing."""
    for _, _, counts in prepared.values():
        assert set(counts) == points(mode)
    total = sum(len(list(cases(counts))) for _, _, counts in prepared.values())
    assert total >= (500 if ALL else 25)


@pytest.mark.slow
@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_kill_at(prepared, mode, point, tally, tmp_path):
    if point not in points(mode):  # cec writes no bases: nothing to be killed at
        assert not any(point in counts for _, _, counts in prepared.values())
        return
    for seed, (folder, before, counts) in prepared.items():
        for name, nth in cases({point: counts[point]}):
            rng = random.Random(f"{seed} {name} {nth}")
            place, history = tmp_path / f"{seed}-{nth}", copy.deepcopy(before)
            shutil.copytree(folder, place)
            spec = f"{name}:{nth}"
            crashed(place, mode, history, spec)
            tally[f"kills in Python, mode {mode}"] += 1
            if ALL and rng.random() < 0.5:
                # Again, in the run that recovers. What it does not reach, it does not die of.
                crashed(place, mode, history, f"{rng.choice(sorted(points(mode)))}:{rng.randrange(1, 4)}", surely=False)
            shutil.rmtree(place)


def crashed(place, mode, history, spec, surely=True):
    """A run that ends with a kill, and one that recovers."""
    point = spec.partition(":")[0]
    start = history.generation
    child = Child(lambda tell: work(place, mode, history.seed, start, VERSIONS_MORE, tell), fault.killer(spec))
    assert child.killed or not surely, f"{spec} was not reached"
    allowed = history.replay(child.told, point)
    # What recovering writes, the model's side must know, too: it is given back through the pipe.
    recovered = Child(lambda tell: recover(place, mode, copy.deepcopy(history), allowed, tell))
    number = recovered.result
    history.extend(allowed[number])
    for _ in range(BASES_EVERY + 1):
        history.generation += 1
        history.extend(history.next(history.states))


@pytest.mark.slow
def test_a_kill_asked_for_by_the_environment(tmp_path, monkeypatch):
    """As a program that knows nothing of tests would meet it."""
    import subprocess
    import sys

    program = (
        "import sys; from quire.checkpoint import Manager\n"
        "with Manager(sys.argv[1]) as checkpoint, checkpoint.load() as pm:\n"
        "    for number in range(9):\n"
        "        pm.map('default')[b'%d' % number] = b''\n"
        "        print(checkpoint.commit(pm), flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "QUIRE_FAULT": "commit.durable:3"}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert done.stdout.split() == [b"1", b"2"]
    with Manager(tmp_path) as checkpoint, checkpoint.load() as pm:
        assert checkpoint.version == 3 and len(pm.map("default")) == 3
