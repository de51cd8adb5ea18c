"""Writes bases beside the program: an image is cut into frames, which several threads pack and write to parts.

The snapshot gives the image's bytes from front to back (docs/format.md). A base of fewer than ``INLINE_BYTES`` is one
file. A larger one is spread over as many parts as there are writers, frame by frame in turn; one that is to be mapped
has one part, the image as it is. The base file, which names the parts, comes last, so that nothing refers to what is
not durable yet. Parts have a random token in their names: two writers never touch the same file, and what a writer
leaves that failed, was cancelled or was killed belongs to no base and is removed by cleaning.

Memory: the frames that are on their way take ``WINDOW_BYTES`` at the most; the snapshot waits meanwhile.
"""

import queue
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from quire.checkpoint import container, fault
from quire.checkpoint.codecs import compress
from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind, Parts
from quire.checkpoint.storage import Storage, join, write_own
from quire.pagemgr import ArenaSnapshot
from quire.pagemgr.errors import ClosedError, ExistsError, InvalidError, NotFoundError, QuireError

FRAME_BYTES = 1 << 20
INLINE_BYTES = 8 << 20
WINDOW_BYTES = 32 << 20
WRITERS = 4
TOKEN_BYTES = 8

# An arena's header, which an image begins with: bytes of a page, and the number of frames in meta slot 0.
PAGE_BYTES_AT = 12
FRAME_LIMIT_AT = 132
BLOCK_BYTES = 65536
FOOTER_BYTES = 32

# Bytes of the image that are done, and all that it has.
Progress: TypeAlias = Callable[[int, int], None]


class CancelledError(QuireError):
    """A base was not written to its end, since somebody wanted it so."""


