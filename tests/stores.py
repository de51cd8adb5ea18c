"""Checkpoints for tests: a Writer makes the files of a store as the provider does, and remembers every state."""

import io
import struct
import tempfile
import uuid
from pathlib import Path

import hypothesis.strategies as st
from models import KEYS, VALUES

import quire
from quire._native import ffi, lib
from quire.checkpoint import StoreId, Version, codecs, container, delta, reader
from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind

FAMILIES = {"default": False, "sorted": True, "$timers": True}
CHANGES = st.dictionaries(
    st.tuples(st.sampled_from(sorted(FAMILIES)), KEYS), st.lists(VALUES, max_size=3), max_size=8
)  # no values: removed
# Of a list: its name, where from (modulo its length), how many records go, and what comes.
SPLICES = st.lists(
    st.tuples(
        st.sampled_from(["events", "queue"]), st.integers(-1, 60), st.integers(0, 3), st.lists(VALUES, max_size=3)
    ),
    max_size=4,
)


def content(state):
    """Family to key to values, list to records, raw pages to bytes by id; without those that are empty."""
    found = {}
    for name, kind in state.sets().items():
        if kind == "sequence":
            found[name] = list(state.list(name))
        elif kind == "raw":
            found[name] = {id: state.raw(name).read(id) for id in state.raw(name).ids()}
        else:
            handle = state.ordered_map(name) if kind == "ordered_map" else state.map(name)
            found[name] = {key: handle.get_all(key) for key in handle}
    return {name: keys for name, keys in found.items() if keys}


def splice(state, splices):
    for name, start, removed, values in splices:
        records = state.list(name)
        start %= len(records) + 1
        records[start : start + removed] = values


def change(pm, changes):
    """Gives keys the values that they are to have. changes: see CHANGES."""
    for (family, key), values in changes.items():
        handle = pm.ordered_map(family) if FAMILIES[family] else pm.map(family)
        handle.pop(key, None)
        for value in values:
            handle.append(key, value)


def put(pm, **values):
    """A value for each key, as text."""
    pm.map("default").update({key.encode(): value.encode() for key, value in values.items()})


class Writer:
    """Writes a store's files as the provider does. states: what each version must hold."""

    def __init__(self, folder, id=None, codec="zstd", page_size=1024, ids=False):
        self.folder, self.id, self.codec, self.ids = Path(folder), id or StoreId(0, 3), codec, ids
        self.pm = quire.PageManager(page_size=page_size)
        self.pm.commit()
        self.version, self.states = Version(0), {Version(0): {}}
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.pm.close()

    def path(self, kind, version=None):
        return self.folder / f"{version or self.version}.{reader.SUFFIXES[kind]}"

    def keys(self):
        state = self.states[self.version]
        return sum(len(keys) for name, keys in state.items() if not name.startswith("$"))

    def write(self, header, frames, keys):
        file = io.BytesIO()
        container.write(file, header, frames, keys, codecs.compress)
        self.path(header.kind).write_bytes(file.getvalue())

    def header(self, kind, parent, **more):
        place = {"operator_id": self.id.operator, "partition_id": self.id.partition, "store_name": self.id.name}
        versions = {"version": self.version.number, "id": self.version.id}
        return FileHeader(
            kind, **versions, parent_version=parent.number, parent_id=parent.id, **place, codec=self.codec, **more
        )

    def commit(self, changes, alone=False):
        """The next version. changes: (family, key) to values. alone: as a base without a delta."""
        parent = self.version
        with self.pm.snapshot() as older:
            change(self.pm, changes)
            payloads = delta.write(self.pm, older)
            self.version = Version(parent.number + 1, str(uuid.uuid4()) if self.ids else "")
            self.states[self.version] = content(self.pm)
            if not alone:
                frames = [Frame(FrameKind.RECORDS, payload) for payload in payloads]
                self.write(self.header(FileKind.DELTA, parent), frames, self.keys())
        self.pm.commit()
        if alone:
            self.base(self.keys())
        return self.version

    def base(self, keys=0):
        """A base of the last version. keys: 0 where it does not count them."""
        with tempfile.TemporaryDirectory() as folder, self.pm.snapshot() as pinned:
            pinned.save(Path(folder) / "image")
            image = (Path(folder) / "image").read_bytes()
        pieces = [image[at : at + 3000] for at in range(0, len(image), 3000)]
        frames = [Frame(FrameKind.IMAGE, piece) for piece in pieces]
        self.write(self.header(FileKind.BASE, self.version, page_bytes=self.pm.page_size), frames, keys)


def sample(folder, **options):
    """Seven versions, with bases of 3 and 6; 4 takes a key away."""
    with Writer(folder, **options) as writer:
        for number in range(1, 8):
            puts = {("default", b"key%d" % key): [b"%d" % number] for key in range(number, number + 4)}
            takes = {("default", b"key1"): []} if number == 4 else {}
            writer.commit({**puts, **takes, ("sorted", b"all"): [b"a", b"b%d" % number], ("$timers", b"t"): [b""]})
            if number in (3, 6):
                writer.base(writer.keys() if number == 6 else 0)
    return writer


def loaded(store, *arguments, **options):
    with store.load(*arguments, **options) as state:
        state.check()
        return content(state)


def crc32c(data):
    """The checksum as four bytes of a file."""
    head = ffi.new("uint8_t[]", lib.QUIRE_FRAME_HEADER_BYTES)
    assert lib.quire_frame_encode(1, 1, ffi.from_buffer("uint8_t[]", bytes(data)), len(data), head) == 0
    return bytes(head[16:20])


def frame_ends(data):
    """Where the header and each frame end."""
    (at,) = struct.unpack_from("<I", data, 12)
    ends = [at]
    while at < len(data):
        (stored,) = struct.unpack_from("<I", data, at + 12)
        at += 24 + stored
        ends.append(at)
    assert at == len(data)
    return ends
