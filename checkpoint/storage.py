"""Where checkpoints lie: local disks, HDFS over its REST interface, and whatever pyarrow has a file system for.

``storage_for`` chooses by the scheme of a URL. All storages speak of paths with slashes, try again what a moment later
may go well, and raise Quire's own exceptions, which name the path and the cause.
"""

import contextlib
import errno
import importlib
import io
import itertools
import os
import posixpath
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from quire.checkpoint import fault
from quire.pagemgr.errors import (
    CorruptError,
    ExistsError,
    InvalidError,
    IOFailedError,
    NoSpaceError,
    NotFoundError,
    QuireError,
)

# Before each further attempt at a call that failed for a passing reason.
RETRY_WAITS_SECONDS = (0.1, 0.4, 1.6)
# Some servers answer with a whole page.
REASON_LENGTH_MAX = 500
TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY}

NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
# What disks say that have no hard links, such as those of other systems, and object stores mounted as folders.
NO_LINKS_ERRNOS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

LOCAL_WRITE_BYTES = 1 << 20

WEBHDFS_PORT = 9870
# NameNodes listen here for Hadoop's own protocol; a URL that names one of these ports was written for Spark.
HDFS_RPC_PORTS = {8020, 9000, 9820}
WEBHDFS_READ_BYTES = 1 << 20
WEBHDFS_TIMEOUT_SECONDS = (10, 60)  # to connect, to wait for bytes
WEBHDFS_TRANSIENT = {"RetriableException", "StandbyException", "SafeModeException"}
# What a NameNode says until the DataNodes have told it which blocks they hold.
WEBHDFS_NO_NODES_YET = re.compile(r"No active .*nodes contain this block")
# A NameNode goes on for minutes to send clients to a DataNode that has died, and picks one at random each time.
WEBHDFS_DATA_NODES_TRIED = 8
HTTP_TRANSIENT = {429, 502, 503, 504}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """What a folder holds under a name. size: bytes of a file, 0 for a folder; modified: when, in nanoseconds."""

    name: str
    size: int
    is_dir: bool
    modified: int = field(default=0, compare=False, repr=False)


class Storage(ABC):
    """Files and folders somewhere. Paths are what ``storage_for`` gave, with names added behind slashes."""

    @abstractmethod
    def list(self, path: str) -> Sequence[Entry]:
        """What is in a folder, by name; ``NotFoundError`` if there is none."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A file for reading, in which one can seek; ``NotFoundError`` if there is none."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""

    @abstractmethod
    def write_atomic(self, path: str, data: bytes | Iterable[bytes], *, replace: bool = False) -> None:
        """Writes a file that appears under its name whole or not at all, in a folder that is made if need be.

        ``ExistsError`` if the name is taken, unless the old file is to be replaced. Bytes, or a list of them, are
        written again after a fault that passes; what comes from an iterator is there only once, so its faults are
        raised at once.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Removes a file; one that is gone already is fine."""

    def display(self, path: str) -> str:
        """The path as people know it, for messages."""
        return path

    def local_path(self, path: str) -> str | None:
        """The path of a file that this machine can map; None where it cannot."""
        return None


def storage_for(
    location: str | os.PathLike[str], storage: "Storage | fs.FileSystem | None" = None
) -> tuple[Storage, str]:
    """The storage that a URL or path names, and the path in it.

    A plain path or ``file:`` is a local disk. ``webhdfs://host:port/path`` is HDFS over REST at that port of the
    NameNode; ``hdfs://`` is the same, at port 9870 where the URL has none or one of Hadoop's own protocol. ``s3://``,
    ``gs://`` and others are pyarrow's. Given a storage, or a file system of pyarrow's, the location is a path in that.

    >>> storage, path = storage_for("file:///data/check%20point/")
    >>> type(storage).__name__, path
    ('LocalStorage', '/data/check point')
    """
    if isinstance(storage, Storage):
        return storage, _trimmed(os.fspath(location))
    if isinstance(storage, fs.FileSystem):
        return ArrowStorage(storage), _trimmed(os.fspath(location))
    if storage is not None:
        raise InvalidError(f"storage {storage!r}: give a Storage, a pyarrow.fs.FileSystem, or None to go by the URL")
    if isinstance(location, os.PathLike):
        return LocalStorage(), str(Path(location).absolute())
    if not isinstance(location, str) or not location or "\0" in location:
        raise InvalidError(f"{location!r} is no place of a checkpoint: give a path or a URL")
    scheme = location.split("://", 1)[0].lower() if "://" in location else ""
    if location.startswith("file:"):
        return LocalStorage(), _trimmed(unquote(urlsplit(location).path))
    if not scheme:
        return LocalStorage(), str(Path(location).absolute())
    if scheme in ("hdfs", "webhdfs", "swebhdfs"):
        return _webhdfs(location)
    try:
        filesystem, path = fs.FileSystem.from_uri(location)
    except Exception as error:
        raise InvalidError(f"{location}: no file system for it can be had from pyarrow: {error}") from error
    return ArrowStorage(filesystem, scheme + "://"), _trimmed(path)


def _trimmed(path: str) -> str:
    return path.rstrip("/") or "/"


def join(path: str, name: str) -> str:
    """A name in a folder."""
    return posixpath.join(path, name)


def hidden_name(path: str) -> str:
    """A name beside the file, which readers of a checkpoint pass over and the provider's cleaning removes."""
    folder, name = posixpath.split(path)
    return join(folder, f".{name}.{uuid.uuid4()}.tmp")


