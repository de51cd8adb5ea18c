"""Spark's text for columns and types, as in ``"user string, n bigint not null"``, to Arrow types. Needs no Spark."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from quire.pagemgr.errors import InvalidError

# The types that take nothing in brackets, as Spark maps them to Arrow.
PLAIN_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
ALIASES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
    "dec": "decimal",
    "numeric": "decimal",
}
PRECISION_MAX = 38
# As deep as a schema may be (rowcodec.c).
DEPTH_MAX = 32
TYPE_NAMES = (
    "string, binary, boolean, tinyint (byte), smallint (short), int (integer), bigint (long), float (real), double, "
    "date, timestamp, timestamp_ntz, decimal(p,s), array<type>, map<type,type>, struct<name: type, ...>, void"
)

TOKEN = re.compile(
    r"\s*(?:(?P<word>\w+)|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<mark>[<>(),:])"
    r"|(?P<other>\S)|$)",
    re.DOTALL,
)


class Token(NamedTuple):
    """A piece of the text; kind "" at its end."""

    kind: str
    text: str
    at: int

    def is_word(self, *words: str) -> bool:
        """True if it is one of these words, in upper or lower case."""
        return self.kind == "word" and self.text.lower() in words


def tokens_of(text: str) -> list[Token]:
    """The pieces of the text, the end as the last of them."""
    found: list[Token] = []
    at = 0
    while not found or found[-1].kind:
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            found.append(Token("", "", len(text.rstrip())))
            break
        found.append(Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
        at = match.end()
    return found


def parse(text: str) -> pa.Schema:
    """The columns that the text names; of a type alone, one column without a name.

    >>> parse("user string not null, visits array<struct<page: string, n: bigint>>").names
    ['user', 'visits']
    >>> parse("DECIMAL(10, 2)").field(0).type
    Decimal128Type(decimal128(10, 2))
    """
    return Parser(text).whole()


class Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens_of(text)
        self._next = 0
        self._depth = 0

    def whole(self) -> pa.Schema:
        """All of the text."""
        fields = [self._nullable("", self._type())] if self._is_type() else self._columns()
        if self._here.kind:
            self._refuse("a comma or the end of the text")
        return pa.schema(fields)

    @property
    def _here(self) -> Token:
        return self._tokens[self._next]

    def _refuse(self, allowed: str, at: Token | None = None, what: str | None = None) -> NoReturn:
        at = at or self._here
        if what is None:
            what = f"{at.text!r} cannot stand here" if at.kind else "the text ends too early"
        line = re.sub(r"\s", " ", self._text)
        raise InvalidError(f"DDL text, character {at.at + 1}: {what}; give {allowed}\n  {line}\n  {' ' * at.at}^")

    def _take(self, mark: str) -> bool:
        """Goes past the mark if it is next."""
        if self._here.kind != "mark" or self._here.text != mark:
            return False
        self._next += 1
        return True

    def _want(self, mark: str, instead: str = "") -> None:
        if not self._take(mark):
            self._refuse(f"{mark!r}{instead}")

    def _is_type(self) -> bool:
        """Whether the text is one type, not columns: a word with nothing behind it that could be its type."""
        first, second = self._here, self._tokens[min(self._next + 1, len(self._tokens) - 1)]
        if first.kind != "word":
            return False
        return not second.kind or (second.kind == "mark" and second.text in "<(") or second.is_word("not", "comment")

    def _columns(self) -> list[pa.Field]:
        """Columns up to where no comma follows."""
        fields: dict[str, pa.Field] = {}
        while True:
            at = self._here
            name = self._name()
            if name in fields:
                self._refuse("each column a name of its own", at, f"there are two columns {name!r}")
            self._take(":")
            fields[name] = self._nullable(name, self._type())
            if not self._take(","):
                return list(fields.values())

    def _name(self) -> str:
        token = self._here
        if token.kind not in ("word", "quoted") or token.text == "``":
            self._refuse("the name of a column, in backquotes if it is more than letters, digits and _")
        self._next += 1
        return token.text if token.kind == "word" else token.text[1:-1].replace("``", "`")

    def _nullable(self, name: str, kind: pa.DataType) -> pa.Field:
        """The column, after what may follow its type."""
        nullable = True
        if self._here.is_word("not"):
            self._next += 1
            if not self._here.is_word("null"):
                self._refuse("'null' behind 'not'")
            self._next += 1
            nullable = False
        if self._here.is_word("comment"):
            self._next += 1
            if self._here.kind != "text":
                self._refuse("a text in quotes behind 'comment'")
            self._next += 1
        return pa.field(name, kind, nullable=nullable)

    def _type(self) -> pa.DataType:
        token = self._here
        word = token.text.lower() if token.kind == "word" else ""
        word = ALIASES.get(word, word)
        plain = PLAIN_TYPES.get(word)
        read = self._made_types().get(word)
        if plain is None and read is None:
            what = f"there is no type {token.text!r}" if token.kind == "word" else None
            self._refuse(f"a type: {TYPE_NAMES}", what=what)
        self._next += 1
        if read is None:
            return plain
        if self._depth == DEPTH_MAX:
            self._refuse(f"types that are nested {DEPTH_MAX} deep at most", token, "this is nested too deep")
        self._depth += 1
        made = read()
        self._depth -= 1
        return made

    def _made_types(self) -> dict[str, Callable[[], Any]]:
        return {"decimal": self._decimal, "array": self._array, "map": self._map, "struct": self._struct}

    def _number(self, low: int, high: int, what: str) -> int:
        token = self._here
        digits = token.kind == "word" and token.text.isascii() and token.text.isdigit() and len(token.text) < 4
        if not digits or not low <= int(token.text) <= high:
            self._refuse(f"{what}, a number from {low} to {high}")
        self._next += 1
        return int(token.text)

    def _decimal(self) -> pa.DataType:
        if not self._take("("):
            return pa.decimal128(10, 0)
        precision = self._number(1, PRECISION_MAX, "how many digits there are")
        scale = self._number(0, precision, "how many of the digits are behind the point") if self._take(",") else 0
        self._want(")", " behind the numbers of a decimal")
        return pa.decimal128(precision, scale)

    def _array(self) -> pa.DataType:
        self._want("<", " and the type of the items")
        item = self._type()
        self._want(">", " behind the type of the items")
        return pa.list_(item)

    def _map(self) -> pa.DataType:
        self._want("<", " and the types of keys and values")
        key = self._type()
        self._want(",", " between the types of keys and values")
        item = self._type()
        self._want(">", " behind the type of the values")
        return pa.map_(key, item)

    def _struct(self) -> pa.DataType:
        self._want("<", " and the fields of the struct")
        fields = self._columns()
        self._want(">", " or ',' behind a field of a struct")
        return pa.struct(fields)
