"""What an operator keeps: values, maps, lists, queues, timers and a watermark, declared by name and type."""

import builtins
import contextlib
import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.pagemgr.errors import InvalidError
from quire.structures.groups import groups_of
from quire.structures.maps import Map, OrderedMap
from quire.structures.page_manager import PageManager, user_name
from quire.structures.schema import ColumnsLike, Schema, as_schema
from quire.structures.sequences import Deque, List

# The types that times may have, by what Spark calls them.
TIMES = {"timestamp": pa.timestamp("us", "UTC"), "bigint": pa.int64()}
INT64_MAX = (1 << 63) - 1
DEADLINE = "deadline"
EARLIEST = datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)
LATEST = datetime.datetime.max.replace(tzinfo=datetime.timezone.utc)

Structure = TypeVar("Structure")


class State:
    """The structures of one operator in a page manager. Each is declared once, with its type; types are DDL or Arrow's.

    What is declared again after a restart has what was committed; with another type it is a ``MismatchError``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     state = quire.State(pm)
    ...     counts = state.map("counts", key="user string", value="n bigint")
    ...     total = state.value("total", "bigint", default=0)
    ...     found = counts.add_many(["bo", "al", "bo"], [1, 1, 1])
    ...     total.set(total.get() + 3)
    ...     sorted(counts.items()), total.get()
    ([('al', 1), ('bo', 2)], 3)
    """

    def __init__(self, pm: PageManager) -> None:
        if not isinstance(pm, PageManager):
            raise InvalidError(f"a State lies in a PageManager, not in {type(pm).__name__}")
        self._pm = pm
        self._declared: builtins.list[str] = []

    def _refuse_taken(self, name: str) -> None:
        if user_name(name) in self._declared:
            raise InvalidError(f"{name!r} is declared already in this state: give each structure a name of its own")

    def _open(self, open_it: Callable[[str, Any], Structure], name: str, columns: Any) -> Structure:
        """Opens or creates, and remembers the name if that went well."""
        self._refuse_taken(name)
        opened = open_it(name, columns)
        self._declared.append(name)
        return opened

    def value(self, name: str, type: ColumnsLike, default: Any = None) -> "Value":
        """One value, ``default`` until it is set.

        >>> import quire
        >>> with quire.PageManager() as pm:
        ...     last = quire.State(pm).value("last", "user string, n bigint")
        ...     last.set({"user": "bo", "n": 3})
        ...     last.get()
        {'user': 'bo', 'n': 3}
        """
        return Value(self._open(self._pm.map, name, Schema(key=pa.null(), value=type)), default)

    def map(self, name: str, key: ColumnsLike, value: ColumnsLike) -> Map:
        """A map in no particular order."""
        return self._open(self._pm.map, name, Schema(key, value))

    def ordered_map(self, name: str, key: ColumnsLike, value: ColumnsLike) -> OrderedMap:
        """A map in the order of its keys."""
        return self._open(self._pm.ordered_map, name, Schema(key, value))

    def list(self, name: str, value: ColumnsLike) -> List:
        """A list of rows."""
        return self._open(self._pm.list, name, as_schema("value", value))

    def queue(self, name: str, value: ColumnsLike) -> Deque:
        """A queue of rows, to take from and add to at both ends."""
        return self._open(self._pm.deque, name, as_schema("value", value))

    def timers(self, name: str, key: ColumnsLike, time: str = "timestamp") -> "Timers":
        """A deadline for each key; ``time`` is its type, ``timestamp`` or ``bigint``."""
        if time not in TIMES:
            raise InvalidError(f"time is {time!r}: give the type of deadlines, one of {', '.join(TIMES)}")
        columns = as_schema("key", key)
        if columns.names == [""]:
            columns = pa.schema([columns.field(0).with_name("key")])
        if DEADLINE in columns.names:
            raise InvalidError(f"the key of timers has a column {DEADLINE!r}, which theirs is called: rename it")
        deadline = pa.field(DEADLINE, TIMES[time], nullable=False)
        by_key = Schema(columns, pa.schema([deadline]))
        by_time = Schema(pa.schema([deadline, *columns]), pa.null())
        key_name, time_name = (f"{user_name(name)}{suffix}" for suffix in (".by_key", ".by_time"))
        self._refuse_taken(time_name)
        return Timers(self._open(self._pm.map, key_name, by_key), self._open(self._pm.ordered_map, time_name, by_time))

    def watermark(
        self, name: str = "watermark", delay: datetime.timedelta | int = datetime.timedelta(0)
    ) -> "Watermark":
        """The greatest event time so far, less a delay: a timedelta, or an int for times that are bigint."""
        if isinstance(delay, datetime.timedelta):
            if not datetime.timedelta(0) <= delay <= LATEST - EARLIEST:
                raise InvalidError(f"delay is {delay!r}: give 0 to {LATEST - EARLIEST}")
            return Watermark(self.value(name, TIMES["timestamp"]), delay)
        if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
            raise InvalidError(
                f"delay is {delay!r}: give a timedelta, or for times that are bigint an int of 0 or more"
            )
        return Watermark(self.value(name, TIMES["bigint"]), delay)


class Value:
    """One value; see ``State.value``."""

    def __init__(self, stored: Map, default: Any) -> None:
        self._stored = stored
        self._default = default

    def get(self) -> Any:
        """The value, or the default if none is set."""
        return self._stored.get(None, self._default)

    def set(self, value: Any) -> None:
        """Sets the value: a plain one if there is one column, else a dict."""
        self._stored[None] = value

    def clear(self) -> None:
        """Forgets the value."""
        self._stored.pop(None, None)


