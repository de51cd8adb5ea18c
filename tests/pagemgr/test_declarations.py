"""The declarations that the compiler sees (``*.cdef.h``) have not drifted from the headers.

The compiler checks types and signatures already; here is what it cannot see: names gone or forgotten, and values.
"""

import re

import pytest

from quire._native import lib

PAIRS = {
    "pagemgr/pagemgr.cdef.h": ["pagemgr/error.h", "pagemgr/pagemgr.h"],
    "structures/structures.cdef.h": ["structures/record.h", "structures/kv.h", "structures/sequence.h"],
    "structures/rowcodec.cdef.h": ["structures/rowcodec.h"],
    "checkpoint/checkpoint.cdef.h": [
        *("checkpoint/container.h", "checkpoint/delta.h", "checkpoint/pages.h", "checkpoint/cec.h"),
        "checkpoint/xxhash32.h",
    ],
    "statestore/family.cdef.h": ["statestore/family.h"],
}
LAYERS = ("pagemgr", "structures", "checkpoint", "statestore")
DECLARATION = re.compile(
    r"(?:^|[;}] ?)(?:static inline )?((?:const |struct )*\w+ \**(quire_\w+)\((?:[^()]|\([^()]*\))*\))"
)


def code_of(path):
    """The text without comments, preprocessor lines and the bodies of functions, white space made equal."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^#.*?(?<!\\)$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\}", "};", re.sub(r"\{$.*?^\}", "{ };", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE)
    return re.sub(r"\s+", " ", text)


def declarations(text):
    """Name to declaration, of every function declared at the top."""
    found = {}
    for statement in text.split(";"):
        match = DECLARATION.search(statement.strip())
        if match and not statement.strip().startswith(("typedef", "extern")):
            found[match[2]] = match[1]
    return found


@pytest.mark.parametrize("declared", PAIRS)
def test_every_declaration_is_in_a_header_word_for_word(source_root, declared):
    headers = {}
    for header in PAIRS[declared]:
        headers.update(declarations(code_of(source_root / header)))
    mine = declarations(code_of(source_root / declared))
    assert len(mine) > 3
    for name, declaration in mine.items():
        assert declaration == headers.get(name), name


def test_every_declared_function_can_be_called(source_root):
    for declared in PAIRS:
        for name in declarations(code_of(source_root / declared)):
            assert callable(getattr(lib, name))


def test_every_function_that_python_uses_is_declared(source_root):
    declared = set()
    for path in PAIRS:
        declared |= set(declarations(code_of(source_root / path)))
    for folder in LAYERS:
        for path in (source_root / folder).glob("*.py"):
            used = set(re.findall(r"\blib\.(quire_\w+)", path.read_text())) - {"quire_python_visit_change"}
            assert {name for name in used if not name.startswith("quire_python_")} <= declared, path


def test_no_declaration_is_unused(source_root):
    text = "".join(path.read_text() for folder in LAYERS for path in (source_root / folder).glob("*.py"))
    text += "".join(path.read_text() for path in (source_root / "tests").rglob("*.py"))
    for declared in PAIRS:
        for name in declarations(code_of(source_root / declared)):
            assert f"lib.{name}" in text, f"{declared} declares {name}, which nothing calls"


def test_constants_have_the_values_of_the_header(source_root):
    text = (source_root / "pagemgr/pagemgr.h").read_text()
    for name, value in re.findall(r"#define (QUIRE_(?:PAGE_BYTES_\w+|NAME_BYTES_MAX)) (\d+)u", text):
        assert getattr(lib, name) == int(value)
    text = (source_root / "structures/kv.h").read_text()
    kinds = re.findall(r"(QUIRE_KIND_\w+|QUIRE_CURSOR_REVERSE) = (\d+)", text)
    assert len(kinds) == 5
    for name, value in kinds:
        assert getattr(lib, name) == int(value)


def test_only_the_two_lowest_layers_touch_the_core(source_root):
    for folder in ("src/quire", "bench"):
        for path in (source_root / folder).rglob("*.py"):
            if path.name != "_native_build.py":
                assert "_native" not in path.read_text(), path
