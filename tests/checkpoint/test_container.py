"""Checkpoint files: what is written is read, and nothing else is."""

import io
import re
import struct
import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

import quire
from quire._native import ffi, lib
from quire.checkpoint import container
from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind

NUMBERS_64 = st.integers(0, 2**64 - 1)
NUMBERS_32 = st.integers(0, 2**32 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HEADERS = st.builds(
    FileHeader,
    st.sampled_from(FileKind),
    version=NUMBERS_64,
    parent_version=NUMBERS_64,
    operator_id=NUMBERS_64,
    partition_id=NUMBERS_32,
    page_bytes=NUMBERS_32,
    flags=st.sampled_from([0, lib.QUIRE_FILE_ROW_CHECKSUMS]),
    store_name=TEXTS,
    id=TEXTS,
    parent_id=TEXTS,
    codec=TEXTS,
)
FRAMES = st.lists(st.builds(Frame, st.sampled_from(FrameKind), st.binary(max_size=2000)), max_size=6)
HEADER = FileHeader(FileKind.DELTA, 7, 6, 0, 3, store_name="left-keys", id="b7", parent_id="a6")


def pack(codec, data):
    assert codec == "zlib"
    return zlib.compress(data)


def unpack(codec, data, raw_bytes):
    assert codec == "zlib"
    return zlib.decompress(data)


def written(header, frames, keys=0, **options):
    file = io.BytesIO()
    container.write(file, header, frames, keys, **options)
    return file.getvalue()


def read(data, **options):
    return container.read(io.BytesIO(data), **options)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sealed(data, at):
    """The bytes with the checksum at a place made right for all before it."""
    return data[:at] + struct.pack("<I", crc32c(data[:at])) + data[at + 4 :]


@given(header=HEADERS)
def test_any_header_comes_back(header):
    data = container.encode(header)
    assert len(data) % 8 == 0
    assert container.encode(header) == data
    assert container.decode(data) == header
    assert container.decode(data + b"behind it") == header
    assert container.read_header(io.BytesIO(data)) == header


@given(header=HEADERS, frames=FRAMES, keys=NUMBERS_64)
def test_any_file_comes_back(header, frames, keys):
    header = FileHeader(**{**vars(header), "codec": ""})
    found = read(written(header, frames, keys))
    assert (found.header, found.frames, found.keys) == (header, frames, keys)


@given(frames=FRAMES)
def test_frames_are_packed_by_the_codec_named(frames):
    header = FileHeader(**{**vars(HEADER), "codec": "zlib"})
    data = written(header, frames, compress=pack)
    assert read(data, decompress=unpack).frames == frames
    if frames:
        with pytest.raises(quire.InvalidError, match="packed with 'zlib': give a function"):
            read(data)
        with pytest.raises(quire.InvalidError, match="packed with 'zlib': give a function"):
            written(header, frames)


def test_what_a_codec_gives_is_checked():
    data = written(FileHeader(**{**vars(HEADER), "codec": "zlib"}), [Frame(FrameKind.IMAGE, b"a" * 99)], compress=pack)
    with pytest.raises(quire.CorruptError, match="has 98 bytes when unpacked with 'zlib', not 99"):
        read(data, decompress=lambda codec, stored, raw_bytes: b"a" * 98)
    with pytest.raises(quire.CorruptError, match="cannot be unpacked with 'zlib'"):
        read(data, decompress=lambda codec, stored, raw_bytes: zlib.decompress(b"what is this"))


def test_a_file_by_its_description():
    """The bytes, taken apart without a line of Quire's own code."""
    payloads = [b"first", b""]
    data = written(HEADER, [Frame(FrameKind.RECORDS, payloads[0]), Frame(FrameKind.IMAGE, payloads[1])], keys=41)
    magic, version, count, kind, flags = struct.unpack_from("<8sIIII", data)
    assert (magic, version, kind, flags) == (b"QUIRECKP", 1, 1, 0)
    assert struct.unpack_from("<QQQII", data, 24) == (7, 6, 0, 3, 0)
    assert struct.unpack_from("<HHHH", data, 56) == (9, 2, 2, 0)
    assert data[64:77] == b"left-keysb7a6"
    assert not any(data[77 : count - 4])
    assert struct.unpack_from("<I", data, count - 4)[0] == crc32c(data[: count - 4])
    at, end = count, struct.pack("<QQQQ", 2, 5, 41, 0)
    for expected_kind, stored in ((1, payloads[0]), (2, payloads[1]), (3, end)):
        magic, kind, raw_bytes, stored_bytes, stored_crc, crc = struct.unpack_from("<4sIIIII", data, at)
        assert (magic, kind, raw_bytes, stored_bytes) == (b"QFRM", expected_kind, len(stored), len(stored))
        assert crc == crc32c(data[at : at + 20])
        at += 24
        assert data[at : at + stored_bytes] == stored
        assert stored_crc == crc32c(stored)
        at += stored_bytes
    assert at == len(data)


SMALL = written(HEADER, [Frame(FrameKind.RECORDS, b"some records"), Frame(FrameKind.RECORDS, b"")], keys=5)


def test_every_single_flip_is_refused():
    refused = (quire.CorruptError, quire.VersionError)
    for place in range(len(SMALL)):
        for value in (*(1 << bit for bit in range(8)), 255):
            damaged = bytearray(SMALL)
            damaged[place] ^= value
            with pytest.raises(refused):
                read(bytes(damaged))


def test_every_truncation_is_refused():
    for count in range(len(SMALL)):
        with pytest.raises(quire.CorruptError, match="truncated"):
            read(SMALL[:count])


@given(more=st.binary(min_size=1, max_size=50))
def test_nothing_may_follow_the_end(more):
    with pytest.raises(quire.CorruptError, match="something follows"):
        read(SMALL + more)
    with pytest.raises(quire.CorruptError, match="something follows"):
        read(SMALL + SMALL)


def test_the_end_tells_what_is_before_it():
    first, second = (Frame(FrameKind.RECORDS, text) for text in (b"first", b"second"))
    whole = written(HEADER, [first, second])
    head = len(container.encode(HEADER))
    without = whole[:head] + whole[head + 24 + len(first.data) :]
    with pytest.raises(quire.CorruptError, match="2 frames with 11 bytes, 1 with 6 are there"):
        read(without)
    twice = whole[: head + 29] + whole[head:]
    with pytest.raises(quire.CorruptError, match="2 frames with 11 bytes, 3 with 16 are there"):
        read(twice)
    longer = (
        whole[:head] + written(HEADER, [Frame(FrameKind.RECORDS, b"firsts")])[head : head + 30] + whole[head + 29 :]
    )
    with pytest.raises(quire.CorruptError, match="2 frames with 11 bytes, 2 with 12 are there"):
        read(longer)


def test_a_later_format_is_told_from_damage():
    at = len(container.encode(HEADER)) - 4
    later = sealed(SMALL[:8] + struct.pack("<I", 2) + SMALL[12:], at)
    with pytest.raises(quire.VersionError, match="format version 2, this build reads version 1"):
        read(later)
    flagged = sealed(SMALL[:20] + struct.pack("<I", 16) + SMALL[24:], at)
    with pytest.raises(quire.VersionError, match="flags 10"):
        read(flagged)


def test_headers_that_make_no_sense():
    """Their checksums are right."""
    data = container.encode(HEADER)
    at = len(data) - 4
    for place, value, message in [
        (16, struct.pack("<I", 6), "kind is 6"),
        (56, struct.pack("<H", 60000), "names in its header do not fit"),
        (62, struct.pack("<H", 9), "names in its header do not fit"),
        (64, b"\xff", "store_name .* is no UTF-8"),
        (12, struct.pack("<I", 64), "said to have 64 bytes"),
        (12, struct.pack("<I", 76), "said to have 76 bytes"),
        (12, struct.pack("<I", 8192), "said to have 8192 bytes"),
    ]:
        with pytest.raises(quire.CorruptError, match=message):
            container.decode(sealed(data[:place] + value + data[place + len(value) :], at))
    with pytest.raises(quire.CorruptError, match="less than the header"):
        container.decode(data[:71])
    with pytest.raises(quire.CorruptError, match="ends within its header"):
        container.decode(data[:-1])
    with pytest.raises(quire.CorruptError, match="does not begin as"):
        container.decode(b"x" * 100)


def test_a_damaged_length_asks_for_no_memory():
    """A frame that says it has a gigabyte, in a file of a few bytes."""
    head = len(container.encode(HEADER))
    huge = sealed(struct.pack("<4sIIIII", b"QFRM", 1, 1 << 30, 1 << 30, 0, 0), 20)
    with pytest.raises(quire.CorruptError, match="truncated: 1073741824 more"):
        read(SMALL[:head] + huge)
    for raw, stored in ((1 << 30) + 1, 5), (5, (1 << 30) + 1):
        larger = sealed(struct.pack("<4sIIIII", b"QFRM", 1, raw, stored, 0, 0), 20)
        with pytest.raises(quire.CorruptError, match="header of a frame is damaged"):
            read(SMALL[:head] + larger)


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"QUIRECKP\1\0\0\0", SMALL[:88], SMALL[:100]]))
def test_any_bytes_are_refused(data, start):
    refused = (quire.CorruptError, quire.VersionError)
    if start + data == SMALL[: len(start + data)] == SMALL:
        return
    with pytest.raises(refused):
        read(start + data)
    if not start:
        with pytest.raises(refused):
            container.decode(data)


