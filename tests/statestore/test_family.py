"""Column families as a task reaches them from another language: addresses and lengths, against plain dicts."""

import contextlib
import itertools
import struct
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from models import KEYS, PAGE_SIZES, VALUES

import quire
from quire._native import ffi, lib
from quire.pagemgr.errors import check

OWN = lib.QUIRE_SPAN_OWN


def bytes_at(address, count):
    return bytes(ffi.buffer(ffi.cast("char *", address), count)) if count else b""


def span_bytes(span):
    """The bytes of an answer, copied, and whether they lie in memory of the family's own."""
    return bytes_at(span.address, span.count & ~OWN), bool(span.count & OWN)


def split(values):
    found, at = [], 0
    while at < len(values):
        (count,) = struct.unpack_from("<I", values, at)
        found.append(values[at + 4 : at + 4 + count])
        at += 4 + count
    assert at == len(values)
    return found


def joined(values):
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def bound(key):
    return (ffi.NULL, 0) if key is None else (key, len(key))


class Family:
    """A family of the core, each method one call of it."""

    def __init__(self, owner, name, ordered):
        out = ffi.new("quire_family **")
        if isinstance(owner, quire.Snapshot):
            check(lib.quire_family_open_snap(owner._handle.pointer, name.encode(), ordered, out))
        else:
            check(lib.quire_family_open(owner._live(), name.encode(), ordered, out))
        self.pointer = out[0]
        self.scans = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for scan in self.scans:
            scan.close()
        lib.quire_family_close(self.pointer)

    def __len__(self):
        count = ffi.new("uint64_t *")
        check(lib.quire_family_count(self.pointer, count))
        return count[0]

    def look_up(self, call, key):
        span = ffi.new("quire_span *")
        code = call(self.pointer, key, len(key), span)
        if code == lib.QUIRE_E_NOTFOUND:
            return None, False
        check(code)
        return span_bytes(span)

    def get(self, key):
        return self.look_up(lib.quire_family_get, key)[0]

    def get_many(self, keys):
        """The values, and how many calls it took; what lies in pages is looked at when all is there."""
        offsets = ffi.new("int32_t[]", [0, *itertools.accumulate(map(len, keys))])
        bytes_of_keys = b"".join(keys)
        spans, done = ffi.new("quire_span[]", max(len(keys), 1)), ffi.new("size_t *")
        found, calls = [], 0
        while len(found) < len(keys):
            call = (bytes_of_keys, offsets, len(found), len(keys), spans, done)
            check(lib.quire_family_get_many(self.pointer, *call))
            assert 0 < done[0] <= len(keys) - len(found)
            answers = [(span.address, span.count) for span in list(spans)[: done[0]]]
            assert not any(count & OWN for _, count in answers[:-1])
            if answers[-1][1] & OWN:  # valid until the next call only
                answers[-1] = bytes_at(answers[-1][0], answers[-1][1] & ~OWN)
            found += answers
            calls += 1
        values = [each if isinstance(each, bytes) else bytes_at(*each) if each[0] else None for each in found]
        return values, calls

    def get_all(self, key):
        values = self.look_up(lib.quire_family_get_all, key)[0]
        return None if values is None else split(values)

    def contains(self, key):
        found = ffi.new("bool *")
        check(lib.quire_family_contains(self.pointer, key, len(key), found))
        return found[0]

    def put(self, key, value):
        check(lib.quire_family_put(self.pointer, key, len(key), value, len(value)))

    def put_many(self, pairs):
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        offsets = [ffi.new("int32_t[]", [0, *itertools.accumulate(map(len, rows))]) for rows in (keys, values)]
        joined = b"".join(keys), b"".join(values)
        check(lib.quire_family_put_many(self.pointer, joined[0], offsets[0], joined[1], offsets[1], len(pairs)))

    def append(self, key, value):
        check(lib.quire_family_append(self.pointer, key, len(key), value, len(value)))

    def remove(self, key):
        check(lib.quire_family_remove(self.pointer, key, len(key)))

    def remove_range(self, lo, hi):
        check(lib.quire_family_remove_range(self.pointer, *bound(lo), *bound(hi)))

    def scan(self, lo=None, hi=None, every=False):
        self.scans.append(Scan(self, lo, hi, every))
        return self.scans[-1]


