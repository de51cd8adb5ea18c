"""Checkpoints a ``quire.PageManager`` from Python, in the files that the Spark provider writes and reads.

The rules are the provider's (docs/checkpoint.md). A commit first makes its file durable and then publishes the pages in
memory, so a failure leaves the last version as it was. Bases are written from a pinned snapshot while the program goes
on. What is written for a commit is up to a ``Mode``; what a file needs to be read, the file itself tells.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from quire.checkpoint import cec, codecs, container, delta, fault, pages
from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind
from quire.checkpoint.io_service import BaseFile, CancelledError, IOService, Job, Progress
from quire.checkpoint.reader import (
    DEFAULT_STORE,
    OTHER_PROVIDERS,
    STATE_FOLDER,
    SUFFIXES,
    Line,
    Listing,
    Loaded,
    Needs,
    Store,
    StoredFile,
    StoreId,
    Version,
    counted_keys,
)
from quire.checkpoint.storage import join, storage_for, write_own
from quire.pagemgr.errors import (
    ClosedError,
    CorruptError,
    ExistsError,
    InvalidError,
    NotFoundError,
    QuireError,
    VersionError,
)
from quire.structures import PageManager, Snapshot

ROW_CHECKSUMS = 1
# As the core has it (cec.c).
EXTENT_TARGET_MAX = 1e9
OPERATOR_MAX = (1 << 63) - 1  # as Spark counts
PARTITION_MAX = (1 << 32) - 1  # what a header has room for
# What writers that were killed leave: the hidden names of storage.py and of Spark.
LEFTOVER = re.compile(
    r"\.(\d{1,18})(?:_[^.]+)?\.(?:[0-9a-f]{1,32}\.(?:\d{1,6}\.)?)?(qdelta|qbase|qpart|qimage)\..*tmp(?:\.crc)?"
)

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------- modes


@dataclass(frozen=True)
class Changes:
    """What a commit file is to hold. since: see ``CheckpointFile``."""

    kind: FileKind
    frames: list[Frame]
    keys: int
    since: int = 0
    page_bytes: int = 0


class Mode(ABC):
    """What is written for a commit. One object for each state that was loaded.

    writes_bases  whether ``maintain()`` does.
    maps_bases    whether these are to be mapped.
    """

    writes_bases = True
    maps_bases = False

    def __init__(self, loaded: Loaded, kind: FileKind | None, extent_target: float) -> None:  # noqa: B027
        """kind: of the commit file of the version that was loaded, if it has one."""

    @abstractmethod
    def write(self, pm: PageManager, older: Snapshot, version: int) -> Changes:
        """What leads from the last version, which the snapshot shows, to the state being written."""

    def committed(self) -> None:  # noqa: B027, not all modes keep something
        """What ``write`` gave last is durable, and committed in memory."""

    def forget(self) -> None:  # noqa: B027
        """What ``write`` gave last, if anything, came to nothing; it may be called again."""

    def base_written(self, version: int, epoch: int) -> None:  # noqa: B027
        """A base of a version is there, which was this epoch; called from another thread."""

    @property
    def start(self) -> int | None:
        """The version that the next commit may start from, if that is another than the last."""
        return None

    # For whoever goes on with the same arena in another process: the number of the version, and its epoch, that pages
    # start from.
    point: tuple[int, int] = (0, 0)


def records(kind: FileKind, payloads: list[bytes], keys: int, since: int = 0) -> Changes:
    """Changes that are told record by record."""
    return Changes(kind, [Frame(FrameKind.RECORDS, payload) for payload in payloads], keys, since)


class DeltaMode(Mode):
    """Changed records."""

    def write(self, pm: PageManager, older: Snapshot, version: int) -> Changes:
        """As Mode says."""
        return records(FileKind.DELTA, delta.write(pm, older), sum(counted_keys(pm)))


class PagesMode(Mode):
    """Changed pages, from the newest version on whose very pages the checkpoint can give back."""

    maps_bases = True

    def __init__(self, loaded: Loaded, kind: FileKind | None, extent_target: float) -> None:
        self._pm = loaded.state
        self._origin = pages.origin(loaded.state)
        self._lock = threading.Lock()  # around point: a version and its epoch
        self.point = (loaded.origin, self._origin)
        self._writing: int | None = None

    def write(self, pm: PageManager, older: Snapshot, version: int) -> Changes:
        """As Mode says."""
        since, epoch = self.point
        keys = sum(counted_keys(pm))
        frames = [Frame(FrameKind.PAGES, payload) for payload in pages.write(pm, epoch)]
        self._writing = version
        return Changes(FileKind.PAGES, frames, keys, since, pm.page_size)

    def committed(self) -> None:
        """As Mode says."""
        if self._writing is not None:
            self._reached(self._writing, self._pm.epoch)
        self._writing = None

    def forget(self) -> None:
        """As Mode says."""
        self._writing = None

    def base_written(self, version: int, epoch: int) -> None:
        """As Mode says."""
        self._reached(version, epoch)

    def _reached(self, version: int, epoch: int) -> None:
        """Pages can start from this version, unless it is the state that was loaded: that has its name already."""
        with self._lock:
            if epoch != self._origin and epoch != self.point[1]:
                self.point = max(self.point, (version, epoch))

    @property
    def start(self) -> int | None:
        """As Mode says."""
        return self.point[0]


class AutoMode(PagesMode):
    """Changed records or changed pages, whichever are fewer bytes; pages of a state that has raw ones."""

    maps_bases = False

    def write(self, pm: PageManager, older: Snapshot, version: int) -> Changes:
        """As Mode says."""
        if "raw" in pm.sets().values():
            return super().write(pm, older, version)
        payloads = delta.write(pm, older)
        if pages.size(pm, self.point[1]) < sum(map(len, payloads)):
            return super().write(pm, older, version)
        return records(FileKind.DELTA, payloads, sum(counted_keys(pm)))


class CecMode(Mode):
    """A log that needs no base."""

    writes_bases = False

    def __init__(self, loaded: Loaded, kind: FileKind | None, extent_target: float) -> None:
        version = loaded.line.version.number
        self._log = loaded.log or cec.Log(loaded.state, extent_target)
        if loaded.log is None and version:
            self._log.foreign(version)
        # A log that says it begins in a version whose file is a log holds every key from there on. Where the state came
        # from elsewhere all the same, a delta must lie between.
        self._apart = loaded.log is None and kind == FileKind.LOG
        self._writing = 0

    def write(self, pm: PageManager, older: Snapshot, version: int) -> Changes:
        """As Mode says."""
        for name, kind in pm.sets().items():
            if kind not in ("map", "ordered_map"):
                modes = "delta, pages and auto" if kind == "sequence" else "pages and auto"
                what = "a list or deque" if kind == "sequence" else "raw pages"
                raise InvalidError(f"{name!r} is {what}, and mode cec takes maps alone: modes {modes} take it")
        self._writing = version
        if self._apart:
            return records(FileKind.DELTA, delta.write(pm, older), sum(counted_keys(pm)))
        payloads, summary = self._log.write(older, version)
        return records(FileKind.LOG, payloads, summary.keys, summary.since)

    def committed(self) -> None:
        """As Mode says."""
        if self._apart:
            self._log.foreign(self._writing)
            self._apart = False
        else:
            self._log.committed()


MODES: dict[str, type[Mode]] = {"delta": DeltaMode, "pages": PagesMode, "cec": CecMode, "auto": AutoMode}


# ---------------------------------------------------------------------------------------------------- the manager


class Pin:
    """A version's snapshot, shared by the manager and a base that is being written; the last who lets go closes it."""

    def __init__(self, version: Version, snapshot: Snapshot) -> None:
        self.version = version
        self.snapshot = snapshot
        self.epoch = snapshot.epoch
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> "Pin":
        """One more who uses it."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """One less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.snapshot.close()


