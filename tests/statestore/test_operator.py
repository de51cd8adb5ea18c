"""Operators without Spark: what process and flush may give, when close is called, and what an error leaves."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import quire
from quire.statestore import operator as module
from quire.statestore.operator import Outbox

ROWS = pa.record_batch({"key": ["a", "b", "a"]})
COUNTED = [{"key": "a", "n": 2}, {"key": "b", "n": 1}]


class Count(quire.Operator):
    """Gives what its function makes of the counts."""

    output = "key string, n bigint"

    def __init__(self, gives: Callable[[Any], Any] = lambda found: found, flushes: Callable[[], Any] = lambda: None):
        self.gives = gives
        self.flushes = flushes
        self.closed = 0

    def open(self, state: quire.State) -> None:
        self.counts = state.map("counts", key="key string", value="n bigint")

    def process(self, batch: pa.RecordBatch) -> Any:
        return self.gives(self.counts.add_many(batch["key"], pa.array([1] * len(batch))))

    def flush(self) -> Any:
        return self.flushes()

    def close(self) -> None:
        self.closed += 1


def yielded(found: Any) -> Iterator[Any]:
    yield from (found.slice(0, 1), None, [found.slice(1)])


@pytest.mark.parametrize(
    ("gives", "rows"),
    [
        (lambda found: found, COUNTED),
        (lambda found: pa.table(found), COUNTED),
        (lambda found: [found, (found,)], COUNTED * 2),
        (yielded, COUNTED),
        (lambda found: found.select(["n", "key"]), COUNTED),
        (lambda found: found.append_column("more", pa.array([1, 2])), COUNTED),
        (lambda found: found.set_column(1, "n", found["n"].cast(pa.int8())), COUNTED),
        (lambda found: found.slice(0, 0), []),
        (lambda found: None, []),
    ],
)
def test_what_process_may_give(gives: Callable[[Any], Any], rows: list[dict[str, Any]]) -> None:
    for made in (Count(gives), Count(lambda found: None, lambda: gives(Count().run([ROWS]).to_batches()[0]))):
        found = made.run([ROWS])
        assert found.to_pylist() == rows
        assert found.schema == pa.schema({"key": pa.string(), "n": pa.int64()})


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda found: found.to_pandas(), r"Count.process\(\) gave DataFrame: give an Arrow record batch, a table"),
        (lambda found: found.to_pylist(), r"Count.process\(\) gave dict: give an Arrow"),
        (lambda found: found["n"], r"Count.process\(\) gave Int64Array"),
        (lambda found: "rows", r"Count.process\(\) gave str"),
        (lambda found: found.select(["key"]), r"process\(\) gave no column 'n', which its output has; .* has key"),
        (lambda found: found.append_column("n", found["n"]), r"gave 2 columns 'n'"),
        (lambda found: found.set_column(1, "n", pa.array(["x", "y"])), r"'n' as string, which does not fit int64"),
    ],
)
def test_what_it_may_not_give(gives: Callable[[Any], Any], says: str) -> None:
    """The state stays at the last commit, and close is called."""
    with quire.PageManager() as pm:
        Count().run([ROWS], pm)
        made = Count(gives)
        with pytest.raises(quire.QuireError, match=says):
            made.run([ROWS], pm)
        assert made.closed == 1
        assert Count().run([ROWS], pm).to_pylist() == [{"key": "a", "n": 4}, {"key": "b", "n": 2}]


def test_nulls_where_the_output_has_none() -> None:
    class Strict(Count):
        output = "key string not null, n bigint"

    with pytest.raises(quire.MismatchError, match=r"gave nulls in column 'key', which its output says is not null"):
        Strict().run([pa.record_batch({"key": pa.array([None, "a"])})])


def test_close_is_called_once_whatever_happens() -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("mine")

    for made in (Count(), Count(fails), Count(flushes=fails)):
        for _ in range(2):
            try:
                made.run([ROWS])
            except ZeroDivisionError as error:
                assert str(error) == "mine"
        assert made.closed == 2


@pytest.mark.parametrize("given", [ROWS, pa.table(ROWS), None, [pa.table(ROWS)], [ROWS, None], ["a"]])
def test_what_run_takes(given: Any) -> None:
    with pytest.raises(quire.InvalidError, match="Arrow record batches, not"):
        Count().run(given)


def test_output_must_be_said() -> None:
    class Silent(Count):
        output = None  # type: ignore[assignment]

    class Odd(Count):
        output = "key string, n many"

    with pytest.raises(quire.InvalidError, match=r"Silent.output is None: give the columns"):
        Silent().run([ROWS])
    with pytest.raises(quire.InvalidError, match="many"):
        Odd().run([ROWS])


def test_large_output_waits_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OUTPUT_BYTES_IN_MEMORY", 100)
    batches = [pa.record_batch({"n": list(range(number))}) for number in range(1, 30)]
    with Outbox(batches[0].schema) as outbox:
        for batch in batches:
            outbox.add(batch)
        assert outbox.rows == sum(batch.num_rows for batch in batches)
        assert [batch.to_pylist() for batch in outbox.take()] == [batch.to_pylist() for batch in batches]
    with Outbox(batches[0].schema) as unread:  # as after an error
        for batch in batches:
            unread.add(batch)


def test_state_is_kept_in_pages_alone() -> None:
    with pytest.raises(quire.InvalidError, match=r"keeps its state in a quire\.PageManager, not str"):
        Count().run([], "path")  # type: ignore[arg-type]


def test_a_message_does_not_hold_all_of_a_long_value() -> None:
    with quire.PageManager() as pm:
        counts = quire.State(pm).map("counts", key="user string", value="n bigint")
        with pytest.raises(quire.InvalidError, match=r"characters\)") as wrong:
            counts["k"] = "x" * 1_000_000
        with pytest.raises(quire.NotFoundError, match=r"characters\)") as missing:
            counts["x" * 1_000_000]
    assert len(str(wrong.value)) < 1000 and len(str(missing.value)) < 1000
