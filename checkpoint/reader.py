"""Reads the checkpoints that Spark's side writes: which stores and versions there are, and the state of each.

A version's state is a base with the deltas after it, its *line*. Queries may go on meanwhile: a file that is gone when
it is opened, or a line with a gap, is looked for in a fresh listing a few times before it counts as missing.
"""

import contextlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire._native import lib
from quire.checkpoint import container, delta, fault
from quire.checkpoint.codecs import decompress
from quire.checkpoint.container import CheckpointFile, FileHeader, FileKind, Frame, FrameKind, Parts
from quire.checkpoint.delta import Op, Record
from quire.checkpoint.storage import Storage, faults, join, retrying, storage_for
from quire.pagemgr.errors import (
    CorruptError,
    InvalidError,
    IOFailedError,
    LimitError,
    NoMemoryError,
    NotFoundError,
    QuireError,
    VersionError,
)
from quire.structures import Map, PageManager, Snapshot

DEFAULT_STORE = "default"
SUFFIXES = {FileKind.DELTA: "qdelta", FileKind.BASE: "qbase"}
FRAMES = {FileKind.DELTA: FrameKind.RECORDS, FileKind.BASE: FrameKind.IMAGE}
# Longer numbers are nobody's version.
FILE_NAME = re.compile(r"(\d{1,18})(?:_([^.]+))?\.(qdelta|qbase)")
PART_NAME = re.compile(r"(\d{1,18})(?:_([^.]+))?\.([0-9a-f]{1,32})\.(\d{1,6})\.qpart")
PART_THREADS = 8
# Column families that Spark keeps for itself; the counts of keys in checkpoints leave them out.
INTERNAL_PREFIX = "$"
# state/<operator>/<partition>/<store>; the default store has no folder of its own.
STATE_FOLDER = "state"
STATE_DEPTH = 3
END_BYTES = lib.QUIRE_FRAME_HEADER_BYTES + lib.QUIRE_FRAME_END_BYTES
OTHER_PROVIDERS = {
    "zip": "RocksDBStateStoreProvider",
    "changelog": "RocksDBStateStoreProvider",
    "delta": "HDFSBackedStateStoreProvider",
    "snapshot": "HDFSBackedStateStoreProvider",
}

# Before each further look at a folder whose files did not fit together.
RELIST_WAITS_SECONDS = (0.05, 0.2, 0.5)

Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class Version:
    """A version of a store: its number and, in checkpoint format 2, the id of the commit.

    >>> Version.parse("7_3f1c"), str(Version(7))
    (Version(number=7, id='3f1c'), '7')
    """

    number: int
    id: str = ""

    def __str__(self) -> str:
        return f"{self.number}_{self.id}" if self.id else str(self.number)

    @staticmethod
    def parse(text: str) -> "Version":
        """The version that a file of this name, but for the suffix, holds."""
        number, _, id = text.partition("_")
        if not number.isdecimal():
            raise InvalidError(
                f"{text!r} is no version: give a number, or one with its id as in the names of the files"
            )
        return Version(int(number), id)


@dataclass(frozen=True, order=True)
class StoreId:
    """Whose state a store holds."""

    operator: int
    partition: int
    name: str = DEFAULT_STORE

    def __str__(self) -> str:
        return f"operator {self.operator}, partition {self.partition}, store {self.name}"


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, as its name tells of it. size: bytes."""

    path: str
    version: Version
    kind: FileKind
    size: int


@dataclass(frozen=True)
class Line:
    """What makes up the state of a version: a base (None: nothing at all) and the deltas after it, oldest first."""

    version: Version
    base: StoredFile | None
    deltas: tuple[StoredFile, ...]

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files in the order in which they are read."""
        return self.deltas if self.base is None else (self.base, *self.deltas)


class Listing:
    """The files of a store at one moment. parts: of bases, or left by a writer that did not come to its base."""

    def __init__(self, files: list[StoredFile], parts: list[StoredFile]) -> None:
        self.files = files
        self.parts = parts
        self.deltas = {file.version: file for file in files if file.kind == FileKind.DELTA}
        self.bases = {file.version: file for file in files if file.kind == FileKind.BASE}
        self.versions = sorted({file.version for file in files})


