"""Lists and deques in deltas: what was spliced, as bytes, and those bytes applied to the older state."""

import os
import random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from hypothesis.stateful import initialize, precondition, rule
from models import VALUES, SequenceMachine

import quire
from quire.checkpoint import delta, pages
from quire.checkpoint.delta import Op, Record, Splice


def all_records(payloads):
    """The records of a delta, after a look at what holds for every delta of sequences."""
    found = [list(delta.records(payload)) for payload in payloads]
    assert all(records and records[0].op in (Op.FAMILY, Op.DROP) for records in found)
    records = [record for part in found for record in part]
    for record in records:
        assert (record.splice is not None) == (record.op == Op.SPLICE)
        assert record.sequence == (record.op != Op.DROP) and not record.ordered and not record.key
    return records


def splices(payloads):
    return [(record.splice, list(record.values)) for record in all_records(payloads) if record.op == Op.SPLICE]


def applied(model, payloads, name="it"):
    """What a reader of records alone makes of a list; None: there is none."""
    model = None if model is None else list(model)
    for record in all_records(payloads):
        if record.family != name:
            continue
        if record.op == Op.FAMILY:
            model = [] if model is None else model
        elif record.op == Op.DROP:
            model = None
        else:
            record.splice.apply(model, record.values)
    return model


def apply(pm, payloads):
    for payload in payloads:
        delta.apply(pm, payload)


def image(snapshot):
    written = bytearray()
    snapshot.write(written.extend)
    return bytes(written)


class SpliceMachine(SequenceMachine):
    """What leads from any snapshot to the state being written; and a follower that only ever gets deltas."""

    @initialize(page_size=st.sampled_from([1024, 8192]))
    def start_follower(self, page_size):
        self.follower = quire.PageManager(page_size=page_size)
        self.followed = None
        self.restored = False

    def teardown(self):
        super().teardown()
        if hasattr(self, "follower"):
            self.follower.close()

    def delta_since(self, snapshot):
        try:
            return delta.write(self.pm, snapshot)
        except quire.InvalidError as error:
            assert self.restored and "a restore lies between" in str(error)
            return None

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def write_and_apply(self, data):
        snapshot, model = data.draw(st.sampled_from(self.snapshots))
        payloads = self.delta_since(snapshot)
        if payloads is None:
            return
        assert applied(model, payloads) == self.model
        with quire.PageManager(page_size=self.page_size) as other:
            other.load_bytes(image(snapshot))
            apply(other, payloads)
            other.check()
            assert list(other.list("it")) == self.model

    @rule()
    def write_all(self):
        payloads = delta.write(self.pm)
        assert applied(None, payloads) == self.model
        with quire.PageManager(page_size=1024) as other:
            apply(other, payloads)
            other.check()
            assert list(other.list("it")) == self.model

    @rule()
    def follow(self):
        self.commit()
        payloads = None if self.followed is None else self.delta_since(self.followed)
        if payloads is None:
            for name in self.follower.sets():
                self.follower.destroy(name)
            payloads = delta.write(self.pm)
        apply(self.follower, payloads)
        self.follower.commit()
        self.follower.check()
        assert list(self.follower.list("it")) == self.model
        if self.followed is not None:
            self.followed.close()
        self.followed = self.pm.snapshot()
        assert delta.write(self.pm, self.followed) == []

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data):
        snapshot, model = data.draw(st.sampled_from(self.snapshots))
        self.pm.restore(snapshot)
        self.model, self.committed = list(model), list(model)
        self.handle = self.open(self.pm)
        self.restored = True

    @rule(values=st.lists(VALUES, max_size=10), twin=st.booleans())
    def make_again(self, values, twin):
        """Destroyed, and there again: as a new one, or as a clone with records that are older than it."""
        if twin:
            self.pm.clone("it", "twin")
        self.pm.destroy("it")
        if twin:
            self.pm.clone("twin", "it")
            self.pm.destroy("twin")
        self.handle = self.open(self.pm)
        self.handle.extend(values)
        self.model = [*(self.model if twin else []), *values]

    @rule(count=st.integers(20, 200))
    def lengthen(self, count):
        """By several nodes, so that there are some that do not change."""
        values = [b"%030d" % number for number in range(count)]
        self.handle.extend(values)
        self.model.extend(values)

    # The handle of a set that was made again is of no use after that was aborted.
    @rule()
    def abort(self):
        self.pm.abort()
        self.handle = self.open(self.pm)
        self.model = self.copy(self.committed)
        assert self.content(self.handle) == self.expected(self.model)

    def reopen(self):
        super().reopen()
        self.followed = None

    # What hypothesis calls is the rule, not the method above.
    reopen = precondition(lambda self: self.path is not None)(rule()(reopen))


