"""``quire demo``: counts page views in an arena file, kills the counting process, and shows that no commit was lost.

A click stream is generated in batches. A worker process counts views per user, one commit a batch, while this process
reads snapshots of the same file. In the middle of a batch the worker is killed with SIGKILL. A second worker finds
exactly the state of the last commit and counts on. At the end the counts are compared with a plain recount of the whole
stream.
"""

import importlib.util
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import quire

USERS = 200_000
SEED = 20
VIEWS = quire.Schema(key={"user": pa.string()}, value={"views": pa.int64()})


# ------------------------------------------------------------------------------------------------ the stream


def clicks_of(batch: int, clicks: int) -> Any:
    """The users who clicked in a batch, as numbers: a few of them click very often."""
    random = np.random.default_rng([SEED, batch])
    return (USERS * random.random(clicks) ** 3).astype(np.int64)


def user_names(numbers: Any) -> Any:
    """The names under which users are stored."""
    return pa.array([f"user-{number:06d}" for number in numbers.tolist()])


def recount(batches: int, clicks: int) -> Any:
    """Views per user after so many batches, counted the plain way."""
    counts = np.zeros(USERS, np.int64)
    for batch in range(batches):
        counts += np.bincount(clicks_of(batch, clicks), minlength=USERS)
    return counts


def stored(snapshot: quire.Snapshot) -> tuple[int, Any]:
    """How many batches a snapshot holds, and its views per user."""
    counts = np.zeros(USERS, np.int64)
    table = snapshot.map("views").to_table()
    numbers = [int(name[5:]) for name in table.column("user").to_pylist()]
    counts[numbers] = table.column("views").to_numpy()
    return int(snapshot.map("progress").get(b"batches", b"0")), counts


# ------------------------------------------------------------------------------------------------ the worker process


def work(path: str, batches: int, clicks: int, stop_in: int) -> None:
    """Counts on from the last commit; in batch stop_in it stops with half of the batch written, to be killed."""
    with quire.PageManager(path, wait=10) as pm:
        views, progress = pm.map("views", VIEWS), pm.map("progress")
        first = int(progress.get(b"batches", b"0"))
        print("found", first, flush=True)
        for batch in range(first, batches):
            users, counts = np.unique(clicks_of(batch, clicks), return_counts=True)
            names = user_names(users)
            before = views.get_many(names).fill_null(0).to_numpy(zero_copy_only=False)
            totals = pa.array(before + counts)
            if batch == stop_in:
                half = len(names) // 2
                views.put_many(names[:half], totals[:half])
                print("half", batch, flush=True)
                signal.pause()
            views.put_many(names, totals)
            progress[b"batches"] = str(batch + 1).encode()
            pm.commit()
            print("done", batch + 1, flush=True)


def start(path: Path, batches: int, clicks: int, stop_in: int = -1) -> "subprocess.Popen[str]":
    """Starts a worker as a process of its own."""
    command = [sys.executable, "-m", "quire.demo", str(path), str(batches), str(clicks), str(stop_in)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def messages(worker: "subprocess.Popen[str]") -> Iterator[tuple[str, int]]:
    """What the worker says, as it says it."""
    assert worker.stdout is not None
    with worker.stdout as lines:
        for line in lines:
            word, number = line.split()
            yield word, int(number)


# ------------------------------------------------------------------------------------------------ the screen


class Screen:
    """Progress and a table on the terminal: with rich if it is installed, in plain lines else."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.console: Any = None
        self.bar: Any = None
        if importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self.console = Console(highlight=False)
            columns = [
                TextColumn("counting"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("batches"),
                TimeElapsedColumn(),
            ]
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=batches)

    def __enter__(self) -> "Screen":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """One line."""
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def progress(self, batches: int) -> None:
        """How many batches are committed."""
        if self.bar is not None:
            self.bar.update(self.task, completed=batches)
        else:
            print(f"  {batches} of {self.batches} batches committed", flush=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values in two columns."""
        if self.console is None:
            for name, value in rows:
                print(f"  {name:<34} {value}")
            return
        from rich.table import Table

        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)


# ------------------------------------------------------------------------------------------------ the demo


