"""Raw pages: sets whose pages hold whatever their user puts there."""

from typing import Any

from quire._native import ffi, lib
from quire.pagemgr.errors import InvalidError, NotFoundError, check
from quire.pagemgr.lifetime import Face
from quire.pagemgr.page_manager import Arena, changed_pages, page_number


class Raw(Face):
    """A set of raw pages, each ``pm.page_size`` bytes; opened with ``pm.raw(name)``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     pages = pm.raw("pages")
    ...     page = pages.alloc()
    ...     pages.write(page, b"hello", offset=2)
    ...     pages.read(page)[:8]
    b'\\x00\\x00hello\\x00'
    """

    def __init__(self, arena: Arena, pointer: Any, name: str) -> None:
        self._arena = arena
        self._pointer = pointer
        self._name = name

    def __repr__(self) -> str:
        return f"<Raw {self._name!r}>"

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._name

    def _check(self, code: int, page_id: int) -> None:
        """As check(), with a message that names the page."""
        if code == lib.QUIRE_E_NOTFOUND:
            raise NotFoundError(f"page {page_id} of {self._name!r} is not in use")
        check(code)

    def alloc(self) -> int:
        """A new page, filled with zeros; its id."""
        page_id = ffi.new("quire_page_id *")
        with self._arena._lock:
            self._arena._live()
            check(lib.quire_raw_alloc(self._pointer, page_id))
        return int(page_id[0])

    def read(self, page_id: int) -> bytes:
        """The bytes of a page."""
        with self._arena._lock:
            page = ffi.new("char[]", lib.quire_arena_page_bytes(self._arena._live()))
            self._check(lib.quire_raw_read(self._pointer, page_number(page_id), page), page_id)
        return bytes(ffi.buffer(page))

    def write(self, page_id: int, data: bytes, offset: int = 0) -> None:
        """Writes bytes into a page, from offset on."""
        if not isinstance(data, bytes | bytearray | memoryview) or not isinstance(offset, int):
            raise InvalidError(
                f"a page takes bytes at an int offset, not {type(data).__name__} at {type(offset).__name__}"
            )
        with self._arena._lock:
            size = lib.quire_arena_page_bytes(self._arena._live())
            if offset < 0 or offset + len(data) > size:
                raise InvalidError(f"{len(data)} bytes at offset {offset} do not fit a page of {size} bytes")
            code = lib.quire_raw_write(self._pointer, page_number(page_id), offset, ffi.from_buffer(data), len(data))
            self._check(code, page_id)

    def free(self, page_id: int) -> None:
        """Gives a page back; its id may be used again."""
        with self._arena._lock:
            self._arena._live()
            self._check(lib.quire_raw_free(self._pointer, page_number(page_id)), page_id)

    def ids(self) -> list[int]:
        """The ids of all pages in use."""
        with self._arena._lock:
            self._arena._live()
            pages = changed_pages(self._pointer, 0)
        return [page_id for page_id, in_use in pages.items() if in_use]