def families(state: PageManager | Snapshot) -> dict[str, Map]:
    """The column families of a state, by name."""
    return {
        name: state.ordered_map(name) if kind == "ordered_map" else state.map(name)
        for name, kind in sorted(state.sets().items())
    }


def counted_keys(state: PageManager | Snapshot) -> list[int]:
    """Keys in each family but Spark's own."""
    return [len(found) for name, found in families(state).items() if not name.startswith(INTERNAL_PREFIX)]


def steadily(call: Callable[[], Result]) -> Result:
    """The result of a call that lists a folder and reads from it, repeated if something it listed is not there."""
    for wait in RELIST_WAITS_SECONDS:
        try:
            return call()
        except NotFoundError:
            time.sleep(wait)
    return call()


class Store:
    """The checkpoint of one store: an operator's, in one partition, under one name. Made by ``Checkpoint``."""

    def __init__(self, storage: Storage, path: str, id: StoreId | None = None) -> None:
        self._storage = storage
        self._path = path
        self._id = id

    def __repr__(self) -> str:
        return f"<Store of {self.id} in {self.location}>"

    @property
    def location(self) -> str:
        """Its folder, for messages."""
        return self._storage.display(self._path)

    @property
    def id(self) -> StoreId:
        """Whose state it is. If the folder's place does not tell, the oldest of its files that can be read does."""
        if self._id is None:
            self._id = steadily(self._id_of_files)
        return self._id

    def _id_of_files(self) -> StoreId:
        files = self.files()
        failure: QuireError | None = None
        for file in files:
            try:
                with self._naming(file), self._storage.open(file.path) as stream:
                    return _store_of(container.read_header(stream))
            except (CorruptError, VersionError) as error:
                failure = failure or error
        raise failure or NotFoundError(f"{self.location} holds no files of Quire")

    def name_of(self, file: StoredFile) -> str:
        """A file with its whole path, for messages."""
        return self._storage.display(file.path)

    # ------------------------------------------------------------------------------------------------ listing

    def files(self) -> list[StoredFile]:
        """All its files, the oldest version first."""
        return self.listing().files

    def versions(self) -> list[Version]:
        """The versions that have a file, oldest first. The oldest may need files that were cleaned away: see line()."""
        return self.listing().versions

    def listing(self) -> Listing:
        """All its files, for those who look at several things of the same moment."""
        files, parts = [], []
        for entry in self._storage.list(self._path):
            path = join(self._path, entry.name)
            if entry.is_dir:
                continue
            if match := FILE_NAME.fullmatch(entry.name):
                kind = FileKind.BASE if match[3] == SUFFIXES[FileKind.BASE] else FileKind.DELTA
                files.append(StoredFile(path, _version(match), kind, entry.size))
            elif match := PART_NAME.fullmatch(entry.name):
                parts.append(StoredFile(path, _version(match), FileKind.PART, entry.size))
        return Listing(sorted(files, key=lambda file: (file.version, file.kind)), parts)

    def resolve(self, version: int | None = None, id: str | None = None) -> Version:
        """The version of that number and id, or the newest; without an id, the one that the newest grew out of."""
        return steadily(lambda: self._resolve(self.listing(), version, id))

    def _resolve(self, listing: Listing, number: int | None, id: str | None) -> Version:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise InvalidError(f"version {number!r}: give a whole number, or None for the newest")
        if number == 0 and not id:
            return Version(0)
        if not listing.versions:
            raise NotFoundError(f"{self.location} holds no version")
        newest = [version for version in listing.versions if version.number == listing.versions[-1].number]
        wanted = newest[0].number if number is None else number
        found = [v for v in listing.versions if v.number == wanted and id in (None, v.id)]
        if len(found) > 1 and len(newest) == 1:
            line = self._ancestors(listing, newest[0])
            found = [v for v in line if v.number == wanted and v in found] or found
        if not found:
            there = f"{listing.versions[0]} to {listing.versions[-1]}"
            raise NotFoundError(f"{self.location} has no version {Version(wanted, id or '')}: there are {there}")
        if len(found) > 1:
            ids = ", ".join(version.id or "none" for version in found)
            raise InvalidError(f"{self.location} has several versions {wanted}: give the id of one: {ids}")
        return found[0]

    def _ancestors(self, listing: Listing, version: Version) -> Iterator[Version]:
        """The version and those it grew out of, newest first, as far as there are deltas."""
        while True:
            yield version
            found = listing.deltas.get(version)
            if found is None or version.number == 0:
                return
            version = self._parent(found)

    def _parent(self, file: StoredFile) -> Version:
        if not file.version.id:
            return Version(file.version.number - 1)
        header = self.header(file)
        return Version(header.parent_version, header.parent_id)

    def line(self, version: int | None = None, id: str | None = None) -> Line:
        """What a version is loaded from: its newest base, the deltas after it; ``NotFoundError`` names what lacks."""
        return steadily(lambda: self._first_line(version, id))

    def _first_line(self, version: int | None, id: str | None) -> Line:
        listing = self.listing()
        return next(self.lines_in(listing, self._resolve(listing, version, id)))

    def lines_in(self, listing: Listing, version: Version) -> Iterator[Line]:
        """All that a version can be loaded from: from the newest base, from the one before, and so on."""
        deltas: list[StoredFile] = []
        found = False
        for at in self._ancestors(listing, version):
            base = listing.bases.get(at)
            if base is not None or at.number == 0:
                found = True
                yield Line(version, base, tuple(reversed(deltas)))
            if at in listing.deltas:
                deltas.append(listing.deltas[at])
            elif not found:
                missing = self._storage.display(join(self._path, f"{at}.{SUFFIXES[FileKind.DELTA]}"))
                raise NotFoundError(f"{missing} is not there, and version {version} has no base newer than that")

    # ------------------------------------------------------------------------------------------------ reading

    def header(self, file: StoredFile) -> FileHeader:
        """A file's header, which must be that of its name and place."""

        def read() -> FileHeader:
            with self._storage.open(file.path) as stream:
                return container.read_header(stream)

        with self._naming(file):
            header = self._read(file, read)
            self._check_identity(file, header)
        return header

    def keys(self, file: StoredFile) -> int:
        """How many keys the state has that the file leads to, from its last bytes. Bases may say 0 for any number."""

        def read() -> int:
            with self._storage.open(file.path) as stream:
                if stream.seek(0, os.SEEK_END) < END_BYTES:
                    raise CorruptError("it is truncated")
                stream.seek(-END_BYTES, os.SEEK_END)
                kind, _, stored = container._read_frame(stream)
            if kind != lib.QUIRE_FRAME_END or len(stored) != lib.QUIRE_FRAME_END_BYTES:
                raise CorruptError("it does not end with an end frame")
            return int(struct.unpack("<QQQQ", stored)[2])

        with self._naming(file):
            return self._read(file, read)

    def read(self, file: StoredFile) -> CheckpointFile:
        """A whole file, verified to the last byte; the image of a base that has parts is put together."""

        def read() -> CheckpointFile:
            with self._storage.open(file.path) as stream:
                found = container.read(stream, decompress)
            self._check_identity(file, found.header)
            if file.kind == FileKind.BASE and any(frame.kind == FrameKind.PARTS for frame in found.frames):
                if len(found.frames) != 1:
                    raise CorruptError(f"it has {len(found.frames)} frames, and one of them is a list of parts")
                parts = Parts.decode(bytes(found.frames[0].data))
                return replace(found, frames=[Frame(FrameKind.IMAGE, self._image(file, found.header, parts))])
            return found

        with self._naming(file):
            found = self._read(file, read)
            wrong = [frame.kind for frame in found.frames if frame.kind != FRAMES[file.kind]]
            if wrong:
                raise CorruptError(f"a {file.kind.name.lower()} has a frame of kind {wrong[0].name.lower()}")
        return found

    def parts(self, base: StoredFile) -> tuple[str, ...]:
        """The names of a base's parts; none if it holds its image itself."""

        def read() -> tuple[str, ...]:
            with self._storage.open(base.path) as stream:
                container.read_header(stream)
                if container._read_frame(stream)[0] != FrameKind.PARTS:
                    return ()
                stream.seek(0)
                (frame,) = container.read(stream, decompress).frames
            return tuple(name for name, _ in Parts.decode(bytes(frame.data)).files)

        with self._naming(base):
            return self._read(base, read)

    def _image(self, base: StoredFile, header: FileHeader, parts: Parts) -> bytearray:
        """The image whose frames are spread over parts, which are read side by side."""
        image = bytearray(parts.image_bytes)

        def read(number: int) -> None:
            name, size = parts.files[number]
            match = PART_NAME.fullmatch(name)
            if match is None or _version(match) != base.version:
                raise CorruptError(f"it names {name!r}, which is no part of it")
            part = StoredFile(join(self._path, name), base.version, FileKind.PART, size)
            with self._naming(part):
                retrying(lambda: self._read_part(part, header, parts, number, image), self.name_of(part))

        with ThreadPoolExecutor(min(PART_THREADS, len(parts.files)), "quire-read") as pool:
            running = [pool.submit(read, number) for number in range(len(parts.files))]
            try:
                for each in running:
                    each.result()
            except NotFoundError as error:
                # If the base is still there, nobody cleaned both away.
                if self._storage.exists(base.path):
                    raise CorruptError(f"one of its parts is gone: {error}") from error
                raise
            finally:
                for each in running:
                    each.cancel()
        return image

    def _read_part(self, part: StoredFile, header: FileHeader, parts: Parts, number: int, image: bytearray) -> None:
        """Puts the frames of a part into the image; each must be there once and full."""
        places = range(number * parts.frame_bytes, parts.image_bytes, len(parts.files) * parts.frame_bytes)
        frames = 0

        def take(frame: Frame) -> None:
            nonlocal frames
            if frames == len(places):
                raise CorruptError(f"it has more than the {frames} frames of its share")
            at = places[frames]
            wanted = min(parts.frame_bytes, parts.image_bytes - at)
            if frame.kind != FrameKind.IMAGE or len(frame.data) != wanted:
                raise CorruptError(
                    f"a frame of kind {frame.kind.name.lower()} has {len(frame.data)} bytes, not {wanted} of an image"
                )
            image[at : at + wanted] = frame.data
            frames += 1

        with self._storage.open(part.path) as stream:
            if stream.seek(0, os.SEEK_END) != part.size:
                raise CorruptError(f"it is truncated or too long: its base says {part.size} bytes")
            stream.seek(0)
            found, _, _ = container.scan(stream, take, decompress)
        if found != replace(header, kind=FileKind.PART, codec=found.codec):
            raise CorruptError("its header is not that of its base: the file was moved or renamed")
        if frames != len(places):
            raise CorruptError(f"it has {frames} frames, not the {len(places)} of its share")

    def _read(self, file: StoredFile, read: Callable[[], Result]) -> Result:
        try:
            return retrying(read, self.name_of(file))
        except CorruptError:
            # A batch that is run again replaces its file. Where bytes are fetched piece by piece, half of them may have
            # been the old one's; a file that is damaged is so the second time, too.
            return retrying(read, self.name_of(file))

    @contextlib.contextmanager
    def _naming(self, file: StoredFile) -> Iterator[None]:
        """Puts the file's name before what is wrong with it."""
        try:
            with faults(self.name_of(file)):
                yield
        except (CorruptError, VersionError, InvalidError) as error:
            raise type(error)(f"{self.name_of(file)}: {error}") from error

    def _check_identity(self, file: StoredFile, header: FileHeader) -> None:
        found = (header.kind, Version(header.version, header.id), _store_of(header))
        if found != (file.kind, file.version, self.id):
            raise CorruptError(
                f"it holds the {header.kind.name.lower()} of version {found[1]} of {found[2]}, which is not what its "
                f"name and place ({self.id}) say: the file was moved or renamed"
            )
        if header.kind == FileKind.DELTA and header.parent_version != header.version - 1:
            raise CorruptError(f"it says that version {found[1]} grew out of version {header.parent_version}")

    # ------------------------------------------------------------------------------------------------ states

    def load(self, version: int | None = None, id: str | None = None, *, repair: bool = False) -> PageManager:
        """The state of a version (None: of the newest) in a page manager of its own, one map for each column family.

        Damage raises ``CorruptError`` with the file's name. repair: pass over a damaged base for an older one with more
        deltas, as the provider does.

        >>> import tempfile, quire
        >>> from quire.checkpoint import delta
        >>> from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind, write
        >>> with tempfile.TemporaryDirectory() as folder, quire.PageManager() as pm:
        ...     pm.map("default")[b"alice"] = b"1"
        ...     frames = [Frame(FrameKind.RECORDS, payload) for payload in delta.write(pm)]
        ...     with open(folder + "/1.qdelta", "wb") as file:
        ...         write(file, FileHeader(FileKind.DELTA, 1, 0, operator_id=0, partition_id=3), frames, keys=1)
        ...     with Checkpoint(folder).store(0, 3).load() as state:
        ...         state.map("default")[b"alice"]
        b'1'
        """
        return self.load_with_line(version, id, repair=repair)[0]

    def load_with_line(
        self, version: int | None = None, id: str | None = None, *, repair: bool = False
    ) -> tuple[PageManager, Line]:
        """As ``load``, with what it was loaded from."""
        return steadily(lambda: self._load(version, id, repair))

    def _load(self, version: int | None, id: str | None, repair: bool) -> tuple[PageManager, Line]:
        listing = self.listing()
        failure: QuireError | None = None
        try:
            for line in self.lines_in(listing, self._resolve(listing, version, id)):
                try:
                    return self.load_line(line), line
                except (CorruptError, VersionError) as error:
                    if not repair:
                        raise
                    failure = failure or error
        except (CorruptError, VersionError, NotFoundError) as error:
            if failure is None:
                raise
            raise failure from error
        raise failure or NotFoundError(f"{self.location} holds no version")

    def load_line(self, line: Line) -> PageManager:
        """The state that a line leads to."""
        state: PageManager | None = None
        try:
            for file in line.files:
                fault.point("load.file")
                state = self.apply(state, file, self.read(file))
            state = state or PageManager()
            state.commit()
        except BaseException:
            if state is not None:
                state.close()
            raise
        return state

    def apply(self, state: PageManager | None, file: StoredFile, found: CheckpointFile) -> PageManager:
        """Does to a state what a file of its line says, and gives it back; a base makes a state of its own.

        Nothing is committed. A state that was given stays the caller's to close, after an error, too.
        """
        made = state
        try:
            if file.kind == FileKind.BASE:
                made = PageManager(page_size=found.header.page_bytes)
                images = [frame.data for frame in found.frames]
                made.load_bytes(images[0] if len(images) == 1 else b"".join(images))
            else:
                made = made or PageManager()
                for frame in found.frames:
                    delta.apply(made, bytes(frame.data))
        except BaseException as error:
            if made is not None and made is not state:
                made.close()
            # All but a lack of memory comes of what the file says.
            if isinstance(error, QuireError) and not isinstance(error, (NoMemoryError, LimitError, IOFailedError)):
                raise CorruptError(f"{self.name_of(file)}: {error}") from error
            raise
        return made

    def changes(self, version: int | None = None, id: str | None = None) -> list[Record]:
        """What a version's delta says; ``NotFoundError`` for a version that is there as a base alone.

        Values are whole: where the file has only what is new in some, the version's state is loaded for the rest.
        """
        return steadily(lambda: self._changes(version, id))

    def _changes(self, version: int | None, id: str | None) -> list[Record]:
        listing = self.listing()
        wanted = self._resolve(listing, version, id)
        if wanted not in listing.deltas:
            raise NotFoundError(f"{self.location} has no delta of version {wanted}, which starts a line of its own")
        found = self.records(listing.deltas[wanted], self.read(listing.deltas[wanted]))
        if all(record.op != Op.PATCH for record in found):
            return found
        with self.load_line(next(self.lines_in(listing, wanted))) as state:
            return [_whole(record, state) if record.op == Op.PATCH else record for record in found]

    def records(self, file: StoredFile, found: CheckpointFile) -> list[Record]:
        """The records of a delta that was read, as they are in it."""
        with self._naming(file):
            return [record for frame in found.frames for record in delta.records(bytes(frame.data))]


