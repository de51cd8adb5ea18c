"""Spark's codecs in Python: what is packed is unpacked, and what is damaged is refused, in bounded memory."""

import struct
import tracemalloc

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import example, given

import quire
from quire.checkpoint import codecs

BOTH = ["lz4", "zstd", "snappy"]
# Runs, noise, and both; some longer than a block.
DATA = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=50), st.integers(0, 4000)),
    st.builds(lambda seed, count: pseudo_random(seed, count), st.integers(1, 1 << 30), st.integers(0, 70_000)),
)


def pseudo_random(seed, count):
    out = bytearray()
    while len(out) < count:
        seed = seed * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        out += seed.to_bytes(8, "little")
    return bytes(out[:count])


@pytest.mark.parametrize("codec", ["", *BOTH])
@given(data=DATA)
@example(b"")
@example(bytes(200_000))
def test_what_is_packed_is_unpacked(codec, data):
    packed = codecs.compress(codec, data)
    assert codecs.decompress(codec, packed, len(data)) == data


@pytest.mark.parametrize("codec", ["", *BOTH])
@given(data=DATA)
def test_the_length_must_be_right(codec, data):
    packed = codecs.compress(codec, data)
    for wrong in {len(data) + 1, len(data) - 1, 2 * len(data) + 5, 0} - {len(data), -1}:
        with pytest.raises(quire.CorruptError):
            codecs.decompress(codec, packed, wrong)


@pytest.mark.parametrize("codec", [*BOTH, "lzf"])
@given(data=DATA, cut=st.floats(0, 1, exclude_max=True))
def test_truncated_streams_are_refused(codec, data, cut):
    packed = lzf(data) if codec == "lzf" else codecs.compress(codec, data)
    short = packed[: int(cut * len(packed))]
    try:
        assert codecs.decompress(codec, short, len(data)) == data == b""  # where an empty stream needs no bytes
    except quire.CorruptError:
        pass


