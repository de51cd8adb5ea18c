"""What changed between two states of an arena's maps and sequences, as bytes; and those bytes applied to another arena.

A delta is a list of payloads, each of which can be read alone. ``delta.h`` says how their bytes lie.
"""

from collections.abc import Collection, Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quire._native import ffi, lib
from quire.pagemgr.callbacks import STOP, collect, keep_error
from quire.pagemgr.errors import CorruptError, InvalidError, check
from quire.pagemgr.page_manager import Arena, ArenaSnapshot
from quire.structures.maps import split_values


class Op(IntEnum):
    """What a record does to a key. ``PUT_ALL`` replaces its values by several, ``PUT`` by one; ``APPEND`` adds to them;
    ``PATCH`` changes parts of its one value.

    ``OPEN`` and ``CHECK`` stand in logs: a key that is new, and one that did not change but is written again.
    ``SPLICE`` is of lists and deques: some records in place of others.
    """

    FAMILY = lib.QUIRE_DELTA_FAMILY
    DROP = lib.QUIRE_DELTA_DROP
    PUT = lib.QUIRE_DELTA_PUT
    PUT_ALL = lib.QUIRE_DELTA_PUT_ALL
    REMOVE = lib.QUIRE_DELTA_REMOVE
    APPEND = lib.QUIRE_DELTA_APPEND
    PATCH = lib.QUIRE_DELTA_PATCH
    OPEN = lib.QUIRE_DELTA_OPEN
    CHECK = lib.QUIRE_DELTA_CHECK
    SPLICE = lib.QUIRE_DELTA_SPLICE


@dataclass(frozen=True)
class Patch:
    """How one value became another: the old bytes at the same places, but for some pieces.

    count   bytes of the new value.
    pieces  where in it each piece lies, and its bytes; in order.

    >>> Patch(5, ((1, b"xy"),)).apply(b"abcdefgh")
    b'axyde'
    """

    count: int
    pieces: tuple[tuple[int, bytes], ...]

    def apply(self, older: bytes) -> bytes:
        """What becomes of the value that it was made from; ``CorruptError`` for one that is too short to be that."""
        value, at = bytearray(), 0
        for start, piece in (*self.pieces, (self.count, b"")):
            value += older[at:start] + piece
            at = start + len(piece)
        if len(value) != self.count:
            raise CorruptError(f"a patch keeps more bytes than the old value has, of which there are {len(older)}")
        return bytes(value)


@dataclass(frozen=True)
class Splice:
    """Where in a sequence some records make room for others.

    position  how many records lie before them; removed: how many they are; behind: how many lie behind them.

    >>> records = [b"a", b"b", b"c", b"d"]
    >>> Splice(position=1, removed=2, behind=1).apply(records, [b"x"])
    >>> records
    [b'a', b'x', b'd']
    """

    position: int
    removed: int
    behind: int

    def apply(self, records: MutableSequence[bytes], values: Iterable[bytes]) -> None:
        """Puts the values in the place of what is removed; ``CorruptError`` for records that it was not made from."""
        if self.position + self.removed + self.behind != len(records):
            raise CorruptError(f"{self} was made from another sequence than one of {len(records)} records")
        records[self.position : self.position + self.removed] = values


@dataclass(frozen=True)
class Record:
    """One record of a delta.

    family    the map or sequence it belongs to, or that it makes (``FAMILY``) or drops (``DROP``).
    ordered   whether that is an ordered map; False for a dropped one, whatever it was.
    key       empty in records that name a family, and in ``SPLICE``.
    values    what the key has from then on, or has besides (``APPEND``); none in ``REMOVE`` and ``PATCH``, and where a
              family is named. Of a ``SPLICE``, the records that are put in, which may be none.
    patch     what is new in the key's value (``PATCH``); else None.
    splice    where the values go (``SPLICE``); else None.
    sequence  whether the family is a list or deque; False for a dropped one.
    """

    op: Op
    family: str
    ordered: bool
    key: bytes = b""
    values: tuple[bytes, ...] = ()
    patch: Patch | None = None
    splice: Splice | None = None
    sequence: bool = False


@ffi.def_extern(name="quire_python_take_payload", error=STOP, onerror=keep_error)  # type: ignore[untyped-decorator]
def take_payload(context: Any, payload: Any, count: int) -> int:
    """Collects one payload."""
    return ffi.from_handle(context).add(lambda: bytes(ffi.buffer(payload, count)))  # type: ignore[no-any-return]


