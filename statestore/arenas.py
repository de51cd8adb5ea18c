"""The arenas of a host: files that the Python workers of all executors on it share, one for each partition's state.

An arena is a copy of what a checkpoint holds, kept so that the next batch finds it in memory. It may vanish at any
time: whoever misses one loads the checkpoint. So cleaning needs no agreement: it takes a file's name away, and a task
that has the file open goes on to its end with it.

    <root>/                      one for each user of the host; nobody else can look into it
        <key>/                   a checkpoint's operator
            owner                its checkpoint and name, for people
            users/<pid>-<start>  an executor, or another program, that used it: gone when that process is
            <partition>.arena    the pages
            <partition>.mark     which version they are of
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoint.pages import identity
from quire.checkpoint.reader import Version
from quire.pagemgr.errors import BusyError, InvalidError, IOFailedError, NoSpaceError, QuireError
from quire.structures import PageManager

SHARED_MEMORY = "/dev/shm"
# What a stopped query of a living application left is removed after so long, and looked for so often.
IDLE_SECONDS = 900.0
SWEEP_SECONDS = 30.0
# Of the file system that the arenas lie in, so much may be theirs; beyond it those go that were not used for longest.
SHARE_OF_DISK = 0.5
ENTER_TRIES = 10


def default_root() -> Path:
    """The folder for arenas where none is given: in memory if the host has a file system for that."""
    shared = Path(SHARED_MEMORY)
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"quire-{os.getuid()}"


def private_folder(path: Path) -> Path:
    """Makes a folder that only this user can look into, or refuses one that is not."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise IOFailedError(f"{path} cannot be made for arenas ({error.strerror}): give another arena_dir") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidError(
            f"{path} is not a folder of this user's alone, as one for state must be: remove it, chmod it to 700, or "
            "give another arena_dir"
        )
    return path


