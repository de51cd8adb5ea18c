"""Columns and types in Spark's text: what it means in Arrow, and where it is wrong."""

import string

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

import quire
from quire.structures.ddl import ALIASES, PLAIN_TYPES, parse


def test_columns_with_all_that_may_stand_there():
    text = (
        "user string, n bigint not null, t timestamp, a array<struct<x: int, y: string>>, m map<string,int>, "
        "d decimal(10,2)"
    )
    assert parse(text).equals(
        pa.schema(
            [
                ("user", pa.string()),
                pa.field("n", pa.int64(), nullable=False),
                ("t", pa.timestamp("us", "UTC")),
                ("a", pa.list_(pa.struct([("x", pa.int32()), ("y", pa.string())]))),
                ("m", pa.map_(pa.string(), pa.int32())),
                ("d", pa.decimal128(10, 2)),
            ]
        )
    )


def test_types_are_those_that_spark_sends():
    from pyspark.sql import types as spark
    from pyspark.sql.pandas.types import to_arrow_schema

    of_spark = spark.StructType(
        [
            spark.StructField("s", spark.StringType()),
            spark.StructField("b", spark.BinaryType(), False),
            spark.StructField("o", spark.BooleanType()),
            spark.StructField("i1", spark.ByteType()),
            spark.StructField("i2", spark.ShortType()),
            spark.StructField("i4", spark.IntegerType()),
            spark.StructField("i8", spark.LongType()),
            spark.StructField("f4", spark.FloatType()),
            spark.StructField("f8", spark.DoubleType()),
            spark.StructField("d", spark.DateType()),
            spark.StructField("t", spark.TimestampType()),
            spark.StructField("n", spark.TimestampNTZType()),
            spark.StructField("v", spark.NullType()),
            spark.StructField("c", spark.DecimalType(38, 18)),
            spark.StructField("a", spark.ArrayType(spark.ArrayType(spark.LongType()))),
            spark.StructField("m", spark.MapType(spark.StringType(), spark.ArrayType(spark.DateType()))),
            spark.StructField("r", spark.StructType([spark.StructField("x", spark.LongType(), False)])),
        ]
    )
    text = (
        "s string, b binary not null, o boolean, i1 tinyint, i2 smallint, i4 int, i8 bigint, f4 float, f8 double, "
        "d date, t timestamp, n timestamp_ntz, v void, c decimal(38,18), a array<array<bigint>>, "
        "m map<string, array<date>>, r struct<x: bigint not null>"
    )
    assert parse(text).equals(to_arrow_schema(of_spark, timezone="UTC"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bigint", pa.int64()),
        (" Decimal ( 5 ) ", pa.decimal128(5, 0)),
        ("numeric", pa.decimal128(10, 0)),
        ("dec(3,3)", pa.decimal128(3, 3)),
        ("array<array<int>>", pa.list_(pa.list_(pa.int32()))),
        ("struct<a int, b: string>", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        *[(alias.upper(), PLAIN_TYPES[name]) for alias, name in ALIASES.items() if name in PLAIN_TYPES],
    ],
)
def test_a_type_alone_is_one_column_without_a_name(text, kind):
    assert parse(text).equals(pa.schema([("", kind)]))


def test_a_type_alone_may_be_not_null():
    assert parse("string not null").equals(pa.schema([pa.field("", pa.string(), nullable=False)]))


def test_names_in_backquotes_comments_and_colons():
    text = """`a b` INT COMMENT 'it''s, not null', `c``d`: string Not Null comment "x, y\\" z",
              date date, 2nd int"""
    with pytest.raises(quire.InvalidError):  # Spark, too, reads two texts there
        parse(text)
    parsed = parse(text.replace("''", "\\'"))
    assert parsed.names == ["a b", "c`d", "date", "2nd"]
    assert [field.nullable for field in parsed] == [True, False, True, True]


# The text, the character that is to blame, and what the message must say.
FAULTS = [
    ("", 1, "name of a column"),
    (" \n ", 1, "ends too early"),
    ("user strin, n bigint", 6, "no type 'strin'"),
    ("strin", 1, "no type 'strin'"),
    ("n interval", 3, "bigint"),
    ("a int b int", 7, "a comma"),
    ("a int,", 7, "ends too early"),
    (", a int", 1, "name of a column"),
    ("a 'int'", 3, "a type"),
    ("'a' int", 1, "name of a column"),
    ("`a int", 1, "name of a column"),
    ("`` int", 1, "name of a column"),
    ("a int; b int", 6, "a comma"),
    ("a int not", 10, "'null'"),
    ("a int comment b", 15, "text in quotes"),
    ("a int, b int, a int", 15, "two columns 'a'"),
    ("s struct<a int, a int>", 17, "two columns 'a'"),
    ("s struct<>", 10, "name of a column"),
    ("s struct<a int", 15, "'>'"),
    ("a array<int", 12, "'>'"),
    ("a array", 8, "'<'"),
    ("m map<int>", 10, "','"),
    ("m map<int,int,int>", 14, "'>'"),
    ("d decimal(0,0)", 11, "1 to 38"),
    ("d decimal(39)", 11, "1 to 38"),
    ("d decimal(99999999999999999999)", 11, "1 to 38"),
    ("d decimal(5,6)", 13, "0 to 5"),
    ("d decimal(5,-1)", 13, "0 to 5"),
    ("d decimal(²)", 11, "1 to 38"),
    ("d decimal(5,1", 14, "')'"),
    ("int(5)", 4, "a comma"),
    ("a\tint,\n b strin", 11, "no type 'strin'"),
    ("array<" * 200 + "int" + ">" * 200, 193, "nested"),
]


@pytest.mark.parametrize(("text", "character", "says"), FAULTS)
def test_a_fault_is_shown_with_its_place_and_what_is_allowed(text, character, says):
    with pytest.raises(quire.InvalidError) as caught:
        quire.Schema(key="int", value=text)
    message, line, mark = str(caught.value).split("\n")
    assert message.startswith(f"the value of a schema, DDL text, character {character}: ")
    assert says in message
    assert line == "  " + "".join(" " if letter.isspace() else letter for letter in text)
    assert mark == " " * (character + 1) + "^"


@given(st.text(st.sampled_from("`'\"<>(),:;\\ \n" + string.ascii_lowercase[:3] + "1é")) | st.text())
def test_any_text_is_columns_or_an_invalid_error(text):
    try:
        parsed = parse(text)
    except quire.InvalidError:
        return
    assert len(parsed) > 0


KINDS = st.recursive(
    st.sampled_from(["string", "Bigint", "double", "decimal(7,3)", "timestamp"]),
    lambda inner: st.one_of(
        inner.map("array<{}>".format),
        inner.map("map<string,{}>".format),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: "struct<" + ", ".join(f"f{i}: {kind}" for i, kind in enumerate(kinds)) + ">"
        ),
    ),
    max_leaves=6,
)