def show_top(screen: Screen, path: Path) -> None:
    """Reads the file from this process, while the worker goes on writing it."""
    with quire.PageManager(path, read_only=True) as reader, reader.snapshot() as snapshot:
        batches, counts = stored(snapshot)
        top = np.argsort(-counts, kind="stable")[:10]
        ranking = ", ".join(f"{number:06d} ({counts[number]})" for number in top)
        screen.say(f"A snapshot read while counting goes on, after batch {batches}. Top ten users: {ranking}")


def count_until_killed(screen: Screen, path: Path, batches: int, clicks: int, victim: int) -> bool:
    """The first worker: counts, and is killed in the middle of batch victim (counted from 0); False if it failed."""
    worker = start(path, batches, clicks, stop_in=victim)
    for word, number in messages(worker):
        if word == "done":
            screen.progress(number)
            if number in (victim // 2, victim - 1):
                show_top(screen, path)
        elif word == "half":
            worker.send_signal(signal.SIGKILL)
    if worker.wait() != -signal.SIGKILL:
        screen.say(f"The counting process failed by itself, with exit code {worker.returncode}; see its message.")
        return False
    screen.say(f"Killed the counting process (SIGKILL) in the middle of batch {victim + 1}, half of it written.")
    return True


def count_to_end(screen: Screen, path: Path, batches: int, clicks: int) -> bool:
    """The second worker: goes on from the last commit."""
    worker = start(path, batches, clicks)
    for word, number in messages(worker):
        if word == "found":
            screen.say(f"A second process opened the arena and goes on after batch {number}.")
        screen.progress(number)
    return worker.wait() == 0


def snapshot_seconds(pm: quire.PageManager) -> float:
    """What taking and closing a snapshot costs, as the median of many."""
    times = []
    for _ in range(1000):
        begin = time.perf_counter()
        pm.snapshot().close()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def run(batches: int, clicks: int, arena: Path | None) -> int:
    """The whole demo; 0 if every comparison held, 1 if not."""
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        path = arena or Path(folder) / "views.arena"
        if path.exists():
            print(f"{path} is there already: name a file that is not", file=sys.stderr)
            return 1
        try:
            quire.PageManager(path).close()
        except quire.QuireError as error:
            print(f"no arena can be made at {path}: {error}", file=sys.stderr)
            return 1
        return show(path, batches, clicks)


def show(path: Path, batches: int, clicks: int) -> int:
    """As run(), on an arena file with nothing in it yet."""
    begin = time.monotonic()
    victim = batches * 2 // 3
    with Screen(batches) as screen:
        screen.say(
            f"Counting {batches * clicks:,} clicks of up to {USERS:,} users in {batches} batches, one commit each."
        )
        if not count_until_killed(screen, path, batches, clicks, victim):
            return 1
        with quire.PageManager(path, wait=10) as pm:
            pm.check()
            with pm.snapshot() as snapshot:
                found, counts = stored(snapshot)
        recovered = found == victim and bool(np.array_equal(counts, recount(victim, clicks)))
        screen.say(
            f"The arena holds exactly batches 1 to {found}, as last committed; check passed."
            if recovered
            else f"WRONG: the arena says {found} batches, expected {victim}, or its counts differ from a recount."
        )
        finished = count_to_end(screen, path, batches, clicks)
    with quire.PageManager(path, wait=10) as pm:
        pm.check()
        with pm.snapshot() as snapshot:
            found, counts = stored(snapshot)
        complete = finished and found == batches and bool(np.array_equal(counts, recount(batches, clicks)))
        stats, records, microseconds = pm.stats(), len(pm.map("views")), snapshot_seconds(pm) * 1e6
    good = recovered and complete
    screen.table(
        [
            ("clicks counted", f"{batches * clicks:,}"),
            ("records (users)", f"{records:,}"),
            ("bytes held by the arena", f"{stats.bytes_held:,}"),
            ("taking a snapshot, microseconds", f"{microseconds:.1f}"),
            ("recovered after the kill", f"batch {victim} of {batches}" if recovered else "WRONG"),
            ("equal to a plain recount", "yes" if complete else "NO"),
            ("check of every page", "passed"),
            ("seconds in all", f"{time.monotonic() - begin:.1f}"),
        ]
    )
    screen.say(
        "Result: a process was killed half-way through a batch, the arena held exactly the last commit, "
        "and the final counts are right."
        if good
        else "Result: the counts are WRONG; see above."
    )
    return 0 if good else 1


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