# ---------------------------------------------------------------------------------------------------- faults


def translated(error: Exception, path: str) -> QuireError:
    """Quire's exception for what a file system raised."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{path} is not there")
    if isinstance(error, FileExistsError):
        return ExistsError(f"{path} is there already")
    reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
    cause = f"{path}: {reason[:REASON_LENGTH_MAX]}"
    if isinstance(error, OSError) and error.errno in NO_SPACE_ERRNOS:
        return NoSpaceError(cause)
    return IOFailedError(cause)


def is_transient(error: Exception) -> bool:
    """Whether the same call may go well a moment later."""
    return isinstance(error, (ConnectionError, TimeoutError)) or (
        isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    )


def retrying(call: Callable[[], Result], path: str, transient: Callable[[Exception], bool] = is_transient) -> Result:
    """The call's result, after further attempts if it fails for a passing reason; Quire's exception if it fails."""
    for wait in (*RETRY_WAITS_SECONDS, None):
        try:
            return call()
        except QuireError:
            raise
        except Exception as error:
            if wait is None or not transient(error):
                raise translated(error, path) from error
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def write_own(storage: Storage, path: str, data: bytes, is_own: Callable[[bytes], bool]) -> None:
    """Writes a file of a new name, or once more what an attempt of one's own left there; else ``ExistsError``.

    The answer to an attempt may have been lost, or it may have failed after the file had its name, which may not be
    safe then. is_own: of the bytes that are there.
    """
    try:
        storage.write_atomic(path, data)
    except ExistsError:
        with storage.open(path) as stream, faults(storage.display(path)):
            found = stream.read()
        if not is_own(found):
            raise
        storage.write_atomic(path, data, replace=True)


def joined(data: bytes | list[bytes] | tuple[bytes, ...]) -> bytes:
    """All bytes of a file, where they can be had as often as it takes."""
    return data if isinstance(data, bytes) else b"".join(data)


class Once:
    """An iterator over bytes that keeps what it raised: a client of HTTP may hide it behind an exception of its own."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self._data = iter(data)
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._data
        except BaseException as error:
            self.error = error
            raise


@contextlib.contextmanager
def faults(path: str) -> Iterator[None]:
    """Turns the file system's exceptions of a block into Quire's."""
    try:
        yield
    except QuireError:
        raise
    except OSError as error:
        raise translated(error, path) from error


