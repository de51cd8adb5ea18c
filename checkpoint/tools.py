"""The commands ``quire inspect``, ``quire verify`` and ``quire dump``.

Data goes to stdout and nothing else does. Exit codes: 0 all is well, 1 something is damaged, 2 it cannot be read.
"""

import contextlib
import csv
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa

from quire.checkpoint.container import CheckpointFile, FileKind
from quire.checkpoint.reader import (
    Checkpoint,
    Line,
    Listing,
    Store,
    StoredFile,
    Version,
    counted_keys,
    differences,
    families,
    raw_pages,
    sequences,
    steadily,
)
from quire.pagemgr.errors import CorruptError, InvalidError, NotFoundError, QuireError, VersionError
from quire.structures import PageManager

FINE, DAMAGED, CANNOT_READ = 0, 1, 2
DAMAGE = (CorruptError, VersionError)
PARQUET_ROWS = 65536

Advance = Callable[[int], None]


def guarded(command: str, run: Callable[[], int]) -> int:
    """The exit code of a command; what went wrong on stderr, in a line."""
    try:
        return run()
    except QuireError as error:
        print(f"quire {command}: {error}", file=sys.stderr)
        return DAMAGED if isinstance(error, DAMAGE) else CANNOT_READ
    except KeyboardInterrupt:
        print(f"quire {command}: interrupted", file=sys.stderr)
        return CANNOT_READ


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal and the package rich is there, and what moves it on."""
    try:
        if not sys.stderr.isatty():
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def as_table(rows: list[list[str]]) -> Iterator[str]:
    """Rows in columns; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def as_size(count: int) -> str:
    """Bytes for people.

    >>> as_size(999), as_size(123456)
    ('999 B', '120.6 KiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def as_ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, runs of them short.

    >>> as_ranges([1, 2, 3, 7, 9, 10])
    '1-3 7 9-10'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


# ---------------------------------------------------------------------------------------------------- inspect


@dataclass
class Summary:
    """What inspect tells of a store.

    keys       of the newest version, by the end of its file; None if that is damaged.
    kind       what the newest version's file holds: delta, pages, log or base; None if it is damaged.
    page_size  of the newest base; None if there is no base.
    extent     how many files, and with how many bytes, the newest version is loaded from; None if files are missing.
    """

    operator: int | str
    partition: int
    store: str
    versions: list[str]
    newest: str
    bases: list[str]
    files: int
    bytes: int
    keys: int | None = None
    kind: str | None = None
    codec: str | None = None
    page_size: int | None = None
    extent: dict[str, int] | None = None
    problems: list[str] = field(default_factory=list)


def summary(store: Store) -> Summary:
    """Looks at the names of a store's files, and at the ends of a few."""
    return steadily(lambda: _summary(store))


def _summary(store: Store) -> Summary:
    listing = store.listing()
    files = listing.files
    if not files:
        raise NotFoundError(f"{store.location} holds no version")
    newest = store.newest(listing)
    bases = [file for file in files if file.kind == FileKind.BASE]
    # The delta where there is one: not all bases count the keys.
    last = min((file for file in files if file.version == newest), key=lambda file: file.kind)
    found = Summary(
        store.operator,
        store.id.partition,
        store.id.name,
        versions=list(dict.fromkeys(str(file.version) for file in files)),
        newest=str(newest),
        bases=[str(file.version) for file in bases],
        files=len(files) + len(listing.parts),
        bytes=sum(file.size for file in (*files, *listing.parts)),
    )
    with noting(found.problems, DAMAGE):
        header = store.header(last)
        found.kind, found.codec = header.kind.name.lower(), header.codec
        found.keys = store.keys(last)
    if bases:
        with noting(found.problems, DAMAGE):
            found.page_size = store.header(bases[-1]).page_bytes
    with noting(found.problems, (*DAMAGE, NotFoundError)):
        line = store.line(newest.number, newest.id)
        names = set(store.parts(line.base)) if line.base is not None else set()
        parts = [part for part in listing.parts if part.path.rpartition("/")[2] in names]
        found.extent = {
            "files": len(line.files) + len(parts),
            "bytes": sum(file.size for file in (*line.files, *parts)),
        }
    return found