TestSpliceMachine = SpliceMachine.TestCase


# ------------------------------------------------------------------------------------------------ what is written


SINGLE = st.tuples(
    st.sampled_from(["append", "appendleft", "pop", "popleft", "insert", "set", "delete"]), st.integers(0, 400), VALUES
)


def one_change(records, operation, index, value):
    """A change of a list or of a deque."""
    index = index % len(records) if records else 0
    if operation in ("append", "appendleft", "insert"):
        records.insert({"append": len(records), "appendleft": 0}.get(operation, index), value)
    elif records and operation == "set":
        records[index] = value
    elif records:
        del records[{"pop": len(records) - 1, "popleft": 0}.get(operation, index)]


@given(
    count=st.integers(0, 400),
    different=st.booleans(),
    changes=st.lists(SINGLE, max_size=30),
    page_size=st.sampled_from([1024, 65536]),
)
@example(count=400, different=True, changes=[("popleft", 0, b""), ("append", 0, b"x")] * 10, page_size=1024)
@example(count=400, different=False, changes=[("popleft", 0, b""), ("append", 0, b"x")] * 10, page_size=65536)
@example(count=400, different=False, changes=[("set", 200, b"x"), ("set", 7, b"y" * 9000)], page_size=1024)
def test_no_more_is_written_than_was_changed(count, different, changes, page_size):
    """Whatever moved between pages for it, and also where all records are alike."""
    with quire.PageManager(page_size=page_size) as pm:
        records = pm.list("it")
        model = [b"record %d" % (number if different else 0) for number in range(count)]
        records.extend(model)
        pm.commit()
        with pm.snapshot() as older:
            expected = list(model)
            for change in changes:
                one_change(records, *change)
                one_change(expected, *change)
            payloads = delta.write(pm, older)
            assert applied(model, payloads) == expected == list(records)
            found = splices(payloads)
            assert sum(splice.removed for splice, _ in found) <= len(changes)
            assert sum(len(values) for _, values in found) <= len(changes)
            starts = [splice.position for splice, _ in found]
            assert starts == sorted(starts)


@pytest.mark.parametrize("page_size", [1024, 4096, 65536])
@pytest.mark.parametrize("count", [20, 1000, 100_000])
def test_queue_is_two_splices(count, page_size):
    with quire.PageManager(page_size=page_size) as pm:
        queue = pm.deque("queue")
        queue.extend(b"%d" % number for number in range(count))
        pm.commit()
        with pm.snapshot() as older:
            for number in range(10):
                queue.popleft()
                queue.append(b"new %d" % number)
            payloads = delta.write(pm, older)
            assert splices(payloads) == [
                (Splice(0, 10, count - 10), []),
                (Splice(count - 10, 0, 0), [b"new %d" % number for number in range(10)]),
            ]
            assert sum(map(len, payloads)) < 150


