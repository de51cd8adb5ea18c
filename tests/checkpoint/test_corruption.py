"""Damaged files of every kind: loading names the file, or with repair=True gives the state as it was; never another.

QUIRE_CORRUPTION=all  many more flipped bytes.
"""

import io
import itertools
import os
import random
from pathlib import Path

import pytest
import stores
from stores import content, loaded

import quire
from quire.checkpoint import Checkpoint, Manager, codecs, container, io_service, reader, storage, tools
from quire.checkpoint.container import Frame, FrameKind

ALL = os.environ.get("QUIRE_CORRUPTION") == "all"
MODES = ["delta"]
CODECS = ["", "lz4", "zstd"]
KINDS = ["delta", "inline base", "base of parts", "part"]
FLIPS = 120 if ALL else 20
REFUSED = (quire.CorruptError, quire.VersionError)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(reader, "RELIST_WAITS_SECONDS", (0, 0, 0))
    monkeypatch.setattr(storage, "RETRY_WAITS_SECONDS", (0, 0, 0))


class Sample:
    """Seven versions with bases of 3 and 6, and what the last holds. name: the file that is to be damaged."""

    def __init__(self, folder, mode, codec, kind):
        self.folder = folder / "state/0/0"
        rng = random.Random(f"{mode} {codec} {kind}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io_service, "INLINE_BYTES", 1 << 30 if kind == "inline base" else 1)
            patch.setattr(io_service, "FRAME_BYTES", 8 << 10)
            with Manager(folder, mode=mode, codec=codec, bases_every=3) as checkpoint, checkpoint.load() as pm:
                for _ in range(7):
                    values = {b"key%d" % rng.randrange(99): rng.randbytes(rng.choice([8, 90])) for _ in range(60)}
                    pm.map("default").update(values)
                    pm.ordered_map("sorted").append(b"all", rng.randbytes(20))
                    checkpoint.commit(pm)
                    checkpoint.maintain()
                self.expected = content(pm)
        self.store = Checkpoint(folder).store()
        parts = sorted(Path(part.path).name for part in self.store.listing().parts if part.version.number == 6)
        self.name = {"delta": "7.qdelta", "part": parts[len(parts) // 2] if parts else ""}.get(kind, "6.qbase")
        self.path = self.folder / self.name
        self.data = self.path.read_bytes()
        assert bool(parts) == (kind != "inline base")

    def damaged(self, data, or_base=False):
        """Loads with this in the place of the file's bytes. or_base: it may be the base that is named for its part."""
        self.path.write_bytes(data)
        with pytest.raises(REFUSED, match=f"{self.name}: |6\\.qbase: " if or_base else f"{self.name}: "):
            self.store.load()
        if self.name == "7.qdelta":
            with pytest.raises(REFUSED, match=f"{self.name}: "):
                self.store.load(repair=True)
        else:
            assert loaded(self.store, repair=True) == self.expected


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module", params=CODECS)
def codec(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def sample(request, mode, codec, tmp_path_factory):
    made = Sample(tmp_path_factory.mktemp("sample"), mode, codec, request.param)
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


def test_lists_of_parts_that_are_sound_and_wrong(mode, tmp_path):
    """With right checksums: what they say is refused, or leads to the same state."""
    sample = Sample(tmp_path, mode, "zstd", "base of parts")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    (frame,) = found.frames
    rng = random.Random(mode)
    for _ in range(FLIPS * 5):
        data = bytearray(frame.data)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        file = io.BytesIO()
        frames = [Frame(FrameKind.PARTS, bytes(data))] * rng.choice([1, 1, 1, 2])
        container.write(file, found.header, frames, found.keys, codecs.compress)
        sample.damaged(file.getvalue())


def test_images_that_are_sound_and_wrong(mode, tmp_path):
    """A part whose frames have right checksums, and other bytes: the image's own checksums tell."""
    sample = Sample(tmp_path, mode, "", "part")
    found = container.read(io.BytesIO(sample.data), codecs.decompress)
    rng = random.Random(mode)
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


@pytest.mark.parametrize("kind", KINDS)
def test_verify_sees_it(tmp_path, mode, kind):
    sample = Sample(tmp_path, mode, "zstd", kind)
    assert tools.examine(sample.store, True, lambda count: None).problems == []
    data = bytearray(sample.data)
    data[len(data) // 2] ^= 1
    sample.path.write_bytes(data)
    problems = tools.examine(sample.store, True, lambda count: None).problems
    assert len(problems) == 1 and sample.name in problems[0]