def image_bytes(start: Any) -> int:
    """How many bytes an image has that begins so."""
    (page_bytes,) = struct.unpack_from("<I", start, PAGE_BYTES_AT)
    (frames,) = struct.unpack_from("<I", start, FRAME_LIMIT_AT)
    body = page_bytes * frames
    return int(body + 4 * -(-body // BLOCK_BYTES) + FOOTER_BYTES)


@dataclass(frozen=True)
class BaseFile:
    """What is to be written as a base: where to, with which header, for a state of so many keys.

    mapped: its image is to be a file of its own, which whoever loads it can map.
    replace: a base that is there already is no good; else it stays, with ``ExistsError``, since pages that somebody has
    written may start from the very pages in it.
    """

    storage: Storage
    folder: str
    name: str
    header: FileHeader
    keys: int
    mapped: bool = False
    replace: bool = False

    @property
    def path(self) -> str:
        """Of the file that has the version's name, and comes last."""
        return join(self.folder, self.name)

    def refuse_other(self) -> None:
        """``ExistsError`` if somebody else's stays, before any work."""
        if not self.replace and self.storage.exists(self.path):
            raise ExistsError(f"{self.storage.display(self.path)} is there already")

    def publish(self, data: bytes) -> None:
        """Gives it its content. Others' differs: images have their arena's identity, parts have random names."""
        if self.replace:
            self.storage.write_atomic(self.path, data, replace=True)
        else:
            write_own(self.storage, self.path, data, lambda found: found == data)


class Job:
    """Work in the background. ``cancel()`` and ``wait()`` may be called from any thread, more than once.

    bytes_done, bytes_total  of the image of a base; the total is 0 until it is known.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.bytes_done = 0
        self.bytes_total = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def cancel(self) -> None:
        """Ends it soon; ``wait()`` then raises ``CancelledError``, unless it was over already."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> None:
        """Returns when it is done, or raises what went wrong; ``TimeoutError`` if it takes longer."""
        if not self._over.wait(seconds):
            raise TimeoutError(f"{self.bytes_done} of {self.bytes_total} bytes are written after {seconds} seconds")
        if self._error is not None:
            raise self._error

    def wait_begun(self) -> None:
        """Waits until a snapshot is at work, which keeps its arena open until it has given all, or for the end."""
        self._begun.wait()

    def check(self) -> None:
        """Raises if it was cancelled."""
        if self._stop.is_set():
            raise CancelledError("the base was cancelled; what was written of it is removed by cleaning")

    def began(self, total: int) -> None:
        """The snapshot gives its first bytes."""
        self.bytes_total = total
        self._begun.set()

    def advance(self, count: int) -> None:
        """So many more bytes of the image went to their file."""
        with self._lock:
            self.bytes_done += count
            if self._progress is not None:
                self._progress(self.bytes_done, self.bytes_total)

    def run(self, work: Callable[["Job"], None]) -> None:
        """Does the work, which checks whether it was cancelled, and keeps how it ended."""
        try:
            work(self)
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()
            self._over.set()


class IOService:
    """A thread that does one piece of work after the other, and a pool of threads that write the parts of a base.

    >>> import quire, tempfile
    >>> from quire.checkpoint import Store, StoreId
    >>> from quire.checkpoint.storage import storage_for
    >>> with tempfile.TemporaryDirectory() as path, quire.PageManager() as pm, IOService() as service:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     epoch = pm.commit()
    ...     storage, folder = storage_for(path)
    ...     header = FileHeader(FileKind.BASE, 7, 7, operator_id=0, partition_id=0, page_bytes=pm.page_size)
    ...     file = BaseFile(storage, folder, "7.qbase", header, keys=1)
    ...     with pm.snapshot() as pinned:
    ...         service.start(lambda job: service.write_base(job, file, pinned)).wait()
    ...     with Store(storage, folder, StoreId(0, 0)).load() as state:
    ...         state.map("users")[b"alice"]
    b'1'
    """

    def __init__(self, writers: int = WRITERS) -> None:
        if isinstance(writers, bool) or not isinstance(writers, int) or not 1 <= writers <= 64:
            raise InvalidError(f"writers {writers!r}: give the number of threads that write, from 1 to 64")
        self._writers = writers
        # Apart from the writers: each part needs a thread while the snapshot writes.
        self._jobs = ThreadPoolExecutor(1, "quire-io")
        self._pool = ThreadPoolExecutor(writers, "quire-part")

    def __enter__(self) -> "IOService":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being done."""
        self._jobs.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    def start(self, work: Callable[[Job], None], progress: Progress | None = None) -> Job:
        """Lets the work be done in the background, once what was started before is over."""
        job = Job(progress)
        try:
            self._jobs.submit(job.run, work)
        except RuntimeError as error:
            raise ClosedError("the IO service is closed") from error
        return job

    def write_base(self, job: Job, file: BaseFile, snapshot: ArenaSnapshot) -> None:
        """Writes a snapshot as a base, as a part of a job's work. Durable when it returns."""
        BaseWriter(file, job, self._writers, self._pool).write(snapshot)


class BaseWriter:
    """One base on its way: cuts the image into frames and deals them out."""

    def __init__(self, file: BaseFile, job: Job, writers: int, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._job = job
        self._writers = writers
        self._pool = pool
        self._buffer = bytearray()
        self._frames: list[Frame] = []
        self._parts: PartWriters | None = None

    def write(self, snapshot: ArenaSnapshot) -> None:
        """Durable when it returns."""
        fault.point("base.start")
        self._file.refuse_other()
        try:
            snapshot.write(self._take)
            if self._buffer:
                self._put(len(self._buffer))
            frames = self._frames if self._parts is None else [self._parts.finish()]
        except BaseException as error:
            if self._parts is not None:
                self._parts.stop(error)
            raise
        fault.point("base.parts")
        self._job.check()
        file = self._file
        if self._parts is not None:
            self._parts.check_there()
        file.publish(b"".join(container.pieces(file.header, frames, file.keys, compress)))
        if self._parts is not None:
            try:
                self._parts.check_there()
            except NotFoundError:
                file.storage.delete(file.path)  # of no use to anybody
                raise
        if self._parts is None:
            self._job.advance(self._job.bytes_total)
        fault.point("base.done")

    def _take(self, piece: Any) -> None:
        """The next bytes of the image."""
        self._job.check()
        if not self._job.bytes_total:
            self._job.began(image_bytes(piece))
            if self._file.mapped or self._job.bytes_total >= INLINE_BYTES:
                self._parts = PartWriters(self._file, self._job, self._writers, self._pool)
        self._buffer += piece
        while len(self._buffer) >= FRAME_BYTES:
            self._put(FRAME_BYTES)

    def _put(self, count: int) -> None:
        """Hands on the first of the bytes that have gathered: all frames but the last are of equal size."""
        frame = Frame(FrameKind.IMAGE, bytes(self._buffer[:count]))
        del self._buffer[:count]
        if self._parts is None:
            self._frames.append(frame)
        else:
            self._parts.put(frame)


class PartWriters:
    """The parts of one base, each written by a thread of its own from a queue of frames."""

    def __init__(self, file: BaseFile, job: Job, count: int, pool: ThreadPoolExecutor) -> None:
        count = 1 if file.mapped else min(count, -(-job.bytes_total // FRAME_BYTES))
        stem, token = file.name.rpartition(".")[0], secrets.token_hex(TOKEN_BYTES)
        self._file = file
        self._job = job
        self._names = [f"{stem}.{token}" + (".qimage" if file.mapped else f".{n}.qpart") for n in range(count)]
        self._sizes = [0] * count
        self._queues: list[queue.SimpleQueue[Frame | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._window = threading.Semaphore(max(count, WINDOW_BYTES // FRAME_BYTES))
        self._failure: BaseException | None = None
        self._frame_bytes = FRAME_BYTES
        self._dealt = 0
        self._running = [pool.submit(self._write, number) for number in range(count)]

    def put(self, frame: Frame) -> None:
        """Waits until there is room on the way, then hands the frame to the writer whose turn it is."""
        self._window.acquire()
        if self._failure is not None:
            raise self._failure
        self._queues[self._dealt % len(self._queues)].put(frame)
        self._dealt += 1

    def finish(self) -> Frame:
        """Waits until all parts are durable, and gives the frame that names them."""
        self._end()
        if self._failure is not None:
            raise self._failure
        files = tuple(zip(self._names, self._sizes, strict=True))
        return Frame(FrameKind.PARTS, Parts(self._job.bytes_total, self._frame_bytes, files).encode())

    def check_there(self) -> None:
        """Refuses to name parts that somebody has cleaned away, as another program may whose bases are newer."""
        for name in self._names:
            path = join(self._file.folder, name)
            if not self._file.storage.exists(path):
                raise NotFoundError(f"{self._file.storage.display(path)} was removed before its base was written")

    def stop(self, reason: BaseException) -> None:
        """Waits until nobody writes any more."""
        self._failure = self._failure or reason
        self._end()

    def _end(self) -> None:
        for each in self._queues:
            each.put(None)
        for running in self._running:
            running.result()

    def _write(self, number: int) -> None:
        file = self._file
        share = self._share(number)
        header = replace(file.header, kind=FileKind.PART)
        pieces = (bytes(frame.data) for frame in share) if file.mapped else container.pieces(header, share, 0, compress)
        try:
            file.storage.write_atomic(join(file.folder, self._names[number]), self._counted(number, pieces))
            fault.point("part.done")
        except BaseException as error:
            self._failure = self._failure or error
            # The frames that nobody takes any more must not hold up the snapshot.
            self._window.release(max(1, WINDOW_BYTES // FRAME_BYTES))

    def _share(self, number: int) -> Iterator[Frame]:
        """The frames of a part as they come, until the end or the first failure of any writer."""
        while (frame := self._queues[number].get()) is not None:
            self._check()
            yield frame
            self._job.advance(len(frame.data))
            self._window.release()
            fault.point("part.frame")
        self._check()

    def _check(self) -> None:
        self._job.check()
        if self._failure is not None:
            raise CancelledError("another part of the base could not be written")

    def _counted(self, number: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._sizes[number] += len(piece)
            yield piece