# ---------------------------------------------------------------------------------------------------- local disks


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalStorage(Storage):
    """The system's own files. On a disk without hard links, of two who write a new name at once the later one may win.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage, path = storage_for(folder)
    ...     storage.write_atomic(path + "/1.qdelta", b"bytes")
    ...     storage.list(path)
    [Entry(name='1.qdelta', size=5, is_dir=False)]
    """

    def list(self, path: str) -> Sequence[Entry]:
        """As Storage says."""
        return retrying(lambda: sorted(self._entries(path), key=lambda entry: entry.name), path)

    def _entries(self, path: str) -> Iterator[Entry]:
        with os.scandir(path) as found:
            for entry in found:
                # A file may be renamed or removed between its name and its size.
                with contextlib.suppress(FileNotFoundError):
                    is_dir, status = entry.is_dir(), entry.stat()
                    yield Entry(entry.name, 0 if is_dir else status.st_size, is_dir, status.st_mtime_ns)

    def open(self, path: str) -> BinaryIO:
        """As Storage says."""
        return retrying(lambda: Path(path).open("rb"), path)

    def exists(self, path: str) -> bool:
        """As Storage says."""
        return retrying(lambda: os.path.lexists(path), path)

    def write_atomic(self, path: str, data: bytes | Iterable[bytes], *, replace: bool = False) -> None:
        """As Storage says; the file and its name are synced."""
        if isinstance(data, (bytes, list, tuple)):
            content = joined(data)
            retrying(lambda: self._write(path, [content], replace), path)
        else:
            with faults(path):
                self._write(path, data, replace)

    def _write(self, path: str, chunks: Iterable[bytes], replace: bool) -> None:
        hidden, folder = Path(hidden_name(path)), Path(path).parent
        fault.point("write.start")
        new = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
        folder.mkdir(parents=True, exist_ok=True)
        for each in new:
            sync_folder(each.parent)
        try:
            with hidden.open("xb") as file:
                for chunk in chunks:
                    for at in range(0, len(chunk), LOCAL_WRITE_BYTES):
                        file.write(chunk[at : at + LOCAL_WRITE_BYTES])
                        fault.point("write.chunk")
                file.flush()
                fault.point("write.written")
                os.fsync(file.fileno())
            fault.point("write.synced")
            try:
                if replace:
                    hidden.replace(path)
                else:
                    self._rename_new(hidden, Path(path))
            except FileNotFoundError as error:
                raise IOFailedError(f"{path}: it was removed, as {hidden.name}, before it had its name") from error
            fault.point("write.published")
        finally:
            hidden.unlink(missing_ok=True)
        sync_folder(folder)
        fault.point("write.done")

    def _rename_new(self, hidden: Path, path: Path) -> None:
        """Gives a file a new name; ``FileExistsError`` if that is taken."""
        try:
            path.hardlink_to(hidden)  # unlike a rename, it fails if the name is taken
        except OSError as error:
            if error.errno not in NO_LINKS_ERRNOS:
                raise
            if path.exists():
                raise FileExistsError(errno.EEXIST, "there already", str(path)) from error
            hidden.rename(path)

    def delete(self, path: str) -> None:
        """As Storage says."""
        retrying(lambda: Path(path).unlink(missing_ok=True), path)

    def local_path(self, path: str) -> str | None:
        """As Storage says."""
        return path


# ---------------------------------------------------------------------------------------------------- pyarrow


