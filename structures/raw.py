"""Raw pages: sets whose pages hold whatever their user puts there."""

from typing import Any

from quire._native import ffi, lib
from quire.pagemgr.callbacks import VISIT_PAGE, collect
from quire.pagemgr.errors import InvalidError, NotFoundError, check
from quire.pagemgr.lifetime import Face
from quire.pagemgr.page_manager import Arena, page_number


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

    def _usable(self) -> Any:
        """The set, if it was not destroyed meanwhile; the arena must be entered."""
        check(lib.quire_set_usable(self._pointer))
        return self._pointer

    def alloc(self) -> int:
        """A new page, filled with zeros; its id."""
        page_id, page = ffi.new("quire_page_id *"), ffi.new("void **")
        with self._arena._entered() as arena:
            pages = self._usable()
            check(lib.quire_arena_reserve(arena, 1))
            check(lib.quire_page_alloc(pages, 0, page_id, page))
        return int(page_id[0])

    def read(self, page_id: int) -> bytes:
        """The bytes of a page."""
        with self._arena._entered() as arena:
            page = lib.quire_page_read(ffi.addressof(self._usable(), "view"), page_number(page_id))
            if page == ffi.NULL:
                raise NotFoundError(f"page {page_id} of {self._name!r} is not in use")
            return bytes(ffi.buffer(page, lib.quire_arena_page_bytes(arena)))

    def write(self, page_id: int, data: bytes, offset: int = 0) -> None:
        """Writes bytes into a page, from offset on."""
        with self._arena._entered() as arena:
            pages, size = self._usable(), lib.quire_arena_page_bytes(arena)
            if offset < 0 or offset + len(data) > size:
                raise InvalidError(f"{len(data)} bytes at offset {offset} do not fit a page of {size} bytes")
            check(lib.quire_arena_reserve(arena, 1))
            page = lib.quire_page_write(pages, page_number(page_id))
            if page == ffi.NULL:
                raise NotFoundError(f"page {page_id} of {self._name!r} is not in use")
            ffi.memmove(ffi.cast("char *", page) + offset, data, len(data))

    def free(self, page_id: int) -> None:
        """Gives a page back; its id may be used again."""
        with self._arena._entered() as arena:
            pages = self._usable()
            check(lib.quire_arena_reserve(arena, 1))
            code = lib.quire_page_free(pages, page_number(page_id))
            if code == lib.QUIRE_E_NOTFOUND:
                raise NotFoundError(f"page {page_id} of {self._name!r} is not in use")
            check(code)

    def ids(self) -> list[int]:
        """The ids of all pages in use."""
        with self._arena._entered():
            view = ffi.addressof(self._usable(), "view")
            found = collect(lambda context: lib.quire_view_changed(view, 0, VISIT_PAGE, context))
        return [page_id for page_id, in_use in found if in_use]
