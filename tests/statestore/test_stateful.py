"""What a task of Spark makes of what it is given; the rest of stateful.py is tested on Spark."""

import pyarrow as pa
import pytest

from quire.pagemgr.errors import InvalidError
from quire.statestore.stateful import PARTITION, Task, told


def task(batch: int | None) -> Task:
    return Task(7, batch, "query", "run", None)


def given(*users: str | None, extended: bool = True, partition: int | None = None) -> pa.RecordBatch:
    """Rows, with the column that Quire's extension adds, before them the row if a partition is given."""
    plain = pa.record_batch({"user": pa.array(users, "string")})
    if not extended:
        return plain
    head = [] if partition is None else [None]
    numbers = [partition] * len(head) + [None] * len(users)
    return pa.record_batch({"user": pa.array([*head, *users], "string"), PARTITION: pa.array(numbers, "int32")})


@pytest.mark.parametrize("batch", [None, 3])
def test_the_row_before_all_others_tells_the_partition(batch):
    for batches, users in (
        ([given("a", "b", partition=2), given("c")], [["a", "b"], ["c"]]),
        ([given(partition=2)], []),
        ([given(partition=2), given(None, "d")], [[None, "d"]]),
    ):
        number, rows = told(batches, task(batch))
        found = [each.to_pydict() for each in rows]
        assert (number, found) == (2, [{"user": each} for each in users])


def test_without_the_extension_a_batch_goes_by_the_task_and_a_stream_is_refused():
    for batches, users in (([given("a", extended=False)], [["a"]]), ([], [])):
        number, rows = told(batches, task(None))
        assert (number, [each["user"].to_pylist() for each in rows]) == (7, users)
        with pytest.raises(InvalidError, match=r"make the session with quire.configure\(\)"):
            told(batches, task(3))
