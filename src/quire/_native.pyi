"""The compiled C core. Only quire.pagemgr and quire.structures call it."""

from typing import Any

ffi: Any
lib: Any