def _version(match: re.Match[str]) -> Version:
    return Version(int(match[1]), match[2] or "")


def _whole(patch: Record, state: PageManager) -> Record:
    """A patch as a put of the value that the state has, which is the state after it: a delta names a key once."""
    family = state.ordered_map(patch.family) if patch.ordered else state.map(patch.family)
    return Record(Op.PUT, patch.family, patch.ordered, patch.key, (family[patch.key],))


def _store_of(header: FileHeader) -> StoreId:
    return StoreId(header.operator_id, header.partition_id, header.store_name)


class Checkpoint:
    """The state in a query's checkpoint, wherever it lies; see ``storage_for`` for what URLs there are.

    url      the checkpoint's folder, the folder ``state`` in it, or any folder below that.
    storage  where the url is a path: a ``Storage``, or a file system of pyarrow's.

    Nothing is kept between calls, so that each sees what a running query has made of its checkpoint meanwhile.
    """

    def __init__(self, url: str | os.PathLike[str], storage: Any = None) -> None:
        self._storage, self._path = storage_for(url, storage)

    def __repr__(self) -> str:
        return f"<Checkpoint in {self.location}>"

    @property
    def location(self) -> str:
        """The folder, for messages."""
        return self._storage.display(self._path)

    def stores(self) -> list[Store]:
        """The stores that have files, by operator, partition and name; ``NotFoundError`` if there is none."""
        folders: list[str] = []
        others: set[str] = set()
        root = self._path
        if any(entry.is_dir and entry.name == STATE_FOLDER for entry in self._storage.list(root)):
            root = join(root, STATE_FOLDER)
        self._search(root, STATE_DEPTH, folders, others)
        if not folders:
            written = " and ".join(sorted({OTHER_PROVIDERS[suffix] for suffix in others & OTHER_PROVIDERS.keys()}))
            hint = f"its files are those of {written}" if written else "give the checkpoint's folder of a query"
            raise NotFoundError(f"{self.location} holds no state that Quire wrote: {hint}")
        return sorted((Store(self._storage, path, _place(path, root)) for path in folders), key=lambda store: store.id)

    def _search(self, path: str, depth: int, folders: list[str], others: set[str]) -> None:
        """Adds the folders from here on that hold files of a store, and the suffixes of all files."""
        entries = [entry for entry in self._storage.list(path) if entry.name[0] not in "._"]
        if any(not entry.is_dir and FILE_NAME.fullmatch(entry.name) for entry in entries):
            folders.append(path)
        others.update(entry.name.rsplit(".", 1)[-1] for entry in entries if not entry.is_dir)
        for entry in entries:
            if entry.is_dir and depth:
                with contextlib.suppress(NotFoundError):
                    self._search(join(path, entry.name), depth - 1, folders, others)

    def store(self, operator: int | None = None, partition: int | None = None, name: str | None = None) -> Store:
        """The store of an operator and partition; what is None may be anything that leaves one store alone.

        Among several names "default" is taken, unless another is given.
        """
        stores = self.stores()
        found = [
            store
            for store in stores
            if operator in (None, store.id.operator)
            and partition in (None, store.id.partition)
            and name in (None, store.id.name)
        ]
        if len(found) > 1 and name is None:
            found = [store for store in found if store.id.name == DEFAULT_STORE] or found
        if len(found) == 1:
            return found[0]
        there = found or stores
        shown = "; ".join(str(store.id) for store in there[:8]) + ("; ..." if len(there) > 8 else "")
        if found:
            raise InvalidError(f"{self.location} has several such stores: choose one of {shown}")
        raise NotFoundError(f"{self.location} has no such store: there are {shown}")


def _place(path: str, root: str) -> StoreId | None:
    """Whose state a folder is for, by the folders it lies in, from the root or from one named state; None: unknown.

    >>> _place("/copy/0/12", "/copy"), _place("/query/state/0/12/left-keys", "/query/state/0"), _place("/a", "/a")
    (StoreId(operator=0, partition=12, name='default'), StoreId(operator=0, partition=12, name='left-keys'), None)
    """
    place = r"(\d+)/(\d+)(?:/([^/]+))?"
    match = re.fullmatch("/?" + place, path[len(root) :]) or re.search(f"(?:^|/){STATE_FOLDER}/{place}$", path)
    return StoreId(int(match[1]), int(match[2]), match[3] or DEFAULT_STORE) if match else None