def test_records_between_the_ends_are_not_read(tmp_path):
    """A mapped image reads a chunk when it is touched: one that is damaged is not, where only the ends change."""
    with quire.PageManager() as pm:
        pm.deque("queue").extend(b"%099d" % number for number in range(100_000))
        pm.commit()
        with pm.snapshot() as pinned:
            pinned.save(tmp_path / "image")
    data = bytearray((tmp_path / "image").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "image").write_bytes(data)
    with quire.PageManager.from_image(tmp_path / "image") as pm, pm.snapshot() as older:
        queue = pm.deque("queue")
        queue.popleft()
        queue.append(b"new")
        assert len(splices(delta.write(pm, older))) == 2
        with pytest.raises(quire.CorruptError):
            list(queue)


def test_long_records_are_spread_over_payloads(pm):
    records = pm.list("it")
    values = [bytes([number]) * 100_000 for number in range(10)]
    records.extend(values)
    payloads = delta.write(pm)
    assert len(payloads) > 2 and max(map(len, payloads)) < 600_000
    assert applied(None, payloads) == values
    pm.commit()
    with pm.snapshot() as older, quire.PageManager() as other:
        apply(other, payloads)
        records[3:8] = [b"x" * 400_000, b"y" * 400_000, b"", b"z"]
        payloads = delta.write(pm, older)
        assert len(payloads) > 1
        apply(other, payloads)
        other.check()
        assert list(other.list("it")) == list(records)


def test_lists_that_come_and_go(pm):
    pm.list("empty")
    pm.list("gone").append(b"a")
    pm.list("becomes a map").append(b"a")
    pm.map("becomes a list")[b"a"] = b"1"
    payloads = delta.write(pm)
    pm.commit()
    with pm.snapshot() as older, quire.PageManager() as other:
        apply(other, payloads)
        assert other.sets() == pm.sets() and list(other.list("empty")) == []
        assert delta.write(pm, older) == []
        for name in ("gone", "becomes a map", "becomes a list"):
            pm.destroy(name)
        pm.map("becomes a map")[b"b"] = b"2"
        pm.list("becomes a list").append(b"c")
        pm.deque("new")
        apply(other, delta.write(pm, older))
        assert other.sets() == pm.sets()
        assert other.map("becomes a map")[b"b"] == b"2" and list(other.list("becomes a list")) == [b"c"]


def test_raw_pages_are_refused(pm):
    pm.raw("blocks").alloc()
    with pytest.raises(quire.InvalidError, match=r"'blocks' is raw pages.*mode pages takes it"):
        delta.write(pm)
    assert pages.write(pm, 0)


