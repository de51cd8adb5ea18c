"""``quire demo``: a streaming query on local Spark with its state in Quire, stopped, killed and gone on with.

Clicks arrive in files. A query counts them by user and hour, with Quire as its state store. It is stopped after a few
batches and started again; later its driver is killed with SIGKILL in the middle of a batch. A new driver goes on from
the same checkpoint. At the end the state is read from the checkpoint and compared, key by key, with a plain recount of
the input; then the same query runs with Quire and with each of Spark's own stores, and a table shows what each cost.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import quire
from quire.demo_query import Order

USERS = 150_000
HOURS = 6
SEED = 20
MORNING = 1_704_096_000
SPARK = "org.apache.spark.sql.execution.streaming.state."
QUIRE = "io.quire.spark.QuireStateStoreProvider"
STORES = {
    "Quire": QUIRE,
    "RocksDB, changelog": SPARK + "RocksDBStateStoreProvider",
    "HDFSBacked": SPARK + "HDFSBackedStateStoreProvider",
}


# ------------------------------------------------------------------------------------------------ the input


def clicks_of(batch: int, batches: int, rows: int) -> tuple[Any, Any]:
    """Who clicked in a batch, and when, in seconds: a few users click very often, and the hours pass slowly."""
    random = np.random.default_rng([SEED, batch])
    users = (USERS * random.random(rows) ** 2).astype(np.int64)
    seconds = (HOURS * 3600 * (batch + random.random(rows)) / batches).astype(np.int64)
    return users, MORNING + seconds


def write_clicks(folder: Path, batches: int, rows: int) -> None:
    """Writes the input, one file a batch; the files' times put them in order."""
    folder.mkdir(parents=True)
    for batch in range(batches):
        users, seconds = clicks_of(batch, batches, rows)
        at = pa.array(seconds * 1_000_000).cast(pa.timestamp("us", tz="UTC"))
        path = folder / f"clicks-{batch:04d}.parquet"
        pq.write_table(pa.table({"user": users, "at": at}), path)
        os.utime(path, (MORNING + batch, MORNING + batch))


