"""The exceptions of Quire: one class for each error code of the C core (the table in ``error.h``).

Each also derives from the built-in exception that a reader of plain Python code would expect, so that
``except KeyError`` catches a missing key and ``except MemoryError`` a limit that is reached.
"""

from typing import NoReturn

from quire._native import ffi, lib


class QuireError(Exception):
    """Base of all errors of Quire.

    ``rows_done`` is set by the bulk calls (``put_many`` and its like): how many rows were stored before the error.

    >>> import quire
    >>> with quire.PageManager(page_size=4096) as pm:
    ...     try:
    ...         pm.map("users")["alice"] = b"1"
    ...     except quire.QuireError as error:
    ...         print(type(error).__name__)
    InvalidError
    """

    rows_done: int | None = None

    def __str__(self) -> str:
        return " ".join(str(argument) for argument in self.args)


class NotFoundError(QuireError, KeyError):
    """No such key, page, set or snapshot."""


class ExistsError(QuireError):
    """The name is taken."""


class InvalidError(QuireError, ValueError):
    """An argument is outside what is allowed."""


class NoMemoryError(QuireError, MemoryError):
    """The system gave no memory."""


class LimitError(QuireError, MemoryError):
    """The memory limit is reached; the last commit is intact."""


class NoSpaceError(QuireError, OSError):
    """The disk is full; the last commit is intact."""


class IOFailedError(QuireError, OSError):
    """Reading or writing failed."""


class CorruptError(QuireError):
    """The data breaks an invariant."""


class VersionError(QuireError):
    """Written by another version of the format."""


class BusyError(QuireError):
    """Another writer holds the arena, or another call is still running on it."""


class ClosedError(QuireError):
    """Used after close, after destroy or across a fork."""


class ReadOnlyError(QuireError):
    """A write through a read-only handle."""


class FullError(QuireError):
    """A structural limit is reached."""


class MismatchError(QuireError):
    """Kind, page size or schema differs from what is stored."""


class PositionError(QuireError, IndexError):
    """A position outside a list or deque. Raised by Python alone; the core says ``NOTFOUND``."""


BY_CODE: dict[int, type[QuireError]] = {
    lib.QUIRE_E_NOTFOUND: NotFoundError,
    lib.QUIRE_E_EXISTS: ExistsError,
    lib.QUIRE_E_INVALID: InvalidError,
    lib.QUIRE_E_NOMEM: NoMemoryError,
    lib.QUIRE_E_LIMIT: LimitError,
    lib.QUIRE_E_NOSPACE: NoSpaceError,
    lib.QUIRE_E_IO: IOFailedError,
    lib.QUIRE_E_CORRUPT: CorruptError,
    lib.QUIRE_E_VERSION: VersionError,
    lib.QUIRE_E_BUSY: BusyError,
    lib.QUIRE_E_CLOSED: ClosedError,
    lib.QUIRE_E_READONLY: ReadOnlyError,
    lib.QUIRE_E_FULL: FullError,
    lib.QUIRE_E_MISMATCH: MismatchError,
}


def fail(code: int) -> NoReturn:
    """Raises the exception for a code that a call of the core has just returned on this thread."""
    if code == lib.QUIRE_E_NOTFOUND:
        # The one code that comes without a message of its own, since it often is no error.
        raise NotFoundError("no such key, page, set or snapshot")
    message = ffi.string(lib.quire_error_message()).decode("utf-8", "replace")
    raise BY_CODE.get(code, QuireError)(message or f"the core returned code {code}")


def check(code: int) -> None:
    """Raises if a call of the core failed: ``check(lib.quire_arena_commit(arena))``."""
    if code:
        fail(code)


SHOWN_MAX = 200  # characters: a message is to be read


def shown(value: object) -> str:
    """A value as a message shows it: shortened, if it is long."""
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}... ({len(text):,} characters)"