class Scan:
    def __init__(self, family, lo, hi, every):
        out = ffi.new("quire_scan **")
        check(lib.quire_scan_open(family.pointer, *bound(lo), *bound(hi), every, out))
        self.pointer = out[0]
        self.every = every
        self.kept = []

    def next(self, most):
        """Up to so many rows; None at the end."""
        rows, count = ffi.new("quire_span_pair[]", most), ffi.new("size_t *")
        check(lib.quire_scan_next(self.pointer, rows, most, count))
        assert count[0] <= most
        found = []
        for row in list(rows)[: count[0]]:
            key, value = self.take(row.key), self.take(row.value)
            found.append((key, split(value) if self.every else value))
        return found or None

    def take(self, span):
        data, own = span_bytes(span)
        if not own:  # it lies in a page, and must stay as it is until the scan is closed
            self.kept.append((span.address, data))
        return data

    def close(self):
        """Closing twice is fine here."""
        if self.pointer is not None:
            for address, data in self.kept:
                assert bytes_at(address, len(data)) == data
            lib.quire_scan_close(self.pointer)
            self.pointer = None


def drained(scan, most=16):
    rows = []
    while (found := scan.next(most)) is not None:
        rows += found
    return rows


class FamilyMachine(RuleBasedStateMachine):
    @initialize(page_size=PAGE_SIZES, ordered=st.booleans())
    def start(self, page_size, ordered):
        self.ordered = ordered
        self.stack = contextlib.ExitStack()
        self.pm = self.stack.enter_context(quire.PageManager(page_size=page_size))
        self.family = self.stack.enter_context(Family(self.pm, "it", ordered))
        self.model = {}
        self.scans = []

    def teardown(self):
        if hasattr(self, "stack"):
            self.pm.check()
            self.stack.close()

    def expected(self, model, lo=None, hi=None, every=False):
        rows = [
            (key, list(values) if every else values[0])
            for key, values in model.items()
            if (lo is None or key >= lo) and (hi is None or key < hi)
        ]
        return sorted(rows)

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        self.family.put(key, value)
        self.model[key] = [value]

    @rule(keys=st.lists(KEYS, max_size=40), value=VALUES)
    def put_many(self, keys, value):
        for key in keys:
            self.put(key, value)

    @rule(key=KEYS, values=st.lists(VALUES, min_size=1, max_size=4))
    def append(self, key, values):
        for value in values:
            self.family.append(key, value)
            self.model.setdefault(key, []).append(value)

    @rule(key=KEYS)
    def remove(self, key):
        self.family.remove(key)
        self.model.pop(key, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_present(self, data):
        self.remove(data.draw(st.sampled_from(sorted(self.model))))

    @precondition(lambda self: self.ordered)
    @rule(lo=st.none() | KEYS, hi=st.none() | KEYS)
    def remove_range(self, lo, hi):
        self.family.remove_range(lo, hi)
        for key, _ in self.expected(self.model, lo, hi):
            del self.model[key]

    @rule(key=KEYS)
    def look_up(self, key):
        values = self.model.get(key)
        assert self.family.get(key) == (values[0] if values else None)
        assert self.family.get_all(key) == values
        assert self.family.contains(key) == (key in self.model)
        assert len(self.family) == len(self.model)

    @rule(keys=st.lists(KEYS, max_size=40))
    def look_up_many(self, keys):
        expected = [self.model[key][0] if key in self.model else None for key in keys]
        assert self.family.get_many(keys)[0] == expected

    @precondition(lambda self: len(self.scans) < 4)
    @rule(lo=st.none() | KEYS, hi=st.none() | KEYS, every=st.booleans())
    def open_scan(self, lo, hi, every):
        if not self.ordered:
            lo = hi = None
        self.scans.append((self.family.scan(lo, hi, every), self.expected(self.model, lo, hi, every), []))

    @precondition(lambda self: self.scans)
    @rule(data=st.data(), most=st.integers(1, 20))
    def advance(self, data, most):
        scan, expected, seen = data.draw(st.sampled_from(self.scans))
        rows = scan.next(most)
        if rows is not None:
            seen += rows
            return
        assert (seen if self.ordered else sorted(seen)) == expected
        assert scan.next(most) is None
        self.end(scan)

    @precondition(lambda self: self.scans)
    @rule(data=st.data())
    def drain(self, data):
        scan, expected, seen = data.draw(st.sampled_from(self.scans))
        seen += drained(scan)
        assert (seen if self.ordered else sorted(seen)) == expected
        self.end(scan)

    def end(self, scan):
        scan.close()
        self.scans = [each for each in self.scans if each[0] is not scan]

    @rule()
    def commit_and_read_back(self):
        self.pm.commit()
        with self.pm.snapshot() as snapshot, Family(snapshot, "it", self.ordered) as old:
            assert len(old) == len(self.model)
            assert sorted(drained(old.scan(every=True))) == self.expected(self.model, every=True)
            for key, values in self.model.items():
                assert old.get_all(key) == values
            assert old.get_many(list(self.model))[0] == [values[0] for values in self.model.values()]


TestFamilyMachine = FamilyMachine.TestCase


@pytest.fixture(params=[False, True], ids=["map", "ordered"])
def ordered(request):
    return request.param


@pytest.mark.parametrize("size", [0, 1, 200, 1000, 5000, 100_000])
def test_a_value_lies_in_a_page_or_is_the_familys_own(pm, page_size, ordered, size):
    value = bytes(range(256)) * (size // 256 + 1)
    with Family(pm, "it", ordered) as family:
        family.put(b"key", value[:size])
        data, own = family.look_up(lib.quire_family_get, b"key")
        assert data == value[:size]
        assert own == (size > page_size)
        family.append(b"key", b"second")
        data, own = family.look_up(lib.quire_family_get_all, b"key")
        assert data == joined([value[:size], b"second"])
        assert not own or size > page_size // 8


def test_many_keys_are_looked_up_in_one_call(pm, page_size, ordered):
    large = b"v" * (2 * page_size)
    with Family(pm, "it", ordered) as family:
        model = {b"%04d" % number: b"%d" % number for number in range(0, 1000, 2)}
        family.put_many(list(model.items()))
        keys = [b"%04d" % number for number in range(1000)]
        assert family.get_many(keys) == ([model.get(key) for key in keys], 1)
        assert family.get_many([]) == ([], 0)
        # A value that does not lie in a page is given by itself, as the last of a call.
        for key in (keys[10], keys[998]):
            family.put(key, large)
            model[key] = large
        assert family.get_many(keys) == ([model.get(key) for key in keys], 3)


def test_a_scan_gives_many_rows_a_call(pm, ordered):
    with Family(pm, "it", ordered) as family:
        for number in range(1000):
            family.put(b"%04d" % number, b"" if number % 2 else b"v")
        scan = family.scan()
        assert [len(scan.next(300)) for _ in range(4)] == [300, 300, 300, 100]
        assert scan.next(300) is None
        one = family.scan()
        family.put(b"0500", b"v" * 100_000)
        assert sorted(drained(one, 1000)) == [(b"%04d" % n, b"" if n % 2 else b"v") for n in range(1000)]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64])
