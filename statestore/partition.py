"""The state of one partition of an operator: the right version before a batch, the next one after it.

Version n is what batch n - 1 left. A batch may be run several times: by a task that is tried again, by a copy of a
slow one, by a second action on the same batch, by a query that was restarted. Each run starts from version n and
commits a version n + 1 of its own, under an id of its own, so that no two of them touch the same file and each version
names the very one it grew out of. The next batch goes on from the one that was committed last: that is the run whose
output counts, as far as anybody can tell, and whichever it is, it is whole.
"""

import itertools
import logging
import os
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from quire.checkpoint import Manager
from quire.checkpoint.container import FileKind
from quire.checkpoint.reader import Listing, Store, Version, counted_keys
from quire.checkpoint.storage import Storage
from quire.pagemgr.errors import BusyError, IOFailedError, NoSpaceError, NotFoundError, QuireError
from quire.statestore.arenas import Arenas, Mark
from quire.structures import PageManager

# A partition that comes back to a host is brought up to date there from so many commits, rather than loaded anew.
CATCH_UP_MAX = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where an operator keeps its state.

    folder      in the checkpoint, in which the partitions' files lie as ``Manager`` has them.
    generation  see ``Manifest``.
    """

    storage: Storage
    folder: str
    arenas: Arenas
    mode: str = "delta"
    limit: int | str | None = None
    bases_every: int = 10
    retain: int = 100
    generation: int = 0

    def manager(self, partition: int) -> Manager:
        """Writes and reads the checkpoint of a partition."""
        return Manager(
            self.folder,
            self.generation,
            partition,
            mode=self.mode,
            bases_every=self.bases_every,
            retain=self.retain,
            ids=True,
            storage=self.storage,
        )


@dataclass
class Measured:
    """What a batch did to a partition's state. in_memory: the version before it was found on the host."""

    load_seconds: float = 0.0
    commit_seconds: float = 0.0
    in_memory: bool = False
    keys: int = 0
    bytes: int = 0
    written: int = 0


