"""A partition's state from batch to batch: run again, moved, deleted or late, the right version is found."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from quire.checkpoint.storage import LocalStorage
from quire.statestore import arenas
from quire.statestore.arenas import Arenas, process_start, program, sweep
from quire.statestore.partition import CATCH_UP_MAX, Partition, Place

Model = dict[bytes, bytes]


def place_on(folder: Path, host: str, **options: object) -> Place:
    checkpoint = folder / "checkpoint"
    arenas = Arenas(str(checkpoint), "Op", folder / host)
    return Place(LocalStorage(), str(checkpoint / "quire" / "Op"), arenas, **options)  # type: ignore[arg-type]


def state_of(pm: quire.PageManager) -> Model:
    return dict(pm.map("m").items())


def change(pm: quire.PageManager, seed: int) -> None:
    """What a batch does to the state, as the seed says."""
    rng, m = random.Random(seed), pm.map("m")
    for _ in range(rng.randrange(20)):
        key = b"%d" % rng.randrange(30)
        if rng.random() < 0.3:
            m.pop(key, None)
        else:
            m[key] = rng.randbytes(rng.choice((0, 5, 60, 3000)))


def changed(model: Model, seed: int) -> Model:
    with quire.PageManager() as pm:
        pm.map("m").update(model)
        change(pm, seed)
        return state_of(pm)


def run(place: Place, batch: int, work: Callable[[quire.PageManager], None], first: int = 0) -> Partition:
    partition = Partition(place, 3, batch, first)
    with partition as pm:
        work(pm)
        partition.commit()
    return partition


def look(place: Place, batch: int, first: int = 0) -> Model:
    with Partition(place, 3, batch, first) as pm:
        return state_of(pm)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(("batch", "batch", "batch", "retry", "fail", "back", "lose", "cut")),
            st.sampled_from(("host-a", "host-b")),
            st.integers(0, 1 << 30),
        ),
        max_size=25,
    ),
    first=st.sampled_from((0, 7)),
    mode=st.sampled_from(("delta", "pages", "auto")),
)
def test_each_batch_finds_what_the_one_before_left(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str, int]], first: int, mode: str
) -> None:
    folder = tmp_path_factory.mktemp("partition")
    hosts = {host: place_on(folder, host, bases_every=4, mode=mode) for host in ("host-a", "host-b")}
    history: list[Model] = [{}]  # by batch: what it starts from
    for kind, host, seed in events:
        place, batch = hosts[host], first + len(history) - 1
        if kind == "batch":
            run(place, batch, lambda pm, seed=seed: change(pm, seed), first)  # type: ignore[misc]
            history.append(changed(history[-1], seed))
        elif kind == "retry" and len(history) > 1:
            # The batch before is run again, with other rows: what it leaves now is what counts.
            run(place, batch - 1, lambda pm, seed=seed: change(pm, seed), first)  # type: ignore[misc]
            history[-1] = changed(history[-2], seed)
        elif kind == "fail":
            with pytest.raises(ZeroDivisionError), Partition(place, 3, batch, first) as pm:
                change(pm, seed)
                raise ZeroDivisionError
        elif kind == "back" and len(history) > 3:
            history = history[:-2]
        elif kind == "lose":
            place.arenas.forget(3)
        elif kind == "cut" and place.arenas.path(3).exists():
            (place.arenas.folder / "3.mark").unlink(missing_ok=True)
        assert look(place, first + len(history) - 1, first) == history[-1]


def test_the_state_is_found_in_memory_where_it_was_left(tmp_path: Path) -> None:
    here, there = place_on(tmp_path, "here"), place_on(tmp_path, "there")
    assert not run(here, 0, lambda pm: change(pm, 1)).measured.in_memory
    assert run(here, 1, lambda pm: change(pm, 2)).measured.in_memory
    assert not run(there, 2, lambda pm: change(pm, 3)).measured.in_memory
    # It comes back: only what it missed is read.
    back = run(here, 3, lambda pm: change(pm, 4))
    assert back.measured.in_memory
    expected: Model = {}
    for seed in (1, 2, 3, 4):
        expected = changed(expected, seed)
    assert look(here, 4) == look(there, 4) == expected


def test_one_that_missed_too_much_is_loaded_anew(tmp_path: Path) -> None:
    here, there = place_on(tmp_path, "here", bases_every=5), place_on(tmp_path, "there", bases_every=5)
    run(here, 0, lambda pm: change(pm, 0))
    expected = changed({}, 0)
    for batch in range(1, CATCH_UP_MAX + 3):
        run(there, batch, lambda pm, seed=batch: change(pm, seed))  # type: ignore[misc]
        expected = changed(expected, batch)
    found = Partition(here, 3, CATCH_UP_MAX + 3, 0)
    with found as pm:
        assert state_of(pm) == expected
    assert not found.measured.in_memory


def test_two_runs_of_a_batch_at_once_both_end_well(tmp_path: Path) -> None:
    """As a task and its speculative copy do; one of them has the arena, the other a copy."""
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))
    first, second = Partition(place, 3, 1, 0), Partition(place, 3, 1, 0)
    with first as one, second as two:
        one.map("m")[b"who"] = b"first"
        two.map("m")[b"who"] = b"second"
        first.commit()
        second.commit()
    assert look(place, 2)[b"who"] == b"second"
    assert look(place_on(tmp_path, "other"), 2)[b"who"] == b"second"


def test_a_zombie_that_wakes_up_late_changes_nothing(tmp_path: Path) -> None:
    """Its version is there beside the one that was gone on from, and nobody looks at it."""
    place, other = place_on(tmp_path, "host"), place_on(tmp_path, "other")
    run(place, 0, lambda pm: change(pm, 1))
    zombie = Partition(other, 3, 1, 0)
    with zombie as pm:
        pm.map("m")[b"who"] = b"zombie"
        run(place, 1, lambda pm: pm.map("m").update({b"who": b"alive"}))
        run(place, 2, lambda pm: pm.map("m").update({b"and": b"on"}))
        zombie.commit()
    for host in (place, other, place_on(tmp_path, "third")):
        found = look(host, 3)
        assert found[b"who"] == b"alive" and found[b"and"] == b"on"


# A task in a process of its own: it has loaded the version when it says "ready", commits when it is told to, and is
# stopped in the middle of that if its last argument says where.
TASK = """
import os, signal, sys
from pathlib import Path
import quire
from quire.checkpoint import fault
from quire.checkpoint.storage import LocalStorage
from quire.statestore.arenas import Arenas
from quire.statestore.partition import Partition, Place
folder, host, batch, who, point = sys.argv[1:]
arenas = Arenas(folder + "/checkpoint", "Op", Path(folder, host))
place = Place(LocalStorage(), folder + "/checkpoint/quire/Op", arenas)
partition = Partition(place, 3, int(batch), 0)
with partition as pm:
    pm.map("m")[b"who"] = who.encode()
    print("ready", flush=True)
    sys.stdin.readline()
    fault.hook = lambda name: os.kill(os.getpid(), signal.SIGSTOP) if name == point else None
    partition.commit()