class Timers:
    """A deadline for each key; see ``State.timers``.

    After an error other than ``InvalidError`` the two maps underneath may differ: abort what was not committed.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     timers = quire.State(pm).timers("timeouts", key="user string", time="bigint")
    ...     timers.set_many(["bo", "al", "cy"], [30, 10, 20])
    ...     timers.set("al", 25)
    ...     timers.due(now=25).to_pylist(), len(timers)
    ([{'user': 'cy', 'deadline': 20}, {'user': 'al', 'deadline': 25}], 1)
    """

    def __init__(self, by_key: Map, by_time: OrderedMap) -> None:
        self._by_key = by_key
        self._by_time = by_time
        schema = by_key.schema
        assert schema is not None
        self._schema = schema
        # What one deadline is in Python, if Python can hold it.
        self._python = int if pa.types.is_integer(schema.value.field(0).type) else datetime.datetime

    def __len__(self) -> int:
        return len(self._by_key)

    def set_many(self, keys: Any, deadlines: Any) -> None:
        """Sets the deadline of each key in place of the one it has; of equal keys the last one counts."""
        columns, (times,) = self._schema._key.arrays(keys), self._schema._value.arrays(deadlines)
        if len(times) != len(columns[0]):
            raise InvalidError(
                f"{len(columns[0])} keys but {len(times)} deadlines: give as many of one as of the other"
            )
        if times.null_count:
            raise InvalidError(f"column {DEADLINE!r}: there are nulls; cancel_many() takes deadlines away")
        distinct, groups = groups_of(self._schema.encode_keys(self._rows(columns)))
        last = np.zeros(len(distinct), np.int64)
        last[groups] = np.arange(len(groups))
        rows = pa.array(last)
        columns, times = [column.take(rows) for column in columns], times.take(rows)
        self._forget(columns)
        self._by_key.put_many(self._rows(columns), times)
        self._by_time.put_many([times, *columns], pa.nulls(len(times)))

    def set(self, key: Any, deadline: Any) -> None:
        """Sets the deadline of the key in place of the one it has."""
        if type(deadline) is self._python:
            with contextlib.suppress(InvalidError):  # nothing has changed then, and set_many() says it better
                old = self._by_key.get(key)
                values = self._schema._key.values(key)
                self._by_time[(deadline, *values)] = None
                self._by_key[key] = deadline
                if old is not None and old != deadline:
                    del self._by_time[(old, *values)]
                return
        self.set_many(self._one(key), [deadline])

    def cancel_many(self, keys: Any) -> int:
        """Takes the deadlines of these keys away; says how many had one."""
        columns = self._schema._key.arrays(keys)
        self._forget(columns)
        return self._by_key.remove_many(self._rows(columns))

    def cancel(self, key: Any) -> bool:
        """Takes the deadline of the key away; says whether it had one."""
        with contextlib.suppress(InvalidError):  # as above
            old = self._by_key.get(key)
            if old is None:
                return False
            del self._by_time[(old, *self._schema._key.values(key))]
            del self._by_key[key]
            return True
        return self.cancel_many(self._one(key)) == 1

    def due(self, now: Any) -> Any:
        """Takes out all keys whose deadline is ``now`` or before: an Arrow table of them, the earliest first."""
        number = self._schema._value.bound(now, None)[1].cast(pa.int64()).as_py()
        kind = self._schema.value.field(0).type
        end = None if number == INT64_MAX else pa.scalar(number + 1, pa.int64()).cast(kind)
        found = self._by_time.pop_range(hi=end).select([*self._schema.key.names, DEADLINE])
        self._by_key.remove_many(found.select(self._schema.key.names))
        return found

    def _rows(self, columns: list[Any]) -> Any:
        """Columns of the key as maps take them."""
        return dict(zip(self._schema.key.names, columns, strict=True))

    def _one(self, key: Any) -> Any:
        """The columns of one key."""
        return self._rows([[value] for value in self._schema._key.values(key)])

    def _forget(self, columns: list[Any]) -> None:
        """Takes out what the ordered map has of these keys."""
        times = self._by_key.get_many(self._rows(columns))
        there = times.is_valid()
        self._by_time.remove_many([column.filter(there) for column in (times, *columns)])


class Watermark:
    """The greatest event time so far, less a delay; it never goes back. See ``State.watermark``.

    >>> import quire
    >>> with quire.PageManager() as pm:
    ...     watermark = quire.State(pm).watermark(delay=10)
    ...     before = watermark.value
    ...     watermark.observe([100, 130, 120])
    ...     watermark.observe([90])
    ...     before, watermark.value
    (None, 120)
    """

    def __init__(self, stored: Value, delay: datetime.timedelta | int) -> None:
        self._stored = stored
        self._delay = delay

    @property
    def value(self) -> Any:
        """The greatest time observed less the delay; None before the first."""
        greatest = self._stored.get()
        if greatest is None:
            return None
        if isinstance(self._delay, int):
            return greatest - self._delay
        return max(greatest, EARLIEST + self._delay) - self._delay

    def observe(self, column: Any) -> None:
        """Takes note of a column of event times; nulls do not count."""
        schema = self._stored._stored.schema
        assert schema is not None
        greatest = pc.max(schema._value.arrays(column)[0])
        if not greatest.is_valid:
            return
        try:
            time = greatest.as_py()
        except (ValueError, OverflowError) as error:
            raise InvalidError(f"an event time that no Python object can hold: {error}") from error
        old = self._stored.get()
        if old is None or time > old:
            self._stored.set(time)
