"""Spark's compression codecs, as its JVM libraries write them, for the frames of checkpoint files.

A frame is one complete stream of its codec. What the four streams look like:

lz4     blocks of net.jpountz's ``LZ4BlockOutputStream``: "LZ4Block", a token (method and size of the largest block),
        packed and unpacked length, a checksum, the packed bytes; the last block is empty. Little endian.
zstd    zstd frames, one after the other.
snappy  snappy-java's ``SnappyOutputStream``: 16 bytes of header, snappy blocks, each behind its length. Big endian.
lzf     compress-lzf's chunks: "ZV", whether it is packed, packed length, unpacked length if so. Big endian.

Python reads all four and writes all but lzf, which Spark itself has left behind.
"""

import struct
from collections.abc import Callable

import pyarrow as pa

from quire._native import lib
from quire.checkpoint import container
from quire.pagemgr.errors import CorruptError, InvalidError

LZ4_BLOCK = struct.Struct("<8sBiiI")
LZ4_MAGIC = b"LZ4Block"
LZ4_METHOD_RAW = 0x10
LZ4_METHOD_PACKED = 0x20
LZ4_LEVEL_BASE = 10  # the largest block of a stream has 2 ** (10 + level) bytes
LZ4_LEVEL = 6
LZ4_SEED = 0x9747B28C
LZ4_CHECKSUM_MASK = 0xFFFFFFF

SNAPPY_HEADER = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)  # the stream's version, and the oldest that can read it
SNAPPY_BLOCK_BYTES = 32 << 10
# A snappy block of n bytes unpacks to no more than this times n; neither does an lz4 block.
EXPANSION_MAX = 256

LZF_LITERALS_MAX = 32


def decompress(codec: str, data: bytes, raw_bytes: int) -> bytes:
    """Unpacks a frame that has raw_bytes bytes unpacked: the ``Decompress`` that ``container.read`` takes.

    ``InvalidError`` for a codec that is not known, ``CorruptError`` for bytes that are not what it writes. No more
    memory is taken than raw_bytes call for.

    >>> decompress("zstd", compress("zstd", b"some bytes"), 10)
    b'some bytes'
    """
    unpack = _known(codec, DECOMPRESS, "read")
    try:
        raw = unpack(data, raw_bytes)
    except CorruptError:
        raise
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error) as error:
        raise CorruptError(f"its {codec} stream is damaged: {error}") from error
    if len(raw) != raw_bytes:
        raise CorruptError(f"its {codec} stream has {len(raw)} bytes or more, not {raw_bytes}")
    return raw


def compress(codec: str, data: bytes) -> bytes:
    """Packs a frame so that Spark can read it: the ``Compress`` that ``container.write`` takes.

    >>> compress("", b"some bytes")
    b'some bytes'
    """
    return _known(codec, COMPRESS, "write")(data)


def _known(codec: str, table: dict[str, "Function"], verb: str) -> "Function":
    if codec not in table:
        names = ", ".join(repr(name) for name in table if name)
        raise InvalidError(
            f"Python cannot {verb} the codec {codec!r}, only {names} and none at all (''): "
            f"let the query write its state with one of them (spark.sql.streaming.stateStore.compression.codec)"
        )
    return table[codec]


def _room(left: int, count: int, packed: int) -> None:
    """Refuses a block that says it unpacks to more than it can, or than there may be, before any memory is taken."""
    if not 0 <= count <= min(left, max(packed, 0) * EXPANSION_MAX):
        raise CorruptError(f"a block of {packed} bytes says that it has {count} unpacked; {left} are left to come")


def _cut(data: bytes, at: int, count: int) -> bytes:
    """So many bytes from a place, all of them."""
    if not 0 <= count <= len(data) - at:
        raise CorruptError(f"a block of {count} bytes is cut off")
    return data[at : at + count]


# ---------------------------------------------------------------------------------------------------- none


def _stored(data: bytes, raw_bytes: int) -> bytes:
    return container.unstore("", data, raw_bytes)


# ---------------------------------------------------------------------------------------------------- lz4


def _unpack_lz4(data: bytes, raw_bytes: int) -> bytes:
    parts: list[bytes] = []
    at, left = 0, raw_bytes
    while True:
        # The checksum goes unread: every frame has a CRC32C of its own.
        magic, token, packed, count, _ = LZ4_BLOCK.unpack_from(data, at)
        at += LZ4_BLOCK.size
        if magic != LZ4_MAGIC:
            raise CorruptError(f"a block of its lz4 stream begins with {magic!r}")
        if not packed and not count:
            break
        _room(left, count, packed)
        block = _cut(data, at, packed)
        at += packed
        parts.append(_unpack_lz4_block(token & 0xF0, block, count))
        left -= count
    if at != len(data):
        raise CorruptError("something follows the end of its lz4 stream")
    return b"".join(parts)


def _unpack_lz4_block(method: int, block: bytes, count: int) -> bytes:
    if method == LZ4_METHOD_RAW and len(block) == count:
        return block
    if method != LZ4_METHOD_PACKED or not count:
        raise CorruptError(f"a block of its lz4 stream has method {method:#x}, {len(block)} bytes packed, {count} not")
    codec = pa.Codec("lz4_raw")
    raw: bytes = codec.decompress(block, count, asbytes=True)
    # pyarrow does not tell how many bytes came out, and leaves the rest of the buffer as it was: only if one byte less
    # is too little room were there so many.
    try:
        codec.decompress(block, count - 1)
    except OSError:
        return raw
    raise CorruptError(f"a block of its lz4 stream has fewer than {count} bytes")


