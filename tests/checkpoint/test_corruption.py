"""Damaged files of every kind: loading names the file, or with repair=True gives the state as it was; never another.

QUIRE_CORRUPTION=all  many more flipped bytes.
"""

import contextlib
import io
import itertools
import os
import random
from pathlib import Path

import pytest
import stores
from stores import content, loaded

import quire
from quire.checkpoint import Checkpoint, Manager, codecs, container, io_service, manager, tools
from quire.checkpoint.container import Frame, FrameKind

ALL = os.environ.get("QUIRE_CORRUPTION") == "all"
CODECS = ["", "lz4", "zstd"]
# What is damaged, and in which modes there is such a file. An image that is mapped has tests of its own.
KINDS = {
    "commit": ["delta", "pages", "cec"],
    "inline base": ["delta", "auto"],
    "base of parts": ["delta"],
    "part": ["delta"],
    "base of an image": ["pages"],
}
MODES_AND_KINDS = [(mode, kind) for kind, modes in KINDS.items() for mode in modes]
FLIPS = 120 if ALL else 20
REFUSED = (quire.CorruptError, quire.VersionError)


class Sample:
    """Seven versions with bases of 3 and 6, if the mode has bases, and what the last holds.

    name: the file that is to be damaged; repaired: whether a base of before may do instead.
    """

    def __init__(self, folder, mode, codec, kind, tally=None):
        self.folder, self.mode, self.tally = folder / "state/0/0", mode, tally
        rng = random.Random(f"{mode} {codec} {kind}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if kind == "inline base" else 1)
            patch.setattr(io_service, "FRAME_BYTES", 8 << 10)
            with Manager(folder, mode=mode, codec=codec, bases_every=3) as checkpoint, checkpoint.load() as pm:
                for _ in range(7):
                    values = {b"key%d" % rng.randrange(99): rng.randbytes(rng.choice([8, 90])) for _ in range(60)}
                    pm.map("default").update(values)
                    pm.ordered_map("sorted").append(b"all", rng.randbytes(20))
                    if mode != "cec":
                        pm.deque("queue").extend(rng.randbytes(rng.choice([8, 90])) for _ in range(9))
                        pm.deque("queue").popleft()
                    checkpoint.commit(pm)
                    checkpoint.maintain()
                self.expected = content(pm)
        self.store = Checkpoint(folder).store()
        parts = sorted(Path(part.path).name for part in self.store.listing().parts if part.version.number == 6)
        part = parts[len(parts) // 2] if parts else ""
        self.name = {"commit": "7.qdelta", "part": part, "image": part}.get(kind, "6.qbase")
        self.repaired = self.name != "7.qdelta"
        self.path = self.folder / self.name
        self.data = self.path.read_bytes()
        assert bool(parts) == (kind != "inline base" and mode != "cec")
        assert any(name.endswith(".qimage") for name in parts) == (mode == "pages")

    def damaged(self, data, or_base=False):
        """Loads with this in the place of the file's bytes. or_base: it may be the base that is named for its part."""
        self.path.write_bytes(data)
        if self.tally is not None:
            self.tally[f"files damaged, mode {self.mode}"] += 1
        with pytest.raises(REFUSED, match=f"{self.name}: |6\\.qbase: " if or_base else f"{self.name}: "):
            self.store.load()
        if not self.repaired:
            with pytest.raises(REFUSED, match=f"{self.name}: "):
                self.store.load(repair=True)
        else:
            assert loaded(self.store, repair=True) == self.expected


@pytest.fixture(scope="module", params=CODECS)
def codec(request):
    return request.param


@pytest.fixture(scope="module", params=MODES_AND_KINDS, ids=" ".join)
def sample(request, codec, tally, tmp_path_factory):
    made = Sample(tmp_path_factory.mktemp("sample"), request.param[0], codec, request.param[1], tally)
    assert loaded(made.store) == made.expected
    yield made
    # It was the damage, and nothing else.
    made.path.write_bytes(made.data)
    assert loaded(made.store) == made.expected


def test_cut_off_at_every_frame(sample):
    ends = stores.frame_ends(sample.data)
    for count in sorted({0, *(end + more for end in ends for more in (-1, 0, 1))} - {len(sample.data)}):
        sample.damaged((sample.data + b"\0")[:count])


def test_flipped_bytes(sample, codec):
    rng = random.Random(f"{sample.name} {codec}")
    for _ in range(FLIPS):
        data = bytearray(sample.data)
        for _ in range(rng.choice([1, 1, 3])):
            place = rng.randrange(len(data))
            data[place] ^= rng.randrange(1, 256)
        if data != sample.data:
            sample.damaged(bytes(data))


def test_frames_left_out_doubled_or_exchanged(sample):
    """Each of them is sound. In a part it may be the checksums of the image that tell."""
    ends = stores.frame_ends(sample.data)
    head, frames = sample.data[: ends[0]], [sample.data[a:b] for a, b in itertools.pairwise(ends)]
    body, end = frames[:-1], frames[-1]
    variants = [body[:-1], [*body, body[-1]], body[1:], []]
    variants += [[*body[:i], body[i + 1], body[i], *body[i + 2 :]] for i in range(len(body) - 1)]
    for variant in variants:
        if variant != body:
            sample.damaged(head + b"".join(variant) + end, or_base=True)


def test_the_file_of_another_version_or_kind(sample):
    for other in sorted(sample.folder.iterdir()):
        if other.name != sample.name:
            sample.damaged(other.read_bytes(), or_base=other.suffix == ".qpart")


@pytest.mark.parametrize("mode", ["delta", "pages", "cec"])
def test_frames_of_commits_that_are_sound_and_wrong(mode, tmp_path):
    """With right checksums: what they say is refused, or changes nothing but what pages and values hold."""
    sample = Sample(tmp_path, mode, "", "commit")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    rng = random.Random(mode)
    refused = 0
    for _ in range(FLIPS * 5):
        frames = list(found.frames)
        which = rng.randrange(len(frames))
        data = bytearray(frames[which].data)
        # Where lengths and numbers are.
        data[rng.choice([rng.randrange(80), rng.randrange(len(data))]) % len(data)] ^= rng.randrange(1, 256)
        frames[which] = Frame(frames[which].kind, bytes(data))
        file = io.BytesIO()
        container.write(file, found.header, frames, found.keys, codecs.compress, found.since)
        sample.path.write_bytes(file.getvalue())
        try:
            with sample.store.load() as state:
                state.check()
                content(state)
        except quire.QuireError:
            refused += 1
    # Most of a delta is values.
    assert refused > (FLIPS // 4 if mode == "delta" else FLIPS)


@pytest.mark.parametrize("since", [0, 3, 5, 7, 8, 1 << 40])
@pytest.mark.parametrize("mode", ["pages", "cec"])
def test_ends_of_commits_that_are_sound_and_wrong(mode, since, tmp_path):
    """A start that is not the right one is refused, or leads to the same state."""
    sample = Sample(tmp_path, mode, "", "commit")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    file = io.BytesIO()
    container.write(file, found.header, found.frames, found.keys, codecs.compress, since)
    sample.path.write_bytes(file.getvalue())
    try:
        assert loaded(sample.store) == sample.expected
    except REFUSED as error:
        assert "7.qdelta: " in str(error)


def test_an_image_that_is_mapped(tmp_path):
    """It is looked at when it is used: nobody gets another state, and verify, which reads it all, names it."""
    sample = Sample(tmp_path, "pages", "", "image")
    rng = random.Random(0)
    for place in [0, 16, len(sample.data) - 1, *(rng.randrange(len(sample.data)) for _ in range(FLIPS))]:
        data = bytearray(sample.data)
        data[place] ^= rng.randrange(1, 256)
        sample.path.write_bytes(data)
        with contextlib.suppress(*REFUSED):
            assert loaded(sample.store) == sample.expected
        problems = tools.examine(sample.store, True, lambda count: None).problems
        assert len(problems) == 1 and "6." in problems[0]
    for data in (b"", sample.data[:-1], sample.data + b"\0", sample.data[:4096]):
        sample.damaged(data, or_base=True)
    sample.path.unlink()
    with pytest.raises(quire.CorruptError, match=r"6\.qbase: one of its parts is gone"):
        sample.store.load()
    assert loaded(sample.store, repair=True) == sample.expected


def test_pages_without_the_base_that_they_need(tmp_path):
    """They go on no other state of the same content."""
    with Manager(tmp_path, mode="auto", bases_every=3) as checkpoint, checkpoint.load() as pm:
        for number in range(5):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manager.pages, "size", lambda pm, since, number=number: 0 if number > 2 else 1 << 60)
                pm.map("default")[b"number"] = b"%d" % number
                checkpoint.commit(pm)
                checkpoint.maintain()
        expected = content(pm)
    store = Checkpoint(tmp_path).store()
    assert loaded(store) == expected
    assert [file.version.number for file in store.line().files] == [3, 4, 5]
    base = tmp_path / "state/0/0/3.qbase"
    data = base.read_bytes()
    base.unlink()
    with pytest.raises(quire.NotFoundError, match=r"3\.qbase is not there, and the pages"):
        store.load()
    # Of the same records, in other pages.
    with store.load(3) as state, state.snapshot() as pinned:
        image = bytearray()
        pinned.write(image.extend)
    header = container.read(io.BytesIO(data), codecs.decompress).header
    file = io.BytesIO()
    container.write(file, header, [Frame(FrameKind.IMAGE, bytes(image))], 1, codecs.compress)
    base.write_bytes(file.getvalue())
    assert loaded(store, 3) == {"default": {b"number": [b"2"]}}
    with pytest.raises(quire.CorruptError, match=r"4\.qdelta: .*this is another"):
        store.load()


def test_lists_of_parts_that_are_sound_and_wrong(tmp_path):
    """With right checksums: what they say is refused, or leads to the same state."""
    sample = Sample(tmp_path, "delta", "zstd", "base of parts")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    (frame,) = found.frames
    rng = random.Random(0)
    for _ in range(FLIPS * 5):
        data = bytearray(frame.data)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        file = io.BytesIO()
        frames = [Frame(FrameKind.PARTS, bytes(data))] * rng.choice([1, 1, 1, 2])
        container.write(file, found.header, frames, found.keys, codecs.compress)
        sample.damaged(file.getvalue())


def test_images_that_are_sound_and_wrong(tmp_path):
    """A part whose frames have right checksums, and other bytes: the image's own checksums tell."""
    sample = Sample(tmp_path, "delta", "", "part")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    rng = random.Random(0)
    for _ in range(FLIPS):
        frames = list(found.frames)
        which = rng.randrange(len(frames))
        data = bytearray(frames[which].data)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        frames[which] = Frame(FrameKind.IMAGE, bytes(data))
        file = io.BytesIO()
        container.write(file, found.header, frames, 0, codecs.compress)
        sample.path.write_bytes(file.getvalue())
        with pytest.raises(quire.CorruptError, match=r"6\.qbase: "):
            sample.store.load()
        assert loaded(sample.store, repair=True) == sample.expected


@pytest.mark.parametrize(("mode", "kind"), MODES_AND_KINDS)
def test_verify_sees_it(tmp_path, mode, kind):
    sample = Sample(tmp_path, mode, "zstd", kind)
    assert tools.examine(sample.store, True, lambda count: None).problems == []
    data = bytearray(sample.data)
    data[len(data) // 2] ^= 1
    sample.path.write_bytes(data)
    problems = tools.examine(sample.store, True, lambda count: None).problems
    assert len(problems) == 1 and sample.name in problems[0]
