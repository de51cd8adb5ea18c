"""Builds ``quire._native``, the C core with its Python binding (cffi, API mode).

setup.py points here. What Python may call is declared in the ``*.cdef.h`` files beside the headers; the compiler checks
each declaration against the real header. ``QUIRE_SANITIZE=address,undefined`` in the environment builds with those
sanitizers.
"""

import os
from pathlib import Path

import cffi

# Relative to the project's folder, where builds run: setuptools refuses absolute paths.
ROOT = Path(os.path.relpath(Path(__file__).resolve().parents[2]))
DECLARATIONS = [
    "pagemgr/pagemgr.cdef.h",
    "structures/structures.cdef.h",
    "structures/rowcodec.cdef.h",
    "checkpoint/checkpoint.cdef.h",
    "statestore/family.cdef.h",
]
HEADERS = [
    "pagemgr/pagemgr.h",
    "structures/kv.h",
    "structures/sequence.h",
    "structures/rowcodec.h",
    "checkpoint/container.h",
    "checkpoint/delta.h",
    "checkpoint/pages.h",
    "checkpoint/xxhash32.h",
    "checkpoint/cec.h",
    "statestore/family.h",
]
LAYERS = ["pagemgr", "structures", "checkpoint", "statestore"]

# Pages are read as bytes and as structs by turns, hence no strict aliasing.
COMPILE = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-g", "-fno-strict-aliasing", "-fvisibility=hidden", "-Wall", "-Wextra"]
LINK = ["-lm"]


def sanitizer_flags() -> list[str]:
    """The flags for the sanitizers that the environment asks for."""
    names = os.environ.get("QUIRE_SANITIZE", "")
    if not names:
        return []
    return [f"-fsanitize={names}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-O1"]


ffibuilder = cffi.FFI()
for declarations in DECLARATIONS:
    ffibuilder.cdef((ROOT / declarations).read_text(encoding="utf-8"))
ffibuilder.set_source(
    "quire._native",
    "".join(f'#include "{header}"\n' for header in HEADERS),
    sources=[str(path) for layer in LAYERS for path in sorted((ROOT / layer).glob("*.c"))],
    depends=[str(path) for layer in LAYERS for path in sorted((ROOT / layer).glob("*.h"))],
    include_dirs=[str(ROOT)],
    extra_compile_args=COMPILE + sanitizer_flags(),
    extra_link_args=LINK + sanitizer_flags(),
)
