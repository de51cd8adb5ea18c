"""Files of every kind with bytes, lengths, records and frames changed, and all checksums made right again.

So it is not the checksums that tell but what reads what is behind them. Each load ends with an error of the right
class, or with a state that passes its checks and can be read and written; and one that does not pass them does no harm
when it is used all the same. Under the sanitizers (tools/run_tests.py) that means more.

QUIRE_FUZZ  cases (default 350; 20000 is a long run). Another QUIRE_TEST_SEED gives others.
"""

import contextlib
import itertools
import os
import random
import re
import struct
from pathlib import Path

import pytest
from seeds import SEED
from stores import crc32c, frame_ends

import quire
from quire._native import ffi, lib
from quire.checkpoint import Checkpoint, Manager, codecs, container, io_service
from quire.checkpoint.container import FrameKind

CASES = int(os.environ.get("QUIRE_FUZZ", "350"))
# Mode of the checkpoint, codec, and which of its files are changed.
KINDS = {
    "delta": ("delta", "", "*.qdelta"),
    "packed": ("delta", "lz4", "*.qdelta"),
    "pages": ("pages", "", "*.qdelta"),
    "log": ("cec", "", "*.qdelta"),
    "inline base": ("delta", "", "*.qbase"),
    "base of parts": ("delta", "", "*.qbase"),
    "part": ("delta", "zstd", "*.qpart"),
    "mapped image": ("pages", "", "*.qimage"),
    "image": ("delta", "", None),
}
REFUSED = (quire.CorruptError, quire.VersionError, quire.NotFoundError, quire.InvalidError, quire.MismatchError)
SCHEMA = quire.Schema({"id": "int64", "name": "string"}, {"count": "int32", "tags": "binary"})
NUMBERS = [0, 1, 2, 3, 7, 8, 0x7F, 0x80, 0xFF, 0x3FFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63]
IMAGE_BLOCK_BYTES = 65536
# Four bytes behind the start of a page of a structure.
PAGE_MAGIC = re.compile(b"QMAP|QTBL|QHAP|QTRS|QTRN|QSEQ|QNOD")


# ------------------------------------------------------------------------------------------------ what is changed


def records(payload):
    """The records of a payload of a delta or log."""
    data = ffi.from_buffer("uint8_t[]", payload)
    at = ffi.new("quire_delta_reader *", {"next": data, "end": data + len(payload)})
    places, record = [0], ffi.new("quire_delta_record *")
    while lib.quire_delta_next(at, record) == 0:
        places.append(at.next - data)
    return [payload[a:b] for a, b in itertools.pairwise(places)]