print("done", flush=True)
"""


class Task:
    """A running TASK."""

    def __init__(self, folder: Path, host: str, batch: int, who: str, stop_at: str = "") -> None:
        command = [sys.executable, "-c", TASK, str(folder), host, str(batch), who, stop_at]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        assert self.output.readline() == "ready\n"

    def go(self) -> None:
        """Lets it commit."""
        self.input.write("\n")
        self.input.flush()

    def wait_until_stopped(self) -> None:
        """Until SIGSTOP has hit it."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    def end(self) -> None:
        """Waits for its commit."""
        assert self.output.readline() == "done\n"
        self.input.close()
        self.output.close()
        assert self.process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("host", "host"), ("host", "other")])
def test_two_processes_commit_a_batch_at_once(tmp_path: Path, hosts: tuple[str, str]) -> None:
    """On one host, or on two: the next batch starts from one of them, whole, and all later ones from the same."""
    run(place_on(tmp_path, "host"), 0, lambda pm: change(pm, 1))
    tasks = [Task(tmp_path, host, 1, who) for host, who in zip(hosts, ("one", "two"), strict=True)]
    for task in tasks:
        task.go()
    for task in tasks:
        task.end()
    found = {host: look(place_on(tmp_path, host), 2) for host in ("host", "other", "third")}
    won = found["third"][b"who"]
    assert won in (b"one", b"two")
    assert all(state == {**changed({}, 1), b"who": won} for state in found.values())
    run(place_on(tmp_path, "other"), 2, lambda pm: pm.map("m").update({b"and": b"on"}))
    assert look(place_on(tmp_path, "host"), 3) == {**changed({}, 1), b"who": won, b"and": b"on"}


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", ["commit.start", "commit.packed", "commit.durable"])
@pytest.mark.parametrize("host", ["host", "other"])
def test_a_process_that_is_stopped_in_its_commit_and_goes_on_late(tmp_path: Path, host: str, stop_at: str) -> None:
    """Its successors have committed meanwhile, and find their own state afterwards."""
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))
    zombie = Task(tmp_path, host, 1, "zombie", stop_at)
    zombie.go()
    zombie.wait_until_stopped()
    run(place, 1, lambda pm: pm.map("m").update({b"who": b"alive"}))
    run(place, 2, lambda pm: pm.map("m").update({b"and": b"on"}))
    os.kill(zombie.process.pid, signal.SIGCONT)
    zombie.end()
    wanted = {**changed({}, 1), b"who": b"alive", b"and": b"on"}
    assert all(look(place_on(tmp_path, each), 3) == wanted for each in ("host", "other", "third"))
    run(place, 3, lambda pm: change(pm, 2))
    assert look(place_on(tmp_path, "other"), 4) == changed(wanted, 2)


