"""Typed records: what goes in comes out, bytes of keys sort as rows do, and nothing else is accepted."""

import datetime
import decimal
import itertools
import math
import pickle
import re
import struct
import zoneinfo
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import quire
from quire._native import ffi, lib
from quire.structures.arrow import Column
from quire.structures.schema import Columns, address, key_row, value_row

# Types and rows nest deeply, so a slow machine may need a while to draw them.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -------------------------------------------------------------------------------- any schema, any rows


def ints(bits, signed=True):
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, 1, max(low, -1)]))


def decimals(precision, scale):
    top = 10**precision - 1
    context = decimal.Context(prec=100)
    return st.integers(-top, top).map(lambda unscaled: decimal.Decimal(unscaled).scaleb(-scale, context))


TEXT = st.one_of(st.text("ab\x00\x01\x02é€😀", max_size=5), st.text(max_size=20))
BYTES = st.one_of(st.text("a\x00\x01\x02", max_size=5).map(str.encode), st.binary(max_size=20))

LEAVES = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{bits}")(), ints(bits)) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), ints(bits, signed=False)) for bits in (8, 16, 32, 64)),
    (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.date32(), ints(32)),
    (pa.date64(), ints(32).map(lambda days: days * 86_400_000)),
    (pa.time32("s"), st.integers(0, 86_400 - 1)),
    (pa.time32("ms"), st.integers(0, 86_400 * 10**3 - 1)),
    (pa.time64("us"), st.integers(0, 86_400 * 10**6 - 1)),
    (pa.time64("ns"), st.integers(0, 86_400 * 10**9 - 1)),
    (pa.timestamp("s"), ints(64)),
    (pa.timestamp("us", tz="Europe/Berlin"), ints(64)),
    (pa.duration("ms"), ints(64)),
    (pa.decimal128(20, 3), decimals(20, 3)),
    (pa.decimal128(38, 5), decimals(38, 5)),
    (pa.decimal256(60, 10), decimals(60, 10)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.binary(), BYTES),
    (pa.large_binary(), BYTES),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
]


def optional(values, nullable):
    return st.one_of(st.none(), values) if nullable else values


@st.composite
def list_types(draw, inner):
    (item, values), nullable = draw(inner), draw(st.booleans())
    nullable = nullable or pa.types.is_null(item)
    field = pa.field("item", item, nullable=nullable)
    values = optional(values, nullable)
    form = draw(st.sampled_from(["list", "large", "fixed"]))
    if form == "fixed":
        size = draw(st.integers(0, 3))
        return pa.list_(field, size), st.lists(values, min_size=size, max_size=size)
    return (pa.list_ if form == "list" else pa.large_list)(field), st.lists(values, max_size=4)


@st.composite
def struct_types(draw, inner):
    children = draw(st.lists(st.tuples(inner, st.booleans()), min_size=0, max_size=3))
    fields = [
        pa.field(f"f{index}", item, nullable=nullable or pa.types.is_null(item))
        for index, ((item, _), nullable) in enumerate(children)
    ]
    values = {
        field.name: optional(values, field.nullable) for field, ((_, values), _) in zip(fields, children, strict=True)
    }
    return pa.struct(fields), st.fixed_dictionaries(values)


TYPES = st.recursive(
    st.sampled_from(LEAVES), lambda inner: st.one_of(list_types(inner), struct_types(inner)), max_leaves=4
)


