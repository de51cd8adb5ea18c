"""Checkpoint files: a header, frames, an end frame, and nothing behind it. ``container.h`` says how their bytes lie.

A frame is compressed by itself, by the codec that the header names; the end frame never is. Python knows no codecs of
its own here: who reads or writes compressed files hands in a function that does it.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, BinaryIO, TypeAlias

from quire._native import ffi, lib
from quire.pagemgr.errors import CorruptError, InvalidError, check, fail

READ_BYTES = 1 << 20

# The name of the codec and the bytes to pack; the packed bytes.
Compress: TypeAlias = Callable[[str, bytes], bytes]
# The name of the codec, the packed bytes, how many there are unpacked; those.
Decompress: TypeAlias = Callable[[str, bytes, int], bytes]


class FileKind(IntEnum):
    """What a commit changed, as records or pages; or a whole state, or a part of one."""

    DELTA = lib.QUIRE_FILE_DELTA
    BASE = lib.QUIRE_FILE_BASE
    PAGES = lib.QUIRE_FILE_PAGES
    LOG = lib.QUIRE_FILE_LOG
    PART = lib.QUIRE_FILE_PART


class FrameKind(IntEnum):
    """What a frame holds: a payload of ``quire.checkpoint.delta``, a piece of an image, pages, or a list of parts."""

    RECORDS = lib.QUIRE_FRAME_RECORDS
    IMAGE = lib.QUIRE_FRAME_IMAGE
    PAGES = lib.QUIRE_FRAME_PAGES
    PARTS = lib.QUIRE_FRAME_PARTS


@dataclass(frozen=True)
class FileHeader:
    """Whose state a file holds, of which version, and what it builds on.

    page_bytes     of the arena that a base or pages were written from; 0 in deltas and logs.
    flags          1: each value has a checksum of its own behind it.
    id, parent_id  unique names of the two versions, where Spark gives them; else empty.
    codec          what packs the frames; empty: nothing does.

    >>> header = FileHeader(FileKind.DELTA, version=7, parent_version=6, operator_id=0, partition_id=3)
    >>> decode(encode(header)) == header
    True
    """

    kind: FileKind
    version: int
    parent_version: int
    operator_id: int
    partition_id: int
    page_bytes: int = 0
    flags: int = 0
    store_name: str = "default"
    id: str = ""
    parent_id: str = ""
    codec: str = ""


@dataclass(frozen=True)
class Frame:
    """One frame, unpacked."""

    kind: FrameKind
    data: bytes | bytearray


@dataclass(frozen=True)
class CheckpointFile:
    """A file as ``read`` found it.

    keys   how many the state has that it leads to.
    since  of a log: the oldest version that holds the newest trace of a key; of pages: the version that they start
           from; else 0.
    image  of a base whose image is a local file of its own: its path, if it is to be mapped.
    """

    header: FileHeader
    frames: list[Frame]
    keys: int
    since: int = 0
    image: str | None = None


@dataclass(frozen=True)
class Parts:
    """The content of a ``PARTS`` frame: the files that an image is spread over.

    image_bytes  of the whole image.
    frame_bytes  what it is cut into; frame k lies in part k modulo the number of parts, and so in the order of k.
    files        name and bytes of each part.

    >>> parts = Parts(3 << 20, 1 << 20, (("7.5eed.0.qpart", 2097344), ("7.5eed.1.qpart", 1048744)))
    >>> Parts.decode(parts.encode()) == parts
    True
    """

    image_bytes: int
    frame_bytes: int
    files: tuple[tuple[str, int], ...]

    def encode(self) -> bytes:
        """The frame's bytes."""
        data = [PARTS_HEAD.pack(len(self.files), self.image_bytes, self.frame_bytes)]
        for name, size in self.files:
            encoded = name.encode()
            data += [struct.pack("<H", len(encoded)), encoded, struct.pack("<Q", size)]
        return b"".join(data)

    @staticmethod
    def decode(data: bytes) -> "Parts":
        """What such bytes say; ``CorruptError`` for what makes no sense."""
        files = []
        try:
            count, image_bytes, frame_bytes = PARTS_HEAD.unpack_from(data)
            at = PARTS_HEAD.size
            for _ in range(count):
                (length,) = struct.unpack_from("<H", data, at)
                name = data[at + 2 : at + 2 + length].decode()
                (size,) = struct.unpack_from("<Q", data, at + 2 + length)
                files.append((name, size))
                at += 10 + length
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptError(f"its list of parts makes no sense: {error}") from error
        # A frame takes more bytes than its header: no memory is asked for that the files cannot fill.
        frames = sum(size for _, size in files) // lib.QUIRE_FRAME_HEADER_BYTES
        if at != len(data) or not files or not frame_bytes or not 0 < image_bytes <= frames * frame_bytes:
            raise CorruptError(f"its {count} parts cannot hold an image of {image_bytes} bytes")
        return Parts(image_bytes, frame_bytes, tuple(files))