@pytest.mark.parametrize("size", [0, 1, 100, 240, 241, 250, 5000, 8000, 8180, 9000])
def test_short_scans_are_as_long_ones(pm, ordered, count, size):
    """Those of few rows are copied, with an end to rows and to bytes; writes and the family's close change nothing."""
    with Family(pm, "it", ordered) as family:
        for number in range(count):
            family.put(b"%05d" % number, bytes([number]) * size)
        scans = [family.scan(every=every) for every in (False, True)]
        for number in range(count):
            family.put(b"%05d" % number, b"other")
        for scan, every in zip(scans, (False, True), strict=True):
            rows = [(b"%05d" % number, bytes([number]) * size) for number in range(count)]
            assert sorted(drained(scan, 7)) == [(key, [value] if every else value) for key, value in rows]


def test_a_scan_with_large_values_gives_each_before_the_next_overwrites_it(pm, ordered):
    expected = {b"%03d" % number: bytes([number]) * (20_000 if number % 3 == 0 else 5) for number in range(60)}
    expected[b"k" * 9000] = b"long key"
    with Family(pm, "it", ordered) as family:
        for key, value in expected.items():
            family.put(key, value)
        assert dict(drained(family.scan(), 50)) == expected


def test_a_scan_sees_the_family_as_it_was(pm, ordered):
    with Family(pm, "it", ordered) as family:
        for number in range(500):
            family.put(b"%03d" % number, b"%d" % number * 20)
        scan = family.scan()
        rows = scan.next(10)
        for number in range(0, 500, 2):
            family.remove(b"%03d" % number)
        family.put(b"new", b"x")
        pm.commit()
        rows += drained(scan)
        assert sorted(rows) == [(b"%03d" % number, b"%d" % number * 20) for number in range(500)]
        pm.abort()
        scan.close()
        assert len(drained(family.scan())) == 251