@st.composite
def batches(draw, min_rows=0):
    """A record batch of one to three columns of any type."""
    columns = draw(st.lists(st.tuples(TYPES, st.booleans()), min_size=1, max_size=3))
    count = draw(st.integers(min_rows, 6))
    fields, arrays = [], []
    for index, ((data_type, values), nullable) in enumerate(columns):
        nullable = nullable or pa.types.is_null(data_type)
        rows = draw(st.lists(optional(values, nullable), min_size=count, max_size=count))
        fields.append(pa.field(f"c{index}", data_type, nullable=nullable))
        arrays.append(pa.array(rows, data_type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def batch_schema(batch):
    return both_sides(batch.schema)


def both_sides(columns):
    """A schema with the same columns in keys and values, which users may not have."""
    schema = quire.Schema(key=columns, value=pa.null())
    schema._value = Columns("value", columns, ordered=False)
    return schema


# -------------------------------------------------------------------------------- an independent view of arrays


def plain(array):
    """The array as Python values that stand for their bits: floats as unsigned integers, times as signed ones."""
    kind = array.type
    if pa.types.is_struct(kind):
        columns = [plain(child) for child in array.flatten()]
        rows = list(zip(*columns, strict=True)) if columns else [()] * len(array)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        items = iter(plain(array.flatten()))
        lengths = [0 if length is None else length for length in pa.compute.list_value_length(array).to_pylist()]
        rows = [tuple(itertools.islice(items, length)) for length in lengths]
    elif pa.types.is_floating(kind):
        rows = array.view(f"uint{kind.bit_width}").to_pylist()
    elif pa.types.is_temporal(kind):
        rows = array.view(f"int{kind.bit_width}").to_pylist()
    else:
        rows = array.to_pylist()
    return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]


def as_float(kind, bits):
    code, unsigned = {16: "eH", 32: "fI", 64: "dQ"}[kind.bit_width]
    return struct.unpack(code, struct.pack(unsigned, bits))[0]


def order(kind, value):
    """Something Python sorts as keys must: nulls first, NaN last, -0.0 as 0.0, text by its code points."""
    if value is None:
        return (0,)
    if pa.types.is_struct(kind):
        return (1, [order(field.type, child) for field, child in zip(kind, value, strict=True)])
    if isinstance(value, tuple):
        return (1, [order(kind.value_type, item) for item in value])
    if pa.types.is_floating(kind):
        number = as_float(kind, value)
        return (1, (1, 0.0)) if math.isnan(number) else (1, (0, number))
    return (1, value)


def normal(kind, value):
    """The value as a key gives it back."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(normal(field.type, child) for field, child in zip(kind, value, strict=True))
    if isinstance(value, tuple):
        return tuple(normal(kind.value_type, item) for item in value)
    if pa.types.is_floating(kind):
        number = as_float(kind, value)
        nan = {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8000000000000}[kind.bit_width]
        return nan if math.isnan(number) else 0 if number == 0 else value
    return value


def columns_of(rows):
    return rows.columns if isinstance(rows, pa.RecordBatch) else [rows]


def plain_rows(rows):
    return list(zip(*(plain(column) for column in columns_of(rows)), strict=True))


# -------------------------------------------------------------------------------- properties


@patient
@given(batches())
def test_values_come_back_bit_for_bit(batch):
    schema = batch_schema(batch)
    decoded = schema.decode_values(schema.encode_values(batch))
    assert plain_rows(decoded) == plain_rows(batch)
    for column, given_column in zip(columns_of(decoded), batch.columns, strict=True):
        column.validate(full=True)
        assert column.type == given_column.type


@patient
@given(batches())
def test_keys_come_back_with_one_nan_and_one_zero(batch):
    schema = batch_schema(batch)
    decoded = schema.decode_keys(schema.encode_keys(batch))
    types = [field.type for field in batch.schema]
    expected = [tuple(map(normal, types, row)) for row in plain_rows(batch)]
    assert plain_rows(decoded) == expected
    for column in columns_of(decoded):
        column.validate(full=True)


@patient
@given(batches(min_rows=2))
def test_bytes_of_keys_sort_as_the_rows_do(batch):
    keys = batch_schema(batch).encode_keys(batch).to_pylist()
    types = [field.type for field in batch.schema]
    rows = [[order(kind, value) for kind, value in zip(types, row, strict=True)] for row in plain_rows(batch)]
    for (key, row), (other_key, other_row) in itertools.combinations(zip(keys, rows, strict=True), 2):
        assert (key < other_key, key == other_key) == (row < other_row, row == other_row)


@patient
@given(batches())
def test_leading_columns_are_a_prefix_of_the_key(batch):
    keys = batch_schema(batch).encode_keys(batch).to_pylist()
    for count in range(1, batch.num_columns):
        leading = batch.select(list(range(count)))
        prefixes = batch_schema(leading).encode_keys(leading).to_pylist()
        rows = [tuple(map(normal, leading.schema.types, row)) for row in plain_rows(leading)]
        for (prefix, row), (key, other_row) in itertools.product(
            zip(prefixes, rows, strict=True), zip(keys, rows, strict=True)
        ):
            assert key.startswith(prefix) == (row == other_row)


@patient
@given(batches(), st.integers(0, 6), st.integers(0, 6))
def test_slices_encode_as_the_rows_they_show(batch, start, count):
    """Offsets of the columns, of structs around them, and of items below them are all honoured."""
    schema = batch_schema(batch)
    shown = batch.slice(start, count)
    for encode in (schema.encode_keys, schema.encode_values):
        assert encode(shown).to_pylist() == encode(batch).to_pylist()[start : start + count]
    whole = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    wrapped = quire.Schema(key=whole.type, value=whole.type)
    for encode in (wrapped.encode_keys, wrapped.encode_values):
        assert encode(whole.slice(start, count)).to_pylist() == encode(whole).to_pylist()[start : start + count]
        # A struct made of columns that are slices themselves.
        inner = pa.StructArray.from_arrays(shown.columns, fields=list(batch.schema))
        assert encode(inner.slice(1)).to_pylist() == encode(whole).to_pylist()[start : start + count][1:]


@patient
@given(batches(), st.data())
def test_nulls_of_a_struct_hide_what_its_columns_hold(batch, data):
    present = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    mask = pa.array([not flag for flag in present], pa.bool_())
    array = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema), mask=mask)
    schema = quire.Schema(key=array.type, value=array.type)
    assert [plain(schema.decode_values(schema.encode_values(array)))] == [plain(array)]
    keys = schema.encode_keys(array).to_pylist()
    assert [key == b"\x00" for key in keys] == [not flag for flag in present]
    assert [row is None for row in plain(schema.decode_keys(pa.array(keys, pa.binary())))] == [
        not flag for flag in present
    ]


@patient
@given(batches(), st.data())
def test_null_rows_decode_to_nulls(batch, data):
    schema = batch_schema(batch)
    present = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    for encode, decode in ((schema.encode_keys, schema.decode_keys), (schema.encode_values, schema.decode_values)):
        encoded = encode(batch).to_pylist()
        gaps = pa.array([row if flag else None for row, flag in zip(encoded, present, strict=True)], pa.large_binary())
        all_rows, decoded = plain_rows(decode(pa.array(encoded, pa.binary()))), plain_rows(decode(gaps))
        empty = (None,) * batch.num_columns
        assert decoded == [row if flag else empty for row, flag in zip(all_rows, present, strict=True)]


@patient
@given(batches(min_rows=1), st.data())
def test_damaged_bytes_are_refused_or_are_what_encode_writes(batch, data):
    """Whatever decodes, encodes to the same bytes; everything else is an error, never a crash."""
    schema = batch_schema(batch)
    for encode, decode in ((schema.encode_keys, schema.decode_keys), (schema.encode_values, schema.decode_values)):
        row = bytearray(encode(batch).to_pylist()[0])
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(row)))
            cut = data.draw(st.integers(0, 2))
            row[at : at + cut] = data.draw(
                st.one_of(st.binary(max_size=3), st.text("\x00\x01\x02", max_size=2).map(str.encode))
            )
        damaged = pa.array([bytes(row)], pa.binary())
        try:
            decoded = decode(damaged)
        except quire.CorruptError as error:
            assert "row 0" in str(error) and re.search("column|the (key|value) ", str(error))
        else:
            assert encode(list(columns_of(decoded)) if batch.num_columns > 1 else decoded).to_pylist() == [bytes(row)]


@patient
@given(batches(min_rows=1), st.binary(max_size=40))
def test_any_bytes_are_refused_or_are_what_encode_writes(batch, row):
    schema = batch_schema(batch)
    for encode, decode in ((schema.encode_keys, schema.decode_keys), (schema.encode_values, schema.decode_values)):
        try:
            decoded = decode(pa.array([row], pa.binary()))
        except quire.CorruptError:
            continue
        assert encode(list(columns_of(decoded)) if batch.num_columns > 1 else decoded).to_pylist() == [row]


# -------------------------------------------------------------------------------- single rows, in Python and in C

PLAIN = [
    leaf for leaf in LEAVES if str(leaf[0]) in {"bool", "double", "string", "large_string", "binary", "large_binary"}
]
PLAIN += [leaf for leaf in LEAVES if pa.types.is_integer(leaf[0])]
ZONES = [datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-7)), zoneinfo.ZoneInfo("Asia/Kolkata")]
TIMES = st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 1, 1), timezones=st.sampled_from(ZONES))
PLAIN += [(pa.timestamp("us", "UTC"), TIMES), (pa.date32(), st.dates())]
LISTS = [
    (pa.list_(pa.field("item", kind, nullable=nullable)), st.lists(optional(values, nullable), max_size=10))
    for kind, values in PLAIN
    for nullable in (False, True)
]
PLAIN += [(pa.null(), st.none())]


@st.composite
def plain_schemas(draw, kinds):
    columns = draw(st.lists(st.tuples(st.sampled_from(kinds), st.booleans()), min_size=1, max_size=10))
    columns = [(leaf, nullable or leaf[0] == pa.null()) for leaf, nullable in columns]
    fields = [pa.field(f"c{index}", kind, nullable=nullable) for index, ((kind, _), nullable) in enumerate(columns)]
    return pa.schema(fields), tuple(draw(optional(values, nullable)) for (_, values), nullable in columns)


@patient
@given(plain_schemas(PLAIN), plain_schemas(PLAIN + LISTS), st.data())
def test_python_packs_a_row_as_c_does(key, value, data):
    for ordered, functions, (schema, row) in ((True, key_row, key), (False, value_row, value)):
        columns = Columns("key" if ordered else "value", schema, ordered)
        arrays = [pa.array([value], field.type) for field, value in zip(schema, row, strict=True)]
        encoded = columns.encode(dict(zip(schema.names, arrays, strict=True)))[0].as_py()
        pack, unpack = functions(schema)
        assert pack(row) in (None, encoded)
        assert columns.pack(row if len(row) > 1 else row[0]) == encoded
        # Damaged or not, what Python reads is what C reads.
        at = data.draw(st.integers(0, len(encoded)))
        changed = encoded[:at] + data.draw(st.binary(max_size=2)) + encoded[at + data.draw(st.integers(0, 2)) :]
        for read in (encoded, changed):
            values = unpack(read)
            if values is not None:
                decoded = columns_of(columns.decode(pa.array([read], pa.binary())))
                assert repr(values) == repr(tuple(column[0].as_py() for column in decoded))


def test_python_packs_plain_rows_without_help():
    """So that the comparison above compares something."""
    schema = pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float64(), "d": pa.bool_(), "e": pa.binary()})
    row = (-5, "é\x00\x01", -0.0, True, b"x")
    for functions in (key_row, value_row):
        pack, _ = functions(schema)
        assert pack(row) is not None
        pack, unpack = functions(schema)
        assert unpack(pack((-5, "é", 2.5, True, None))) == (-5, "é", 2.5, True, None)
        pack, unpack = functions(pa.schema({"t": pa.timestamp("us", "UTC"), "n": pa.null()}))
        time = datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, datetime.timezone.utc)
        assert unpack(pack((time, None))) == (time, None)
        assert pack((time.replace(tzinfo=None), None)) is None
        pack, unpack = functions(pa.schema({"day": pa.date32()}))
        assert unpack(pack((time.date(),))) == (time.date(),)
    kinds = [(pa.int16(), -5), (pa.string(), "é"), (pa.float64(), -0.0), (pa.bool_(), True), (pa.binary(), b"")]
    for kind, item in [*kinds, (pa.date32(), time.date()), (pa.timestamp("us", "UTC"), time)]:
        pack, unpack = value_row(pa.schema({"list": pa.list_(kind), "n": pa.int8()}))
        for count in (0, 1, 8, 127):
            assert unpack(pack(([item] * count, 7))) == ([item] * count, 7)
        assert unpack(pack((None, 7))) == (None, 7)
        assert pack(([item] * 128, 7)) is None


@patient
@given(batches(min_rows=1))
def test_single_rows_pass_through_the_bulk_path(batch):
    schema = batch_schema(batch)
    assume(
        not any(word in str(batch.schema) for word in ("date", "time", "duration"))
    )  # most are beyond Python's datetime
    for encode, unpack, pack in (
        (schema.encode_keys, schema.key_from_bytes, schema.key_bytes),
        (schema.encode_values, schema.value_from_bytes, schema.value_bytes),
    ):
        encoded = encode(batch)[0].as_py()
        row = unpack(encoded)
        assert "nan" in repr(row).lower() or pack(row) == encoded


def test_rows_are_plain_with_one_column_tuples_and_dicts_with_several():
    one = quire.Schema(key=pa.int32(), value=pa.string())
    assert one.key_from_bytes(one.key_bytes(7)) == 7
    assert one.value_from_bytes(one.value_bytes("x" * 300)) == "x" * 300
    assert one.decode_keys(one.encode_keys(pa.array([1, None], pa.int32()))).to_pylist() == [1, None]
    day = datetime.date(2024, 2, 29)
    many = quire.Schema(
        key=[("user", pa.string()), ("day", pa.date32())], value={"n": pa.int64(), "tags": pa.list_(pa.string())}
    )
    key = many.key_bytes(("al", day))
    assert key == many.key_bytes({"day": day, "user": "al"})
    assert many.key_from_bytes(key) == ("al", day)
    value = {"n": None, "tags": ["a", None, ""]}
    assert many.value_from_bytes(many.value_bytes(value)) == value
    assert many.value_bytes((None, ["a", None, ""])) == many.value_bytes(value)


def test_prefixes_name_leading_columns_or_the_start_of_a_text():
    schema = quire.Schema(key={"user": pa.string(), "day": pa.date32(), "n": pa.int8()}, value=pa.null())
    day = datetime.date(2024, 1, 1)
    key = schema.key_bytes(("a\x00b", day, 3))
    assert key.startswith(schema.prefix_bytes("a\x00b"))
    assert key.startswith(schema.prefix_bytes("a\x00b", day))
    assert key == schema.prefix_bytes("a\x00b", day, 3)
    assert not key.startswith(schema.prefix_bytes("a"))
    assert key.startswith(schema.prefix_bytes("a", partial=True))
    assert key.startswith(schema.prefix_bytes("a\x00", partial=True))
    assert not key.startswith(schema.prefix_bytes("b", partial=True))
    for values, partial in (((), False), (("a", day, 3, 4), False), (("a", day), True), ((None,), True)):
        with pytest.raises(quire.InvalidError):
            schema.prefix_bytes(*values, partial=partial)


# -------------------------------------------------------------------------------- particular bytes


@pytest.mark.parametrize(
    ("kind", "row", "encoded"),
    [
        (pa.int32(), -1, "01 7fffffff"),
        (pa.uint16(), 258, "01 0102"),
        (pa.int64(), None, "00"),
        (pa.float64(), 1.0, "01 bff0000000000000"),
        (pa.float64(), -1.0, "01 400fffffffffffff"),
        (pa.float64(), -0.0, "01 8000000000000000"),
        (pa.float64(), math.nan, "01 fff8000000000000"),
        (pa.bool_(), True, "01 01"),
        (pa.decimal128(5, 2), decimal.Decimal("-0.01"), "01 7fffffffffffffffffffffffffffffff"),
        (pa.string(), "a\x00\x01b", "01 61 0101 0102 62 00"),
        (pa.binary(2), b"\x00\x01", "01 0001"),
        (pa.list_(pa.int8()), [5, None], "01 01 01 85 01 00 00"),
        (pa.struct({"a": pa.int8(), "b": pa.string()}), {"a": 5, "b": "x"}, "01 01 85 01 78 00"),
    ],
)
def test_keys_are_the_bytes_that_the_documentation_gives(kind, row, encoded):
    schema = quire.Schema(key=kind, value=pa.null())
    assert schema.key_bytes(row) == bytes.fromhex(encoded)
    assert schema.encode_keys(pa.array([row], kind)).to_pylist() == [bytes.fromhex(encoded)]


@pytest.mark.parametrize(
    ("kind", "row", "encoded"),
    [
        (pa.int32(), -2, "00 feffffff"),
        (pa.int32(), None, "01 00000000"),
        (pa.string(), "abc", "00 03 616263"),
        (pa.string(), None, "01"),
        (pa.string(), "x" * 200, "00 c801" + " 78" * 200),
        (pa.bool_(), True, "00 01"),
        (pa.null(), None, "01"),
        (pa.list_(pa.int16()), [1, None, 3], "00 03 02 0100 0000 0300"),
        (pa.list_(pa.field("item", pa.int16(), nullable=False)), [1, 2], "00 02 0100 0200"),
        (pa.list_(pa.string()), ["a", None], "00 02 02 01 61"),
        (pa.list_(pa.int8(), 2), [1, 2], "00 00 01 02"),
        (pa.struct({"s": pa.string(), "n": pa.int16()}), {"s": "x", "n": 7}, "00 00 0700 01 78"),
        (pa.map_(pa.string(), pa.int8()), [("k", 9)], "00 01 00 09 01 6b"),
    ],
)
def test_values_are_the_bytes_that_the_documentation_gives(kind, row, encoded):
    schema = quire.Schema(key=pa.null(), value=kind)
    assert schema.value_bytes(row) == bytes.fromhex(encoded)
    assert schema.encode_values(pa.array([row], kind)).to_pylist() == [bytes.fromhex(encoded)]
    assert schema.value_from_bytes(bytes.fromhex(encoded)) == row


def test_the_example_of_the_documentation():
    schema = quire.Schema(
        key=pa.schema([pa.field("user", pa.string(), nullable=False), ("day", pa.date32())]),
        value={"name": pa.string(), "visits": pa.int64(), "score": pa.float32()},
    )
    key = schema.key_bytes(("bo", datetime.date(2022, 1, 8)))
    assert key.hex(" ") == "62 6f 00 01 80 00 4a 38"
    value = schema.value_bytes({"name": "Bo", "visits": 3, "score": None})
    assert value.hex(" ") == "04 03 00 00 00 00 00 00 00 00 00 00 00 02 42 6f"
    without_marker = quire.Schema(key=schema.key, value=pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    assert len(without_marker.value_bytes(1)) == 8


def test_every_nan_is_one_key_and_stays_itself_in_a_value():
    bits = pa.array([0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001], pa.uint64())
    rows = bits.view(pa.float64())
    schema = quire.Schema(key=pa.float64(), value=pa.float64())
    assert len(set(schema.encode_keys(rows).to_pylist())) == 1
    assert schema.encode_keys(rows)[0].as_py() > schema.key_bytes(math.inf)
    assert schema.decode_values(schema.encode_values(rows)).view(pa.uint64()).equals(bits)
    assert schema.key_bytes(-0.0) == schema.key_bytes(0.0)
    assert math.copysign(1, schema.value_from_bytes(schema.value_bytes(-0.0))) == -1


def test_many_rows_cross_the_blocks_in_which_c_works():
    count = 5000
    generator = np.random.default_rng(7)
    numbers = pa.array(generator.integers(-(2**40), 2**40, count), mask=generator.random(count) < 0.1)
    words = pa.array([f"w{number}" for number in generator.integers(0, 10**9, count)])
    schema = quire.Schema(key={"w": pa.string(), "n": pa.int64()}, value={"m": pa.int64(), "v": pa.large_string()})
    keys = schema.encode_keys([words, numbers])
    assert schema.decode_keys(keys).equals(pa.record_batch({"w": words, "n": numbers}))
    batch = pa.record_batch({"m": numbers, "v": words.cast(pa.large_string())})
    values = schema.encode_values(batch)
    assert schema.decode_values(values).equals(batch)
    gaps = pa.compute.if_else(pa.array(generator.random(count) < 0.5), values, None)
    assert schema.decode_values(gaps)["m"].null_count == sum(
        gap is None or number is None for gap, number in zip(gaps.to_pylist(), numbers.to_pylist(), strict=True)
    )
    assert schema.decode_values(values.slice(1234, 2000)).equals(batch.slice(1234, 2000))


# -------------------------------------------------------------------------------- what is accepted, what is not


def test_arrays_are_cast_where_nothing_is_lost():
    schema = quire.Schema(key=pa.int32(), value=pa.large_string())
    assert schema.encode_keys(pa.array([1, 2])).equals(schema.encode_keys(pa.array([1, 2], pa.int32())))
    assert schema.encode_keys(pa.array([1.0, 2.0])).equals(schema.encode_keys(pa.array([1, 2], pa.int32())))
    assert schema.encode_keys([1, 2]).equals(schema.encode_keys(np.array([1, 2])))
    assert schema.encode_keys(pa.nulls(2)).to_pylist() == [b"\x00", b"\x00"]
    assert schema.encode_values(pa.array(["a"])).to_pylist() == [b"\x00\x01a"]
    assert schema.encode_values(pa.chunked_array([["a"], ["b"]])).to_pylist() == [b"\x00\x01a", b"\x00\x01b"]
    single = quire.Schema(key=pa.float32(), value=pa.list_(pa.int16()))
    assert single.encode_keys(pa.array([0.5, None])).to_pylist()[1] == b"\x00"
    assert single.encode_values(pa.array([[1, None]])).equals(
        single.encode_values(pa.array([[1, None]], pa.list_(pa.int16())))
    )
    empty = single.encode_keys(pa.array([], pa.float32()))
    assert len(empty) == 0 and len(single.decode_keys(empty)) == 0


@pytest.mark.parametrize(
    ("kind", "given_rows"),
    [
        (pa.int32(), pa.array([1 << 40])),
        (pa.int32(), pa.array(["1"])),
        (pa.string(), pa.array([1])),
        (pa.float32(), pa.array([0.1])),
        (pa.float64(), pa.array([2**53 + 1])),
        (pa.int64(), pa.array([1.5])),
        (pa.int64(), pa.array([True])),
        (pa.timestamp("s"), pa.array([1500], pa.timestamp("ms"))),
        (pa.timestamp("us", "UTC"), pa.array([1], pa.timestamp("us"))),
        (pa.timestamp("us"), pa.array([1], pa.int64())),
        (pa.string(), pa.array([b"x"])),
        (pa.list_(pa.string()), pa.array([[1]])),
        (pa.struct({"a": pa.int8()}), pa.array([{"b": 1}])),
        (pa.int8(), ["x"]),
    ],
)
def test_a_column_of_another_type_is_named_with_both_types(kind, given_rows):
    schema = quire.Schema(key={"word": kind}, value=pa.null())
    with pytest.raises(quire.InvalidError) as caught:
        schema.encode_keys(given_rows)
    assert "'word'" in str(caught.value) and str(kind) in str(caught.value)
    assert str(getattr(given_rows, "type", "list")) in str(caught.value)


def test_dictionaries_are_decoded_first():
    words = pa.array(["b", "a", None, "b"])
    schema = quire.Schema(key=pa.string(), value=pa.dictionary(pa.int8(), pa.string()))
    assert schema.value.field(0).type == pa.string()
    assert schema.encode_keys(words.dictionary_encode()).equals(schema.encode_keys(words))
    assert schema.encode_values(words.dictionary_encode()).equals(schema.encode_values(words))


def test_columns_come_by_name_or_in_order():
    schema = quire.Schema(key={"a": pa.int8(), "b": pa.int16()}, value=pa.null())
    expected = schema.encode_keys([pa.array([1], pa.int8()), pa.array([2], pa.int16())])
    batch = pa.record_batch({"b": pa.array([2], pa.int16()), "a": pa.array([1], pa.int8())})
    for rows in (batch, pa.table(batch), batch.to_struct_array(), {"a": [1], "b": [2]}):
        assert schema.encode_keys(rows).equals(expected)
    for wrong, named in (
        ({"a": [1]}, "'b'"),
        ({"a": [1], "b": [2], "c": [3]}, "'c'"),
        ([pa.array([1])], "2 columns"),
        (pa.array([1]), "int64"),
        ({"a": [1], "b": [2, 3]}, "length"),
    ):
        with pytest.raises(quire.InvalidError, match=named):
            schema.encode_keys(wrong)
    for wrong_row in ((1,), (1, 2, 3), 1, {"a": 1}, ("x", 2), (1000, 2)):
        with pytest.raises(quire.InvalidError):
            schema.key_bytes(wrong_row)
    with pytest.raises(quire.InvalidError, match="not int64"):
        schema.decode_keys(pa.array([1]))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.binary_view(),
        pa.month_day_nano_interval(),
        pa.list_view(pa.int8()),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.struct({"inner": pa.dictionary(pa.int8(), pa.string())}),
        pa.list_(pa.list_(pa.int64(), 1 << 20), 1 << 10),
    ],
)
def test_a_type_that_cannot_be_held_is_named(kind):
    for part in ({"key": {"x": kind}, "value": pa.null()}, {"key": pa.null(), "value": {"x": kind}}):
        with pytest.raises(quire.InvalidError, match="column 'x"):
            quire.Schema(**part)
    with pytest.raises(quire.InvalidError, match=r"column 'x.*is of Arrow type map.*supported are null, bool"):
        quire.Schema(key={"x": pa.map_(pa.int8(), pa.int8())}, value=pa.null())


def test_no_name_may_be_in_both_key_and_value():
    with pytest.raises(quire.InvalidError, match=r"\['n'\]"):
        quire.Schema(key={"n": pa.int8(), "m": pa.int8()}, value={"n": pa.int8()})
    quire.Schema(key=pa.int8(), value=pa.int8())


UTC = datetime.timezone.utc
NOON = datetime.datetime(2024, 2, 29, 12, 30, 1, 500_000)
POINT = pa.struct({"x": pa.int8(), "y": pa.string()})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int32(), 1.9),
        (pa.int32(), True),
        (pa.int32(), np.bool_(True)),
        (pa.int32(), np.float64(1.5)),
        (pa.int32(), decimal.Decimal("1.5")),
        (pa.int32(), math.inf),
        (pa.int64(), datetime.timedelta(1)),
        (pa.int64(), np.timedelta64(5, "s")),
        (pa.float32(), 1e300),
        (pa.float32(), np.float64(-1e300)),
        (pa.float16(), 70000.0),
        (pa.float16(), 2049),
        (pa.float64(), True),
        (pa.float64(), 2**53 + 1),
        (pa.bool_(), 1),
        (pa.string(), b"x"),
        (pa.string(), "\ud800"),
        (pa.binary(2), "ab"),
        (pa.timestamp("s"), NOON),
        (pa.timestamp("us"), NOON.replace(tzinfo=UTC)),
        (pa.timestamp("us"), 5),
        (pa.timestamp("us"), 1.5),
        (pa.timestamp("us", "UTC"), NOON),
        (pa.timestamp("us", "UTC"), np.datetime64(NOON)),
        (pa.timestamp("s", "UTC"), NOON.replace(tzinfo=UTC)),
        (pa.date32(), NOON),
        (pa.date64(), NOON),
        (pa.date64(), 5),
        (pa.time32("s"), NOON.time()),
        (pa.time64("us"), NOON.time().replace(tzinfo=UTC)),
        (pa.duration("s"), datetime.timedelta(seconds=1.5)),
        (pa.list_(pa.int32()), [1, 1.5]),
        (pa.list_(pa.int32()), np.array([1.5])),
        (pa.list_(pa.list_(pa.date32())), [[NOON]]),
        (POINT, {"x": 1, "y": "a", "z": 2}),
        (POINT, {"x": 1.5, "y": "a"}),
        (POINT, (1, b"a")),
        (POINT, [("x", 1), ("y", "a")]),
    ],
)
def test_a_python_object_that_would_be_changed_is_refused(pm, kind, value):
    for schema, named in ((quire.Schema({"word": kind}, {"count": kind}), "'word'"), (quire.Schema(kind, kind), "key")):
        with pytest.raises(quire.InvalidError, match=named):
            schema.key_bytes(value)
        with pytest.raises(quire.InvalidError):
            schema.value_bytes(value)
        for rows in ([None, value], (value,), iter([value])):
            with pytest.raises(quire.InvalidError, match=named):
                schema.encode_keys(rows)
    users = pm.map("users", quire.Schema(pa.string(), kind))
    with pytest.raises(quire.InvalidError):
        users["a"] = value
    with pytest.raises(quire.InvalidError):
        users.put_many(["a"], [value])
    assert len(users) == 0


def test_a_map_of_python_objects_that_would_be_changed_is_refused():
    schema = quire.Schema(pa.null(), pa.map_(pa.string(), pa.int8()))
    for value in ({"k": 1.5}, [("k", 1.5)], [(b"k", 1)]):
        with pytest.raises(quire.InvalidError, match="the value"):
            schema.value_bytes(value)
    assert schema.value_from_bytes(schema.value_bytes({"k": 1, "l": None})) == [("k", 1), ("l", None)]


@pytest.mark.parametrize(
    ("kind", "value", "back"),
    [
        (pa.int32(), 2.0, 2),
        (pa.int32(), np.int64(5), 5),
        (pa.float32(), 0.5, 0.5),
        (pa.float32(), 0.1, float(np.float32(0.1))),
        (pa.float32(), -math.inf, -math.inf),
        (pa.float64(), 7, 7.0),
        (pa.float64(), np.float32(1.5), 1.5),
        (pa.binary(), "é", "é".encode()),
        (pa.binary(), bytearray(b"x"), b"x"),
        (pa.decimal128(5, 2), 3, decimal.Decimal("3.00")),
        (pa.timestamp("ms"), NOON, NOON),
        (pa.timestamp("ns"), NOON, NOON),
        (
            pa.timestamp("s", "UTC"),
            datetime.datetime(2024, 1, 1, tzinfo=UTC),
            datetime.datetime(2024, 1, 1, tzinfo=UTC),
        ),
        (pa.time32("ms"), NOON.time(), NOON.time()),
        (pa.duration("ms"), datetime.timedelta(seconds=1.5), datetime.timedelta(seconds=1.5)),
        (pa.date64(), NOON.date(), NOON.date()),
        (pa.list_(pa.int32()), (1, 2.0, None), [1, 2, None]),
        (POINT, {"x": 1}, {"x": 1, "y": None}),
        (POINT, (1, "a"), {"x": 1, "y": "a"}),
        (pa.int32(), pa.scalar(5, pa.int32()), 5),
    ],
)
def test_python_objects_are_taken_where_nothing_is_lost(kind, value, back):
    schema = quire.Schema(kind, kind)
    assert schema.key_from_bytes(schema.key_bytes(value)) == back
    assert schema.value_from_bytes(schema.value_bytes(value)) == back
    assert schema.decode_values(schema.encode_values([value, None])).to_pylist() == [back, None]


def test_arrays_of_numpy_are_cast_as_those_of_arrow():
    for kind, rows in (
        (pa.int32(), np.array([1.5])),
        (pa.int32(), np.array([True])),
        (pa.int32(), np.array([1.5], object)),
        (pa.float32(), np.array([1e300])),
        (pa.date32(), np.array(["2024-01-01T12"], "M8[ms]")),
        (pa.string(), "abc"),
        (pa.string(), {"a", 1}),
    ):
        with pytest.raises(quire.InvalidError):
            quire.Schema(kind, pa.null()).encode_keys(rows)
    schema = quire.Schema(pa.timestamp("s"), pa.null())
    assert schema.encode_keys(np.array(["2024-01-01T12"], "M8[ms]")).to_pylist() == [
        schema.key_bytes(datetime.datetime(2024, 1, 1, 12))
    ]


def test_times_beyond_python_are_told_to_be_read_in_bulk(pm):
    kind = pa.timestamp("s")
    events = pm.ordered_map("events", quire.Schema({"at": kind}, {"took": pa.duration("s")}))
    at, took = pa.array([1 << 40], pa.int64()).view(kind), pa.array([1 << 60], pa.int64()).view(pa.duration("s"))
    events.put_many(at, took)
    for call, named in (
        (lambda: list(events), "'at'"),
        (lambda: list(events.items()), "'at'"),
        (events.first, "'at'"),
        (lambda: list(events.values()), "'took'"),
        (lambda: events[at[0]], "'took'"),
    ):
        with pytest.raises(quire.InvalidError, match=rf"{named}.*in bulk"):
            call()
    assert events.to_table().column("at").combine_chunks().equals(at)
    assert events.get_many(at).equals(took)


def test_schemas_need_columns_with_names_of_their_own():
    for wrong in ({}, [("a", pa.int8()), ("a", pa.int8())], 5, {"a": "no such type"}):
        with pytest.raises(quire.InvalidError):
            quire.Schema(key=wrong, value=pa.null())


def test_nulls_where_none_may_be_are_refused_with_row_and_column():
    rows = pa.array([1, 2, None], pa.int8())
    for kind, given_rows in (
        (pa.int8(), rows),
        (pa.struct([pa.field("in", pa.int8(), nullable=False)]), pa.StructArray.from_arrays([rows], ["in"])),
        (pa.string(), pa.array(["a", "b", None])),
    ):
        field = pa.field("x", kind, nullable=pa.types.is_struct(kind))
        array = given_rows
        if pa.types.is_struct(kind):
            array = pa.StructArray.from_arrays([rows], fields=list(kind))
        schema = both_sides(pa.schema([field]))
        for encode in (schema.encode_keys, schema.encode_values):
            with pytest.raises(quire.InvalidError, match=r"row 2, column 'x.*null"):
                encode(array)


def test_text_that_is_not_utf8_is_refused_both_ways():
    bad = pa.array([b"ok", b"\xed\xa0\x80"]).view(pa.string())
    schema = quire.Schema(key=pa.string(), value=pa.string())
    for encode, part in ((schema.encode_keys, "key"), (schema.encode_values, "value")):
        with pytest.raises(quire.InvalidError, match=rf"row 1, the {part}.*UTF-8"):
            encode(bad)
    for text in (b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80"):
        with pytest.raises(quire.CorruptError, match="UTF-8"):
            schema.key_from_bytes(b"\x01" + text + b"\x00")
        with pytest.raises(quire.CorruptError, match="UTF-8"):
            schema.value_from_bytes(b"\x00" + bytes([len(text)]) + text)


def test_a_list_that_claims_too_many_items_takes_no_memory():
    for item in (pa.int64(), pa.null(), pa.struct([]), pa.struct([pa.field("s", pa.string(), nullable=False)])):
        for nullable in {True, pa.types.is_null(item)}:
            schema = quire.Schema(key=pa.null(), value=pa.list_(pa.field("item", item, nullable=nullable)))
            for count in (b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01"):
                with pytest.raises(quire.CorruptError):
                    schema.value_from_bytes(b"\x00" + count)


# -------------------------------------------------------------------------------- the schema as a thing


@patient
@given(batches())
@example(pa.record_batch({"": pa.array([1])}))
def test_a_schema_survives_bytes_and_pickle(batch):
    values = pa.schema([field.with_name(f"value {field.name}") for field in batch.schema])
    schema = quire.Schema(key=batch.schema, value=values)
    for copy in (quire.Schema.from_bytes(schema.to_bytes()), pickle.loads(pickle.dumps(schema))):
        assert copy == schema and hash(copy) == hash(schema) and copy.to_bytes() == schema.to_bytes()
        assert copy.encode_keys(batch).equals(schema.encode_keys(batch))


def test_schemas_differ_by_name_type_and_nullability():
    variants = [
        quire.Schema(key=pa.int8(), value=pa.int8()),
        quire.Schema(key={"a": pa.int8()}, value=pa.int8()),
        quire.Schema(key=pa.int16(), value=pa.int8()),
        quire.Schema(key=pa.int8(), value=pa.schema([pa.field("", pa.int8(), nullable=False)])),
    ]
    assert Counter(variants).most_common(1)[0][1] == 1
    assert len({schema.to_bytes() for schema in variants}) == len(variants)
    assert variants[0] != "a schema"
    assert "int8 not null" in repr(variants[3])
    tagged = pa.schema([pa.field("a", pa.int8(), metadata={"k": "v"})], metadata={"m": "n"})
    assert quire.Schema(key=tagged, value=pa.int8()) == variants[1]


def test_bytes_that_are_no_schema_are_refused():
    good = quire.Schema(key=pa.int8(), value=pa.string()).to_bytes()
    for bad in (b"", good[:10], good[:40], b"XXXX" + good[4:], good[:4] + b"\x09" + good[5:], good[:-30]):
        with pytest.raises(quire.CorruptError):
            quire.Schema.from_bytes(bad)


# -------------------------------------------------------------------------------- the C face alone


def encode_in_c(columns, array, column):
    exported = ffi.new("struct ArrowArray *")
    array._export_to_c(address(exported))
    try:
        return lib.quire_codec_encode(columns._codec, exported, column.pointer)
    finally:
        exported.release(exported)


def test_encode_appends_null_structs_as_null_rows_and_undoes_failures():
    schema = pa.schema([pa.field("s", pa.string(), nullable=False)])
    for ordered in (True, False):
        columns = Columns("key", schema, ordered)
        column = Column()
        words = pa.array(["a", "b", "c"])
        rows = pa.StructArray.from_arrays([words], fields=list(schema), mask=pa.array([False, True, False]))
        bad = pa.StructArray.from_arrays(
            [pa.array(["d", "e", None])], fields=list(schema), mask=pa.array([False, True, False])
        )
        assert encode_in_c(columns, rows, column) == 0
        assert encode_in_c(columns, bad, column) == lib.QUIRE_E_INVALID
        assert encode_in_c(columns, rows.slice(1), column) == 0
        array = column.to_array()
        array.validate(full=True)
        a, c = columns.pack("a"), columns.pack("c")
        assert array.to_pylist() == [a, None, c, None, c]


def test_arrays_that_do_not_fit_the_codec_are_refused():
    columns = Columns("key", pa.schema({"a": pa.int8(), "b": pa.list_(pa.int8())}), True)
    column = Column()
    for wrong in (
        pa.array([1]),
        pa.StructArray.from_arrays([pa.array([1])], ["a"]),
        pa.StructArray.from_arrays([pa.array(["x"]), pa.array([[1]])], ["a", "b"]),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([1])], ["a", "b"]),
    ):
        assert encode_in_c(columns, wrong, column) == lib.QUIRE_E_INVALID
    assert column.pointer.row_count == 0


def test_fixed_width_rows_are_read_in_place():
    columns = Columns("key", pa.schema([pa.field("a", pa.int16(), nullable=False)]), True)
    rows = pa.array([b"\x80\x01", None, b"\x7f\xff"], pa.binary(2))
    assert columns.decode(rows).to_pylist() == [1, None, -1]
    assert columns.decode(rows.slice(2)).to_pylist() == [-1]
