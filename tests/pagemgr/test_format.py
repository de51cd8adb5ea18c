"""Reads real files by docs/format.md alone, with none of Quire's own code: page and code cannot part ways."""

import re
import struct

import quire

NO_PAGE = 0xFFFFFFFF


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class ArenaFile:
    """An arena as the page describes it."""

    def __init__(self, data):
        self.data = data
        magic, version, self.page_bytes, _, crc = struct.unpack_from("<8sII16sI", data)
        assert magic == b"QUIREARN" and version == 1 and crc == crc32c(data[:32])
        self.current, self.synced = struct.unpack_from("<QQ", data, 64)
        meta = data[128 + 64 * (self.current & 1) :][:64]
        self.epoch, self.frame_limit = struct.unpack_from("<II", meta)
        assert self.epoch == self.current >> 1
        assert struct.unpack_from("<I", meta, 36)[0] == crc32c(meta[:36])
        self.catalog = struct.unpack_from("<QIIII", meta, 8)
        self.set_count = struct.unpack_from("<I", meta, 32)[0]

    def frame(self, number):
        assert 0 < number < self.frame_limit
        return self.data[number * self.page_bytes :][: self.page_bytes]

    def page(self, table, index):
        entry, depth, limit, _, _ = table
        assert index < limit
        per_node = self.page_bytes // 8
        for level in reversed(range(depth)):
            node = self.frame(entry & 0xFFFFFFFF)
            above = entry >> 32
            entry = struct.unpack_from("<Q", node, index // per_node**level % per_node * 8)[0]
            assert entry >> 32 <= above or entry & 0xFFFFFFFF == 0
        return self.frame(entry & 0xFFFFFFFF)

    def sets(self):
        found = {}
        for index in range(self.catalog[2]):
            page = self.page(self.catalog, index)
            for at in range(0, self.page_bytes // 256 * 256, 256):
                set_id, kind, name_bytes = struct.unpack_from("<III", page, at)
                if set_id:
                    assert set_id == index * (self.page_bytes // 256) + at // 256 + 1
                    tables = [struct.unpack_from("<QIIII", page, at + offset) for offset in (16, 40)]
                    found[page[at + 64 : at + 64 + name_bytes].decode()] = (kind, *tables)
        assert len(found) == self.set_count
        return found


def records_of_map(arena, table, directory):
    """Follows every word of the hash table to its record."""
    version, magic, _seed, count, level, planes, split = struct.unpack_from("<I4sQQIII", arena.page(table, 0))
    assert version == 1 and magic == b"QMAP" and directory[2] == planes * 2**level + split
    records = {}
    for bucket in range(directory[2]):
        page = arena.page(directory, bucket)
        while True:
            chained, kind = struct.unpack_from("<I4s", page)
            assert kind == b"QTBL"
            for (word,) in struct.iter_unpack("<Q", page[16:]):
                if word:
                    place = (word & (1 << 34) - 1) * 8
                    home = arena.page(table, place // arena.page_bytes)
                    assert home[4:8] == b"QHAP"
                    key, value, stamp, size = read_record(home, place % arena.page_bytes)
                    records[key] = (value, stamp, size)
            if chained == NO_PAGE:
                break
            page = arena.page(table, chained)
    assert len(records) == count
    return records


def read_record(page, at):
    key_word, value_word, stamp = struct.unpack_from("<HHI", page, at)
    assert key_word < 0x4000 and value_word < 0x4000  # one value, both parts in the page
    end = at + 8 + key_word + value_word
    assert not any(page[end : (end + 7) // 8 * 8])
    return page[at + 8 : at + 8 + key_word], page[at + 8 + key_word : end], stamp, (end + 7) // 8 * 8 - at


def test_an_arena_by_its_description(path, page_size):
    expected = {b"key-%d" % i: b"v" * (i % 90) for i in range(3000)}
    with quire.PageManager(path, page_size=page_size) as pm:
        pm.map("numbers").update(expected)
        pm.ordered_map("other")[b"a"] = b"b"
        epoch = pm.commit()
        pm.map("numbers").update({b"never": b"committed"})
    arena = ArenaFile(path.read_bytes())
    assert (arena.page_bytes, arena.epoch, arena.synced) == (page_size, epoch, 0)
    sets = arena.sets()
    assert {name: kind for name, (kind, *_) in sets.items()} == {"numbers": 1, "other": 2}
    records = records_of_map(arena, *sets["numbers"][1:])
    assert {key: value for key, (value, _, _) in records.items()} == expected
    assert {stamp for _, stamp, _ in records.values()} == {epoch}


def test_an_image_by_its_description(pm, tmp_path, page_size):
    pm.map("numbers").update({b"key-%d" % i: b"value" for i in range(2000)})
    pm.commit()
    with pm.snapshot() as snapshot:
        snapshot.save(tmp_path / "image")
    data = (tmp_path / "image").read_bytes()
    magic, version, block_bytes, body_bytes, checksums_crc, crc = struct.unpack("<8sIIQII", data[-32:])
    assert (magic, version, block_bytes) == (b"QUIREIMG", 1, 65536) and crc == crc32c(data[-32:-4])
    checksums = data[body_bytes:-32]
    assert checksums_crc == crc32c(checksums)
    blocks = [data[at : min(at + block_bytes, body_bytes)] for at in range(0, body_bytes, block_bytes)]
    assert [crc32c(block) for block in blocks] == [value for (value,) in struct.iter_unpack("<I", checksums)]
    arena = ArenaFile(data)
    assert arena.synced == arena.current and arena.frame_limit * page_size == body_bytes
    assert len(records_of_map(arena, *arena.sets()["numbers"][1:])) == 2000


def test_the_example_in_the_description(path, source_root):
    """The dump of alice = 1 stands in the file as it stands on the page."""
    page = (source_root / "docs/format.md").read_text()
    dump = re.search(r"^((?:[0-9a-f]{2} ){15}[0-9a-f]{2})$", page, re.MULTILINE)
    with quire.PageManager(path) as pm:
        pm.map("users")[b"alice"] = b"1"
        assert pm.commit() == 2
    assert bytes.fromhex(dump[1]) in path.read_bytes()