def recount(batches: int, rows: int) -> Any:
    """Clicks per user and hour, counted the plain way: an array of HOURS rows."""
    counts = np.zeros((HOURS, USERS), np.int64)
    for batch in range(batches):
        users, seconds = clicks_of(batch, batches, rows)
        np.add.at(counts, ((seconds - MORNING) // 3600, users), 1)
    return counts


def stored(folder: Path) -> Any:
    """The state that the query left, as recount() gives it."""
    counts = np.zeros((HOURS, USERS), np.int64)
    table = pq.read_table(folder)
    hours = (table.column("hour").to_numpy() - MORNING) // 3600
    # Added, not set: a key that the state held twice would show.
    np.add.at(counts, (hours, table.column("user").to_numpy()), table.column("clicks").to_numpy())
    return counts


# ------------------------------------------------------------------------------------------------ the driver's process


class Driver:
    """A running quire.demo_query."""

    def __init__(self, order: Order, log: Path) -> None:
        self.log = log
        self.jvm = 0
        command = [sys.executable, "-m", "quire.demo_query", json.dumps(asdict(order))]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """What the driver says, as it says it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                event: dict[str, Any] = json.loads(line)
                self.jvm = event.get("jvm", self.jvm)
                yield event

    def kill(self) -> None:
        """SIGKILL, for the JVM first: nobody gets to tidy up."""
        if self.process.poll() is None:
            if self.jvm:
                try:
                    os.kill(self.jvm, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def under_way(driver: Driver, checkpoint: Path, batch: int) -> bool:
    """Waits until a batch has begun, by Spark's own logs; False if it was over before that was seen."""
    while not (checkpoint / "offsets" / str(batch)).exists():
        if driver.process.poll() is not None:
            return False
        time.sleep(0.01)
    time.sleep(0.15)
    return not (checkpoint / "commits" / str(batch)).exists()


# ------------------------------------------------------------------------------------------------ the screen


class Screen:
    """Progress and tables on the terminal: with rich if it is installed, in plain lines else."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.console: Any = None
        self.bar: Any = None
        if importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self.console = Console(highlight=False)
            columns = [
                TextColumn("{task.fields[what]}"),
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[details]}"),
            ]
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=batches, what="starting Spark", details="")

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

    def doing(self, what: str) -> None:
        """What goes on now."""
        if self.bar is not None:
            self.bar.update(self.task, what=what)
        else:
            print(f"  {what}", flush=True)

    def batch(self, event: dict[str, Any], what: str = "counting") -> None:
        """A batch is done."""
        details = (
            f"{event['rows'] / event['seconds']:,.0f} rows/s, {event['keys']:,} keys, {event['memory'] / 2**20:.0f} MB"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=event["number"] + 1, what=what, details=details)
        else:
            print(f"  {what}: batch {event['number'] + 1} of {self.batches}: {details}", flush=True)

    def table(self, titles: list[str], rows: list[list[str]]) -> None:
        """Rows under titles; the first column is text, the others are numbers."""
        if self.console is None:
            widths = [max(len(row[place]) for row in [titles, *rows]) for place in range(len(titles))]
            for row in [titles, *rows]:
                cells = [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
                ]
                print("  " + "  ".join(cells))
            return
        from rich.table import Table

        table = Table()
        for place, title in enumerate(titles):
            table.add_column(title, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


# ------------------------------------------------------------------------------------------------ the demo


class FailedError(Exception):
    """The driver ended by itself; the text says what is known."""


def count_until_killed(screen: Screen, order: Order, log: Path, victim: int) -> int:
    """The first driver: stops and starts its query once, then is killed in the middle of a batch; its number."""
    with Driver(order, log) as driver:
        for event in driver.events():
            if event["event"] == "ready":
                screen.doing("counting")
            elif event["event"] == "stopped":
                screen.say(f"Stopped the query after batch {event['number'] + 1}, and started it again.")
            elif event["event"] == "batch":
                screen.batch(event)
                batch = event["number"] + 1
                if victim <= batch < screen.batches and under_way(driver, Path(order.checkpoint), batch):
                    driver.kill()
                    screen.say(f"Killed the driver (SIGKILL) in the middle of batch {batch + 1}.")
                    return int(batch)
        raise FailedError(f"the driver ended by itself, with exit code {driver.process.wait()}")


def count_to_end(screen: Screen, order: Order, log: Path, killed: int) -> list[dict[str, Any]]:
    """The second driver: it goes on from the checkpoint, writes down the state, and runs the comparison."""
    results = []
    first = True
    with Driver(order, log) as driver:
        for event in driver.events():
            if event["event"] == "batch":
                if first:
                    screen.say(
                        f"A new driver found batch {killed} committed and did batch {event['number'] + 1} "
                        f"{'again, from its beginning' if event['number'] == killed else 'next'}."
                    )
                first = False
                screen.batch(event)
            elif event["event"] == "state":
                screen.doing("comparing")
            elif event["event"] == "measured":
                screen.batch(event, event["name"])
            elif event["event"] == "compared":
                results.append(event)
        if driver.process.wait() != 0:
            raise FailedError(f"the driver ended by itself, with exit code {driver.process.returncode}")
    return results


def missing() -> str:
    """What this machine lacks for the demo, if anything."""
    if importlib.util.find_spec("pyspark") is None:
        return "the demo needs PySpark: pip install 'quire[spark]'"
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        return "the demo needs Java 17 or later: install a JDK, or set JAVA_HOME to one"
    return ""


def run(batches: int, rows: int, checkpoint: Path | None) -> int:
    """The whole demo; 0 if nothing was lost, 1 if something was or the demo could not run."""
    lacking = missing()
    if lacking:
        print(lacking, file=sys.stderr)
        return 1
    if checkpoint is not None and checkpoint.exists():
        print(f"{checkpoint} is there already: name a folder that is not", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="quire-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "driver.log"
        try:
            print("Looking for Quire's jar for this Spark (it is built once, in about 15 seconds) ...", flush=True)
            quire.jar()
            return show(folder, (checkpoint or folder / "checkpoint").absolute(), batches, rows, log)
        except (quire.QuireError, FailedError) as error:
            print(f"The demo failed: {error}", file=sys.stderr)
            if log.exists():
                # PySpark logs each error twice; the lines of JSON are for machines.
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                print(*[line for line in lines if not line.startswith("{")][-30:], sep="\n", file=sys.stderr)
            return 1


def show(folder: Path, checkpoint: Path, batches: int, rows: int, log: Path) -> int:
    """As run(), with a folder for all that is not to be kept."""
    begin = time.monotonic()
    clicks, state = folder / "clicks", folder / "state"
    write_clicks(clicks, batches, rows)
    stop, victim = batches // 4, batches // 2
    order = Order(str(clicks), str(checkpoint), QUIRE, stop, "", {}, str(folder))
    with Screen(batches) as screen:
        screen.say(
            f"Counting {batches * rows:,} clicks of {USERS:,} users by user and hour: {batches} batches, "
            "each committed to the checkpoint."
        )
        killed = count_until_killed(screen, order, log, victim)
        order.stop_after, order.state, order.compare = 0, str(state), STORES
        screen.doing("starting Spark")
        results = count_to_end(screen, order, log, killed)
    expected, found = recount(batches, rows), stored(state)
    wrong = int(np.count_nonzero(expected != found))
    screen.table(
        ["store", "s a batch", "state MB", "JVM heap MB", "written MB a batch"],
        [
            [
                result["name"],
                f"{result['seconds']:.2f}",
                f"{result['memory'] / 2**20:.1f}",
                f"{result['heap'] / 2**20:.1f}",
                f"{result['written'] / 2**20:.2f}",
            ]
            for result in results
        ],
    )
    screen.say(
        f"Each store counted the same {batches} batches of {rows:,} rows, from the beginning, by turns, a batch each, "
        "in one JVM. Seconds are medians, with the work in them that Spark does without any state; state is what the "
        "store reports, heap what the JVM held less when the store had been unloaded."
    )
    keys = int(np.count_nonzero(expected))
    if wrong:
        screen.say(
            f"Result: WRONG. {wrong:,} of {keys:,} counts in the state differ from a plain recount of the input."
        )
        return 1
    screen.say(
        f"Result: stopped once, killed once, and nothing lost or counted twice: all {keys:,} counts in the state equal "
        f"a plain recount of the input. ({time.monotonic() - begin:.0f} s)"
    )
    return 0