@contextlib.contextmanager
def noting(problems: list[str], damage: tuple[type[QuireError], ...]) -> Iterator[None]:
    """Notes damage, and goes on behind the block."""
    try:
        yield
    except damage as error:
        if str(error) not in problems:
            problems.append(str(error))


def inspect(url: str, as_json: bool = False, storage: Any = None) -> int:
    """Prints which stores and versions a checkpoint has."""
    checkpoint = Checkpoint(url, storage)
    found = [summary(store) for store in checkpoint.stores()]
    problems = [problem for each in found for problem in each.problems]
    if as_json:
        print(json.dumps({"checkpoint": checkpoint.location, "stores": [asdict(each) for each in found]}, indent=2))
    else:
        print(checkpoint.location)
        for line in as_table([HEADINGS, *map(_row, found)]):
            print(line)
        keys = sum(each.keys or 0 for each in found)
        print(f"{_count(len(found), 'store')}, {_count(keys, 'key')}, {as_size(sum(each.bytes for each in found))}")
    for problem in problems:
        print(f"quire inspect: {problem}", file=sys.stderr)
    return DAMAGED if problems else FINE


HEADINGS = ["operator", "partition", "store", "versions", "bases", "files", "bytes", "keys", "kind", "codec", "page"]
HEADINGS += ["extent"]