def test_damaged_nodes_never_crash(tmp_path):
    """In the older state, the newer one, or both: an error, or some delta; no crash and no endless loop."""
    path = tmp_path / "arena"
    rng = random.Random(1)
    with quire.PageManager(path, page_size=1024) as pm, path.open("r+b", buffering=0) as file:
        records = pm.list("it")
        records.extend(rng.randbytes(rng.choice([10, 100, 700])) for _ in range(300))
        pm.commit()
        with pm.snapshot() as older:
            for change in range(12):
                one_change(
                    records, *[("popleft", 0, b""), ("append", 0, b"x" * 99), ("set", 31 * change, b"y")][change % 3]
                )
            good = delta.write(pm, older)
            data = path.read_bytes()
            nodes = [at for at in range(0, len(data), 1024) if data[at + 4 : at + 8] in (b"QNOD", b"QSEQ")]
            assert len(nodes) > 20
            refused = 0
            for _ in range(600):
                # The header, the slots, or anything.
                at = rng.choice(nodes) + rng.randrange(rng.choice([24, 24, 60, 1024]))
                other = rng.choice([0, 1, 255, data[at] ^ 1, rng.choice(nodes) // 1024 % 256])
                os.pwrite(file.fileno(), bytes([other]), at)
                try:
                    delta.write(pm, older)
                except quire.CorruptError:
                    refused += 1
                os.pwrite(file.fileno(), data[at : at + 1], at)
            assert refused > 60
            assert delta.write(pm, older) == good


# ------------------------------------------------------------------------------------------------ what is read


def number(value):
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(found) + bytes([value])


def family(kind=3, name=b"it"):
    return bytes([1, kind]) + len(name).to_bytes(2, "little") + name


def splice(position, removed, behind, *values, count=None):
    packed = b"".join(len(value).to_bytes(4, "little") + value for value in values)
    count = len(values) if count is None else count
    return b"\x0a" + b"".join(map(number, [position, removed, behind, len(packed), count])) + packed


def test_bytes_are_those_of_the_description(pm, source_root):
    """As docs/format.md has it."""
    queue = pm.deque("q")
    queue.extend([b"a", b"b", b"c"])
    pm.commit()
    with pm.snapshot() as older:
        queue.popleft()
        queue.append(b"de")
        (payload,) = delta.write(pm, older)
    assert payload == family(name=b"q") + splice(0, 1, 2) + splice(2, 0, 0, b"de")
    assert f"\n{payload.hex(' ')}\n" in (source_root / "docs/format.md").read_text()


BAD = {
    "changes nothing": splice(1, 0, 1),
    "made from another sequence": splice(0, 1, 0, b"x"),
    "from another sequence": splice(3, 0, 0, b"x"),
    "another sequence": splice(0, 3, 0, b"x"),
    "more records than there can be": splice((1 << 64) - 1, 2, 1, b"x"),
    "more records than": splice(1, 2, (1 << 64) - 1, b"x"),
    "not as many as it says": splice(0, 0, 2, b"x", count=2),
    "are not as many": splice(0, 1, 1, b"x", count=0),
    "do not fit": b"\x0a\x00\x00\x02\x05\x01\x02\x00\x00\x00x",
    "longer than what is left": splice(0, 0, 2, b"abc")[:-1],
    "a length does not end": b"\x0a\x00\xff\xff",
    "only splices are of sequences": b"\x03\x01\x01kv",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_splices_are_refused(pm, message):
    pm.list("it").extend([b"a", b"b"])
    with pytest.raises(quire.CorruptError, match=message):
        delta.apply(pm, family() + BAD[message])
    assert list(pm.list("it")) == [b"a", b"b"]
    pm.check()


def test_splices_of_no_sequence_are_refused(pm):
    pm.map("map")
    for head in (b"", family(1, b"map"), b"\x02\x00\x02\x00it"):
        for read in (lambda data: delta.apply(pm, data), lambda data: list(delta.records(data))):
            with pytest.raises(quire.CorruptError, match=r"belongs to no family|only splices are of sequences"):
                read(head + splice(0, 0, 0, b"x"))
    with pytest.raises(quire.CorruptError, match="kind is unknown"):
        delta.apply(pm, family(4, b"raw"))
    with pytest.raises(quire.MismatchError):
        delta.apply(pm, family(3, b"map"))
    with pytest.raises(quire.CorruptError, match="made from another sequence than one of 0 records"):
        Splice(0, 1, 0).apply([], [])
    assert next(delta.records(family())) == Record(Op.FAMILY, "it", False, sequence=True)


PIECES = st.one_of(
    st.sampled_from([family(), family(1, b"map"), family(3, b"other"), b"\x02\x00\x02\x00it"]),
    st.builds(splice, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.binary(max_size=3), VALUES),
    st.builds(splice, st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
    st.binary(max_size=12),
)


@given(start=st.lists(VALUES, max_size=6), pieces=st.lists(PIECES, max_size=8), cut=st.integers(0, 8))
def test_any_bytes(start, pieces, cut):
    """They are done, or refused; what is left is sound in any case."""
    payload = b"".join([family(), *pieces])
    with quire.PageManager(page_size=1024) as pm:
        pm.list("it").extend(start)
        try:
            delta.apply(pm, payload[: len(payload) - cut])
        except (quire.CorruptError, quire.MismatchError):
            pass
        else:
            list(delta.records(payload[: len(payload) - cut]))
        pm.check()