def process_start(pid: int) -> str | None:
    """When a process began, by the kernel's clock; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def program() -> str:
    """The process that this one works for, by its id and start: the executor of a Python worker, else itself."""
    pid = os.getpid()
    for _ in range(2):  # worker, daemon, executor
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if b"pyspark" not in Path(f"/proc/{pid}/cmdline").read_bytes() or parent <= 1:
            break
        pid = parent
    return f"{pid}-{process_start(pid)}"


@dataclass(frozen=True)
class Mark:
    """Which version an arena is of: which arena, at which of its commits. point: as ``Manager.adopt`` takes it.

    A file of that name may be another arena by now, and its commits may have the same numbers.
    """

    version: Version
    identity: str
    epoch: int
    point: tuple[int, int] = (0, 0)

    @staticmethod
    def of(pm: PageManager, version: Version, point: tuple[int, int] = (0, 0)) -> "Mark":
        """Says that the last commit of an arena is a version."""
        return Mark(version, identity(pm), pm.epoch, point)

    def fits(self, pm: PageManager) -> bool:
        """Whether it is of this arena as it is."""
        return (self.identity, self.epoch) == (identity(pm), pm.epoch)


class Arenas:
    """The arenas of one operator of one checkpoint, on this host."""

    def __init__(self, checkpoint: str, operator: str, root: str | os.PathLike[str] | None = None) -> None:
        self._root = private_folder(Path(root) if root is not None else default_root())
        key = hashlib.sha256(f"{checkpoint}\0{operator}".encode()).hexdigest()[:24]
        self.folder = self._root / key
        self._title = f"{operator} of {checkpoint}\n"

    def path(self, partition: int) -> Path:
        """Where a partition's arena is, or would be."""
        return self.folder / f"{partition}.arena"

    def _mark_path(self, partition: int) -> Path:
        return self.folder / f"{partition}.mark"

    def enter(self) -> None:
        """Makes the folder, and says who uses it."""
        users = self.folder / "users"
        for _ in range(ENTER_TRIES):  # the folder may be swept from under our feet
            try:
                users.mkdir(mode=0o700, parents=True, exist_ok=True)
                (users / program()).touch(mode=0o600)
                (self.folder / "owner").write_text(self._title)
                return
            except FileNotFoundError:
                continue
            except OSError as error:
                kind = NoSpaceError if error.errno == errno.ENOSPC else IOFailedError
                raise kind(f"{self.folder} cannot be used for arenas ({error}): give another arena_dir") from error
        raise IOFailedError(f"{self.folder} cannot be made: somebody removes it again and again")

    def open(self, partition: int, limit: int | str | None = None) -> tuple[PageManager, Mark] | None:
        """The arena of a partition as it was left by whoever had it last; None if there is none that can be used.

        ``BusyError`` while another task has it. One that was left in the middle of something is removed.
        """
        try:
            pm = PageManager(self.path(partition), limit) if self.path(partition).exists() else None
        except BusyError:
            raise
        except QuireError:
            pm = None
        if pm is not None:
            mark = self._mark(partition)
            if mark is not None and mark.fits(pm):
                return pm, mark
            pm.close()
        self.forget(partition)
        return None

    def _mark(self, partition: int) -> Mark | None:
        try:
            found = json.loads(self._mark_path(partition).read_text())
            version = Version(found["version"], found["id"])
            return Mark(version, found["identity"], found["epoch"], tuple(found["point"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def leave(self, partition: int, mark: Mark) -> None:
        """Says which version the arena is of that was just committed; without that it is of no use to the next."""
        found = {"version": mark.version.number, "id": mark.version.id, "point": mark.point}
        found |= {"identity": mark.identity, "epoch": mark.epoch}
        path = self._mark_path(partition)
        hidden = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            hidden.write_text(json.dumps(found))
            hidden.replace(path)
        except OSError:  # swept meanwhile, or there is no room: the version is in the checkpoint
            hidden.unlink(missing_ok=True)
            self.forget(partition)

    def forget(self, partition: int) -> None:
        """Removes a partition's arena; whoever has it open keeps it until they close it."""
        self._mark_path(partition).unlink(missing_ok=True)
        self.path(partition).unlink(missing_ok=True)

    def sweep(self, now: bool = False) -> None:
        """Removes what nobody will use again, and what is too much; but for now, every half minute in a process."""
        clock = time.monotonic()
        with _sweep_lock:
            if not now and clock - _last_sweep.get(str(self._root), -math.inf) < SWEEP_SECONDS:
                return
            _last_sweep[str(self._root)] = clock
        sweep(self._root, keep=self.folder)


_sweep_lock = threading.Lock()
_last_sweep: dict[str, float] = {}


def sweep(root: Path, keep: Path | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
    """Removes arenas of processes that have died, those that were idle for long, and the oldest of too many.

    keep: a folder to leave alone.
    """
    folders = [folder for folder in _folders(root) if folder != keep]
    for folder in folders:
        if not _has_users(folder) or time.time() - _last_use(folder) > idle_seconds:
            shutil.rmtree(folder, ignore_errors=True)
    system = os.statvfs(root)
    allowed = int(system.f_blocks * system.f_frsize * SHARE_OF_DISK)
    held = {folder: _bytes_in(folder) for folder in _folders(root)}
    for folder in sorted(set(folders) & held.keys(), key=_last_use):
        if sum(held.values()) <= allowed:
            break
        shutil.rmtree(folder, ignore_errors=True)
        held.pop(folder)


def _folders(root: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))


def _has_users(folder: Path) -> bool:
    """Whether a process lives that used the folder; forgets those that do not."""
    living = False
    with contextlib.suppress(FileNotFoundError):
        for user in (folder / "users").iterdir():
            pid, _, start = user.name.partition("-")
            if pid.isdecimal() and process_start(int(pid)) == start:
                living = True
            else:
                user.unlink(missing_ok=True)
    return living


def _last_use(folder: Path) -> float:
    """When a batch last ended in the folder."""
    times = [folder.stat().st_mtime] if folder.exists() else [0.0]
    with contextlib.suppress(FileNotFoundError):
        for mark in folder.glob("*.mark"):
            with contextlib.suppress(FileNotFoundError):
                times.append(mark.stat().st_mtime)
    return max(times)


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
