"""Typed records: rows of Arrow types as the bytes that maps keep.

A ``Schema`` says which columns a map's keys and values have. It turns whole Arrow batches into arrays of bytes and
back in C (``rowcodec.c``), without a Python object per record; ``docs/typed-records.md`` gives every byte. Bytes of
keys sort as the rows do, so an ordered map with a schema is ordered by its columns.
"""

import datetime
import decimal
import math
import struct
from array import array as Numbers
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire._native import ffi, lib
from quire.pagemgr.errors import CorruptError, InvalidError, QuireError, check, shown
from quire.structures.arrow import Column, Rows
from quire.structures.ddl import parse

# What says the columns of a key or value: DDL text, an Arrow schema, one type, {name: type}, or [(name, type), ...].
ColumnsLike: TypeAlias = Any
# Rows in bulk: a record batch or table, a struct array, arrays by name or in order; for one column its array.
RowsLike: TypeAlias = Any

FORMAT_VERSION = 1
HEADER = struct.Struct("<4sII")  # magic, format version, bytes of the key part
MAGIC = b"QSCH"


class Schema:
    """The columns of a map's keys and values, in Arrow types.

    ``key`` and ``value`` are each an Arrow schema, a dict of names and types, a list of (name, type) pairs, a single
    type, or columns or a type as Spark writes them (``"user string, n bigint not null"``). With one column, rows are
    plain values and bulk data is an array; with several, keys are tuples, values are dicts and bulk data is a record
    batch. No name may be in both the key and the value.

    >>> import pyarrow as pa
    >>> import quire
    >>> schema = quire.Schema(key={"user": pa.string(), "day": pa.date32()}, value=pa.int64())
    >>> keys = pa.record_batch({"user": ["bo", "al"], "day": pa.array([19000, 19001], pa.date32())})
    >>> encoded = schema.encode_keys(keys)
    >>> schema.decode_keys(encoded).equals(keys)
    True
    >>> encoded[0].as_py().startswith(schema.prefix_bytes("bo"))
    True
    >>> schema.value_from_bytes(schema.value_bytes(7))
    7
    >>> quire.Schema(key="user string, day date", value="bigint") == schema
    True
    """

    def __init__(self, key: ColumnsLike, value: ColumnsLike) -> None:
        self._key = Columns("key", key, ordered=True)
        self._value = Columns("value", value, ordered=False)
        shared = [name for name in self.key.names if name and name in self.value.names]
        if shared:
            raise InvalidError(f"columns {shared} are in both the key and the value: give each a name of its own")
        self._prefixes: dict[int, Columns] = {}

    @property
    def key(self) -> pa.Schema:
        """The columns of keys."""
        return self._key.schema

    @property
    def value(self) -> pa.Schema:
        """The columns of values."""
        return self._value.schema

    def encode_keys(self, rows: RowsLike) -> pa.BinaryArray:
        """The rows as bytes that sort as they do; large_binary from 2 GiB on.

        ``rows`` is a record batch, table or struct array (columns by name), a dict of arrays, or a list of arrays in
        order; with one column it may be that column's array. Types are cast where nothing is lost.

        >>> import pyarrow as pa
        >>> import quire
        >>> schema = quire.Schema(key=pa.int16(), value=pa.null())
        >>> [key.hex() for key in schema.encode_keys(pa.array([-1, 0, 1])).to_pylist()]
        ['017fff', '018000', '018001']
        """
        return self._key.encode(rows)

    def decode_keys(self, encoded: pa.Array) -> pa.RecordBatch | pa.Array:
        """The rows that ``encode_keys`` was given: an array if there is one column, else a record batch.

        Null rows give nulls in every column. Raises ``CorruptError`` for bytes that this schema did not encode.
        """
        return self._key.decode(encoded)

    def encode_values(self, rows: RowsLike) -> pa.BinaryArray:
        """The rows as short bytes, in no order. See ``encode_keys``."""
        return self._value.encode(rows)

    def decode_values(self, encoded: pa.Array) -> pa.RecordBatch | pa.Array:
        """The rows that ``encode_values`` was given. See ``decode_keys``."""
        return self._value.decode(encoded)

    def key_bytes(self, row: Any) -> bytes:
        """One key as bytes: a plain value if there is one column, else a tuple in order or a dict by name."""
        return self._key.pack(row)

    def key_from_bytes(self, encoded: bytes) -> Any:
        """The key again: a plain value if there is one column, else a tuple.

        A time that Python's datetime cannot hold, such as one with nanoseconds, is an ``InvalidError``: read it in
        bulk, as Arrow.
        """
        values = self._key.unpack(encoded)
        return values[0] if self._key.single else values

    def value_bytes(self, row: Any) -> bytes:
        """One value as bytes: a plain value if there is one column, else a dict by name or a tuple in order."""
        return self._value.pack(row)

    def value_from_bytes(self, encoded: bytes) -> Any:
        """The value again: a plain value if there is one column, else a dict. See ``key_from_bytes``."""
        values = self._value.unpack(encoded)
        return values[0] if self._value.single else dict(zip(self._value.schema.names, values, strict=True))

    def prefix_bytes(self, *values: Any, partial: bool = False) -> bytes:
        """What all keys begin with whose leading columns have these values.

        With ``partial``, the last value is text or bytes, and keys count in which that column only begins with it.

        >>> import pyarrow as pa
        >>> import quire
        >>> schema = quire.Schema(key={"user": pa.string(), "item": pa.int32()}, value=pa.null())
        >>> key = schema.key_bytes(("anna", 5))
        >>> key.startswith(schema.prefix_bytes("anna")), key.startswith(schema.prefix_bytes("an"))
        (True, False)
        >>> key.startswith(schema.prefix_bytes("an", partial=True))
        True
        """
        count = len(values)
        if not 1 <= count <= len(self.key):
            raise InvalidError(f"a prefix takes 1 to {len(self.key)} leading key columns, not {count} values")
        columns = self._prefixes.get(count)
        if columns is None:
            columns = Columns("key", pa.schema(list(self.key)[:count]), ordered=True)
            self._prefixes[count] = columns
        encoded = columns.pack(values[0] if count == 1 else values)
        if not partial:
            return encoded
        field = self.key.field(count - 1)
        if family(field.type) not in ("text", "bytes") or values[-1] is None:
            raise InvalidError(
                f"a partial prefix ends in text or bytes; {columns.called(field)} is {field.type} and was given "
                f"{values[-1]!r}"
            )
        return encoded[:-1]  # without the byte that ends the text

    def to_bytes(self) -> bytes:
        """The schema itself as bytes: a header, then the Arrow IPC messages of key and value.

        >>> import pyarrow as pa
        >>> import quire
        >>> schema = quire.Schema(key=pa.string(), value={"count": pa.int64()})
        >>> quire.Schema.from_bytes(schema.to_bytes()) == schema
        True
        """
        key, value = (bytes(part.schema.serialize()) for part in (self._key, self._value))
        return HEADER.pack(MAGIC, FORMAT_VERSION, len(key)) + key + value

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "Schema":
        """The schema that ``to_bytes`` was called on."""
        try:
            magic, version, key_bytes = HEADER.unpack_from(encoded)
            if magic != MAGIC or version != FORMAT_VERSION:
                raise CorruptError(f"a schema opens with {MAGIC!r} and version {FORMAT_VERSION}, not {encoded[:8]!r}")
            middle = HEADER.size + key_bytes
            parts = [encoded[HEADER.size : middle], encoded[middle:]]
            key, value = (pa.ipc.read_schema(pa.py_buffer(part)) for part in parts)
        except (struct.error, pa.ArrowException, OSError, EOFError) as error:
            raise CorruptError(f"these {len(encoded)} bytes are no schema: {error}") from error
        return cls(key, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return bool(self.key.equals(other.key) and self.value.equals(other.value))

    def __hash__(self) -> int:
        return hash((str(self.key), str(self.value)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"Schema(key={self._key!r}, value={self._value!r})"


class Columns:
    """The columns of a key or of a value, with their codec. Internal; users meet ``Schema``."""

    def __init__(self, part: str, columns: ColumnsLike, ordered: bool) -> None:
        self.part = part
        self.schema = as_schema(part, columns)
        self.single = len(self.schema) == 1
        self._struct = pa.struct(list(self.schema))
        self._names = {name: index for index, name in enumerate(self.schema.names)}
        self._codec = make_codec(self.schema, ordered)
        self._packer, self._unpacker = key_row(self.schema) if ordered else value_row(self.schema)

    def __repr__(self) -> str:
        def shown(field: pa.Field) -> str:
            return f"{field.type}" if field.nullable else f"{field.type} not null"

        if self.schema.names == [""]:
            return shown(self.schema.field(0))
        return "{" + ", ".join(f"{field.name!r}: {shown(field)}" for field in self.schema) + "}"

    def called(self, field: pa.Field) -> str:
        """How messages name a column."""
        return f"column {field.name!r} of the {self.part}" if field.name else f"the {self.part}"

    def _check(self, code: int) -> None:
        """As check(), with a name for the one column that has none."""
        try:
            check(code)
        except QuireError as error:
            error.args = (str(error).replace("column ''", f"the {self.part}"),)
            raise

    # -------------------------------------------------------------------------------- bulk

    def arrays(self, rows: RowsLike) -> list[pa.Array]:
        """The columns of rows in the declared types."""
        arrays = [self._cast(field, array) for field, array in zip(self.schema, self._split(rows), strict=True)]
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            raise InvalidError(f"the columns of the {self.part} differ in length: {sorted(lengths)}")
        return arrays

    def encode(self, rows: RowsLike) -> pa.Array:
        """Rows to an array of bytes."""
        batch = pa.RecordBatch.from_arrays(self.arrays(rows), schema=self.schema)
        exported = ffi.new("struct ArrowArray *")
        batch._export_to_c(address(exported))
        column = Column()
        try:
            self._check(lib.quire_codec_encode(self._codec, exported, column.pointer))
        finally:
            exported.release(exported)
        return column.to_array()

    def decode(self, encoded: pa.Array) -> Any:
        """An array of bytes to rows."""
        rows = encoded_rows(self.part, encoded)
        made = ffi.new("struct ArrowArray *")
        self._check(lib.quire_codec_decode(self._codec, rows.pointer, made))
        array = pa.Array._import_from_c(address(made), self._struct)
        fields = list(self.schema)
        if array.null_count == 0:
            arrays = [array.field(index) for index in range(len(fields))]
        else:
            arrays = array.flatten()
            fields = [field.with_nullable(True) for field in fields]
        return arrays[0] if self.single else pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _split(self, rows: RowsLike) -> list[Any]:
        """The columns of rows, in this schema's order."""
        if isinstance(rows, (pa.RecordBatch, pa.Table)):
            return self._by_name({name: rows.column(index) for index, name in enumerate(rows.schema.names)})
        if isinstance(rows, Mapping):
            return self._by_name(rows)
        if self.single:
            return [rows]
        if isinstance(rows, pa.StructArray):
            return self._by_name(dict(zip([field.name for field in rows.type], rows.flatten(), strict=True)))
        if not isinstance(rows, (list, tuple)) or len(rows) != len(self.schema):
            given = rows.type if isinstance(rows, (pa.Array, pa.ChunkedArray)) else type(rows).__name__
            raise InvalidError(
                f"the {self.part} has {len(self.schema)} columns {self.schema.names}: pass a record batch, a dict of "
                f"arrays, or a list of {len(self.schema)} arrays in that order, not {given}"
            )
        return list(rows)

    def _by_name(self, rows: Mapping[str, Any]) -> list[Any]:
        if rows.keys() != self._names.keys():
            missing = [name for name in self._names if name not in rows]
            unknown = [name for name in rows if name not in self._names]
            raise InvalidError(
                f"the {self.part} has the columns {self.schema.names}; missing here: {missing}, not known: {unknown}"
            )
        return [rows[name] for name in self._names]

    def _cast(self, field: pa.Field, array: Any) -> pa.Array:
        """The column as an array of the declared type, if that takes nothing away from it."""
        try:
            if not isinstance(array, (pa.Array, pa.ChunkedArray)):
                array = objects_as_array(array, field.type)
            if isinstance(array, pa.ChunkedArray):
                array = array.combine_chunks()
            given = array.type
            if given == field.type:
                return array
            if pa.types.is_dictionary(given):
                array = array.dictionary_decode()
            if not may_cast(array.type, field.type):
                raise TypeError("the types are of different families")
            cast = array.cast(field.type)
            if pa.types.is_floating(field.type) and pa.types.is_floating(array.type):
                same = pc.or_(pc.equal(cast.cast(array.type), array), pc.is_nan(array))
                if not pc.all(same, min_count=0).as_py():
                    raise ValueError("digits would be lost")
            return cast
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            shown = array.type if isinstance(array, (pa.Array, pa.ChunkedArray)) else type(array).__name__
            raise InvalidError(
                f"{self.called(field)} is {field.type}; the {shown} given cannot become that without loss: {error}"
            ) from error

    def bound(self, bound: Any, column: str | None) -> tuple[int, pa.Scalar]:
        """The place of the column of that name, or of the only one, and what its values are compared with."""
        names = self.schema.names
        if column not in names and (column is not None or not self.single):
            raise InvalidError(f"column {column!r}: give one of the columns of the {self.part}, {names}")
        index = 0 if column is None else names.index(column)
        field = self.schema.field(index)
        limit = self._one(field, bound)[0]
        try:
            if limit.is_valid and pc.less(limit, limit) is not None:
                return index, limit
        except pa.ArrowException as error:
            raise InvalidError(f"{self.called(field)} is {field.type}, which has no order here: {error}") from error
        raise InvalidError(f"{self.called(field)}: give a bound that is not null")

    # -------------------------------------------------------------------------------- one row

    def pack(self, row: Any) -> bytes:
        """One row to bytes."""
        values = self.values(row)
        if self._packer is not None:
            encoded = self._packer(values)
            if encoded is not None:
                return encoded
        arrays = [self._one(field, value) for field, value in zip(self.schema, values, strict=True)]
        packed: bytes = self.encode(dict(zip(self.schema.names, arrays, strict=True)))[0].as_py()
        return packed

    def unpack(self, encoded: bytes) -> tuple[Any, ...]:
        """Bytes to the values of one row."""
        if self._unpacker is not None and type(encoded) is bytes:
            values = self._unpacker(encoded)
            if values is not None:
                return values
        rows = self.decode(pa.array([encoded], pa.binary()))
        columns = [rows] if self.single else rows.columns
        return tuple(self._python(field, column[0]) for field, column in zip(self.schema, columns, strict=True))

    def _python(self, field: pa.Field, scalar: pa.Scalar) -> Any:
        try:
            return scalar.as_py()
        except (ValueError, OverflowError) as error:
            raise InvalidError(
                f"{self.called(field)} is {field.type} and holds what no Python object can; read it in bulk, as Arrow "
                f"(get_many, to_batches, range_batches): {error}"
            ) from error

    def values(self, row: Any) -> Sequence[Any]:
        """The values of one row, in order."""
        if self.single:
            return (row,)
        if isinstance(row, Mapping):
            return self._by_name(row)
        if isinstance(row, (tuple, list)) and len(row) == len(self.schema):
            return row
        raise InvalidError(
            f"the {self.part} has {len(self.schema)} columns {self.schema.names}: pass a tuple of as many values or a "
            f"dict, not {shown(row)}"
        )

    def _one(self, field: pa.Field, value: Any) -> pa.Array:
        try:
            return objects_as_array([value], field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidError(
                f"{self.called(field)} is {field.type} and cannot hold {shown(value)} of type {type(value).__name__} "
                f"without loss: {shown(error)}"
            ) from error


# -------------------------------------------------------------------------------- schemas and casts


def as_schema(part: str, columns: ColumnsLike) -> pa.Schema:
    """The Arrow schema behind any way to say it, without metadata and dictionaries."""
    try:
        if isinstance(columns, str):
            columns = parse(columns)
        elif isinstance(columns, pa.DataType):
            columns = pa.schema([("", columns)])
        elif isinstance(columns, Mapping):
            columns = pa.schema(list(columns.items()))
        elif not isinstance(columns, pa.Schema):
            columns = pa.schema(columns)
    except InvalidError as error:
        raise InvalidError(f"the {part} of a schema, {error}") from None
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise InvalidError(
            f"the {part} of a schema is DDL text, a pyarrow.Schema, a pyarrow type, a dict of names and types or a "
            f"list of (name, type), not {columns!r}: {error}"
        ) from error
    names = columns.names
    if not names or len(set(names)) != len(names):
        raise InvalidError(
            f"the {part} of a schema needs at least one column, each with a name of its own, not {names}"
        )
    return pa.schema([field.with_type(plain_type(field.type)).remove_metadata() for field in columns])


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary-encoded column; any other type as it is."""
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


FAMILIES: list[tuple[str, list[Callable[[pa.DataType], bool]]]] = [
    ("integer", [pa.types.is_integer]),
    ("float", [pa.types.is_floating]),
    ("decimal", [pa.types.is_decimal]),
    ("text", [pa.types.is_string, pa.types.is_large_string]),
    ("bytes", [pa.types.is_binary, pa.types.is_large_binary]),
    ("fixed bytes", [pa.types.is_fixed_size_binary]),
    ("date", [pa.types.is_date]),
    ("time", [pa.types.is_time]),
    ("duration", [pa.types.is_duration]),
    ("list", [pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list]),
    ("struct", [pa.types.is_struct]),
]
# A cast that checks its values may go from the first to the second.
CASTS = {
    ("integer", "float"),
    ("integer", "decimal"),
    ("float", "integer"),
    ("text", "bytes"),
    ("fixed bytes", "bytes"),
    ("bytes", "fixed bytes"),
}


def family(data_type: pa.DataType) -> str:
    """Types of one family may be cast to each other; a type without one is a family of its own."""
    if pa.types.is_timestamp(data_type):
        return "timestamp" if data_type.tz is None else "timestamp with zone"
    for name, tests in FAMILIES:
        if any(test(data_type) for test in tests):
            return name
    return {"string_view": "text", "binary_view": "bytes"}.get(str(data_type), str(data_type))


def may_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a user who hands in the one where the other is declared would expect it to work, if no value suffers."""
    if pa.types.is_null(given):
        return True
    pair = family(given), family(wanted)
    if pair == ("list", "list"):
        return may_cast(given.value_type, wanted.value_type)
    if pair == ("struct", "struct"):
        fields = {field.name: field.type for field in given}
        return len(fields) == wanted.num_fields and all(
            field.name in fields and may_cast(fields[field.name], field.type) for field in wanted
        )
    return pair[0] == pair[1] or pair in CASTS


# -------------------------------------------------------------------------------- Python objects
#
# pyarrow turns Python objects into a declared type by any means: it cuts fractions off, drops fields and forgets time
# zones. So objects are looked at first, by the rules that hold for Arrow columns; only floats may be rounded to a
# narrower float, since Python has no other way to write them.

PYTHON_FAMILIES: list[tuple[str, tuple[type, ...]]] = [
    ("bool", (bool, np.bool_)),
    ("duration", (datetime.timedelta, np.timedelta64)),
    ("integer", (int, np.integer)),
    ("float", (float, np.floating)),
    ("decimal", (decimal.Decimal,)),
    ("text", (str,)),
    ("bytes", (bytes, bytearray, memoryview)),
    ("timestamp", (datetime.datetime, np.datetime64)),
    ("date", (datetime.date,)),
    ("time", (datetime.time,)),
    ("struct", (Mapping,)),
    ("list", (Sequence, Set, np.ndarray)),
]
# Where all objects are of these types, pyarrow itself refuses what does not fit.
SAFE: dict[str, set[type]] = {
    "bool": {bool, type(None)},
    "integer": {int, type(None)},
    "decimal": {int, decimal.Decimal, type(None)},
    "text": {str, type(None)},
    "bytes": {bytes, str, type(None)},
    "fixed bytes": {bytes, type(None)},
    "date": {datetime.date, type(None)},
    "double": {float, int, type(None)},
}
UNIT_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def objects_as_array(values: Any, wanted: pa.DataType) -> Any:
    """Python objects as an array of that type, none of them changed; an array of another library as it is."""
    if hasattr(values, "__arrow_array__") or getattr(values, "dtype", None) not in (None, np.dtype(object)):
        return pa.array(values)
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError("this is one object; give a list of them")
    rows = values if isinstance(values, (list, tuple)) else list(values)
    refuse_loss(rows, wanted)
    return pa.array(rows, type=wanted)


def python_family(value: Any) -> str:
    """The family, as of Arrow types, that an object belongs to."""
    for name, types in PYTHON_FAMILIES:
        if isinstance(value, types):
            zoned = isinstance(value, datetime.datetime) and value.utcoffset() is not None
            return "timestamp with zone" if zoned else name
    return type(value).__name__


def refuse_loss(values: Any, wanted: pa.DataType) -> None:
    """Raises ValueError if one of the objects would not come back from that type as it is."""
    kind = "double" if pa.types.is_float64(wanted) else family(wanted)
    if set(map(type, values)) <= SAFE.get(kind, set()):
        return
    for value in values:
        if value is not None and not isinstance(value, pa.Scalar):
            refuse_changed(value, wanted)


def refuse_changed(value: Any, wanted: pa.DataType) -> None:
    """As refuse_loss(), for one object that is not None."""
    if pa.types.is_map(wanted):
        for key, item in value.items() if isinstance(value, Mapping) else list(value):
            refuse_loss([key], wanted.key_type)
            refuse_loss([item], wanted.item_type)
        return
    given, declared = python_family(value), family(wanted)
    if declared == "struct" and isinstance(value, (Mapping, tuple)):
        refuse_struct(value, wanted)
        return
    if given != declared and (given, declared) not in CASTS:
        raise ValueError(f"{value!r} is a {given}, {wanted} a {declared}")
    if declared == "list":
        refuse_loss(value, wanted.value_type)
    elif (declared == "integer" and given == "float" and not float(value).is_integer()) or (
        declared == "float" and not fits_float(value, wanted.bit_width, given)
    ):
        raise ValueError(f"{value!r} would be changed")
    elif declared in ("timestamp", "timestamp with zone", "time", "duration"):
        refuse_time(value, UNIT_NANOSECONDS[wanted.unit])


def refuse_struct(value: Any, wanted: pa.DataType) -> None:
    """As refuse_changed(), for a struct: a dict, in which missing fields are null, or a tuple."""
    names = [field.name for field in wanted]
    if not isinstance(value, Mapping):
        value = dict(zip(names, value, strict=True))
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"the struct has the fields {names}; not known: {unknown}")
    for field in wanted:
        refuse_loss([value.get(field.name)], field.type)


def fits_float(value: Any, bits: int, given: str) -> bool:
    """Whether a number can be that wide a float: an integer exactly, a float rounded but not to infinity."""
    number = float(value)
    if value == value and number != value:
        return False
    code = {16: "<e", 32: "<f", 64: "<d"}[bits]
    try:
        rounded = struct.unpack(code, struct.pack(code, number))[0]
    except OverflowError:
        return False
    return given == "float" or bool(rounded == value)


def refuse_time(value: Any, unit: int) -> None:
    """Raises ValueError if a time has a zone that cannot be kept, or is finer than a unit of so many nanoseconds."""
    if isinstance(value, np.generic):
        return  # pyarrow takes them in the very same unit only
    if isinstance(value, datetime.time) and value.tzinfo is not None:
        raise ValueError(f"{value!r} has a time zone, which would be lost")
    parts = ("microseconds", "nanoseconds") if isinstance(value, datetime.timedelta) else ("microsecond", "nanosecond")
    if (getattr(value, parts[0]) * 1000 + getattr(value, parts[1], 0)) % unit:
        raise ValueError(f"{value!r} is finer than the unit")


# -------------------------------------------------------------------------------- the C side


def address(pointer: Any) -> int:
    """A cffi pointer as the integer that pyarrow takes."""
    return int(ffi.cast("uintptr_t", pointer))


def make_codec(schema: pa.Schema, ordered: bool) -> Any:
    """The C codec, destroyed when no longer referred to."""
    exported = ffi.new("struct ArrowSchema *")
    schema._export_to_c(address(exported))
    codec = ffi.new("quire_codec **")
    try:
        check(lib.quire_codec_create(exported, ordered, codec))
    finally:
        exported.release(exported)
    return ffi.gc(codec[0], lib.quire_codec_destroy)


def encoded_rows(part: str, encoded: Any) -> Rows:
    """A binary array as the C side takes it."""
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    if not isinstance(encoded, (pa.BinaryArray, pa.LargeBinaryArray, pa.FixedSizeBinaryArray)):
        given = encoded.type if isinstance(encoded, pa.Array) else type(encoded).__name__
        raise InvalidError(f"encoded rows of the {part} are an array of binary or large_binary, not {given}")
    return Rows(encoded)


# -------------------------------------------------------------------------------- one row in Python
#
# A single key or value of plain types, or a value with lists of these, is packed here, in a tenth of the time that a
# batch of one row takes through Arrow. These functions know only the plain case and return None for anything else
# (another Python type, a value out of range, bytes that look odd), which then goes the long way and gets its answer or
# its error there. Tests hold them against the C side.

SIGNED = {"int8": "b", "int16": "h", "int32": "i", "int64": "q"}
INTEGERS = SIGNED | {f"u{name}": code.upper() for name, code in SIGNED.items()}
TEXTS = {"string": str, "large_string": str, "binary": bytes, "large_binary": bytes}
TIME = pa.timestamp("us", "UTC")
# In the very zone that Arrow gives.
EPOCH: datetime.datetime = pa.scalar(0, TIME).as_py()
DAY_ZERO = EPOCH.toordinal()
OTHERS = {
    "double": (float, "d"),
    "bool": (bool, "B"),
    str(TIME): (datetime.datetime, "q"),
    "date32[day]": (datetime.date, "i"),
    "null": (type(None), ""),
}


class Plain:
    """A column of a type that Python packs itself. items: of a list, which has no other attributes but nullable."""

    def __init__(self, field: pa.Field) -> None:
        self.nullable: bool = field.nullable
        self.items: Plain | None = None
        if pa.types.is_list(field.type):
            self.items = Plain(field.type.value_field)
            self.text = self.null = False
            return
        name = str(field.type)
        self.python: Any = TEXTS.get(name, OTHERS[name][0] if name in OTHERS else int)
        self.code = INTEGERS.get(name, OTHERS[name][1] if name in OTHERS else "B")
        self.text = name in TEXTS
        self.to_number: Callable[[Any], int] | None
        self.from_number: Callable[[Any], Any]
        self.to_number, self.from_number = NUMBERS.get(name, (None, self.python))
        self.null = name == "null"
        self.width = struct.calcsize("<" + self.code)
        self.bias = 1 << (8 * self.width - 1) if self.code.islower() else 0
        self.unsigned = struct.Struct(">" + ("Q" if name == "double" else self.code.upper()))


def plain_columns(schema: pa.Schema, lists: bool) -> list[Plain] | None:
    """The columns, if Python can pack all of them; lists: those, too."""
    known = {*INTEGERS, *TEXTS, *OTHERS}

    def is_plain(field: pa.Field) -> bool:
        return str(field.type) in known and (field.nullable or field.type != pa.null())

    def is_known(field: pa.Field) -> bool:
        if lists and pa.types.is_list(field.type):
            return is_plain(field.type.value_field) and field.type.value_type != pa.null()
        return is_plain(field)

    return [Plain(field) for field in schema] if all(map(is_known, schema)) else None


RowPacker: TypeAlias = Callable[[Sequence[Any]], bytes | None]
RowUnpacker: TypeAlias = Callable[[bytes], tuple[Any, ...] | None]
RowFunctions: TypeAlias = tuple[RowPacker | None, RowUnpacker | None]


def time_number(time: datetime.datetime) -> int:
    """A time as Arrow stores it."""
    if time.utcoffset() is None:
        raise ValueError  # the long way says that a zone is missing
    since = time - EPOCH
    return (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds


def time_value(number: int) -> datetime.datetime:
    """The time again; OverflowError if Python has none such."""
    return EPOCH + datetime.timedelta(microseconds=number)


def day_number(day: datetime.date) -> int:
    """A date as Arrow stores it."""
    return day.toordinal() - DAY_ZERO


def day_value(number: int) -> datetime.date:
    """The date again; ValueError or OverflowError if Python has none such."""
    return datetime.date.fromordinal(number + DAY_ZERO)


# Both ways, for types whose Python objects are no numbers.
NUMBERS: dict[str, tuple[Callable[[Any], int], Callable[[int], Any]]] = {
    str(TIME): (time_number, time_value),
    "date32[day]": (day_number, day_value),
}


def key_number(column: Plain, value: Any) -> int:
    """The unsigned number that sorts as the value does."""
    if column.to_number is not None:
        return column.to_number(value) + column.bias
    if column.code != "d":
        return int(value) + column.bias
    if value != value:
        raise ValueError  # the long way knows about NaN
    bits: int = struct.unpack(">Q", struct.pack(">d", value + 0.0))[0]
    return bits ^ (0xFFFFFFFFFFFFFFFF if bits >> 63 else 1 << 63)


def key_value(column: Plain, number: int) -> Any:
    """The value again."""
    if column.to_number is not None:
        return column.from_number(number - column.bias)
    if column.code != "d":
        if column.python is bool and number > 1:
            raise ValueError
        return column.python(number - column.bias)
    value: float = struct.unpack(">d", struct.pack(">Q", number ^ (1 << 63 if number >> 63 else 0xFFFFFFFFFFFFFFFF)))[0]
    if value != value or (value == 0.0 and not number >> 63):
        raise ValueError
    return value


def key_row(schema: pa.Schema) -> RowFunctions:
    """Functions that pack and unpack one key of these columns."""
    columns = plain_columns(schema, lists=False)
    if columns is None:
        return None, None

    def pack(values: Sequence[Any]) -> bytes | None:
        parts = []
        try:
            for column, value in zip(columns, values, strict=True):
                if value is None and column.nullable:
                    parts.append(b"\x00")
                    continue
                if type(value) is not column.python:
                    return None
                if column.nullable:
                    parts.append(b"\x01")
                if column.text:
                    raw: bytes = value.encode() if column.python is str else value
                    parts.append(raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01"))
                    parts.append(b"\x00")
                else:
                    parts.append(column.unsigned.pack(key_number(column, value)))
        except (struct.error, ValueError):
            return None
        return b"".join(parts)

    def unpack(encoded: bytes) -> tuple[Any, ...] | None:
        at = 0
        values: list[Any] = []
        try:
            for column in columns:
                if column.nullable:
                    marker = encoded[at]
                    at += 1
                    if marker == 0:
                        values.append(None)
                        continue
                    if marker != 1 or column.null:
                        return None
                if column.text:
                    end = encoded.index(0, at)
                    raw = encoded[at:end]
                    if 1 in raw:
                        return None
                    values.append(raw.decode() if column.python is str else raw)
                    at = end + 1
                else:
                    values.append(key_value(column, column.unsigned.unpack_from(encoded, at)[0]))
                    at += column.width
        except (struct.error, ValueError, IndexError, OverflowError):
            return None
        return tuple(values) if at == len(encoded) else None

    return pack, unpack


LENGTH_MAX = 127  # of what a length of one byte is put before


def pack_list(items: Plain, values: Any) -> bytes:
    """A short list without nulls; ValueError or OverflowError for all others."""
    count = len(values) if type(values) is list else LENGTH_MAX + 1
    if count > LENGTH_MAX or not {*map(type, values)} <= {items.python}:
        raise ValueError
    head = bytes((count,)) + bytes((count + 7) // 8 if items.nullable else 0)
    if items.text:
        raws = [value.encode() for value in values] if items.python is str else values
        if any(len(raw) > LENGTH_MAX for raw in raws):
            raise ValueError
        return head + b"".join([bytes((len(raw),)) + raw for raw in raws])
    if items.code == "d" and any(value != value for value in values):
        raise ValueError
    numbers = values if items.to_number is None else map(items.to_number, values)
    return head + Numbers(items.code, numbers).tobytes()


def unpack_list(items: Plain, encoded: bytes, at: int) -> tuple[list[Any], int]:
    """The list again, and where it ends."""
    count = encoded[at]
    start = at + 1 + ((count + 7) // 8 if items.nullable else 0)
    if count > LENGTH_MAX or any(encoded[at + 1 : start]):
        raise ValueError
    if not items.text:
        end = start + count * items.width
        if end > len(encoded):
            raise ValueError
        numbers = Numbers(items.code, encoded[start:end])
        if items.python is bool and any(number > 1 for number in numbers):
            raise ValueError
        if items.code == "d" and any(number != number for number in numbers):
            raise ValueError
        found = numbers.tolist()
        return (found if items.python in (int, float) else [*map(items.from_number, found)]), end
    raws = []
    for _ in range(count):
        end = start + 1 + encoded[start]
        if encoded[start] > LENGTH_MAX or end > len(encoded):
            raise ValueError
        raws.append(encoded[start + 1 : end])
        start = end
    return [raw.decode() for raw in raws] if items.python is str else raws, start


def value_row(schema: pa.Schema) -> RowFunctions:
    """Functions that pack and unpack one value of these columns."""
    columns = plain_columns(schema, lists=True)
    if columns is None:
        return None, None
    bit_count = sum(column.nullable for column in columns)
    bit_bytes = (bit_count + 7) // 8
    fixed = struct.Struct("<" + "".join(column.code for column in columns if not (column.text or column.items)))
    head_bytes = bit_bytes + fixed.size

    def pack(values: Sequence[Any]) -> bytes | None:
        bits, bit = 0, 1
        numbers: list[Any] = []
        texts: list[bytes] = []
        try:
            for column, value in zip(columns, values, strict=True):
                if value is None:
                    if not column.nullable:
                        return None
                    bits |= bit
                    if not (column.text or column.null or column.items):
                        numbers.append(0)
                elif column.items is not None:
                    texts.append(pack_list(column.items, value))
                elif type(value) is not column.python or value != value:
                    return None
                elif column.text:
                    raw: bytes = value.encode() if column.python is str else value
                    if len(raw) > LENGTH_MAX:
                        return None
                    texts.append(bytes((len(raw),)))
                    texts.append(raw)
                else:
                    numbers.append(value if column.to_number is None else column.to_number(value))
                bit <<= column.nullable
            return b"".join((bits.to_bytes(bit_bytes, "little"), fixed.pack(*numbers), *texts))
        except (struct.error, ValueError, OverflowError):
            return None

    def unpack(encoded: bytes) -> tuple[Any, ...] | None:
        bits = int.from_bytes(encoded[:bit_bytes], "little")
        if bits >> bit_count or len(encoded) < head_bytes:
            return None
        at = head_bytes
        values: list[Any] = []
        try:
            numbers = iter(fixed.unpack_from(encoded, bit_bytes))
            for column in columns:
                null = column.nullable and bits & 1
                bits >>= column.nullable
                if column.null:
                    if not null:
                        return None
                    values.append(None)
                elif column.items is not None:
                    found = None
                    if not null:
                        found, at = unpack_list(column.items, encoded, at)
                    values.append(found)
                elif not column.text:
                    number = next(numbers)
                    odd = number != 0 or math.copysign(1, number) < 0 if null else number != number
                    if odd or (column.python is bool and number > 1):
                        return None
                    values.append(None if null else column.from_number(number))
                elif null:
                    values.append(None)
                else:
                    end = at + 1 + encoded[at]
                    if encoded[at] > LENGTH_MAX or end > len(encoded):
                        return None
                    raw = encoded[at + 1 : end]
                    values.append(raw.decode() if column.python is str else raw)
                    at = end
        except (struct.error, ValueError, IndexError, OverflowError):
            return None
        return tuple(values) if at == len(encoded) else None

    return pack, unpack