class Partition:
    """The state of a partition for one batch; a context manager, which gives the pages to work on.

    Left without ``commit()``, nothing has happened to the state.
    """

    def __init__(self, place: Place, partition: int, batch: int, first: int) -> None:
        """first: the batch that the operator began with."""
        self._place = place
        self._partition = partition
        self._batch = batch
        self._first = first
        self._shared = False
        self._pm: PageManager | None = None
        self.measured = Measured()
        self._manager = place.manager(partition)

    def __enter__(self) -> PageManager:
        started = time.perf_counter()
        try:
            self._pm = self._load()
        except BaseException as error:
            self._close(error)
            raise
        self.measured.load_seconds = time.perf_counter() - started
        return self._pm

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._manager.close()
        if self._pm is not None:
            self._pm.close()
        if isinstance(error, NoSpaceError):
            self._place.arenas.sweep(now=True)  # for whoever tries again

    # ------------------------------------------------------------------------------------------------ before

    def _load(self) -> PageManager:
        store = self._manager.store
        try:
            listing = store.listing()
        except NotFoundError:
            listing = Listing([], [])
        wanted = self._wanted(listing)
        self._place.arenas.enter()
        try:
            found = self._place.arenas.open(self._partition, self._place.limit)
        except BusyError:
            # Another run of this batch, or one that nobody waits for any more. It keeps the arena; the checkpoint has
            # all there is.
            return self._manager_load(listing, wanted, None)
        if found is not None:
            pm, mark = found
            try:
                if self._catch_up(store, listing, pm, mark.version, wanted):
                    self._manager.adopt(pm, wanted, listing, mark.point if mark.version == wanted else (0, 0))
                    self.measured.in_memory = True
                    return self._marked(pm, wanted)
            except QuireError:
                pass  # whatever was wrong with the copy, the checkpoint decides
            pm.close()
        self._place.arenas.forget(self._partition)
        self._place.arenas.sweep()  # there may be more to come than there was
        try:
            pm = self._manager_load(listing, wanted, os.fspath(self._place.arenas.path(self._partition)))
        except (BusyError, IOFailedError):
            # Another run was quicker, or the folder was swept meanwhile.
            return self._manager_load(listing, wanted, None)
        return self._marked(pm, wanted)

    def _marked(self, pm: PageManager, version: Version) -> PageManager:
        """Says at once what the arena is, so that it need not be loaded again should this run fail."""
        self._shared = True
        self._place.arenas.leave(self._partition, Mark.of(pm, version, self._manager.point))
        return pm

    def _manager_load(self, listing: Listing, wanted: Version, path: str | None) -> PageManager:
        if self._batch == self._first and wanted not in listing.bases:
            return self._manager.begin(wanted.number, path, self._place.limit)
        return self._manager.load(wanted.number, wanted.id, repair=True, path=path, limit=self._place.limit)

    def _wanted(self, listing: Listing) -> Version:
        """The version that the batch starts from: of several, the one that was committed last."""
        number = self._batch
        if number == self._first:
            return Version(number)
        found = listing.last(number)
        if found is not None:
            return found
        newest = listing.versions[-1].number if listing.versions else None
        has = "none at all" if newest is None else f"the newest is {newest}"
        raise NotFoundError(
            f"partition {self._partition} has no version {number}, which batch {number - 1} should have left in "
            f"{self._manager.store.location}: {has}. Either files were removed, or batch {number - 1} was not run to "
            "its end in every partition, as by take(), first() or limit() in foreachBatch: let an action there read "
            "all of the batch"
        )

    def _catch_up(self, store: Store, listing: Listing, pm: PageManager, has: Version, wanted: Version) -> bool:
        """Brings an arena from the version it has to the one wanted; False if that is not on its way."""
        if has == wanted:
            return True
        if has.number >= wanted.number or self._batch == self._first:
            return False
        way = list(itertools.islice(store.ancestors(listing, wanted), CATCH_UP_MAX))
        if has not in way:
            return False
        for version in reversed(way[: way.index(has)]):
            file = listing.deltas[version]
            found = store.read(file)
            if found.header.kind != FileKind.DELTA:
                return False
            store.apply(pm, file, found)
        pm.commit()
        return True

    # ------------------------------------------------------------------------------------------------ after

    def commit(self) -> None:
        """Makes the next version durable, and leaves the pages to whoever runs the next batch here."""
        assert self._pm is not None
        pm, started = self._pm, time.perf_counter()
        self._manager.commit(pm)
        version = self._manager.version_id
        if self._shared:
            self._place.arenas.leave(self._partition, Mark.of(pm, version, self._manager.point))
        self.measured.commit_seconds = time.perf_counter() - started
        self.measured.written = self._manager.bytes_written
        self.measured.keys = sum(counted_keys(pm))
        stats = pm.stats()
        self.measured.bytes = (stats.frames_used + stats.frames_dirty) * stats.page_bytes
        if self._manager.repaired:
            self._manager.maintain()  # by who knows what is damaged
        elif (version.number + self._partition) % self._place.bases_every == 0:
            self._maintain(version)

    def _maintain(self, version: Version) -> None:
        """A base, and cleaning: beside the batches to come where this process lives on, else now."""
        self._place.arenas.sweep()
        if not self._shared or "SPARK_REUSE_WORKER" not in os.environ:
            self._manager.maintain()
            return
        try:
            base = Base(self._place, self._partition, version)
        except QuireError as error:
            log.warning("no base of version %s could be begun, which will be tried again: %s", version, error)
            return
        threading.Thread(target=base.write, name=f"quire-base-{self._partition}", daemon=True).start()


class Base:
    """A base written by a thread of its own, from the arena as it was, while others go on to change it."""

    def __init__(self, place: Place, partition: int, version: Version) -> None:
        self._manager = place.manager(partition)
        self._pm = PageManager(place.arenas.path(partition), read_only=True)
        try:
            self._manager.adopt(self._pm, version, self._manager.store.listing())
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        """Writes it; what goes wrong is logged by the manager, and the next one will do better."""
        try:
            self._manager.maintain(background=True).wait()
        except Exception:
            pass  # logged
        finally:
            self.close()

    def close(self) -> None:
        """Lets the arena go."""
        self._manager.close()
        self._pm.close()