def write(arena: Arena, older: ArenaSnapshot | None = None, lists: Collection[str] = ()) -> list[bytes]:
    """What changed from an older snapshot of the arena (None: from nothing) to its state being written, as payloads.

    Nothing changed gives no payloads. The cost follows the changes, not the size. A state with raw pages is refused.
    Of the maps named in lists, where a key's old values begin its new ones, only those behind them are written. Of a
    long value that replaces another one, only what differs is written where that is less.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     users = pm.map("users")
    ...     users[b"alice"] = b"1"
    ...     epoch = pm.commit()
    ...     with pm.snapshot() as older:
    ...         users[b"bob"] = b"2"
    ...         [record.key for payload in write(pm, older) for record in records(payload) if record.values]
    [b'bob']
    """
    names = _names(lists)
    if older is None:
        with arena._lock:
            return _write(arena, ffi.NULL, names)
    if not isinstance(older, ArenaSnapshot):
        raise InvalidError(f"changes since what? give an older snapshot of the arena, not {type(older).__name__}")
    with older._handle.gate, arena._lock:
        return _write(arena, older._handle.pointer, names)


def _names(lists: Any) -> list[Any]:
    if isinstance(lists, str) or not all(isinstance(name, str) for name in lists):
        raise InvalidError(f"lists {lists!r}: give the names of maps, as a list of str")
    return [ffi.new("char[]", name.encode("utf-8", "surrogatepass")) for name in lists]


def _write(arena: Arena, older: Any, names: list[Any]) -> list[bytes]:
    pointer, take = arena._live(), lib.quire_python_take_payload
    lists = ffi.new("char *[]", names)
    return collect(lambda context: lib.quire_delta_write(pointer, older, lists, len(names), take, context))


def apply(arena: Arena, payload: bytes) -> None:
    """Does what one payload says to the state being written, which must be the one that the delta starts from.

    After a ``CorruptError`` what came before the bad record has been done: abort the arena.

    >>> import quire
    >>> with quire.PageManager() as pm, quire.PageManager() as other:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     for payload in write(pm):
    ...         apply(other, payload)
    ...     other.map("users")[b"alice"]
    b'1'
    """
    data = _payload(payload)
    with arena._lock:
        check(lib.quire_delta_apply(arena._live(), data, len(data)))


def records(payload: bytes) -> Iterator[Record]:
    """The records of one payload, in order; ``CorruptError`` at one that makes no sense.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     pm.map("users")[b"alice"] = b"1"
    ...     for payload in write(pm):
    ...         for record in records(payload):
    ...             print(record.op.name, record.family, record.key, record.values)
    FAMILY users b'' ()
    PUT users b'alice' (b'1',)
    """
    data = _payload(payload)
    start = ffi.from_buffer("uint8_t[]", data)  # keeps the bytes that the reader points into
    reader = ffi.new("quire_delta_reader *", {"next": start, "end": start + len(data)})
    found = ffi.new("quire_delta_record *")
    family: Record | None = None
    while (code := lib.quire_delta_next(reader, found)) != lib.QUIRE_E_NOTFOUND:
        check(code)
        record = _record(found, family)
        family = record if record.op == Op.FAMILY else None if record.op == Op.DROP else family
        yield record


def _payload(payload: Any) -> bytes:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidError(
            f"a payload is bytes or bytes-like, not {type(payload).__name__}: give those of write() singly"
        )
    return bytes(payload)


def _record(found: Any, family: Record | None) -> Record:
    op = Op(found.op)
    key = bytes(ffi.buffer(found.key, found.key_bytes)) if found.key_bytes else b""
    if op in (Op.FAMILY, Op.DROP):
        try:
            name = key.decode()
        except UnicodeDecodeError as error:
            raise CorruptError(f"a record of a delta makes no sense: the family's name {key!r} is no UTF-8") from error
        kind = found.kind if op == Op.FAMILY else None
        return Record(op, name, kind == lib.QUIRE_KIND_ORDERED, sequence=kind == lib.QUIRE_KIND_SEQUENCE)
    if family is None:
        raise CorruptError("a record of a delta makes no sense: it belongs to no family")
    if (op == Op.SPLICE) != family.sequence:
        raise CorruptError("a record of a delta makes no sense: only splices are of sequences, and of nothing else")
    value = bytes(ffi.buffer(found.value, found.value_bytes)) if found.value_bytes else b""
    if op == Op.PATCH:
        return Record(op, family.family, family.ordered, key, patch=Patch(found.patched_bytes, _pieces(value)))
    if op == Op.SPLICE:
        splice = Splice(found.position, found.removed, found.behind)
        put_in = tuple(split_values(value, found.value_count))
        return Record(op, family.family, False, values=put_in, splice=splice, sequence=True)
    several = op in (Op.PUT_ALL, Op.APPEND, Op.OPEN, Op.CHECK)
    values = split_values(value, found.value_count) if several else [value] * found.value_count
    return Record(op, family.family, family.ordered, key, tuple(values))


def _pieces(patch: bytes) -> tuple[tuple[int, bytes], ...]:
    """The runs of a patch that quire_delta_next has found good, behind its check of two bytes."""
    pieces, place, next = [], 0, 2
    while next < len(patch):
        kept, next = _varint(patch, next)
        count, next = _varint(patch, next)
        pieces.append((place + kept, patch[next : next + count]))
        place += kept + count
        next += count
    return tuple(pieces)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and where it ends."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