def _row(found: Summary) -> list[str]:
    unknown = "?"
    newest = Version.parse(found.newest)
    return [
        str(found.operator),
        str(found.partition),
        found.store,
        as_ranges(Version.parse(text).number for text in found.versions) + (f" ({newest})" if newest.id else ""),
        as_ranges(Version.parse(text).number for text in found.bases) or "-",
        str(found.files),
        as_size(found.bytes),
        unknown if found.keys is None else str(found.keys),
        found.kind or unknown,
        unknown if found.codec is None else found.codec or "none",
        str(found.page_size or "-"),
        unknown
        if found.extent is None
        else f"{_count(found.extent['files'], 'file')}, {as_size(found.extent['bytes'])}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------- verify


@dataclass
class Verdict:
    """What verify found in a store. version: the newest; keys: of that, if it is sound."""

    operator: int | str
    partition: int
    store: str
    version: str = ""
    files: int = 0
    bytes: int = 0
    keys: int | None = None
    problems: list[str] = field(default_factory=list)


class CleanedError(Exception):
    """A query that goes on has removed a file that was to be looked at, since nothing needs it any more."""


class Examination:
    """One look at all that a store's newest version needs, or at all of its files, as far as they stay.

    missing_is_damage: else ``NotFoundError`` is raised for a missing file, since a new listing may do without it.
    """

    def __init__(self, store: Store, every_file: bool, advance: Advance, missing_is_damage: bool) -> None:
        self._store = store
        self._every_file = every_file
        self._advance = advance
        self._damage = (*DAMAGE, NotFoundError) if missing_is_damage else DAMAGE
        self._seen: set[StoredFile] = set()
        self._parts: list[StoredFile] = []
        self._verdict = Verdict(store.operator, store.id.partition, store.id.name)

    def run(self) -> Verdict:
        """Looks, and tells."""
        listing = self._store.listing()
        if not listing.files:
            raise NotFoundError(f"{self._store.location} holds no version")
        self._parts = listing.parts
        # In checkpoint format 2 attempts at one batch may have left several newest versions.
        newest = [version for version in listing.versions if version.number == listing.versions[-1].number]
        self._verdict.version = " ".join(map(str, newest))
        for version in newest:
            lines: list[Line] = []
            with self._noting():
                lines = self._lines(listing, version)
            if lines:
                self._verdict.keys = self._replay_longest(lines, listing)
        if self._every_file:
            self._look_at_others(listing)
        return self._verdict

    def _lines(self, listing: Listing, version: Version) -> list[Line]:
        """What a version can be loaded from, if every file is looked at; else the shortest."""
        lines: list[Line] = []
        try:
            for line in self._store.lines_in(listing, version):
                lines.append(line)
                if not self._every_file:
                    break
        except NotFoundError:
            if not lines:
                raise
            # A file that was listed is gone, which shows when it is looked at.
        return lines

    def _replay_longest(self, lines: list[Line], listing: Listing) -> int | None:
        """As ``_replay``, of the last of these lines that is there long enough."""
        for line in reversed(lines):
            with contextlib.suppress(CleanedError):
                return self._replay(line, listing)
        raise NotFoundError(
            f"{self._store.location}: the query removes files faster than they can be read; verify a copy, or let it "
            "keep more versions"
        )

    def _look_at_others(self, listing: Listing) -> None:
        """The files that the newest version does not need: along with what they need, or by themselves."""
        for file in reversed(listing.files):
            if file.kind == FileKind.DELTA:
                self._note_hole(listing, file)
            if file in self._seen:
                continue
            lines: list[Line] = []
            with contextlib.suppress(NotFoundError, *DAMAGE):
                lines = self._lines(listing, file.version)
            if lines and file in lines[-1].files:
                with contextlib.suppress(CleanedError):
                    self._replay(lines[-1], listing)
            if file not in self._seen:
                self._look_at(file)

    def _note_hole(self, listing: Listing, file: StoredFile) -> None:
        """Cleaning removes the oldest first: what is missing between others was removed by somebody else."""
        with contextlib.suppress(NotFoundError, *DAMAGE):  # of a query that goes on; or what is named elsewhere
            parent = self._store.parent(listing, file)
            # Files may have come and gone while they were listed.
            if self._is_hole(listing, parent) and self._is_hole(self._store.listing(), parent):
                missing = self._store.path_of(parent, FileKind.DELTA)
                self._verdict.problems.append(f"{missing} is not there, and files of versions before it are")

    def _is_hole(self, listing: Listing, version: Version) -> bool:
        return version not in listing.versions and listing.reaches_behind(version)

    def _noting(self) -> contextlib.AbstractContextManager[None]:
        return noting(self._verdict.problems, self._damage)

    def _read(self, file: StoredFile) -> CheckpointFile:
        if file not in self._seen:
            self._seen.add(file)
            # With its parts, if it has any.
            read = [file, *(part for part in self._parts if (file.kind, file.version) == (FileKind.BASE, part.version))]
            self._verdict.files += len(read)
            self._verdict.bytes += sum(each.size for each in read)
            self._advance(sum(each.size for each in read))
        with self._while_it_stays(file):
            return self._store.read(file)

    @contextlib.contextmanager
    def _while_it_stays(self, file: StoredFile) -> Iterator[None]:
        """``CleanedError`` if a file that was there is gone with all that were older."""
        try:
            yield
        except NotFoundError as error:
            left = self._store.files()
            if left and file not in left and left[0].version.number >= file.version.number:
                raise CleanedError from error
            raise

    def _replay(self, line: Line, listing: Listing) -> int | None:
        """Reads a line to its end, and goes on behind a damaged file to name all that are damaged.

        Gives the keys of the state that it leads to, if that is sound.
        """
        state = PageManager()
        sound = True
        try:
            for file in line.files:
                done = whole = False
                with self._noting():
                    found = self._read(file)
                    if sound:
                        state = self._store.apply(state, file, found)
                        # Logs that the line starts with hold every key of the later of these versions alone.
                        whole = not (line.logs and found.header.kind == FileKind.LOG and found.since < line.first)
                        if whole:
                            with contextlib.suppress(CleanedError):
                                self._check_keys(state, file, found, listing)
                    else:
                        self._store.records(file, found)
                    done = True
                sound = sound and done
                base = listing.bases.get(file.version)
                if sound and whole and self._every_file and base not in (None, line.base):
                    self._look_at(base, state)
            if sound:
                with self._noting():
                    self._check_pages(state, line.version)
                return sum(counted_keys(state))
        finally:
            state.close()
        return None

    def _look_at(self, file: StoredFile, expected: PageManager | None = None) -> None:
        """A file by itself. expected: the state that a base must hold."""
        with contextlib.suppress(CleanedError), self._noting():
            found = self._read(file)
            if file.kind == FileKind.DELTA:
                self._store.records(file, found)
                return
            with self._store.apply(PageManager(), file, found) as state:
                self._check_pages(state, file.version)
                if expected is not None and next(differences(expected, state), None) is not None:
                    raise CorruptError(
                        f"{self._store.name_of(file)}: the commit files up to its version lead to another state"
                    )

    def _check_pages(self, state: PageManager, version: Version) -> None:
        try:
            state.check()
        except CorruptError as error:
            raise CorruptError(f"{self._store.location}: version {version}: {error}") from error

    def _check_keys(self, state: PageManager, file: StoredFile, found: CheckpointFile, listing: Listing) -> None:
        keys, counted = found.keys, listing.deltas.get(file.version)
        if file.kind == FileKind.BASE and not keys:
            # Not all bases count the keys; the delta of their version does.
            if counted is None:
                return
            with self._while_it_stays(counted):
                if self._store.header(counted).kind == FileKind.LOG:
                    return
                keys = self._store.keys(counted)
        # A log counts every key, those that Spark keeps for itself, too.
        is_log = found.header.kind == FileKind.LOG
        there = sum(map(len, families(state).values())) if is_log else sum(counted_keys(state))
        if keys != there and (is_log or not keys_fit(state, keys)):
            name = self._store.name_of(file)
            raise CorruptError(f"{name}: the state has {there} keys, the end of its file says {keys}")


def examine(store: Store, every_file: bool, advance: Advance) -> Verdict:
    """Looks at a store whose query may be running: what is missing is looked for again before it counts."""
    try:
        return steadily(lambda: Examination(store, every_file, advance, missing_is_damage=False).run())
    except NotFoundError:
        return Examination(store, every_file, advance, missing_is_damage=True).run()


def keys_fit(state: PageManager, keys: int) -> bool:
    """Whether a state may be the one that had so many keys when it was written.

    A query counts those families only that it still has: those of a variable that it no longer uses stay, uncounted.
    """
    counts = counted_keys(state)
    if keys == sum(counts):
        return True
    # Bit n: some of them have n keys together. There are too many choices to look at each.
    sums = 1 if len(counts) > 1 else 0
    for count in counts:
        sums |= sums << count
    return bool(sums >> keys & 1)


def verify(url: str, as_json: bool = False, every_file: bool = False, storage: Any = None) -> int:
    """Reads what the newest versions need, or every file, and names each that is damaged."""
    checkpoint = Checkpoint(url, storage)
    batch = checkpoint.last_batch()
    stores = checkpoint.stores()
    missing = checkpoint.lacking(stores, batch)
    total = sum(sum(file.size for file in _scope(store, every_file)) for store in stores)
    with progress("verifying", total) as advance:
        verdicts = [examine(store, every_file, advance) for store in stores]
    problems = [problem for verdict in verdicts for problem in verdict.problems] + missing
    if as_json:
        stores_json = [asdict(verdict) for verdict in verdicts]
        told = {"checkpoint": checkpoint.location, "ok": not problems, "stores": stores_json, "missing": missing}
        print(json.dumps(told, indent=2))
    else:
        for problem in problems:
            print(problem)
        files, size = sum(verdict.files for verdict in verdicts), sum(verdict.bytes for verdict in verdicts)
        state = f"{len(problems)} damaged or missing" if problems else "all sound"
        print(f"{_count(len(verdicts), 'store')}, {_count(files, 'file')}, {as_size(size)} read: {state}")
    return DAMAGED if problems else FINE


def _scope(store: Store, every_file: bool) -> Iterable[StoredFile]:
    """What will be read, as far as it is known; for the progress bar alone."""
    with contextlib.suppress(QuireError):
        listing = store.listing()
        files = listing.files if every_file else store.line().files
        bases = {file.version for file in files if file.kind == FileKind.BASE}
        return [*files, *(part for part in listing.parts if part.version in bases)]
    return ()


# ---------------------------------------------------------------------------------------------------- dump


def as_text(data: Any) -> str:
    """Bytes as text if they are that, else in hex; what has a type, as Python shows it.

    >>> as_text(b"alice"), as_text(bytes(2)), as_text(7)
    ("'alice'", '0000', '7')
    """
    if not isinstance(data, bytes):
        return repr(data)
    text = data.decode("ascii", "replace")
    return repr(text) if text.isascii() and text.isprintable() and text else data.hex() or "''"


def dump(
    url: str,
    operator: int | str | None = None,
    partition: int | None = None,
    store: str | None = None,
    version: str | None = None,
    since: str | None = None,
    family: str | None = None,
    format: str = "table",
    limit: int | None = None,
    storage: Any = None,
) -> int:
    """Prints the records of a version, or in what it differs from an older one."""
    if format == "parquet" and sys.stdout.isatty():
        raise InvalidError("Parquet is nothing for a terminal: send it to a file, as in > state.parquet")
    chosen = Checkpoint(url, storage).store(operator, partition, store)
    with contextlib.ExitStack() as stack:
        newer = stack.enter_context(_load(chosen, version))
        older = None if since is None else stack.enter_context(_load(chosen, since))
        states = [newer] if older is None else [older, newer]
        # A name may have been that of a list, and be that of a map.
        sets = [(name, kind) for state in states for name, kind in state.sets().items()]
        names = sorted({name for name, _ in sets})
        if family is not None and family not in names:
            raise NotFoundError(f"{chosen.location} has no family {family!r}: there are {', '.join(names)}")
        columns = _columns(older is not None, {kind for name, kind in sets if family in (None, name)})
        typed = {n for n in names if family in (None, n) and any(is_typed(state, n) for state in states)}
        if format == "parquet" and typed:
            if older is not None or (len(names) > 1 and family is None):
                raise InvalidError(
                    "Parquet takes one structure of this state at a time, and no differences: give --family, one of "
                    f"{', '.join(names)}, without --since; or another --format"
                )
            write_parquet([table_of(newer, *typed).slice(0, limit)])
            return FINE
        lines = _records(newer, family) if older is None else _changes(older, newer, family)
        FORMATS[format](itertools.islice(lines, limit), columns)
    return FINE


def is_typed(state: PageManager, name: str) -> bool:
    """Whether a structure's records have columns."""
    kind = state.sets().get(name)
    if kind == "sequence":
        return state.list(name).schema is not None
    return kind in ("map", "ordered_map") and families(state)[name].schema is not None


def table_of(state: PageManager, name: str) -> pa.Table:
    """A structure with typed records as a table."""
    return state.list(name).to_table() if state.sets()[name] == "sequence" else families(state)[name].to_rows()


def _load(store: Store, version: str | None) -> PageManager:
    if version is None:
        return store.load()
    wanted = Version.parse(version)
    return store.load(wanted.number, wanted.id or None)


# A record: its family and key, or position if it has no key; and its values or, of a difference, what was done and the
# values before and after.
Record: TypeAlias = dict[str, Any]


def _records(state: PageManager, family: str | None) -> Iterator[Record]:
    for name, found in families(state).items():
        if family in (None, name):
            for key in found:
                yield {"family": name, "key": key, "values": found.get_all(key)}
    for name, records in sequences(state).items():
        if family in (None, name):
            for position, value in enumerate(records):
                yield {"family": name, "position": position, "values": [value]}
    for name, pages in raw_pages(state).items():
        if family in (None, name):
            for id, value in sorted(pages.items()):
                yield {"family": name, "position": id, "values": [value]}


def _changes(older: PageManager, newer: PageManager, family: str | None) -> Iterator[Record]:
    for found in differences(older, newer, family):
        place = {"key": found.key} if found.position is None else {"position": found.position}
        yield {"change": found.change, "family": found.family, **place, "before": found.older, "after": found.newer}


def _one_a_value(lines: Iterable[Record]) -> Iterator[Record]:
    """Rows for tables, where a key with several values has several rows; differences stay one each."""
    for line in lines:
        if "change" in line:
            yield line
        else:
            start = {name: field for name, field in line.items() if name != "values"}
            yield from ({**start, "value": value} for value in line["values"])


def _print_table(lines: Iterable[Record], columns: list[str]) -> None:
    """Fields apart by tabs, values by spaces."""
    for line in lines:
        shown = {name: " ".join(map(as_text, line[name])) for name in ("values", "before", "after") if line.get(name)}
        start = [line["change"]] if "change" in line else []
        place = as_text(line["key"]) if "key" in line else str(line["position"])
        print("\t".join([*start, line["family"], place, " -> ".join(shown.values())]))


def _print_json(lines: Iterable[Record], columns: list[str]) -> None:
    for line in lines:
        print(json.dumps({name: _hex(field) for name, field in line.items()}, default=str))


def _print_csv(lines: Iterable[Record], columns: list[str]) -> None:
    """Bytes in hex; the values of a difference are apart by spaces."""
    table = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    table.writeheader()
    for line in _one_a_value(lines):
        fields = {name: _hex(field) for name, field in line.items()}
        table.writerow(
            {name: " ".join(map(str, field)) if isinstance(field, list) else field for name, field in fields.items()}
        )


def _print_parquet(lines: Iterable[Record], columns: list[str]) -> None:
    values = pa.list_(pa.binary())
    types = {"change": pa.string(), "family": pa.string(), "position": pa.int64(), "before": values, "after": values}
    schema = pa.schema([(name, types.get(name, pa.binary())) for name in columns])
    rows = _one_a_value(lines)
    batches = iter(lambda: list(itertools.islice(rows, PARQUET_ROWS)), [])
    write_parquet(itertools.chain([schema.empty_table()], (pa.Table.from_pylist(batch, schema) for batch in batches)))


def write_parquet(tables: Iterable[pa.Table]) -> None:
    """Writes tables, of which there is at least one, to stdout as one file."""
    from pyarrow import parquet  # takes its time

    found = iter(tables)
    first = next(found)
    sys.stdout.flush()
    with parquet.ParquetWriter(Unclosed(sys.stdout.buffer), first.schema) as writer:
        for table in itertools.chain([first], found):
            if table.num_rows:
                writer.write_table(table)
    sys.stdout.buffer.flush()


class Unclosed(io.RawIOBase):
    """A stream that others write to, and close, and that stays open."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._at = 0

    def writable(self) -> bool:
        """As io says."""
        return True

    def write(self, data: Any) -> int:
        """As io says."""
        self._stream.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes so far: a pipe cannot tell."""
        return self._at


def _columns(changes: bool, kinds: set[str]) -> list[str]:
    """Those of a table that shows such sets: what has no keys has positions, and a column for these."""
    places = ["key", *(["position"] if kinds & {"sequence", "raw"} else [])]
    return ["change", "family", *places, "before", "after"] if changes else ["family", *places, "value"]


def _hex(field: Any) -> Any:
    if isinstance(field, list):
        return [value.hex() if isinstance(value, bytes) else value for value in field]
    return field.hex() if isinstance(field, bytes) else field


FORMATS: dict[str, Callable[[Iterable[Record], list[str]], None]] = {
    "table": _print_table,
    "json": _print_json,
    "csv": _print_csv,
    "parquet": _print_parquet,
}