def _pack_lz4(data: bytes) -> bytes:
    codec, parts = pa.Codec("lz4_raw"), []
    for at in range(0, len(data), 1 << LZ4_LEVEL_BASE + LZ4_LEVEL):
        raw = data[at : at + (1 << LZ4_LEVEL_BASE + LZ4_LEVEL)]
        block, method = codec.compress(raw, asbytes=True), LZ4_METHOD_PACKED
        if len(block) >= len(raw):
            block, method = raw, LZ4_METHOD_RAW
        checksum = _xxhash32(raw, LZ4_SEED) & LZ4_CHECKSUM_MASK
        parts += [LZ4_BLOCK.pack(LZ4_MAGIC, method | LZ4_LEVEL, len(block), len(raw), checksum), block]
    parts.append(LZ4_BLOCK.pack(LZ4_MAGIC, LZ4_METHOD_RAW | LZ4_LEVEL, 0, 0, 0))
    return b"".join(parts)


def _xxhash32(data: bytes, seed: int) -> int:
    """XXH32, which is what the JVM compares the blocks of an lz4 stream with.

    >>> hex(_xxhash32(b"", 0)), hex(_xxhash32(b"Nobody inspects the spammish repetition", 0))
    ('0x2cc5d05', '0xe2293b2f')
    """
    return int(lib.quire_xxhash32(seed, data, len(data)))


# ---------------------------------------------------------------------------------------------------- zstd


def _unpack_zstd(data: bytes, raw_bytes: int) -> bytes:
    # As a stream, since only that says how many bytes there are. One more than wanted: it then reads on to the end of
    # the stream and sees what is wrong there.
    with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
        raw: bytes = stream.read(raw_bytes + 1)
        return raw


def _pack_zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


# ---------------------------------------------------------------------------------------------------- snappy


def _unpack_snappy(data: bytes, raw_bytes: int) -> bytes:
    magic = SNAPPY_HEADER[:8]
    if data[:8] != magic or len(data) < len(SNAPPY_HEADER):
        raise CorruptError(f"its snappy stream begins with {data[:8]!r}, not {magic!r}")
    codec, parts = pa.Codec("snappy"), []
    at, left = len(SNAPPY_HEADER), raw_bytes
    while at < len(data):
        (packed,) = struct.unpack_from(">i", data, at)
        block = _cut(data, at + 4, packed)
        at += 4 + packed
        count = _varint(block)
        _room(left, count, packed)
        # With the block's own length the codec fills its buffer or fails.
        parts.append(codec.decompress(block, count, asbytes=True))
        left -= count
    return b"".join(parts)


def _varint(data: bytes) -> int:
    """The number that a snappy block begins with: how many bytes it has unpacked."""
    value = 0
    for i in range(5):
        value |= (data[i] & 0x7F) << 7 * i
        if data[i] < 0x80:
            return value
    raise CorruptError("a block of its snappy stream begins with no length")


def _pack_snappy(data: bytes) -> bytes:
    codec, parts = pa.Codec("snappy"), [SNAPPY_HEADER]
    for at in range(0, len(data), SNAPPY_BLOCK_BYTES):
        block = codec.compress(data[at : at + SNAPPY_BLOCK_BYTES], asbytes=True)
        parts += [struct.pack(">i", len(block)), block]
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------- lzf


def _unpack_lzf(data: bytes, raw_bytes: int) -> bytes:
    parts: list[bytes] = []
    at, left = 0, raw_bytes
    while at < len(data):
        magic, kind, packed = struct.unpack_from(">2sBH", data, at)
        at += 5
        count = packed
        if kind == 1:
            (count,) = struct.unpack_from(">H", data, at)
            at += 2
        if magic != b"ZV" or kind > 1 or count > left:
            raise CorruptError(f"a chunk of its lzf stream begins with {magic!r}, kind {kind}, {count} bytes")
        chunk = _cut(data, at, packed)
        at += packed
        parts.append(_unpack_lzf_chunk(chunk, count) if kind else chunk)
        left -= count
    return b"".join(parts)


def _unpack_lzf_chunk(chunk: bytes, count: int) -> bytes:
    """Runs of bytes as they are, and of bytes that came before: how many, and how far back they begin."""
    raw, at = bytearray(), 0
    while at < len(chunk):
        control = chunk[at]
        at += 1
        if control < LZF_LITERALS_MAX:
            raw += _cut(chunk, at, control + 1)
            at += control + 1
        else:
            length = control >> 5
            if length == 7:
                length += chunk[at]
                at += 1
            length += 2
            start = len(raw) - ((control & 0x1F) << 8) - chunk[at] - 1
            at += 1
            if start < 0:
                raise CorruptError("a chunk of its lzf stream points before its beginning")
            run = raw[start : start + length]
            # A run that reaches into itself repeats.
            raw += (run * (length // len(run) + 1))[:length]
        if len(raw) > count:
            break
    if len(raw) != count:
        raise CorruptError(f"a chunk of its lzf stream has {len(raw)} bytes, not {count}")
    return bytes(raw)


Function = Callable[..., bytes]

DECOMPRESS: dict[str, Function] = {
    "": _stored,
    "lz4": _unpack_lz4,
    "zstd": _unpack_zstd,
    "snappy": _unpack_snappy,
    "lzf": _unpack_lzf,
}
COMPRESS: dict[str, Function] = {"": bytes, "lz4": _pack_lz4, "zstd": _pack_zstd, "snappy": _pack_snappy}
