"""Maps, ordered maps, lists and deques on flat pages, and the page manager that opens them."""

from quire.structures.maps import Map, OrderedMap
from quire.structures.page_manager import PageManager, Snapshot
from quire.structures.raw import Raw
from quire.structures.schema import Schema
from quire.structures.sequences import Deque, List

__all__ = ["Deque", "List", "Map", "OrderedMap", "PageManager", "Raw", "Schema", "Snapshot"]
