"""The table of errors: C header, Python classes and declarations for the compiler agree."""

import re

import pytest

import quire
from quire._native import ffi, lib
from quire.pagemgr import errors


@pytest.fixture
def table(source_root):
    text = (source_root / "pagemgr/error.h").read_text()
    rows = re.findall(r'X\((\w+), (-\d+), "([^"]+)"\)', text)
    assert len(rows) == 14
    return {name: (int(value), meaning) for name, value, meaning in rows}


def test_each_code_has_one_class(table):
    assert {code for code, _ in table.values()} == set(errors.BY_CODE)
    assert len(set(errors.BY_CODE.values())) == len(errors.BY_CODE)
    for name, (code, _) in table.items():
        assert getattr(lib, f"QUIRE_E_{name}") == code
        assert ffi.string(lib.quire_error_name(code)).decode() == name
        words = {
            "NOTFOUND": "NotFound",
            "NOMEM": "NoMemory",
            "NOSPACE": "NoSpace",
            "IO": "IOFailed",
            "READONLY": "ReadOnly",
        }
        assert errors.BY_CODE[code].__name__ == words.get(name, name.capitalize()) + "Error"


def test_each_class_is_public_and_derives_from_quire_error():
    for kind in errors.BY_CODE.values():
        assert issubclass(kind, quire.QuireError)
        assert getattr(quire, kind.__name__) is kind
        assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (quire.NotFoundError, KeyError),
        (quire.InvalidError, ValueError),
        (quire.NoMemoryError, MemoryError),
        (quire.LimitError, MemoryError),
        (quire.NoSpaceError, OSError),
        (quire.IOFailedError, OSError),
        (quire.PositionError, IndexError),
    ],
)
def test_classes_are_also_what_plain_python_code_expects(kind, builtin):
    assert issubclass(kind, builtin)
    assert str(kind("what went wrong")) == "what went wrong"


def test_a_message_of_the_core_reaches_the_exception(tmp_path):
    with pytest.raises(quire.QuireError) as caught:
        quire.PageManager(tmp_path / "no" / "such" / "folder")
    assert "folder" in str(caught.value)


def test_an_unknown_code_is_still_an_error():
    with pytest.raises(quire.QuireError):
        errors.check(-99)
    errors.check(0)
