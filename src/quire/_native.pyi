"""The compiled C core. Only quire.pagemgr, quire.structures and quire.checkpoint call it."""

from typing import Any

ffi: Any
lib: Any
