"""What a checkpoint says of an operator in Python: ``quire/<operator>/operator.json``.

It is written by the operator's first task, whichever that is, and replaced by nothing but ``quire repartition``.
"""

import json
from dataclasses import asdict, dataclass, field

from quire.checkpoint.reader import MANIFEST
from quire.checkpoint.storage import Storage, join
from quire.pagemgr.errors import CorruptError, ExistsError, VersionError

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """An operator and where its keys are.

    by           the columns that say which partition a row belongs to; types: of these, as Spark says them.
    first_batch  the batch that it began with, or that this generation did.
    generation   how often the number of partitions was changed; names the folder of the partitions.
    query        the id that Spark gave the query; "" if it is not known.
    """

    name: str
    by: list[str]
    types: list[str]
    partitions: int
    first_batch: int = 0
    generation: int = 0
    query: str = ""
    format: int = field(default=FORMAT)

    @staticmethod
    def read(storage: Storage, folder: str) -> "Manifest":
        """The manifest of an operator's folder; ``NotFoundError`` if there is none."""
        path = join(folder, MANIFEST)
        with storage.open(path) as stream:
            data = stream.read()
        try:
            found = json.loads(data)
            if found["format"] == FORMAT:
                return Manifest(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{storage.display(path)} is no description of an operator: {error}") from error
        raise VersionError(
            f"{storage.display(path)} is of format {found['format']!r}; this Quire reads {FORMAT}: use a newer one"
        )

    def write(self, storage: Storage, folder: str, *, replace: bool = False) -> "Manifest":
        """Writes it, unless there is one already and it is not to be replaced; gives the one that counts."""
        data = json.dumps(asdict(self), indent=1).encode()
        try:
            storage.write_atomic(join(folder, MANIFEST), data, replace=replace)
        except ExistsError:
            pass  # another partition's task was first
        return Manifest.read(storage, folder)