def changed(data, rng, others=()):
    """Some bytes that differ a little. others: what may be spliced in."""
    data = bytearray(data)
    heads = [match.start() - 4 for match in PAGE_MAGIC.finditer(data)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        # Where there is something, and where lengths and kinds lie.
        head = rng.choice(heads) if heads and rng.randrange(3) else 0
        at = rng.choice([rng.randrange(len(data) + 1), min(max(head, 0) + rng.randrange(80), len(data))])
        if rng.randrange(2):
            at = next((place for place in range(at, len(data)) if data[place]), at)
        some = data[at : at + rng.choice([1, 2, 4, 8, 30, 300])]
        what = rng.randrange(10)
        if what < 2:
            data[at : at + 1] = bytes([rng.choice([rng.randrange(256), 0, 1, 0x7F, 0x80, 0xFF])])
        elif what < 5:
            width = rng.choice([1, 2, 4, 4, 8])
            at -= at % width
            old = int.from_bytes(data[at : at + width], "little")
            other = rng.randrange(len(data) // width + 1) * width
            given = [rng.choice(NUMBERS), old + rng.choice([-8, -1, 1, 8]), old ^ (1 << rng.randrange(8 * width))]
            given.append(int.from_bytes(data[other : other + width], "little"))
            new = (rng.choice(given) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            data[at : at + width] = new[: len(data) - at]
        elif what == 5:
            del data[at : at + len(some)]
        elif what == 6:
            data[at:at] = some
        elif what == 9:
            del data[at:]
        elif what == 7 and others:
            other = rng.choice(others)
            from_ = rng.randrange(len(other) + 1)
            data[at : at + len(some)] = other[from_ : from_ + rng.choice([len(some), 100])]
        else:
            to = rng.randrange(len(data) + 1)
            data[to : to + len(some)] = some
    return bytes(data)


def changed_records(payload, rng, others):
    """Whole records dropped, doubled, exchanged, brought from elsewhere; other kinds, other lengths; and a new end."""
    found = records(payload)
    more = [record for other in others for record in records(other)] or found
    for _ in range(rng.choice([1, 2, 5])):
        at = rng.randrange(len(found) + 1)
        what = rng.randrange(8)
        if what == 0:
            del found[at : at + rng.choice([1, 5])]
        elif what == 1 and more:
            found.insert(at, rng.choice(more))
        elif what == 2 and found:
            found[at % len(found)] = bytes([rng.randrange(11)]) + found[at % len(found)][1:]
        elif what == 3 and found:
            found[at % len(found)] = changed(found[at % len(found)], rng)
        elif what == 4:
            rng.shuffle(found)
        elif found:
            # Lengths, and mostly of the last one: behind it the memory ends.
            del found[at % len(found) + 1 :]
            record = bytearray(found[-1])
            for place in rng.sample(range(1, 8), 2):
                if place < len(record):
                    record[place] = (record[place] + rng.choice([-1, 1, 2, 16, 64, 128])) % 256
            found[-1] = bytes(record)
    return b"".join(found)


def changed_image(image, rng):
    """An image whose arena says something else, under right checksums."""
    (body_bytes,) = struct.unpack_from("<Q", image, len(image) - 16)
    body = bytearray(changed(image[:body_bytes], rng))
    if len(body) != body_bytes and rng.randrange(4):
        body = bytearray(body.ljust(body_bytes, b"\0")[:body_bytes])
    if len(body) >= 256:
        body[32:36] = crc32c(body[:32])
        for slot in (128, 192):
            body[slot + 36 : slot + 40] = crc32c(body[slot : slot + 36])
    image, foot = sealed(body)[:-32], sealed(body)[-32:-4]
    if not rng.randrange(20):
        foot = changed(foot, rng)
    return image + foot + crc32c(foot)


def sealed(body):
    """The image of an arena, with its checksums."""
    blocks = [body[at : at + IMAGE_BLOCK_BYTES] for at in range(0, len(body), IMAGE_BLOCK_BYTES)]
    checksums = b"".join(map(crc32c, blocks))
    foot = b"QUIREIMG" + struct.pack("<IIQ", 1, IMAGE_BLOCK_BYTES, len(body)) + crc32c(checksums)
    return bytes(body) + checksums + foot + crc32c(foot)


class File:
    """A file of frames, taken apart; put together again with checksums that are right."""

    def __init__(self, data):
        ends = frame_ends(data)
        self.head = data[: ends[0]]
        self.codec = container.decode(self.head).codec
        frames = [(*struct.unpack_from("<II", data, a + 4), data[a + 24 : b]) for a, b in itertools.pairwise(ends)]
        self.end = frames.pop()[2]
        self.frames = [[kind, codecs.decompress(self.codec, stored, raw)] for kind, raw, stored in frames]

    def change(self, rng, others):
        payloads = [data for other in others for _, data in other.frames]
        what = rng.randrange(14)
        at = rng.randrange(len(self.frames)) if self.frames else 0
        if what == 0:
            self.head = changed(self.head[:-4], rng) + b"\0\0\0\0"
        elif what == 1:
            fields = list(struct.unpack("<QQQQ", self.end))
            fields[rng.randrange(4)] = rng.choice([*NUMBERS, *range(12)])
            self.end = struct.pack("<QQQQ", *fields)
        elif what == 2:
            del self.frames[at : at + 1]
        elif what == 3 and self.frames:
            self.frames.insert(rng.randrange(len(self.frames)), list(self.frames[at]))
        elif what == 4 and self.frames:
            self.frames[at][0] = rng.randrange(7)
        elif what == 5:
            other = rng.choice(others)
            self.frames[at : at + 1] = [list(frame) for frame in other.frames[: rng.choice([1, 9])]]
        elif what < 10 and self.frames and self.frames[at][0] == FrameKind.RECORDS:
            self.frames[at][1] = changed_records(self.frames[at][1], rng, payloads)
        elif self.frames:
            self.frames[at][1] = changed(self.frames[at][1], rng, payloads)

    def put_together(self, rng):
        counts = [len(self.frames), sum(len(data) for _, data in self.frames)]
        if rng.randrange(8):
            self.end = struct.pack("<QQ", *counts) + self.end[16:]
        data = self.head[:-4] + crc32c(self.head[:-4])
        for kind, raw in [*self.frames, [lib.QUIRE_FRAME_END, self.end]]:
            stored = raw if kind == lib.QUIRE_FRAME_END else codecs.compress(self.codec, raw)
            count = len(raw)
            if not rng.randrange(40):
                stored = changed(stored, rng)
            if not rng.randrange(40):
                count = rng.choice([*NUMBERS[:-1], count + 1])
            frame = b"QFRM" + struct.pack("<III", kind, count, len(stored)) + crc32c(stored)
            data += frame + crc32c(frame) + stored
        return data if rng.randrange(20) else changed(data, rng)


# ------------------------------------------------------------------------------------------------ what it is done to


def fill(pm, number, rng, all_kinds):
    """Another version: keys and values short, long and very long, several values, and keys that go."""
    plain, ordered = pm.map("default"), pm.ordered_map("sorted")
    for _ in range(25):
        key = b"key%d" % rng.randrange(60)
        plain[key] = rng.randbytes(4) + bytes(rng.choice([0, 30, 60, 250]))
        ordered.append(key, rng.randbytes(rng.choice([0, 8, 50])))
    for key in rng.sample(sorted(ordered), 4):
        ordered.pop(key)
    plain.pop(rng.choice(sorted(plain)))
    plain[b"long"] = (plain.get(b"long") or bytes(6000))[:-1] + rng.randbytes(1 + number)
    ordered[b"k" * 3000] = b"%d" % number
    plain.append(b"several", rng.randbytes(700))
    pm.map("typed", SCHEMA)[number % 3, "name"] = (number, b"tag")
    if number == 4:
        pm.destroy("dropped")
    elif number < 4:
        pm.map("dropped")[b"%d" % number] = b""
    if all_kinds:
        pm.list("list").extend(rng.randbytes(size) for size in (0, 9, 5000))
        pm.deque("deque").extend(rng.randbytes(size) for size in (0, 9, 90))


class Sample:
    """Six versions in a checkpoint, with bases of 2 and 4 if the mode has them; or an image, without one."""

    def __init__(self, folder, kind):
        mode, codec, pattern = KINDS[kind]
        self.kind, self.folder = kind, folder
        rng = random.Random(kind)
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if kind == "inline base" else 1)
            patch.setattr(io_service, "FRAME_BYTES", 16 << 10)
            checkpoint = stack.enter_context(Manager(folder, mode=mode, codec=codec, bases_every=2))
            pm = stack.enter_context(checkpoint.load())
            for number in range(1, 7):
                fill(pm, number, rng, all_kinds=False)
                checkpoint.commit(pm)
                if number < 5:
                    checkpoint.maintain()
            if pattern is None:
                fill(pm, 7, rng, all_kinds=True)
                pm.commit()
                image = bytearray()
                with pm.snapshot() as pinned:
                    pinned.write(image.extend)
                self.files = {folder / "an.image": bytes(image)}
                return
        self.store = Checkpoint(folder).store()
        found = {path: path.read_bytes() for path in sorted(folder.rglob(pattern))}
        used = {Path(file.path) for file in self.store.line().files}
        parts = {path.with_name(name) for path in used for name in self.part_names(path)}
        self.files = {path: data for path, data in found.items() if path in used | parts}
        assert self.files, (kind, used, parts)

    def part_names(self, path):
        file = next(file for file in self.store.files() if Path(file.path) == path)
        return self.store.parts(file) if path.suffix == ".qbase" else ()

    def case(self, rng):
        """One file changed, loaded, used, and put back."""
        path = rng.choice(sorted(self.files))
        if path.suffix in (".image", ".qimage"):
            data = changed_image(self.files[path], rng)
        else:
            file = File(self.files[path])
            others = [File(data) for data in self.files.values()]
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                file.change(rng, others)
            data = file.put_together(rng)
        path.write_bytes(data)
        try:
            with self.load(path, data, rng) as state:
                use(state, rng)
        except REFUSED:
            return False
        finally:
            if path.suffix != ".image":
                path.write_bytes(self.files[path])
        return True

    def load(self, path, data, rng):
        if path.suffix == ".image":
            return quire.PageManager.from_image(rng.choice([path, data]))
        if not rng.randrange(3):
            with contextlib.suppress(*REFUSED):
                self.store.changes(6)
        # 4 is its base alone.
        version = 6 if path.suffix == ".qdelta" else rng.choice([4, 6])
        return self.store.load(version, repair=rng.randrange(4) == 0)


def read_all(state, *allowed):
    for name, kind in state.sets().items():
        with contextlib.suppress(*allowed):
            if kind == "sequence":
                assert len(list(state.list(name))) == len(state.list(name))
            elif kind != "raw":
                handle = getattr(state, kind)(name)
                keys = list(handle)
                assert len(keys) == len(handle)
                for key in keys:
                    handle.get_all(key)


def write_all(state, rng, *allowed):
    """To each of its structures, those that were there and those that are new to it."""
    state.map("written")[b"1"] = b""
    for name, kind in state.sets().items():
        if kind == "sequence":
            with contextlib.suppress(*allowed):
                state.deque(name).extend([rng.randbytes(500), b""])
                state.deque(name).popleft()
        elif kind != "raw" and name != "typed":
            handle = getattr(state, kind)(name)
            for _ in range(30):
                key = b"key%d" % rng.randrange(80)
                with contextlib.suppress(*allowed):
                    handle.pop(key, None)
                    handle[key] = rng.randbytes(rng.choice([4, 300, 5000]))
                    handle.append(key, rng.randbytes(700))
    state.commit()


def use(state, rng):
    """All of it read, and written to; what does not pass its checks, too, as who does not check would."""
    try:
        state.check()
    except quire.CorruptError:
        with contextlib.suppress(AssertionError):  # counts may be wrong
            read_all(state, quire.QuireError)
        with contextlib.suppress(quire.QuireError):
            write_all(state, rng, quire.QuireError)
        raise
    # The bytes of a typed map may be no row.
    read_all(state, quire.CorruptError)
    write_all(state, rng)
    state.check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_behind_the_checksums(kind, tally, tmp_path):
    sample = Sample(tmp_path, kind)
    count = -(-CASES // len(KINDS))
    taken = 0
    for number in range(count):
        try:
            taken += sample.case(random.Random(f"{SEED} {kind} {number}"))
        except Exception:
            print(f"case {number}")
            raise
    print(f"{kind}: {taken} of {count} were loaded")
    tally[f"files changed under right checksums, mode {KINDS[kind][0]}"] += count
    assert taken < count


def arena(fill):
    """The bytes of an arena, as an image holds them."""
    image = bytearray()
    with quire.PageManager() as pm:
        fill(pm)
        pm.commit()
        with pm.snapshot() as pinned:
            pinned.write(image.extend)
    (body_bytes,) = struct.unpack_from("<Q", image, len(image) - 16)
    return image[:body_bytes]


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize(
    ("kind", "magic", "at"), [("map", b"QMAP", 16), ("ordered_map", b"QTRS", 24), ("list", b"QSEQ", 8)]
)
def test_more_records_than_there_is_room_for(kind, magic, at, count):
    """Python asks for memory by the count, and takes none that is no index."""

    def fill(pm):
        handle = getattr(pm, kind)("default")
        handle.append(*([b"value"] if kind == "list" else [b"key", b"value"]))

    body = arena(fill)
    at += body.index(magic) - 4
    assert struct.unpack_from("<Q", body, at) == (1,)
    struct.pack_into("<Q", body, at, count)
    with quire.PageManager.from_image(sealed(body)) as state:
        with pytest.raises(quire.CorruptError, match=f"{count} records"):
            len(getattr(state, kind)("default"))
        with pytest.raises(quire.CorruptError):
            state.check()


@pytest.mark.parametrize("size", [0, 899, 901, 1 << 20, 0xFFFFFFFF])
def test_values_of_a_stream_that_do_not_fit(size):
    """Whoever takes them apart goes by their lengths, in Java without a look at where the memory ends."""

    def fill(pm):
        for byte in b"abc":
            pm.map("default").append(b"key", bytes([byte]) * 900)

    body = arena(fill)
    at = body.index(b"b" * 900) - 4
    assert struct.unpack_from("<I", body, at) == (900,)
    struct.pack_into("<I", body, at, size)
    with quire.PageManager.from_image(sealed(body)) as state:
        with pytest.raises(quire.CorruptError):
            state.check()
        with pytest.raises(quire.CorruptError):
            state.map("default").get_all(b"key")