@given(st.lists(KINDS, min_size=1, max_size=4))
def test_columns_are_their_types_put_together(kinds):
    parsed = parse(", ".join(f"`c {i}` {kind}" for i, kind in enumerate(kinds)))
    assert parsed.names == [f"c {i}" for i in range(len(kinds))]
    assert parsed.types == [parse(kind).field(0).type for kind in kinds]


def test_schemas_take_text_on_either_side(pm):
    schema = quire.Schema(key="user string not null, day date", value="n bigint")
    assert schema.key.names == ["user", "day"]
    assert not schema.key.field("user").nullable
    assert schema == quire.Schema(schema.key, {"n": pa.int64()})
    counts = pm.map("counts", quire.Schema("string", value="n bigint, top array<string>"))
    counts["bo"] = {"n": 3, "top": ["a"]}
    assert counts["bo"] == {"n": 3, "top": ["a"]}
    assert pm.map("counts").schema == quire.Schema(pa.string(), "n bigint, top array<string>")


def test_types_that_a_key_cannot_hold_are_named():
    with pytest.raises(quire.InvalidError, match="column 'm' is of Arrow type map"):
        quire.Schema(key="m map<string,int>", value="int")
    with pytest.raises(quire.InvalidError, match="both the key and the value"):
        quire.Schema(key="a int", value="a string")


def test_what_is_neither_text_nor_columns():
    with pytest.raises(quire.InvalidError, match=r"DDL text, a pyarrow\.Schema"):
        quire.Schema(key=7, value="int")
    with pytest.raises(quire.InvalidError, match=r"DDL text, a pyarrow\.Schema"):
        quire.Schema(key="int", value=b"int")