class ArrowStorage(Storage):
    """A file system of pyarrow's. Those of object stores try failed requests again by themselves.

    >>> from pyarrow import fs
    >>> storage, path = storage_for("checkpoint", fs._MockFileSystem())
    >>> storage.write_atomic(path + "/1.qdelta", [b"by", b"tes"])
    >>> storage.list(path), storage.open(path + "/1.qdelta").read()
    ([Entry(name='1.qdelta', size=5, is_dir=False)], b'bytes')
    """

    def __init__(self, filesystem: Any, prefix: str = "") -> None:
        self._fs = filesystem
        self._prefix = prefix

    def display(self, path: str) -> str:
        """With the scheme of the URL, where there was one."""
        return self._prefix + path

    def list(self, path: str) -> Sequence[Entry]:
        """As Storage says."""
        found = retrying(lambda: self._fs.get_file_info(fs.FileSelector(path)), self.display(path))
        entries = (
            Entry(info.base_name, info.size or 0, info.type == fs.FileType.Directory, info.mtime_ns or 0)
            for info in found
        )
        return sorted(entries, key=lambda entry: entry.name)

    def open(self, path: str) -> BinaryIO:
        """As Storage says."""
        file: BinaryIO = retrying(lambda: self._fs.open_input_file(path), self.display(path))
        return file

    def exists(self, path: str) -> bool:
        """As Storage says."""
        info = retrying(lambda: self._fs.get_file_info(path), self.display(path))
        return bool(info.type != fs.FileType.NotFound)

    def write_atomic(self, path: str, data: bytes | Iterable[bytes], *, replace: bool = False) -> None:
        """As Storage says, but for one thing: of two who write a new name at once, the later one may win."""
        if isinstance(data, (bytes, list, tuple)):
            content = joined(data)
            retrying(lambda: self._write(path, [content], replace), self.display(path))
        else:
            with faults(self.display(path)):
                self._write(path, data, replace)

    def _write(self, path: str, chunks: Iterable[bytes], replace: bool) -> None:
        hidden = hidden_name(path)
        if not replace and self.exists(path):
            raise ExistsError(f"{self.display(path)} is there already")
        self._fs.create_dir(posixpath.dirname(path) or "/", recursive=True)
        try:
            with self._fs.open_output_stream(hidden) as file:
                for chunk in chunks:
                    file.write(chunk)
            self._fs.move(hidden, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.delete_file(hidden)
            raise

    def delete(self, path: str) -> None:
        """As Storage says."""
        with contextlib.suppress(NotFoundError):
            retrying(lambda: self._fs.delete_file(path), self.display(path))


# ---------------------------------------------------------------------------------------------------- WebHDFS


def _webhdfs(url: str) -> tuple[Storage, str]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidError(f"{url}: {error}") from error
    if not host:
        raise InvalidError(f"{url} names no host: write it as webhdfs://host:{WEBHDFS_PORT}/path")
    if port is None or (parts.scheme.lower() == "hdfs" and port in HDFS_RPC_PORTS):
        port = WEBHDFS_PORT
    scheme = "https" if parts.scheme.lower() == "swebhdfs" else "http"
    address = f"[{host}]" if ":" in host else host
    # Neither Hadoop nor Spark unescapes the path of such a URL.
    path = url.split("://", 1)[1].partition("/")[2]
    return WebHdfsStorage(f"{scheme}://{address}:{port}", parts.username), _trimmed("/" + path)


class WebHdfsStorage(Storage):
    """HDFS over its REST interface, by the package ``hdfs``.

    url   of the NameNode's REST interface, such as ``http://namenode:9870``; several of them separated by semicolons.
    user  who to be; by default HADOOP_USER_NAME in the environment, or else who runs this.
    """

    def __init__(self, url: str, user: str | None = None) -> None:
        try:
            hdfs, requests = importlib.import_module("hdfs"), importlib.import_module("requests")
        except ImportError as error:
            raise InvalidError(f"{url}: HDFS is read with the package hdfs ({error}): pip install hdfs") from error
        session = requests.Session()
        session.hooks["response"].append(_refuse_unavailable)
        # As Hadoop writes it, and as storage_for() takes it.
        self._shown = re.sub(r"^http(s?)://([^;]*).*", r"\1webhdfs://\2", url)
        self._client = hdfs.InsecureClient(
            url, user or os.environ.get("HADOOP_USER_NAME"), timeout=WEBHDFS_TIMEOUT_SECONDS, session=session
        )
        self._name_nodes = {urlsplit(each).netloc for each in url.split(";")}
        self._error = hdfs.HdfsError
        self._unreachable = (requests.exceptions.ConnectionError, requests.exceptions.Timeout)
        # urllib3's, which requests lets through where a body is read bit by bit.
        self._broken = (
            requests.exceptions.ChunkedEncodingError,
            importlib.import_module("urllib3").exceptions.HTTPError,
        )

    def display(self, path: str) -> str:
        """The URL of a path."""
        return f"{self._shown}{path}"

    def _call(self, call: Callable[[], Result], path: str) -> Result:
        def with_another_node() -> Result:
            for _ in range(WEBHDFS_DATA_NODES_TRIED - 1):
                try:
                    return self._explained(call, path)
                except ConnectionError as error:
                    if not self._is_of_data_node(error):
                        raise
            return self._explained(call, path)

        return retrying(with_another_node, self.display(path), self._is_transient)

    def _is_of_data_node(self, error: Exception) -> bool:
        """Whether it was a DataNode, where the NameNode sends for content, that did not answer."""
        request = getattr(error.__cause__, "request", None)
        return request is not None and urlsplit(request.url).netloc not in self._name_nodes

    def _explained(self, call: Callable[[], Result], path: str) -> Result:
        try:
            return call()
        except self._error as error:
            if error.exception == "FileNotFoundException":
                raise FileNotFoundError(path) from error
            if isinstance(error.message, bytes):
                text = error.message.decode("utf-8", "replace").strip()
                raise OSError(
                    f"not the REST interface of HDFS, whose port is {WEBHDFS_PORT} unless set otherwise: {text}"
                ) from error
            raise
        except self._unreachable as error:
            raise ConnectionError(f"no answer from the REST interface of HDFS: {error}") from error

    def _is_transient(self, error: Exception) -> bool:
        return (
            is_transient(error)
            or isinstance(error, self._broken)
            or getattr(error, "exception", None) in WEBHDFS_TRANSIENT
            or (isinstance(error, self._error) and WEBHDFS_NO_NODES_YET.search(str(error)) is not None)
        )

    def list(self, path: str) -> Sequence[Entry]:
        """As Storage says."""
        found = self._call(lambda: self._client.list(path, status=True), path)
        entries = (
            Entry(name, status["length"], status["type"] == "DIRECTORY", status["modificationTime"] * 1_000_000)
            for name, status in found
        )
        return sorted(entries, key=lambda entry: entry.name)

    def open(self, path: str) -> BinaryIO:
        """As Storage says. It is read piece by piece, each of which is asked for again if the connection breaks."""
        status = self._call(lambda: self._client.status(path), path)
        if status["type"] == "DIRECTORY":
            raise IOFailedError(f"{self.display(path)} is a folder")

        def fetch(offset: int, count: int) -> bytes:
            def piece() -> bytes:
                with self._client.read(path, offset=offset, length=count) as body:
                    data: bytes = body.read()
                if len(data) != count:
                    raise ConnectionError(f"{len(data)} bytes came instead of {count}")
                return data

            try:
                return self._call(piece, path)
            except IOFailedError as error:
                if self._call(lambda: self._client.status(path), path)["length"] == status["length"]:
                    raise
                raise CorruptError(f"{self.display(path)} was replaced while it was read") from error

        return io.BufferedReader(_Pieces(fetch, status["length"]), WEBHDFS_READ_BYTES)

    def exists(self, path: str) -> bool:
        """As Storage says."""
        try:
            self._call(lambda: self._client.status(path), path)
        except NotFoundError:
            return False
        return True

    def write_atomic(self, path: str, data: bytes | Iterable[bytes], *, replace: bool = False) -> None:
        """As Storage says. Only the gateway HttpFS removes a file to replace it: for a moment there is none then."""
        hidden = hidden_name(path)
        try:
            self._send(hidden, data, path)
            if not replace and self.exists(path):
                raise ExistsError(f"{self.display(path)} is there already")
            self._rename(hidden, path, replace)
        except BaseException:
            with contextlib.suppress(QuireError):
                self.delete(hidden)
            raise

    def _send(self, hidden: str, data: bytes | Iterable[bytes], path: str) -> None:
        if isinstance(data, (bytes, list, tuple)):
            content = joined(data)
            self._call(lambda: self._client.write(hidden, data=content, overwrite=True), path)
            return
        chunks = Once(data)
        try:
            self._explained(lambda: self._client.write(hidden, data=chunks, overwrite=True), path)
        except Exception as error:
            if chunks.error is not None:
                raise chunks.error from None
            raise translated(error, self.display(path)) from error

    def _replace(self, hidden: str, path: str) -> None:
        # The package has this request, but without its options.
        answer = self._client._rename(hidden, destination=self._client.resolve(path), renameoptions="OVERWRITE")
        # A NameNode that knows the option says no more than that all went well.
        if answer.content and not answer.json()["boolean"]:
            self._client.delete(path)
            self._client.rename(hidden, path)

    def _rename(self, hidden: str, path: str, replace: bool) -> None:
        rename = self._replace if replace else self._client.rename
        try:
            self._call(lambda: rename(hidden, path), path)
        except (IOFailedError, NotFoundError):
            # An attempt whose answer was lost may have done it: the hidden file, which nobody else knows, is then gone.
            if self.exists(hidden):
                if not replace and self.exists(path):
                    raise ExistsError(f"{self.display(path)} is there already") from None
                raise
            if not self.exists(path):
                raise

    def delete(self, path: str) -> None:
        """As Storage says."""
        with contextlib.suppress(NotFoundError):
            self._call(lambda: self._client.delete(path), path)


def _refuse_unavailable(response: Any, *_: Any, **__: Any) -> None:
    """Makes answers such as 503 faults that pass; the package has no way to tell them from others."""
    if response.status_code in HTTP_TRANSIENT:
        raise ConnectionError(f"HTTP status {response.status_code} {response.reason}")


class _Pieces(io.RawIOBase):
    """A file whose bytes are fetched by place and count."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning of the file")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._fetch(self._at, count)
            self._at += count
        return count

    def readall(self) -> bytes:
        # What it inherits would ask for a few kilobytes at a time.
        parts = []
        while self._at < self._size:
            parts.append(self._fetch(self._at, min(WEBHDFS_READ_BYTES, self._size - self._at)))
            self._at += len(parts[-1])
        return b"".join(parts)