class Manager:
    """The checkpoint of one store, to be written and read.

    url          a folder: a path or URL as ``storage_for`` takes it. The files lie in ``state/<operator>/<partition>``
                 below it (and there in a folder of the store's name, unless that is "default"), as Spark has them.
    mode         what a commit writes: "delta", changed records; "pages", changed pages; "auto", whichever is less;
                 "cec", a log that needs no base. The mode may change from one run to the next. Maps are taken by all of
                 them, lists and deques by all but cec, raw pages by pages and auto.
    codec        packs the files: lz4, zstd, snappy or "" for none.
    bases_every  after so many versions ``maintain()`` writes a base.
    retain       how many versions before the newest can still be loaded; ``maintain()`` removes older files.
    extent_target
                 in mode cec: how much of the log a restart may have to read, in multiples of the keys; more than 1.
    ids          give each commit an id of its own, so that a version can be committed more than once, side by side, as
                 by tasks that are run again. Who loads then says which.
    storage      where the url is a path: a ``Storage``, or a file system of pyarrow's.

    A program loads a state, changes it, and commits it, as often as it likes:

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Manager(folder.name) as checkpoint, checkpoint.load() as pm:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     checkpoint.commit(pm)
    ...     checkpoint.maintain().wait()
    1
    >>> with Manager(folder.name) as checkpoint, checkpoint.load() as pm:
    ...     checkpoint.version, pm.map("users")[b"alice"]
    (1, b'1')
    >>> folder.cleanup()

    Of two programs that commit the same version the first one wins, whole; the other gets ``ExistsError`` and must load
    again. (Spark's provider, like ``ids``, gives each commit a file of its own: there both have it.)
    ``load(version=v)`` goes back: the next commit removes what came after v.

    Threads: one at a time. A base is written by threads of the manager's own.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        operator: int = 0,
        partition: int = 0,
        store: str = DEFAULT_STORE,
        *,
        mode: str = "delta",
        codec: str = "lz4",
        bases_every: int = 10,
        retain: int = 100,
        extent_target: float = 2.0,
        ids: bool = False,
        storage: Any = None,
    ) -> None:
        if not isinstance(ids, bool):
            raise InvalidError(f"ids {ids!r}: give True or False")
        self._ids = ids
        self._id = StoreId(
            _whole("operator", operator, 0, OPERATOR_MAX),
            _whole("partition", partition, 0, PARTITION_MAX),
            _store_name(store),
        )
        self._make_mode = _known("mode", mode, MODES)
        self._codec = codec
        _known("codec", codec, codecs.COMPRESS)
        self._bases_every = _whole("bases_every", bases_every, 1)
        self._retain = _whole("retain", retain, 1)
        self._extent_target = _more_than_one("extent_target", extent_target)
        self._storage, root = storage_for(url, storage)
        names = [STATE_FOLDER, str(operator), str(partition), *([] if store == DEFAULT_STORE else [store])]
        self._folder = join(root, "/".join(names))
        self._store = Store(self._storage, self._folder, self._id)
        self._service = IOService()
        self._closed = False
        self._lock = threading.Lock()  # around what the job changes, too: _last_base
        self._job: Job | None = None
        self._state: State | None = None
        self._needs: dict[StoredFile, Needs] = {}  # of commit files, so that cleaning reads each once
        self._last_base = 0
        self.bytes_written = 0
        """Of the last commit's file."""

    def __repr__(self) -> str:
        return f"<Manager of {self._id} in {self._store.location}>"

    def __enter__(self) -> "Manager":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._job is not None:
            self._job.cancel()
        self.close()

    def close(self) -> None:
        """Waits for the base that is being written, if any. What ``load`` gave stays the caller's to close."""
        self._closed = True
        self._service.close()
        self._drop_state()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the manager of {self._store.location} is closed")

    @property
    def store(self) -> Store:
        """The store, to look at its files and versions."""
        return self._store

    @property
    def version(self) -> int:
        """The version that was loaded or committed last."""
        return self._loaded().pin.version.number

    @property
    def point(self) -> tuple[int, int]:
        """What ``adopt()`` of the same arena, by another manager, is to be given."""
        return self._loaded().mode.point

    @property
    def version_id(self) -> Version:
        """The same with its id, if it has one."""
        return self._loaded().pin.version

    @property
    def repaired(self) -> bool:
        """Whether loading passed over damaged bases, which ``maintain()`` has yet to remove."""
        return bool(self._loaded().damaged)

    def _loaded(self) -> "State":
        self._check_open()
        if self._state is None:
            raise InvalidError("no version is loaded: load() one")
        return self._state

    # ------------------------------------------------------------------------------------------------ loading

    def load(
        self,
        version: int | None = None,
        id: str | None = None,
        *,
        repair: bool = False,
        path: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
    ) -> PageManager:
        """The state of a version (None: of the newest; in a new folder it is empty) to change and commit.

        What was loaded before can be committed no more, and a base that is being written is cancelled. Damage raises
        ``CorruptError`` with the file's name; repair: pass over a damaged base for an older one, and have the next
        ``maintain()`` remove it. path, limit: of the arena, which must be a new file; None: in memory.
        """
        self._check_open()
        self._end_job(cancel=True)
        self._drop_state()
        listing = self._listing()
        if listing.files:
            loaded = self._store.recover(version, id, repair=repair, extent_target=self._extent_target)
        else:
            self._refuse_others()
            if version not in (None, 0) or id is not None:
                raise NotFoundError(f"{self._store.location} has no version {version}: it holds none at all")
            loaded = Loaded(PageManager(), Line(Version(0), None, ()))
        if path is not None or limit is not None:
            loaded = self._moved(loaded, path, limit)
        pm, line = loaded.state, loaded.line
        try:
            header = self._store.header(line.files[-1]) if line.files else None
            pm.commit()
            commit = loaded.listing.deltas.get(line.version)
            kind = None if commit is None else self._store.header(commit).kind
            mode = self._make_mode(loaded, kind, self._extent_target)
            flags = 0 if header is None else header.flags
            self._state = State(pm, Pin(line.version, pm.snapshot()), mode, flags, self._ids, set(loaded.damaged))
        except BaseException:
            pm.close()
            raise
        # Who gives ids has others beside it, whose lines are nobody's business but cleaning's.
        self._state.newer = not self._ids and loaded.listing.reaches_beyond(line.version)
        self._last_base = line.base.version.number if line.base else 0
        fault.point("load.done")
        return pm

    def _moved(self, loaded: Loaded, path: str | os.PathLike[str] | None, limit: int | str | None) -> Loaded:
        """The same state in an arena of its own making."""
        with loaded.state as source:
            if loaded.log is not None:
                loaded.log.close()
            pm = _new_arena(path, limit, source.page_size)
            try:
                if source.sets():
                    image = bytearray()
                    with source.snapshot() as last:
                        last.write(image.extend)
                    pm.load_bytes(image)
            except BaseException:
                pm.close()
                raise
        return Loaded(pm, loaded.line, listing=loaded.listing, damaged=loaded.damaged)

    def begin(
        self, number: int, path: str | os.PathLike[str] | None = None, limit: int | str | None = None
    ) -> PageManager:
        """An empty state that counts as the version of this number, in place of ``load()``. path, limit: as there."""
        _whole("number", number, 0)
        pm = _new_arena(path, limit)
        try:
            pm.commit()
            self.adopt(pm, Version(number), Listing([], []))
            if number > 0:
                self._write_first_base(replace=False)
        except BaseException:
            pm.close()
            raise
        return pm

    def write_version(self, pm: PageManager, number: int) -> None:
        """Makes a state the version of this number, from 1, by a base alone, and goes on from it."""
        pm.commit()
        self.adopt(pm, Version(_whole("number", number, 1)), Listing([], []))
        self._write_first_base(replace=True)

    def _write_first_base(self, replace: bool) -> None:
        """The base of a version that has no commit file. replace: what is there may be of another state."""
        state = self._loaded()
        page_bytes = state.pm.page_size
        self._service.start(lambda job: self._write_base(job, state.pin, page_bytes, state, replace)).wait()

    def adopt(self, pm: PageManager, version: Version, listing: Listing, point: tuple[int, int] = (0, 0)) -> None:
        """Goes on from a state that is known to be this version of the checkpoint, in place of ``load()``.

        For checkpoints that Python alone writes, and not in mode cec, whose log is in memory. listing: of the store,
        from a moment ago. point: what ``point`` was when the arena was left. Changes that ``pm`` has not committed are
        the next commit's.
        """
        self._check_open()
        self._end_job(cancel=True)
        self._drop_state()
        mode = self._make_mode(Loaded(pm, Line(version, None, ())), None, self._extent_target)
        mode.point = point
        self._state = State(pm, Pin(version, pm.snapshot()), mode, 0, self._ids)
        self._last_base = max((found.number for found in listing.bases if found.number <= version.number), default=0)

    def _listing(self) -> Listing:
        try:
            return self._store.listing()
        except NotFoundError:
            return Listing([], [])

    def _refuse_others(self) -> None:
        try:
            suffixes = {entry.name.rsplit(".", 1)[-1] for entry in self._storage.list(self._folder)}
        except NotFoundError:
            return
        found = sorted({OTHER_PROVIDERS[suffix] for suffix in suffixes & OTHER_PROVIDERS.keys()})
        if found:
            raise InvalidError(
                f"{self._store.location} was written by {' and '.join(found)}: give another checkpoint's folder"
            )

    def _drop_state(self) -> None:
        state, self._state = self._state, None
        self._needs = {}
        if state is not None:
            state.pin.release()

    # ------------------------------------------------------------------------------------------------ committing

    def commit(self, pm: PageManager) -> int:
        """Makes the state the next version, durable when it returns, and commits it in memory, too; gives its number.

        After an error the last version is as it was, in the files and in memory: ``pm.abort()`` goes back to it,
        another ``commit()`` tries again. What the mode does not take is refused (``mode`` above).
        """
        state = self._loaded()
        if pm is not state.pm:
            raise InvalidError("commit what? give the page manager that load() gave last")
        pm.epoch  # noqa: B018, raises if it is closed
        if state.flags & ROW_CHECKSUMS:
            raise InvalidError(
                f"{self._store.location} has a checksum behind each value "
                "(spark.sql.streaming.stateStore.rowChecksum.enabled), which Python does not write"
            )
        fault.point("commit.start")
        parent, version = state.pin.version, state.next
        try:
            changes = state.mode.write(pm, state.pin.snapshot, version.number)
            header = self._header(changes.kind, version, parent, changes.page_bytes, state.flags)
            pieces = container.pieces(header, changes.frames, changes.keys, codecs.compress, changes.since)
            data = b"".join(pieces)
            fault.point("commit.packed")
            self._drop_newer(state)
            self._publish(state, version, data)
            self.bytes_written = len(data)
        except BaseException:
            state.mode.forget()
            raise
        fault.point("commit.durable")
        try:
            pm.commit()
            pin = Pin(version, pm.snapshot())
        except BaseException as error:
            self._drop_state()
            if not isinstance(error, Exception):
                raise
            raise QuireError(f"version {version} is durable, but not in memory ({error}): load() again") from error
        fault.point("commit.done")
        state.follow(pin)
        state.mode.committed()
        return version.number

    def _header(self, kind: FileKind, version: Version, parent: Version, page_bytes: int, flags: int) -> FileHeader:
        return FileHeader(
            kind,
            version.number,
            parent.number,
            self._id.operator,
            self._id.partition,
            page_bytes,
            flags,
            self._id.name,
            version.id,
            parent.id,
            self._codec,
        )

    def _path(self, kind: FileKind, version: Version) -> str:
        return join(self._folder, f"{version}.{SUFFIXES[kind]}")

    def _publish(self, state: "State", version: Version, data: bytes) -> None:
        """Writes a commit file under a name that nobody else has taken."""
        path = self._path(FileKind.DELTA, version)
        state.attempts.add(hashlib.sha256(data).digest())

        def may_go(found: bytes) -> bool:
            return found == data or (
                hashlib.sha256(found).digest() in state.attempts and not self._was_followed(version)
            )

        try:
            write_own(self._storage, path, data, may_go)
        except ExistsError:
            raise ExistsError(
                f"{self._storage.display(path)} is there already: another program has committed version {version}, or "
                "has gone on from one that a commit which failed here had left. "
                "It stays, and the changes made here are not durable: load() again"
            ) from None

    def _was_followed(self, version: Version) -> bool:
        """Whether there is a commit that grew out of this one."""
        listing = self._listing()
        after = [file for file in listing.deltas.values() if file.version.number == version.number + 1]
        return any(self._store.parent(listing, file) == version for file in after)

    def _drop_newer(self, state: "State") -> None:
        """Removes what came after a version that was gone back to, the newest first, so that no gap comes to be."""
        if not state.newer:
            return
        number, hidden = state.pin.version.number, self._hidden()
        for file in reversed(self._store.files()):
            if file.version.number > number:
                fault.point("drop.delete")
                self._remove(file.path, hidden)
        self._needs = {}
        state.newer = False

    # ------------------------------------------------------------------------------------------------ maintenance

    def maintain(self, *, background: bool = False, progress: Progress | None = None) -> Job:
        """Writes a base of the last version if one is due, then removes the files that nothing needs any more.

        background: returns once the base has begun; the program may go on, ``Job.wait()`` waits and raises what went
        wrong, which is logged otherwise, and tried again by the next ``maintain()``. One that runs is not doubled.
        progress: is called with the bytes of the base that are done, and of all, from other threads.
        """
        state = self._loaded()
        if self._job is not None and not self._job.done:
            if background:
                return self._job
            self._end_job(cancel=False)
        pin = state.pin
        # Of now: a commit made while the base is written starts from here, and cleaning comes after both.
        start = state.mode.start
        due = state.mode.writes_bases and pin.version.number - self._last_base >= self._bases_every
        # The pages of others may start from the version that was loaded, and a base of it would have other ones.
        due = due and not (pin.version == state.loaded and pin.epoch == state.origin != 0)
        page_bytes = state.pm.page_size if due else 0
        pin.share()

        def work(job: Job) -> None:
            try:
                job.check()
                if due:
                    self._write_base(job, pin, page_bytes, state, replace=pin.version in state.damaged)
                self._clean(job, pin.version, start, state.damaged)
            except BaseException as error:
                if background and not isinstance(error, CancelledError):
                    log.warning("maintenance of %s failed, and will be tried again: %s", self._store.location, error)
                raise
            finally:
                pin.release()

        try:
            self._job = job = self._service.start(work, progress)
        except BaseException:
            pin.release()
            raise
        if background:
            if due:
                job.wait_begun()
            return job
        try:
            job.wait()
        except BaseException:
            job.cancel()
            raise
        return job

    def _end_job(self, cancel: bool) -> None:
        if self._job is not None:
            if cancel:
                self._job.cancel()
            try:
                self._job.wait()
            except Exception:
                pass  # logged, or raised by the call that waited for it
            self._job = None

    def _write_base(self, job: Job, pin: Pin, page_bytes: int, state: "State", replace: bool) -> None:
        """Writes the base of a version, unless there is one that is not to be replaced: then nothing starts from it."""
        header = self._header(FileKind.BASE, pin.version, pin.version, page_bytes, state.flags)
        name = f"{pin.version}.{SUFFIXES[FileKind.BASE]}"
        mapped = state.mode.maps_bases and self._storage.local_path(self._folder) is not None
        file = BaseFile(self._storage, self._folder, name, header, sum(counted_keys(pin.snapshot)), mapped, replace)
        try:
            self._service.write_base(job, file, pin.snapshot)
            state.mode.base_written(pin.version.number, pin.epoch)
            state.damaged.discard(pin.version)
        except ExistsError as error:
            log.info("another program has written the base of version %s: %s", pin.version, error)
        with self._lock:
            self._last_base = max(self._last_base, pin.version.number)

    def _clean(self, job: Job, latest: Version, start: int | None, damaged: set[Version]) -> None:
        """Removes what no version from ``latest - retain`` on needs, and what writers left that did not finish.

        start: a version that the next commit may start from. damaged: versions whose bases nobody can rely on, and
        which go: others, who do not know, might. Parts without a base may be somebody's work in progress while they are
        not older than the newest base.
        """
        listing = self._listing()
        if not listing.files:
            return
        # Of files that are there alone, or it would grow for ever.
        self._needs = listing.needs = {file: self._needs[file] for file in listing.files if file in self._needs}
        bases = listing.bases
        listing.bases = {version: base for version, base in bases.items() if version not in damaged}
        earliest = min(latest.number - self._retain, latest.number if start is None else start)
        # Whether they led to the last one or not: there may be several lines, and several who go on from them.
        kept = [version for version in listing.versions if version.number >= earliest]
        first = min((self._first_needed(listing, version) for version in kept), default=0)
        newest = first
        with contextlib.suppress(CorruptError, VersionError):
            led = self._store.ancestors(listing, latest)
            newest = next((v.number for v in led if v in listing.bases and v.number >= first), first)
        gone = [bases[version].path for version in damaged & bases.keys()]
        gone += [file.path for file in listing.files if file.version.number < first and file.path not in gone]
        older = [base for base in bases.values() if first <= base.version.number < newest]
        gone += self._strays(listing, older, newest)
        hidden = self._hidden()
        for name in sorted(hidden):
            match = LEFTOVER.fullmatch(name)
            if match and int(match[1]) < (newest if match[2] in ("qpart", "qimage") else first):
                gone.append(join(self._folder, name))
        for path in gone:
            job.check()
            fault.point("clean.delete")
            self._remove(path, hidden)
        damaged.clear()
        fault.point("clean.done")

    def _first_needed(self, listing: Listing, version: Version) -> int:
        """The oldest version whose files one needs; itself, if some are gone; 0 if damage hides what it needs."""
        try:
            return next(self._store.lines_in(listing, version)).first
        except NotFoundError:
            return version.number
        except (CorruptError, VersionError):
            return 0

    def _hidden(self) -> set[str]:
        return {entry.name for entry in self._storage.list(self._folder) if entry.name.startswith(".")}

    def _remove(self, path: str, hidden: set[str]) -> None:
        """Deletes a file, and the checksums that Hadoop keeps of it on local disks: they would be held against the next
        file of its name.
        """
        folder, _, name = path.rpartition("/")
        if f".{name}.crc" in hidden:
            self._storage.delete(join(folder, f".{name}.crc"))
        self._storage.delete(path)

    def _strays(self, listing: Listing, bases: list[StoredFile], newest: int) -> list[str]:
        """The parts older than the newest base that none of these bases names."""
        old = [part for part in listing.parts if part.version.number < newest]
        named: set[str] = set()
        unknown: set[Version] = set()
        for base in bases:
            if any(part.version == base.version for part in old):
                try:
                    named.update(join(self._folder, name) for name in self._store.parts(base))
                except (CorruptError, VersionError):
                    unknown.add(base.version)  # whoever repairs it may want them
                except NotFoundError:
                    pass  # somebody else cleans, too
        # Whoever wrote them may have come to the base meanwhile.
        now = self._listing().bases if old else {}
        unknown |= {part.version for part in old if part.version in now and part.version not in listing.bases}
        return sorted(part.path for part in old if part.path not in named and part.version not in unknown)


