"""Reads the checkpoints that Spark's side writes: which stores and versions there are, and the state of each.

A version's state is a base, or nothing, with the commit files after it, its *line*. A commit file's header says what it
holds, and so which files it needs (docs/checkpoint.md, "Loading a version"). Queries may go on meanwhile: a file that
is gone when it is opened, or a line with a gap, is looked for in a fresh listing a few times before it counts as
missing.
"""

import contextlib
import difflib
import json
import os
import re
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from quire._native import lib
from quire.checkpoint import cec, container, delta, fault, pages
from quire.checkpoint.codecs import decompress
from quire.checkpoint.container import CheckpointFile, FileHeader, FileKind, Frame, FrameKind, Parts
from quire.checkpoint.delta import Op, Record, Splice
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
from quire.structures import List, Map, OrderedMap, PageManager, Snapshot

DEFAULT_STORE = "default"
SUFFIXES = {FileKind.DELTA: "qdelta", FileKind.BASE: "qbase"}
# What a commit file, <version>.qdelta, may be by its header.
COMMITS = (FileKind.DELTA, FileKind.PAGES, FileKind.LOG)
FRAMES = {
    FileKind.DELTA: FrameKind.RECORDS,
    FileKind.PAGES: FrameKind.PAGES,
    FileKind.LOG: FrameKind.RECORDS,
    FileKind.BASE: FrameKind.IMAGE,
}
# Longer numbers are nobody's version.
FILE_NAME = re.compile(r"(\d{1,18})(?:_([^.]+))?\.(qdelta|qbase)")
PART_NAME = re.compile(r"(\d{1,18})(?:_([^.]+))?\.[0-9a-f]{1,32}\.(?:\d{1,6}\.qpart|qimage)")
IMAGE_SUFFIX = ".qimage"
PART_THREADS = 8
# Files that are read before they are wanted, and the bytes that these may have, packed.
AHEAD_FILES = 4
AHEAD_BYTES = 32 << 20
# Column families that Spark keeps for itself; the counts of keys in checkpoints leave them out.
INTERNAL_PREFIX = "$"
# state/<operator>/<partition>/<store>; the default store has no folder of its own.
STATE_FOLDER = "state"
STATE_DEPTH = 3
VERSION_DIGITS_MAX = 18  # longer numbers are nobody's version
UNKNOWN = -1  # operator and partition of a folder that does not tell whose it is
# Beside it: commits/<batch>, and state/<operator>/_metadata, which says what stores an operator of Spark's has.
COMMITS_FOLDER = "commits"
METADATA_FOLDER = "_metadata"
# quire/<operator>/: a checkpoint of its own for each operator in Python, with what it is (statestore/stateful.py).
OPERATORS_FOLDER = "quire"
MANIFEST = "operator.json"
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
        if not number.isdecimal() or len(number) > VERSION_DIGITS_MAX:
            raise InvalidError(
                f"{text[:40]!r} is no version: give a number, or one with its id as in the names of the files"
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
    """A file of a store, as its name tells of it. kind: DELTA for all commit files; size: bytes; modified: when."""

    path: str
    version: Version
    kind: FileKind
    size: int
    modified: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Line:
    """What makes up the state of a version: a base (None: nothing at all) and commit files after it, oldest first.

    deltas  the commit files to read; pages stand for the files between them and where they start from.
    logs    the first of them are logs that hold all there is.
    """

    version: Version
    base: StoredFile | None
    deltas: tuple[StoredFile, ...]
    logs: bool = False

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files in the order in which they are read."""
        return self.deltas if self.base is None else (self.base, *self.deltas)

    @property
    def first(self) -> int:
        """The number of the oldest version whose files are needed."""
        return self.files[0].version.number if self.base is not None or self.logs else 0


@dataclass(frozen=True)
class Needs:
    """What a commit file says that it needs. since: of pages the version they start from, of a log its extent's."""

    kind: FileKind
    parent: Version
    since: int = 0


@dataclass
class Loaded:
    """A state that was loaded, and what it was loaded from.

    origin  the number of the version whose pages it still has where nothing changed: of a base or of pages; 0: none.
    log     the log that it can go on with, if the last files were logs, of which it knows what was before.
    listing the files that there were.
    damaged the versions whose bases were passed over, since they are damaged.
    """

    state: PageManager
    line: Line
    origin: int = 0
    log: cec.Log | None = None
    listing: "Listing" = field(default_factory=lambda: Listing([], []))
    damaged: tuple[Version, ...] = ()


class Listing:
    """The files of a store at one moment. parts: of bases, or left by a writer that did not come to its base.

    needs: what is known of the commit files.
    """

    def __init__(self, files: list[StoredFile], parts: list[StoredFile]) -> None:
        self.files = files
        self.parts = parts
        self.needs: dict[StoredFile, Needs] = {}
        self.deltas = {file.version: file for file in files if file.kind == FileKind.DELTA}
        self.bases = {file.version: file for file in files if file.kind == FileKind.BASE}
        self.versions = sorted({file.version for file in files})

    def last(self, number: int | None = None) -> Version | None:
        """Of the versions, or those of a number, the one that was committed last; a base is written later."""
        found: dict[Version, int] = {}
        for file in self.files:
            if number in (None, file.version.number):
                found[file.version] = min(file.modified, found.get(file.version, file.modified))
        return max(found, key=lambda version: (found[version], version), default=None)

    def reaches_behind(self, version: Version) -> bool:
        """Whether there are versions of a lower number."""
        return bool(self.versions) and self.versions[0].number < version.number

    def reaches_beyond(self, version: Version) -> bool:
        """Whether there are versions of a higher number."""
        return any(found.number > version.number for found in self.versions)


def families(state: PageManager | Snapshot) -> dict[str, Map]:
    """The maps of a state, which are Spark's column families, by name."""
    return {
        name: state.ordered_map(name) if kind == "ordered_map" else state.map(name)
        for name, kind in sorted(state.sets().items())
        if kind in ("map", "ordered_map")
    }


def sequences(state: PageManager | Snapshot) -> dict[str, List]:
    """The lists and deques of a state, by name."""
    return {name: state.list(name) for name, kind in sorted(state.sets().items()) if kind == "sequence"}


def raw_pages(state: PageManager) -> dict[str, dict[int, bytes]]:
    """The raw pages of a state, by name and id."""
    names = [name for name, kind in sorted(state.sets().items()) if kind == "raw"]
    return {name: {id: state.raw(name).read(id) for id in state.raw(name).ids()} for name in names}


def counted_keys(state: PageManager | Snapshot) -> list[int]:
    """Keys in each family but Spark's own, and records in each list and deque."""
    maps = [len(found) for name, found in families(state).items() if not name.startswith(INTERNAL_PREFIX)]
    return maps + [len(found) for found in sequences(state).values()]


@dataclass(frozen=True)
class Difference:
    """A key that two states differ in: what it has in each, nothing where it is not there.

    position  of a record of a list or deque, which has no key: where it is or, if it was removed, was. Of raw pages the
              page's id. Else None.
    """

    family: str
    key: bytes
    older: list[bytes]
    newer: list[bytes]
    position: int | None = None

    @property
    def change(self) -> str:
        """What became of it."""
        return "removed" if not self.newer else "changed" if self.older else "added"


def differences(older: PageManager, newer: PageManager, family: str | None = None) -> Iterator[Difference]:
    """The keys that two states differ in, family by family, those removed last; then the records of lists and deques,
    and the raw pages.

    >>> import quire
    >>> with quire.PageManager() as one, quire.PageManager() as other:
    ...     one.map("default").update({b"alice": b"1", b"bob": b"2"})
    ...     other.map("default").update({b"alice": b"3", b"carol": b"4"})
    ...     sorted((found.key, found.change) for found in differences(one, other))
    [(b'alice', 'changed'), (b'bob', 'removed'), (b'carol', 'added')]
    """

    def names(one: Iterable[str], other: Iterable[str]) -> list[str]:
        return sorted(name for name in {*one, *other} if family in (None, name))

    maps = families(older), families(newer)
    for name in names(*maps):
        yield from _map_differences(name, *(found.get(name) for found in maps))
    lists = sequences(older), sequences(newer)
    for name in names(*lists):
        yield from _list_differences(name, *(list(found.get(name, ())) for found in lists))
    raw = raw_pages(older), raw_pages(newer)
    for name in names(*raw):
        yield from _page_differences(name, *(found.get(name, {}) for found in raw))


def _map_differences(name: str, old: Map | None, new: Map | None) -> Iterator[Difference]:
    for key in new or ():
        was, values = old.get_all(key) if old is not None else [], new.get_all(key) if new is not None else []
        if was != values:
            yield Difference(name, key, was, values)
    for key in old or ():
        if new is None or key not in new:
            yield Difference(name, key, old.get_all(key) if old is not None else [], [])


def _list_differences(name: str, old: list[bytes], new: list[bytes]) -> Iterator[Difference]:
    for start, end, new_start, new_end in stretches(old, new):
        for step in range(max(end - start, new_end - new_start)):
            was = [old[start + step]] if start + step < end else []
            now = [new[new_start + step]] if new_start + step < new_end else []
            yield Difference(name, b"", was, now, (new_start if now else start) + step)


def _page_differences(name: str, old: dict[int, bytes], new: dict[int, bytes]) -> Iterator[Difference]:
    for id in sorted(old.keys() | new.keys()):
        was, now = ([found[id]] if id in found else [] for found in (old, new))
        if was != now:
            yield Difference(name, b"", was, now, id)


def stretches(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Where two lists differ: a stretch of the one, from and to, and what the other has in its place, in order.

    >>> list(stretches([b"a", b"b", b"c", b"d"], [b"b", b"x", b"d", b"e"]))
    [(0, 1, 0, 0), (2, 3, 1, 2), (4, 4, 3, 4)]
    """
    same, most = 0, min(len(old), len(new))
    while same < most and old[same] == new[same]:
        same += 1
    end = 0
    while end < most - same and old[-1 - end] == new[-1 - end]:
        end += 1
    was, now = old[same : len(old) - end], new[same : len(new) - end]
    stays = overlap(was, now)
    if 2 * stays >= max(len(was), len(now)):
        # A queue that moved on, which what follows could take hours for.
        changes = [(0, len(was) - stays, 0, 0), (len(was), len(was), stays, len(now))]
    else:
        found = difflib.SequenceMatcher(None, was, now).get_opcodes()
        changes = [(start, stop, begin, end) for tag, start, stop, begin, end in found if tag != "equal"]
    for start, stop, new_start, new_stop in changes:
        if start != stop or new_start != new_stop:
            yield same + start, same + stop, same + new_start, same + new_stop


def overlap(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """How many records at the end of one list the other begins with. The time follows their length.

    >>> overlap([b"a", b"b", b"a", b"b"], [b"a", b"b", b"c"])
    2
    """
    if not new:
        return 0
    shorter = [0] * len(new)  # of so many that fit, how many of them begin and end alike
    count = 0
    for number in range(1, len(new)):
        while count and new[number] != new[count]:
            count = shorter[count - 1]
        count += new[number] == new[count]
        shorter[number] = count
    count = 0
    for record in old:
        while count and (count == len(new) or record != new[count]):
            count = shorter[count - 1]
        count += record == new[count]
    return count


def steadily(call: Callable[[], Result]) -> Result:
    """The result of a call that lists a folder and reads from it, repeated if something it listed is not there."""
    for wait in RELIST_WAITS_SECONDS:
        try:
            return call()
        except NotFoundError:
            time.sleep(wait)
    return call()


class Store:
    """The checkpoint of one store: an operator's, in one partition, under one name. Made by ``Checkpoint``.

    step  the name of the operator in Python whose state it is: of several commits of a version the last one counts.
    """

    def __init__(self, storage: Storage, path: str, id: StoreId | None = None, step: str = "") -> None:
        self._storage = storage
        self._path = path
        self._id = id
        self.step = step

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

    @property
    def operator(self) -> int | str:
        """The operator whose state it is: Spark's have numbers, Python's have names."""
        return self.step or self.id.operator

    def title(self) -> str:
        """Whose state it is, for messages."""
        return f"operator {self.operator}, partition {self.id.partition}, store {self.id.name}"

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

    def path_of(self, version: Version, kind: FileKind) -> str:
        """The whole path of the file that a version would have, for messages."""
        return self._storage.display(join(self._path, f"{version}.{SUFFIXES[kind]}"))

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
                files.append(StoredFile(path, _version(match), kind, entry.size, entry.modified))
            elif match := PART_NAME.fullmatch(entry.name):
                parts.append(StoredFile(path, _version(match), FileKind.PART, entry.size))
        return Listing(sorted(files, key=lambda file: (file.version, file.kind)), parts)

    def resolve(self, version: int | None = None, id: str | None = None) -> Version:
        """The version of that number and id, or the newest.

        A batch may be committed more than once, each time under another id. Without one it is the version that the last
        commit of all grew out of, or else the last of them.
        """
        return steadily(lambda: self._resolve(self.listing(), version, id))

    def newest(self, listing: Listing) -> Version:
        """What ``resolve()`` gives, of a listing."""
        return self._resolve(listing, None, None)

    def _resolve(self, listing: Listing, number: int | None, id: str | None) -> Version:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise InvalidError(f"version {number!r}: give a whole number, or None for the newest")
        if number == 0 and not id:
            return Version(0)
        if not listing.versions:
            raise NotFoundError(f"{self.location} holds no version")
        wanted = listing.versions[-1].number if number is None else number
        found = [v for v in listing.versions if v.number == wanted and id in (None, v.id)]
        if not found:
            there = f"{listing.versions[0]} to {listing.versions[-1]}"
            raise NotFoundError(f"{self.location} has no version {Version(wanted, id or '')}: there are {there}")
        if len(found) == 1:
            return found[0]
        newest, last = listing.last(), listing.last(wanted)
        assert newest is not None and last is not None
        # What is too damaged to tell what it grew out of is nobody's choice.
        with contextlib.suppress(CorruptError, VersionError):
            return next((v for v in self.ancestors(listing, newest) if v in found), last)
        return last

    def ancestors(self, listing: Listing, version: Version) -> Iterator[Version]:
        """The version and those it grew out of, newest first, as far as there are commit files."""
        while True:
            yield version
            found = listing.deltas.get(version)
            if found is None or version.number == 0:
                return
            version = self.parent(listing, found)

    def parent(self, listing: Listing, file: StoredFile) -> Version:
        """The version that a commit file's grew out of."""
        return self._needs(listing, file).parent if file.version.id else Version(file.version.number - 1)

    def _needs(self, listing: Listing, file: StoredFile) -> Needs:
        """What a commit file needs, by its header and its end."""
        found = listing.needs.get(file)
        if found is None:
            header = self.header(file)
            since = 0 if header.kind == FileKind.DELTA else self.end(file)[1]
            if header.kind == FileKind.PAGES and since >= header.version:
                raise CorruptError(f"{self.name_of(file)}: it says that its pages start from version {since}")
            found = Needs(header.kind, Version(header.parent_version, header.parent_id), since)
            listing.needs[file] = found
        return found

    def line(self, version: int | None = None, id: str | None = None) -> Line:
        """What a version is loaded from, from the newest start on; ``NotFoundError`` names what lacks."""
        return steadily(lambda: self._first_line(version, id))

    def _first_line(self, version: int | None, id: str | None) -> Line:
        listing = self.listing()
        return next(self.lines_in(listing, self._resolve(listing, version, id)))

    def lines_in(self, listing: Listing, version: Version) -> Iterator[Line]:
        """All that a version can be loaded from: from the newest base, from the one before, and so on.

        Logs that hold every key are a start like a base. Behind pages nothing will do but a base of the version that
        they start from, or further pages.
        """
        deltas: list[StoredFile] = []
        damage: QuireError | None = None
        found = behind_pages = False
        extent: int | None = None  # where the logs begin that were met last, if nothing else lay between
        at = version
        while True:
            base = listing.bases.get(at)
            if base is not None or at.number == 0:
                found = True
                yield Line(version, base, tuple(reversed(deltas)))
            file = listing.deltas.get(at)
            if at.number == 0 or (file is None and found):
                return
            if file is None:
                missing = self.path_of(at, FileKind.DELTA)
                what = f"{missing} is not there, and version {version} has no base newer than that"
                raise NotFoundError(what) if damage is None else type(damage)(f"{damage}; {what}")
            try:
                needs = self._needs(listing, file)
            except (CorruptError, VersionError) as error:
                if at.id:
                    raise
                # Whoever reads the line will name it. It may be a delta.
                damage = damage or error
                needs = Needs(FileKind.DELTA, Version(at.number - 1))
            if behind_pages and needs.kind != FileKind.PAGES:
                if found:
                    return
                missing = self.path_of(at, FileKind.BASE)
                raise damage or NotFoundError(f"{missing} is not there, and the pages behind it need it")
            deltas.append(file)
            if needs.kind != FileKind.LOG:
                extent = None
            elif extent is None:
                extent = needs.since
            if extent == at.number:
                found = True
                yield Line(version, None, tuple(reversed(deltas)), logs=True)
            behind_pages = needs.kind == FileKind.PAGES
            try:
                at = self._start_of_pages(listing, at, needs.since) if behind_pages else self.parent(listing, file)
            except NotFoundError:
                if found:
                    return
                raise

    def _start_of_pages(self, listing: Listing, at: Version, since: int) -> Version:
        """The version of a line that pages start from."""
        if since == 0 or not at.id:
            return Version(since)
        for version in self.ancestors(listing, at):
            if version.number == since:
                return version
        raise NotFoundError(f"{self.location}: version {at} needs version {since}, and what lies between is not there")

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
        """How many keys, and records of lists and deques, the state has that the file leads to, from its last bytes.

        Bases may say 0 for any number.
        """
        return self.end(file)[0]

    def end(self, file: StoredFile) -> tuple[int, int]:
        """What a file's last bytes say: the number of keys, and the oldest version that it needs."""

        def read() -> tuple[int, int]:
            with self._storage.open(file.path) as stream:
                if stream.seek(0, os.SEEK_END) < END_BYTES:
                    raise CorruptError("it is truncated")
                stream.seek(-END_BYTES, os.SEEK_END)
                kind, _, stored = container._read_frame(stream)
            if kind != lib.QUIRE_FRAME_END or len(stored) != lib.QUIRE_FRAME_END_BYTES:
                raise CorruptError("it does not end with an end frame")
            _, _, keys, since = struct.unpack("<QQQQ", stored)
            return int(keys), int(since)

        with self._naming(file):
            return self._read(file, read)

    def read(self, file: StoredFile, mapped: bool = False) -> CheckpointFile:
        """A whole file, verified to the last byte; the image of a base that has parts is put together.

        mapped: an image that is a local file of its own is named and not read.
        """

        def read() -> CheckpointFile:
            with self._storage.open(file.path) as stream:
                found = container.read(stream, decompress)
            self._check_identity(file, found.header)
            if file.kind == FileKind.BASE and any(frame.kind == FrameKind.PARTS for frame in found.frames):
                if len(found.frames) != 1:
                    raise CorruptError(f"it has {len(found.frames)} frames, and one of them is a list of parts")
                parts = Parts.decode(bytes(found.frames[0].data))
                if mapped and (path := self._local_image(file, parts)) is not None:
                    return replace(found, frames=[], image=path)
                return replace(found, frames=[Frame(FrameKind.IMAGE, self._image(file, found.header, parts))])
            return found

        with self._naming(file):
            found = self._read(file, read)
            wrong = [frame.kind for frame in found.frames if frame.kind != FRAMES[found.header.kind]]
            if wrong:
                kind = found.header.kind.name.lower()
                raise CorruptError(f"a file of kind {kind} has a frame of kind {wrong[0].name.lower()}")
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

    def _local_image(self, base: StoredFile, parts: Parts) -> str | None:
        """The path of an image that can be mapped."""
        name, size = parts.files[0]
        path = self._storage.local_path(join(self._path, name))
        if path is None or len(parts.files) != 1 or not name.endswith(IMAGE_SUFFIX):
            return None
        self._check_part(base, name)
        with self._parts_of(base):
            if not self._storage.exists(path):
                raise NotFoundError(f"{path} is not there")
        found = Path(path).stat().st_size
        if found != size or found != parts.image_bytes:
            raise CorruptError(f"its image {name} has {found} bytes, not the {size} that it says")
        return path

    def _check_part(self, base: StoredFile, name: str) -> None:
        match = PART_NAME.fullmatch(name)
        if match is None or _version(match) != base.version:
            raise CorruptError(f"it names {name!r}, which is no part of it")

    def _image(self, base: StoredFile, header: FileHeader, parts: Parts) -> bytearray:
        """The image whose frames are spread over parts, which are read side by side."""
        image = bytearray(parts.image_bytes)

        def read(number: int) -> None:
            name, size = parts.files[number]
            self._check_part(base, name)
            part = StoredFile(join(self._path, name), base.version, FileKind.PART, size)
            with self._naming(part):
                retrying(lambda: self._read_part(part, header, parts, number, image), self.name_of(part))

        with ThreadPoolExecutor(min(PART_THREADS, len(parts.files)), "quire-read") as pool:
            running = [pool.submit(read, number) for number in range(len(parts.files))]
            try:
                with self._parts_of(base):
                    for each in running:
                        each.result()
            finally:
                for each in running:
                    each.cancel()
        return image

    @contextlib.contextmanager
    def _parts_of(self, base: StoredFile) -> Iterator[None]:
        """A part that is missing is damage if its base is there: nobody cleaned both away."""
        try:
            yield
        except NotFoundError as error:
            if self._storage.exists(base.path):
                raise CorruptError(f"one of its parts is gone: {error}") from error
            raise

    def _read_part(self, part: StoredFile, header: FileHeader, parts: Parts, number: int, image: bytearray) -> None:
        """Puts the frames of a part into the image; each must be there once and full."""
        if part.path.endswith(IMAGE_SUFFIX):
            self._read_image(part, parts, image)
            return
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

    def _read_image(self, part: StoredFile, parts: Parts, image: bytearray) -> None:
        """The part that is the image itself."""
        with self._storage.open(part.path) as stream:
            count = stream.seek(0, os.SEEK_END)
            if len(parts.files) != 1 or not count == part.size == parts.image_bytes:
                raise CorruptError(f"it has {count} bytes: its base says {part.size}")
            stream.seek(0)
            image[:] = stream.read()
        if len(image) != count:
            raise CorruptError(f"it is truncated: {count - len(image)} more bytes must follow")

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
        kinds = COMMITS if file.kind == FileKind.DELTA else (file.kind,)
        if header.kind not in kinds or found[1:] != (file.version, self.id):
            raise CorruptError(
                f"it holds the {header.kind.name.lower()} of version {found[1]} of {found[2]}, which is not what its "
                f"name and place ({self.id}) say: the file was moved or renamed"
            )
        if header.kind in COMMITS and header.parent_version != header.version - 1:
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
        loaded = self.recover(version, id, repair=repair)
        if loaded.log is not None:
            loaded.log.close()
        return loaded.state

    def recover(
        self, version: int | None = None, id: str | None = None, *, repair: bool = False, extent_target: float = 2.0
    ) -> Loaded:
        """As ``load``, with what it was loaded from. extent_target: of the log, if the state comes with one."""
        return steadily(lambda: self._load(version, id, repair, extent_target))

    def _load(self, version: int | None, id: str | None, repair: bool, extent_target: float) -> Loaded:
        listing = self.listing()
        failure: QuireError | None = None
        damaged: list[Version] = []
        try:
            for line in self.lines_in(listing, self._resolve(listing, version, id)):
                try:
                    loaded = self._follow(listing, line, extent_target)
                    loaded.damaged = tuple(damaged)
                    return loaded
                except (CorruptError, VersionError) as error:
                    if not repair:
                        raise
                    failure = failure or error
                    # Another version's reader may make something of what this one does not know.
                    if line.base is not None and isinstance(error, CorruptError):
                        damaged.append(line.base.version)
        except (CorruptError, VersionError, NotFoundError) as error:
            if failure is None:
                raise
            raise failure from error
        raise failure or NotFoundError(f"{self.location} holds no version")

    def _follow(self, listing: Listing, line: Line, extent_target: float) -> Loaded:
        """The state that a line leads to, committed."""
        loaded = Loaded(PageManager(), line, line.base.version.number if line.base else 0, listing=listing)
        try:
            # Of the logs that go on from what was before: the last file, and its keys.
            last: tuple[StoredFile, int] | None = None
            before = Version(0)
            with contextlib.closing(self._read_in_order(line.files)) as files:
                for file, found in files:
                    log = found.header.kind == FileKind.LOG
                    # Behind a base of a version that has a log of its own it may need what was before the base.
                    if log and loaded.log is None and not self._is_log(listing, before):
                        loaded.state.commit()
                        loaded.log = cec.Log(loaded.state, extent_target)
                        if before.number:
                            loaded.log.foreign(before.number)
                    before = file.version
                    if log and loaded.log is not None:
                        self._apply_log(loaded, file, found)
                        last = file, found.keys
                    else:
                        self._end_log(loaded, last)
                        if loaded.log is not None:
                            loaded.log.close()
                            loaded.log = None
                        loaded.state = self.apply(loaded.state, file, found)
                        if found.header.kind == FileKind.PAGES:
                            loaded.origin = file.version.number
            self._end_log(loaded, last)
            loaded.state.commit()
        except BaseException:
            loaded.state.close()
            raise
        return loaded

    def _is_log(self, listing: Listing, version: Version) -> bool:
        """Whether the version's commit file is a log."""
        file = listing.deltas.get(version)
        return file is not None and self._needs(listing, file).kind == FileKind.LOG

    def _read_in_order(self, files: Sequence[StoredFile]) -> Generator[tuple[StoredFile, CheckpointFile], None, None]:
        """The files, each read when it is wanted, or before that beside those who use the one before."""
        ahead: dict[StoredFile, Future[CheckpointFile]] = {}
        pool = ThreadPoolExecutor(AHEAD_FILES, "quire-ahead")
        try:
            for number, file in enumerate(files, 1):
                for later in files[number : number + AHEAD_FILES]:
                    if later not in ahead and sum(each.size for each in ahead) + later.size <= AHEAD_BYTES:
                        ahead[later] = pool.submit(self.read, later)
                fault.point("load.file")
                yield file, ahead.pop(file).result() if file in ahead else self.read(file, mapped=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _apply_log(self, loaded: Loaded, file: StoredFile, found: CheckpointFile) -> None:
        """One version of a log that the state is loaded from: a commit for each, so that stamps follow versions."""
        assert loaded.log is not None
        with self._blaming(file):
            for frame in found.frames:
                loaded.log.apply(bytes(frame.data))
            loaded.state.commit()
            loaded.log.loaded(file.version.number)

    def _end_log(self, loaded: Loaded, last: tuple[StoredFile, int] | None) -> None:
        if loaded.log is not None and last is not None:
            with self._blaming(last[0]):
                loaded.log.complete(last[1])

    @contextlib.contextmanager
    def _blaming(self, file: StoredFile) -> Iterator[None]:
        """All but a lack of memory comes of what the file says."""
        try:
            yield
        except QuireError as error:
            if isinstance(error, (NoMemoryError, LimitError, IOFailedError)):
                raise
            raise CorruptError(f"{self.name_of(file)}: {error}") from error

    def apply(self, state: PageManager, file: StoredFile, found: CheckpointFile) -> PageManager:
        """Does to a state what a file of its line says, and gives it back; or another one, and closes it.

        A base makes a state of its own, and so may pages put on the empty state. Pages are committed, records are not.
        After an error the state is of no use, and the caller's to close.
        """
        with self._blaming(file):
            if file.kind == FileKind.BASE:
                return self._from_base(state, file, found)
            if found.header.kind == FileKind.PAGES:
                return self._with_pages(state, found)
            for frame in found.frames:
                delta.apply(state, bytes(frame.data))
        return state

    def _from_base(self, state: PageManager, file: StoredFile, found: CheckpointFile) -> PageManager:
        images = [frame.data for frame in found.frames]
        image = found.image or (images[0] if len(images) == 1 else b"".join(images))
        made = PageManager.from_image(image, name=self.name_of(file))
        if made.page_size != found.header.page_bytes:
            made.close()
            raise CorruptError(f"its image has pages of {made.page_size} bytes, not of {found.header.page_bytes}")
        state.close()
        return made

    def _with_pages(self, state: PageManager, found: CheckpointFile) -> PageManager:
        made = state
        if found.since == 0 and state.page_size != found.header.page_bytes and not state.sets():
            made = PageManager(page_size=found.header.page_bytes)
        try:
            for frame in found.frames:
                pages.apply(made, bytes(frame.data))
            made.commit()
        except BaseException:
            if made is not state:
                made.close()
            raise
        if made is not state:
            state.close()
        return made

    def changes(self, version: int | None = None, id: str | None = None) -> list[Record]:
        """What a version changed; ``NotFoundError`` for a version that is there as a base alone.

        Values are whole: where the file has only what is new in some, the version's state is loaded for the rest. Pages
        tell of no records: the states before and after them are compared, but for raw pages. What a log writes again is
        left out.
        """
        return steadily(lambda: self._changes(version, id))

    def _changes(self, version: int | None, id: str | None) -> list[Record]:
        listing = self.listing()
        wanted = self._resolve(listing, version, id)
        if wanted not in listing.deltas:
            raise NotFoundError(f"{self.location} has no delta of version {wanted}, which starts a line of its own")
        file = listing.deltas[wanted]
        found = self.read(file)
        if found.header.kind == FileKind.PAGES:
            with (
                self._state_in(listing, self.parent(listing, file)) as before,
                self._state_in(listing, wanted) as after,
            ):
                return _compared(before, after)
        records = [record for record in self.records(file, found) if record.op != Op.CHECK]
        if all(record.op != Op.PATCH for record in records):
            return records
        with self._state_in(listing, wanted) as state:
            return [_whole(record, state) if record.op == Op.PATCH else record for record in records]

    def _state_in(self, listing: Listing, version: Version) -> PageManager:
        loaded = self._follow(listing, next(self.lines_in(listing, version)), 2.0)
        if loaded.log is not None:
            loaded.log.close()
        return loaded.state

    def records(self, file: StoredFile, found: CheckpointFile) -> list[Record]:
        """The records of a delta or log that was read, as they are in it; none of pages."""
        if found.header.kind == FileKind.PAGES:
            return []
        with self._naming(file):
            return [record for frame in found.frames for record in delta.records(bytes(frame.data))]


def _version(match: re.Match[str]) -> Version:
    return Version(int(match[1]), match[2] or "")


def _whole(patch: Record, state: PageManager) -> Record:
    """A patch as a put of the value that the state has, which is the state after it: a delta names a key once."""
    family = state.ordered_map(patch.family) if patch.ordered else state.map(patch.family)
    return Record(Op.PUT, patch.family, patch.ordered, patch.key, (family[patch.key],))


def _compared(before: PageManager, after: PageManager) -> list[Record]:
    """What leads from one state to another, as a delta would say it; raw pages, of which none tells, are left out."""
    was, now = families(before), families(after)
    lists, lists_now = sequences(before), sequences(after)
    ordered = {name: isinstance(found, OrderedMap) for name, found in {**was, **now}.items()}
    gone = (was.keys() - now.keys()) | (lists.keys() - lists_now.keys())
    records = [Record(Op.DROP, name, False) for name in sorted(gone)]
    for name in sorted(now):
        records.append(Record(Op.FAMILY, name, ordered[name]))
        for found in _map_differences(name, was.get(name), now[name]):
            op = Op.REMOVE if not found.newer else Op.PUT if len(found.newer) == 1 else Op.PUT_ALL
            records.append(Record(op, name, ordered[name], found.key, tuple(found.newer)))
    for name in sorted(lists_now):
        records.append(Record(Op.FAMILY, name, False, sequence=True))
        old, new = list(lists.get(name, ())), list(lists_now[name])
        for start, end, new_start, new_end in stretches(old, new):
            splice = Splice(new_start, end - start, len(old) - end)
            values = tuple(new[new_start:new_end])
            records.append(Record(Op.SPLICE, name, False, values=values, splice=splice, sequence=True))
    return records


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
        names = {entry.name for entry in self._storage.list(root)}
        step = root.rpartition("/")[2] if MANIFEST in names else ""
        steps = self._steps(root) if OPERATORS_FOLDER in names else []
        if STATE_FOLDER in names:
            root = join(root, STATE_FOLDER)
        if not steps or STATE_FOLDER in names:
            self._search(root, STATE_DEPTH, folders, others)
        if not folders and not steps:
            written = " and ".join(sorted({OTHER_PROVIDERS[suffix] for suffix in others & OTHER_PROVIDERS.keys()}))
            hint = f"its files are those of {written}" if written else "give the checkpoint's folder of a query"
            raise NotFoundError(f"{self.location} holds no state that Quire wrote: {hint}")
        stores = [Store(self._storage, path, self._known(path, root), step) for path in folders]
        return sorted([*stores, *steps], key=lambda store: (store.step, store.id))

    def last_batch(self) -> int | None:
        """The last batch that the query has committed; None if there is none, or this is not the query's folder."""
        if all(entry.name != COMMITS_FOLDER for entry in self._storage.list(self._path)):
            return None
        names = [entry.name for entry in self._storage.list(join(self._path, COMMITS_FOLDER))]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def lacking(self, stores: Sequence[Store], batch: int | None) -> list[str]:
        """What Spark's own notes say must be there after a batch, and is not: whole stores, or their last versions.

        batch: what ``last_batch()`` said before the stores were asked for, since the query may go on meanwhile.
        """
        if batch is None:
            return []
        root = join(self._path, STATE_FOLDER)
        found: list[str] = []
        there = {store.id for store in stores if not store.step}
        for operator in sorted({store.operator for store in there}):
            for name, partitions in self._promised(join(root, str(operator))):
                for number in range(partitions):
                    if StoreId(operator, number, name) not in there:
                        place = join(root, f"{operator}/{number}" + ("" if name == DEFAULT_STORE else f"/{name}"))
                        found.append(f"{self._storage.display(place)} has no files, and is a store of the query's")
        for store in stores:
            newest = max((version.number for version in store.versions()), default=0)
            if not store.step and newest <= batch:
                found.append(f"{store.location} ends with version {newest}: batch {batch} made version {batch + 1}")
        return found

    def _promised(self, operator: str) -> list[tuple[str, int]]:
        """The stores of each partition of an operator, by name, and how many partitions it has, if it can be told."""
        with contextlib.suppress(NotFoundError, ValueError, KeyError, TypeError):
            path = join(operator, f"{METADATA_FOLDER}/metadata")
            if not self._storage.exists(path):  # transformWithState has one for each run
                runs = join(operator, f"{METADATA_FOLDER}/v2")
                path = join(runs, str(max(int(e.name) for e in self._storage.list(runs) if e.name.isdecimal())))
            with self._storage.open(path) as file:
                told = json.loads(file.read().split(b"\n", 1)[1])
            return [(each["storeName"], each["numPartitions"]) for each in told["stateStoreInfo"]]
        return []

    def _known(self, path: str, root: str) -> StoreId | None:
        """Whose state a folder holds. One that nothing can be read of must not keep others from being looked at."""
        placed = _place(path, root)
        if placed is None and path != root:
            try:
                return Store(self._storage, path).id
            except (CorruptError, VersionError):
                return StoreId(UNKNOWN, UNKNOWN, path.removeprefix(root).strip("/"))
        return placed

    def _steps(self, root: str) -> list[Store]:
        """The stores of Python's operators in a query's checkpoint."""
        folder = join(root, OPERATORS_FOLDER)
        found: list[Store] = []
        for entry in self._storage.list(folder):
            with contextlib.suppress(NotFoundError):
                if self._storage.exists(join(join(folder, entry.name), MANIFEST)):
                    found += Checkpoint(join(folder, entry.name), self._storage).stores()
        return found

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

    def store(self, operator: int | str | None = None, partition: int | None = None, name: str | None = None) -> Store:
        """The store of an operator and partition; what is None may be anything that leaves one store alone.

        Spark's operators have numbers, Python's have names. Among several stores "default" is taken, unless one is
        given.
        """
        stores = self.stores()
        found = [
            store
            for store in stores
            if operator in (None, store.operator)
            and partition in (None, store.id.partition)
            and name in (None, store.id.name)
        ]
        if len(found) > 1 and name is None:
            found = [store for store in found if store.id.name == DEFAULT_STORE] or found
        if len(found) == 1:
            return found[0]
        there = found or stores
        shown = "; ".join(map(Store.title, there[:8])) + ("; ..." if len(there) > 8 else "")
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