@given(data=st.binary(min_size=24, max_size=24), end=st.binary(max_size=64))
def test_any_bytes_as_a_frame_or_an_end(data, end):
    """Straight at the core: codes, never a crash."""
    frame = ffi.new("quire_frame_header *")
    code = lib.quire_frame_decode(ffi.from_buffer("uint8_t[]", data), frame)
    assert code == lib.QUIRE_E_CORRUPT
    code = lib.quire_frame_decode(ffi.from_buffer("uint8_t[]", sealed(data, 20)), frame)
    assert code == lib.QUIRE_E_CORRUPT or data[:4] == b"QFRM"
    code = lib.quire_file_end_decode(ffi.from_buffer("uint8_t[]", end), len(end), ffi.new("quire_file_end *"))
    assert code == (lib.QUIRE_OK if len(end) == 32 else lib.QUIRE_E_CORRUPT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": 6}, "kind 6: give one of FileKind"),
        ({"version": -1}, "version -1: give a whole number from 0 to 18446744073709551615"),
        ({"partition_id": 1 << 32}, "partition_id 4294967296: give a whole number from 0 to 4294967295"),
        ({"page_bytes": True}, "page_bytes True"),
        ({"operator_id": "7"}, "operator_id '7'"),
        ({"store_name": b"default"}, "store_name b'default': give a str"),
        ({"id": "\ud800"}, "id '.*': give a str that can be written as UTF-8"),
        ({"codec": "c" * 5000}, "take 5088 bytes; at most 4096 are allowed"),
    ],
)
def test_headers_that_cannot_be(wrong, message):
    with pytest.raises(quire.InvalidError, match=message):
        container.encode(FileHeader(**{**vars(HEADER), **wrong}))


def test_what_cannot_be_written():
    with pytest.raises(quire.InvalidError, match="keys -1"):
        written(HEADER, [], keys=-1)
    with pytest.raises(quire.InvalidError, match="kind 3 of a frame"):
        written(HEADER, [Frame(3, b"")])


def test_a_stream_that_gives_few_bytes_at_a_time():
    class Slow(io.BytesIO):
        def read(self, count=-1):
            return super().read(min(count, 3))

    assert container.read(Slow(SMALL)) == read(SMALL)


def test_constants_have_the_values_of_the_header(source_root):
    text = (source_root / "checkpoint/container.h").read_text()
    found = re.findall(r"#define (QUIRE_(?:FILE|FRAME)_\w+) +(\d+)u", text)
    assert len(found) == 5
    for name, value in found:
        assert getattr(lib, name) == int(value)