class State:
    """What a manager has loaded, and goes on from.

    loaded    the version that was loaded; origin: the epoch of the image or pages that it came from, if any.
    ids       versions have ids.
    next      the version that the next commit makes, however many attempts it takes.
    newer     versions after the one loaded were there at the time.
    attempts  digests of what was written for the next version by commits that failed.
    damaged   versions whose bases loading had to pass over, as long as they are there.
    """

    def __init__(
        self, pm: PageManager, pin: Pin, mode: Mode, flags: int, ids: bool, damaged: set[Version] | None = None
    ) -> None:
        self.pm = pm
        self.pin = pin
        self.mode = mode
        self.flags = flags
        self.ids = ids or bool(pin.version.id)
        self.loaded, self.origin = pin.version, pages.origin(pm)
        self.next = self._after(pin.version)
        self.newer = False
        self.attempts: set[bytes] = set()
        self.damaged = damaged or set()

    def follow(self, pin: Pin) -> None:
        """Goes on from the next version."""
        self.pin.release()
        self.pin = pin
        self.next = self._after(pin.version)
        self.attempts.clear()

    def _after(self, version: Version) -> Version:
        return Version(version.number + 1, str(uuid.uuid4()) if self.ids else "")


def _new_arena(
    path: str | os.PathLike[str] | None, limit: int | str | None, page_size: int | None = None
) -> PageManager:
    """An arena with nothing in it: what it held would be taken for a part of the checkpoint's state, and is in none."""
    pm = PageManager(path, limit, page_size)
    if names := sorted(pm.sets()):
        pm.close()
        raise InvalidError(f"path {os.fspath(path or '')!r} is an arena that holds {', '.join(names)}: give a new file")
    return pm


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise InvalidError(f"{name} {value!r}: give a whole number from {least}" + (f" to {most}" if most else ""))
    return value


def _more_than_one(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value <= EXTENT_TARGET_MAX:
        raise InvalidError(
            f"{name} {value!r}: give a number greater than 1, {EXTENT_TARGET_MAX:g} at most: a log that is no longer "
            "than there are live keys cannot be held, each must be in it once"
        )
    return float(value)


def _store_name(name: Any) -> str:
    if not isinstance(name, str) or not name or "/" in name or name[0] in "._":
        raise InvalidError(f"store {name!r}: give a name that a folder can have, which begins with neither . nor _")
    return name


def _known(what: str, name: Any, table: dict[str, Any]) -> Any:
    if not isinstance(name, str) or name not in table:
        raise InvalidError(f"{what} {name!r}: give one of {', '.join(map(repr, table))}")
    return table[name]