def test_a_version_that_is_missing_is_told_with_its_likely_cause(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))
    with pytest.raises(quire.NotFoundError, match=r"no version 2, which batch 1 should have left.*newest is 1.*take"):
        look(place, 2)
    with pytest.raises(quire.NotFoundError, match="none at all"):
        look(place_on(tmp_path / "new", "host"), 2)


def test_bases_are_written_and_old_files_go(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host", bases_every=5, retain=3)
    for batch in range(40):
        run(place, batch, lambda pm, seed=batch: change(pm, seed))  # type: ignore[misc]
    folder = Path(place.folder, "state", "0", "3")
    names = sorted(path.name for path in folder.iterdir())
    assert any(name.endswith(".qbase") for name in names) and len(names) < 15, names
    expected: Model = {}
    for seed in range(40):
        expected = changed(expected, seed)
    assert look(place_on(tmp_path, "other"), 40) == expected


def test_a_limit_is_kept_and_the_state_stays(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host", limit="2m")
    run(place, 0, lambda pm: pm.map("m").update({b"k": b"v"}))

    def too_much(pm: quire.PageManager) -> None:
        for i in range(5000):
            pm.map("m")[b"%d" % i] = b"x" * 1000

    with pytest.raises(quire.LimitError):
        run(place, 1, too_much)
    assert look(place, 1) == {b"k": b"v"}


def test_others_cannot_look_into_the_arenas(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))
    assert (tmp_path / "host").stat().st_mode & 0o077 == 0
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(quire.InvalidError, match="chmod it to 700"):
        Arenas("c", "Op", tmp_path / "open")


def test_arenas_of_the_dead_are_swept_and_those_in_use_are_not(tmp_path: Path) -> None:
    dead, alive = place_on(tmp_path / "1", "host"), place_on(tmp_path / "2", "host")
    root = tmp_path / "arenas"
    dead, alive = (Place(place.storage, place.folder, Arenas(place.folder, "Op", root)) for place in (dead, alive))
    run(dead, 0, lambda pm: change(pm, 1))
    run(alive, 0, lambda pm: change(pm, 1))
    for user in (dead.arenas.folder / "users").iterdir():
        user.rename(user.with_name(f"{user.name.partition('-')[0]}-1"))  # the same pid, another process
    sweep(root)
    assert not dead.arenas.folder.exists() and alive.arenas.path(3).exists()
    sweep(root, idle_seconds=-1)
    assert not alive.arenas.folder.exists()
    # Both go on from their checkpoints.
    assert look(dead, 1) == look(alive, 1) == changed({}, 1)


def test_room_is_made_where_there_was_none(tmp_path: Path) -> None:
    """What dead processes left is swept when a new arena is made, and at once by a task that found no room."""
    root = tmp_path / "arenas"

    def left_behind(name: str) -> Place:
        place = Place(LocalStorage(), str(tmp_path / name), Arenas(name, "Op", root))
        run(place, 0, lambda pm: change(pm, 1))
        for user in (place.arenas.folder / "users").iterdir():
            user.rename(user.with_name("1-1"))
        return place

    def full(pm: quire.PageManager) -> None:
        raise quire.NoSpaceError("no room")

    dead = left_behind("dead")
    place = Place(LocalStorage(), str(tmp_path / "new"), Arenas("new", "Op", root))
    arenas._last_sweep.clear()  # half a minute has gone by
    run(place, 0, lambda pm: change(pm, 1))
    assert not dead.arenas.folder.exists()
    dead = left_behind("dead too")
    run(place, 1, lambda pm: change(pm, 2))
    assert dead.arenas.folder.exists()
    with pytest.raises(quire.NoSpaceError):
        run(place, 2, full)
    assert not dead.arenas.folder.exists() and place.arenas.path(3).exists()
    run(place, 2, lambda pm: change(pm, 3))


def test_arenas_take_no_more_than_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for longest go, and the one that is in use stays, however large it is."""
    places = [Place(LocalStorage(), str(tmp_path / n), Arenas(n, "Op", tmp_path / "arenas")) for n in "abc"]
    for age, place in enumerate(places):
        run(place, 0, lambda pm: change(pm, 1))
        for path in (place.arenas.folder, place.arenas.folder / "3.mark"):
            os.utime(path, (time.time() - 60 + age, time.time() - 60 + age))
    size = sum(path.stat().st_blocks * 512 for path in places[0].arenas.folder.iterdir())
    system = os.statvfs(tmp_path)
    monkeypatch.setattr(arenas, "SHARE_OF_DISK", 2.5 * size / (system.f_blocks * system.f_frsize))
    sweep(tmp_path / "arenas")
    assert [place.arenas.folder.exists() for place in places] == [False, True, True]
    monkeypatch.setattr(arenas, "SHARE_OF_DISK", 0)
    sweep(tmp_path / "arenas", keep=places[1].arenas.folder)
    assert [place.arenas.folder.exists() for place in places] == [False, True, False]
    assert all(look(place, 1) == changed({}, 1) for place in places)


def test_arenas_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host")
    place.arenas.folder.write_text("a file where the folder should be")
    with pytest.raises(quire.QuireError, match=r"cannot be used for arenas .*: give another arena_dir"):
        look(place, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(quire.QuireError, match=r"cannot be made for arenas .*: give another arena_dir"):
        place_on(tmp_path, "file/below")


def test_a_mark_that_cannot_be_written_leaves_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the arenas' file system is full: the version is durable, and is read from the checkpoint."""
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        partition = Partition(place, 3, 1, 0)
        with partition as pm:
            change(pm, 2)
            patched.setattr(Path, "write_text", full)
            partition.commit()
    assert not place.arenas.path(3).exists()
    again = Partition(place, 3, 2, 0)
    with again as pm:
        assert state_of(pm) == changed(changed({}, 1), 2)
    assert not again.measured.in_memory


def test_an_arena_swept_while_a_batch_runs_harms_nobody(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host")
    run(place, 0, lambda pm: change(pm, 1))
    partition = Partition(place, 3, 1, 0)
    with partition as pm:
        sweep(tmp_path / "host", idle_seconds=-1)
        change(pm, 2)
        partition.commit()
    assert look(place, 2) == changed(changed({}, 1), 2)


def test_a_program_is_named_by_its_id_and_start() -> None:
    pid, start = program().split("-")
    assert process_start(int(pid)) == start and process_start(1 << 30) is None


def test_threads_of_one_process_share_the_arenas(tmp_path: Path) -> None:
    place = place_on(tmp_path, "host")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for batch in range(5):
                partition = Partition(place, number, batch, 0)
                with partition as pm:
                    change(pm, batch)
                    partition.commit()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