@given(lo=st.none() | KEYS, hi=st.none() | KEYS, keys=st.lists(KEYS, max_size=30, unique=True))
def test_bounds_are_half_open(lo, hi, keys):
    with quire.PageManager(page_size=1024) as pm, Family(pm, "it", True) as family:
        for key in keys:
            family.put(key, b"v")
        inside = sorted(key for key in keys if (lo is None or key >= lo) and (hi is None or key < hi))
        assert [key for key, _ in drained(family.scan(lo, hi))] == inside
        family.remove_range(lo, hi)
        assert sorted(key for key, _ in drained(family.scan())) == sorted(set(keys) - set(inside))


def test_what_is_refused(pm, ordered):
    pm.commit()
    with pm.snapshot() as empty, pytest.raises(quire.NotFoundError):
        Family(empty, "it", ordered)
    with Family(pm, "it", ordered) as family:
        family.put(b"a", b"1")
        with pytest.raises(quire.MismatchError):
            Family(pm, "it", not ordered)
        if not ordered:
            with pytest.raises(quire.InvalidError, match="unordered"):
                family.scan(b"a")
            with pytest.raises(quire.InvalidError, match="ordered"):
                family.remove_range(b"a", b"b")
        pm.commit()
        with pm.snapshot() as snapshot, Family(snapshot, "it", ordered) as old:
            for write in (lambda: old.put(b"a", b"2"), lambda: old.append(b"a", b"2"), lambda: old.remove(b"a")):
                with pytest.raises(quire.ReadOnlyError):
                    write()
            pm.destroy("it")
            with pytest.raises(quire.ClosedError):
                family.get(b"a")
            assert old.get(b"a") == b"1"
    lib.quire_family_close(ffi.NULL)
    lib.quire_scan_close(ffi.NULL)


def test_families_follow_a_restore(pm, ordered):
    with Family(pm, "it", ordered) as family:
        family.put(b"a", b"1")
        pm.commit()
        with pm.snapshot() as first:
            family.put(b"a", b"2" * 9000)
            pm.commit()
            scan = family.scan()
            pm.restore(first)
            assert family.get(b"a") == b"1"
            family.put(b"b", b"3")
            assert drained(scan) == [(b"a", b"2" * 9000)]
            scan.close()
            assert sorted(drained(family.scan())) == [(b"a", b"1"), (b"b", b"3")]


@pytest.mark.parametrize("ordered", [False, True])
def test_many_puts_at_once_are_made_in_their_order(pm, ordered):
    random = Random(4)
    with Family(pm, "many", ordered) as family:
        model = {}
        for count in (0, 1, 64, 500):
            pairs = [
                (b"%d" % random.randrange(200), random.randbytes(random.choice([0, 8, 40, 9000]))) for _ in range(count)
            ]
            family.put_many(pairs)
            model.update(pairs)
            assert len(family) == len(model)
            assert all(family.get(key) == value for key, value in model.items())


@pytest.mark.parametrize("made_ordered", [False, True])
def test_an_empty_family_of_the_other_order_does_not_stand_in_the_way(made_ordered):
    with quire.PageManager() as pm:
        with Family(pm, "default", made_ordered):
            pm.commit()
        with pm.snapshot() as snapshot, pytest.raises(KeyError):
            Family(snapshot, "default", not made_ordered)
        with Family(pm, "default", not made_ordered) as family:
            family.put(b"key", b"value")
            pm.commit()
        with pm.snapshot() as snapshot:
            with Family(snapshot, "default", not made_ordered) as family:
                assert family.get(b"key") == b"value"
            with pytest.raises(quire.QuireError, match="open it as what it was made"):
                Family(snapshot, "default", made_ordered)
        with pytest.raises(quire.QuireError, match="open it as what it was made"):
            Family(pm, "default", made_ordered)