PARTS_HEAD = struct.Struct("<IQI")  # number of parts, bytes of the image, bytes of a frame
NUMBERS = {"version": 64, "parent_version": 64, "operator_id": 64, "partition_id": 32, "page_bytes": 32, "flags": 32}
TEXTS = ("store_name", "id", "parent_id", "codec")


def _number(name: str, value: Any, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise InvalidError(f"{name} {value!r}: give a whole number from 0 to {(1 << bits) - 1}")
    return value


def _text(name: str, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        pass
    raise InvalidError(f"{name} {value!r}: give a str that can be written as UTF-8")


def encode(header: FileHeader) -> bytes:
    """The header's bytes."""
    if header.kind not in list(FileKind):
        raise InvalidError(f"kind {header.kind!r}: give one of FileKind")
    fields: dict[str, Any] = {name: _number(name, getattr(header, name), bits) for name, bits in NUMBERS.items()}
    texts = {name: _text(name, getattr(header, name)) for name in TEXTS}
    kept = {name: ffi.from_buffer("char[]", text) for name, text in texts.items()}
    fields.update({name: {"bytes": kept[name], "count": len(text)} for name, text in texts.items()})
    native = ffi.new("quire_file_header *", {"kind": int(header.kind), **fields})
    count = lib.quire_file_header_bytes(native)
    check(min(count, 0))
    data = ffi.new("uint8_t[]", count)
    check(lib.quire_file_header_encode(native, data, count))
    return bytes(ffi.buffer(data))


def decode(data: bytes) -> FileHeader:
    """The header that the bytes begin with; ``CorruptError``, or ``VersionError`` for a later format."""
    native = ffi.new("quire_file_header *")
    kept = ffi.from_buffer("uint8_t[]", data)  # the texts point into it
    check(lib.quire_file_header_decode(kept, len(data), native))
    fields: dict[str, Any] = {name: int(getattr(native, name)) for name in NUMBERS}
    for name in TEXTS:
        text = getattr(native, name)
        raw = bytes(ffi.buffer(text.bytes, text.count)) if text.count else b""
        try:
            fields[name] = raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptError(f"its {name} {raw!r} is no UTF-8") from error
    return FileHeader(FileKind(native.kind), **fields)


def store(codec: str, data: bytes) -> bytes:
    """The ``Compress`` of files that name no codec."""
    if codec:
        raise InvalidError(f"the frames are packed with {codec!r}: give a function that does it")
    return data


def unstore(codec: str, data: bytes, raw_bytes: int) -> bytes:
    """The ``Decompress`` of files that name no codec."""
    return store(codec, data)


def _frame(kind: int, raw_bytes: int, stored: bytes) -> bytes:
    head = ffi.new("uint8_t[]", lib.QUIRE_FRAME_HEADER_BYTES)
    raw_bytes = min(raw_bytes, 0xFFFFFFFF)  # more than enough to be refused
    check(lib.quire_frame_encode(kind, raw_bytes, ffi.from_buffer("uint8_t[]", stored), len(stored), head))
    return bytes(ffi.buffer(head)) + stored


def pieces(
    header: FileHeader, frames: Iterable[Frame], keys: int, compress: Compress = store, since: int = 0
) -> Iterator[bytes]:
    """The bytes of a whole file: its header, one piece for each frame as it comes, and the end.

    >>> header = FileHeader(FileKind.DELTA, version=7, parent_version=6, operator_id=0, partition_id=3)
    >>> [len(piece) for piece in pieces(header, [Frame(FrameKind.RECORDS, b"payload")], keys=1)]
    [80, 31, 56]
    """
    end = ffi.new("quire_file_end *", {"keys": _number("keys", keys, 64), "since": _number("since", since, 64)})
    yield encode(header)
    for frame in frames:
        if frame.kind not in list(FrameKind):
            raise InvalidError(f"kind {frame.kind!r} of a frame: give one of FrameKind")
        yield _frame(frame.kind, len(frame.data), compress(header.codec, bytes(frame.data)))
        end.frames += 1
        end.raw_bytes += len(frame.data)
    content = ffi.new("uint8_t[]", lib.QUIRE_FRAME_END_BYTES)
    lib.quire_file_end_encode(end, content)
    yield _frame(lib.QUIRE_FRAME_END, lib.QUIRE_FRAME_END_BYTES, bytes(ffi.buffer(content)))


def write(
    stream: BinaryIO, header: FileHeader, frames: Iterable[Frame], keys: int, compress: Compress = store, since: int = 0
) -> None:
    """Writes a whole file.

    >>> import io
    >>> header = FileHeader(FileKind.DELTA, version=7, parent_version=6, operator_id=0, partition_id=3)
    >>> file = io.BytesIO()
    >>> write(file, header, [Frame(FrameKind.RECORDS, b"payload")], keys=1)
    >>> found = read(io.BytesIO(file.getvalue()))
    >>> found.header == header, found.frames[0].data, found.keys
    (True, b'payload', 1)
    """
    for piece in pieces(header, frames, keys, compress, since):
        stream.write(piece)


def read(stream: BinaryIO, decompress: Decompress = unstore) -> CheckpointFile:
    """Reads a file to its end and verifies every byte of it.

    ``CorruptError`` for one that is damaged, truncated or has something behind its end; ``VersionError`` for one of a
    later format.
    """
    frames: list[Frame] = []
    header, keys, since = scan(stream, frames.append, decompress)
    return CheckpointFile(header, frames, keys, since)


def scan(
    stream: BinaryIO, take: Callable[[Frame], None], decompress: Decompress = unstore
) -> tuple[FileHeader, int, int]:
    """As ``read``, but hands each frame on as it comes; gives the header, the keys, and since when a log reaches."""
    header = read_header(stream)
    frames = raw_bytes = 0
    while True:
        kind, count, stored = _read_frame(stream)
        if kind == lib.QUIRE_FRAME_END:
            break
        take(Frame(FrameKind(kind), _unpack(decompress, header.codec, stored, count)))
        frames += 1
        raw_bytes += count
    end = ffi.new("quire_file_end *")
    check(lib.quire_file_end_decode(ffi.from_buffer("uint8_t[]", stored), len(stored), end))
    if count != len(stored) or end.frames != frames or end.raw_bytes != raw_bytes:
        raise CorruptError(
            f"its end tells of {end.frames} frames with {end.raw_bytes} bytes, {frames} with {raw_bytes} are there"
        )
    if stream.read(1):
        raise CorruptError("something follows its end")
    return header, int(end.keys), int(end.since)


def read_header(stream: BinaryIO) -> FileHeader:
    """The header alone; the stream is then at the first frame."""
    head = _take(stream, lib.QUIRE_FILE_HEADER_BYTES_MIN)
    count = lib.quire_file_header_peek(ffi.from_buffer("uint8_t[]", head), len(head))
    if count < 0:
        fail(count)
    return decode(head + _take(stream, count - len(head)))


def _read_frame(stream: BinaryIO) -> tuple[int, int, bytes]:
    """The next frame: its kind, how many bytes it has unpacked, and its stored bytes, verified."""
    native = ffi.new("quire_frame_header *")
    head = _take(stream, lib.QUIRE_FRAME_HEADER_BYTES)
    check(lib.quire_frame_decode(ffi.from_buffer("uint8_t[]", head), native))
    stored = _take(stream, native.stored_bytes)
    check(lib.quire_frame_verify(native, ffi.from_buffer("uint8_t[]", stored)))
    return int(native.kind), int(native.raw_bytes), stored


def _unpack(decompress: Decompress, codec: str, stored: bytes, count: int) -> bytes:
    try:
        data = decompress(codec, stored, count)
    except InvalidError:
        raise
    except Exception as error:
        raise CorruptError(f"a frame cannot be unpacked with {codec!r}: {error}") from error
    if len(data) != count:
        raise CorruptError(f"a frame has {len(data)} bytes when unpacked with {codec!r}, not {count}")
    return data


def _take(stream: BinaryIO, count: int) -> bytes:
    """Exactly count bytes, read piecewise: a damaged length must not ask for memory that the file has no bytes for."""
    parts, left = [], count
    while left:
        part = stream.read(min(left, READ_BYTES))
        if not part:
            raise CorruptError(f"it is truncated: {left} more bytes must follow")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