@pytest.mark.parametrize("codec", [*BOTH, "lzf"])
@given(data=DATA.filter(len), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flips_give_an_error_or_as_many_bytes(codec, data, place, flip):
    """The checksum of a frame comes first and finds all flips; here the codec alone must stay within its bounds."""
    packed = bytearray(lzf(data) if codec == "lzf" else codecs.compress(codec, data))
    packed[int(place * len(packed))] ^= flip
    try:
        assert len(codecs.decompress(codec, bytes(packed), len(data))) == len(data)
    except quire.CorruptError:
        pass


@pytest.mark.parametrize("codec", [*BOTH, "lzf"])
@given(data=st.binary(max_size=200), raw_bytes=st.integers(0, 1 << 20), head=st.booleans())
def test_any_bytes(codec, data, raw_bytes, head):
    heads = {"lz4": b"LZ4Block\x26", "zstd": b"\x28\xb5\x2f\xfd", "snappy": codecs.SNAPPY_HEADER, "lzf": b"ZV\x01"}
    try:
        found = codecs.decompress(codec, (heads[codec] if head else b"") + data, raw_bytes)
        assert len(found) == raw_bytes
    except quire.CorruptError:
        pass


def test_lengths_in_a_stream_ask_for_no_memory():
    """A few bytes that speak of a gigabyte."""
    huge = 1 << 30
    streams = {
        "lz4": codecs.LZ4_BLOCK.pack(b"LZ4Block", 0x26, 20, huge, 0) + bytes(20),
        "snappy": codecs.SNAPPY_HEADER + struct.pack(">i", 7) + b"\x80\x80\x80\x80\x04ab",
    }
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        for codec, stream in streams.items():
            with pytest.raises(quire.CorruptError, match="unpacked"):
                codecs.decompress(codec, stream, huge)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_an_lz4_block_shorter_than_it_says():
    """pyarrow would hand out what happened to lie in its buffer."""
    block = pa.Codec("lz4_raw").compress(b"abc" * 100, asbytes=True)
    stream = codecs.LZ4_BLOCK.pack(b"LZ4Block", 0x26, len(block), 400, 0) + block
    stream += codecs.LZ4_BLOCK.pack(b"LZ4Block", 0x16, 0, 0, 0)
    with pytest.raises(quire.CorruptError, match="fewer than 400 bytes"):
        codecs.decompress("lz4", stream, 400)


def test_streams_by_their_description():
    lz4 = codecs.compress("lz4", b"a" * 100_000)
    assert lz4[:8] == b"LZ4Block" and lz4[8] == 0x26
    assert struct.unpack_from("<i", lz4, 13) == (65536,)
    assert lz4[-21:] == b"LZ4Block\x16" + bytes(12)
    # Bytes that do not pack are kept as they are.
    noise = pseudo_random(1, 1000)
    assert codecs.compress("lz4", noise)[8] == 0x16 and noise in codecs.compress("lz4", noise)
    snappy = codecs.compress("snappy", b"a" * 100)
    assert snappy[:16] == b"\x82SNAPPY\0\0\0\0\1\0\0\0\1"
    assert struct.unpack_from(">i", snappy, 16) == (len(snappy) - 20,)
    with pytest.raises(quire.CorruptError, match="something follows the end of its lz4"):
        codecs.decompress("lz4", lz4 + b"x", 100_000)


@given(parts=st.lists(st.binary(max_size=100), max_size=4))
def test_zstd_frames_one_after_the_other(parts):
    packed = b"".join(codecs.compress("zstd", part) for part in parts)
    assert codecs.decompress("zstd", packed, sum(map(len, parts))) == b"".join(parts)


def lzf(data, chunk_bytes=5000):
    """A simple packer: a run of the last byte, or of what came 3 bytes before, else bytes as they are."""
    out = bytearray()
    for at in range(0, len(data), chunk_bytes):
        raw = data[at : at + chunk_bytes]
        packed, place = bytearray(), 0
        while place < len(raw):
            for back in (1, 3):
                length = 0
                while (
                    back <= place
                    and length < 264
                    and raw[place + length : place + length + 1]
                    == (raw[place + length - back : place + length - back + 1])
                ):
                    length += 1
                    if place + length == len(raw):
                        break
                if length >= 3:
                    break
            if length >= 3:
                code = length - 2
                packed += bytes([code << 5, back - 1]) if code < 7 else bytes([7 << 5, code - 7, back - 1])
                place += length
            else:
                packed += bytes([0, raw[place]])
                place += 1
        if len(packed) < len(raw):
            out += struct.pack(">2sBHH", b"ZV", 1, len(packed), len(raw)) + packed
        else:
            out += struct.pack(">2sBH", b"ZV", 0, len(raw)) + raw
    return bytes(out)


@given(data=DATA)
@example(b"\0" * 10_000)
@example(b"abc" * 5000)
def test_lzf_is_unpacked(data):
    assert codecs.decompress("lzf", lzf(data), len(data)) == data


def test_lzf_that_points_before_its_beginning():
    with pytest.raises(quire.CorruptError, match="points before its beginning"):
        codecs.decompress("lzf", struct.pack(">2sBHH", b"ZV", 1, 4, 5) + bytes([0, 65, 2 << 5, 9]), 5)


def test_codecs_that_are_not_known():
    with pytest.raises(
        quire.InvalidError, match=r"cannot read the codec 'gzip', only 'lz4', 'zstd', 'snappy', 'lzf' .*"
    ):
        codecs.decompress("gzip", b"", 0)
    with pytest.raises(
        quire.InvalidError, match=r"cannot write the codec 'lzf', only 'lz4', 'zstd', 'snappy' and none"
    ):
        codecs.compress("lzf", b"")


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0x02CC5D05),
        (b"a", 0, 0x550D7456),
        (b"Nobody inspects the spammish repetition", 0, 0xE2293B2F),
    ],
)
def test_the_checksum_of_lz4_blocks(data, seed, expected):
    assert codecs._xxhash32(data, seed) == expected
