"""The examples without Spark: whatever the batches are and whatever happens to the state, they give the reference."""

import importlib
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

import quire
from quire.checkpoint.reader import families
from quire.checkpoint.storage import LocalStorage
from quire.statestore.arenas import Arenas
from quire.statestore.operator import execute
from quire.statestore.partition import Partition, Place

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))
OPERATORS = {
    "sessions": "Sessions",
    "interval_join": "IntervalJoin",
    "top_k": "TopK",
    "deduplicate": "Deduplicate",
    "windowed_aggregate": "WindowedAggregate",
    "window_join": "WindowJoin",
}
Row = dict[str, Any]
Make = Callable[[], quire.Operator]


def example(name: str) -> tuple[ModuleType, type[quire.Operator]]:
    module = importlib.import_module(name)
    return module, getattr(module, OPERATORS[name])


def cut(rng: random.Random, rows: list[Row], schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Micro-batches of any size, none at all among them, each of Arrow batches of any size in no order of rows."""
    while rows:
        size = rng.choice((0, 1, 7, 20, 60))
        batch, rows = rng.sample(rows[:size], len(rows[:size])), rows[size:]
        middle = rng.randint(0, len(batch))
        yield [pa.RecordBatch.from_pylist(part, schema) for part in (batch[:middle], batch[middle:])]


def on_pages(make: Make, batches: Iterable[list[pa.RecordBatch]]) -> list[Row]:
    with quire.PageManager() as pm:
        return [row for batch in batches for row in make().run(batch, pm).to_pylist()]


class Lost(Exception):
    """What happens to tasks."""


def losing(batches: list[pa.RecordBatch], rng: random.Random) -> Iterator[pa.RecordBatch]:
    """Some of the batches, and then an error."""
    yield from batches[: rng.randint(0, len(batches))]
    raise Lost


def attempt(make: Make, place: Place, number: int, batches: Iterable[pa.RecordBatch], lose: bool = False) -> list[Row]:
    """A task of the micro-batch of that number. lose: all its work, just before the commit."""
    partition = Partition(place, 0, number, 0)
    with partition as pm:
        made = list(execute(make(), pm, batches))
        if lose:
            raise Lost
        partition.commit()
    return [row for batch in made for row in batch.to_pylist()]


def with_failures(make: Make, batches: Iterable[list[pa.RecordBatch]], folder: Path, rng: random.Random) -> list[Row]:
    """Two hosts; tasks fail in the middle or at the end, or are run again after their commit; arenas vanish."""
    storage, checkpoint = LocalStorage(), str(folder / "checkpoint")
    mode = rng.choice(("delta", "pages", "auto"))
    hosts = [Place(storage, checkpoint, Arenas(checkpoint, "Op", folder / host), mode, bases_every=3) for host in "ab"]
    made = []
    for number, batch in enumerate(batches):
        for event in rng.choices(("fail", "lose", "repeat", "forget"), k=rng.choice((0, 0, 1, 2))):
            place = rng.choice(hosts)
            if event == "forget":
                place.arenas.forget(0)
            elif event == "repeat":
                attempt(make, place, number, batch)
            else:
                with pytest.raises(Lost):
                    attempt(make, place, number, losing(batch, rng) if event == "fail" else batch, lose=True)
        made += attempt(make, rng.choice(hosts), number, batch)
    return made


def compare(name: str, make: Make, seed: int, folder: Path | None = None) -> None:
    """Runs an operator on random input; what it gives must be what the example's reference says."""
    module, _ = example(name)
    rng = random.Random(seed)
    rows = module.generate(rng, rng.choice((1, 50, 200, 300)))
    if rng.random() < 0.3:
        rows = rows[: rng.randint(0, len(rows))]
    batches = cut(rng, rows, module.INPUT)
    made = on_pages(make, batches) if folder is None else with_failures(make, batches, folder, rng)
    final = module.latest(made) if hasattr(module, "latest") else made
    multiset = importlib.import_module("local_spark").multiset
    assert multiset(final) == multiset(module.reference(rows)), f"{name}, seed {seed}"


@pytest.mark.parametrize("name", OPERATORS)
def test_batches_make_no_difference(name: str) -> None:
    for seed in range(8):
        compare(name, example(name)[1], seed)


@pytest.mark.parametrize("name", OPERATORS)
def test_failures_make_no_difference(name: str, tmp_path: Path) -> None:
    for seed in range(4):
        compare(name, example(name)[1], seed, tmp_path / str(seed))


@pytest.mark.parametrize("name", OPERATORS)
def test_time_zones_make_no_difference(name: str) -> None:
    """Spark sends times in the time zone of the session."""
    module, operator = example(name)
    rows = module.generate(random.Random(1), 100)
    zone = pa.timestamp("us", "Asia/Kolkata")
    fields = [field.with_type(zone) if pa.types.is_timestamp(field.type) else field for field in module.INPUT]
    zoned = operator().run([pa.RecordBatch.from_pylist(rows, pa.schema(fields))])
    assert zoned.num_rows > 0
    multiset = importlib.import_module("local_spark").multiset
    assert multiset(zoned.to_pylist()) == multiset(module.reference(rows))


# ---------------------------------------------------------------------------------------------- what is kept


def kept(name: str, make: Make) -> int:
    """How many values the state has after a stream, the last row of which comes ten days after the others."""
    module, _ = example(name)
    rng = random.Random(5)
    rows = module.generate(rng, 300)
    last = {**rows[-1], "time": rows[-1]["time"] + timedelta(days=10)}
    with quire.PageManager() as pm:
        for batch in [*cut(rng, rows, module.INPUT), [pa.RecordBatch.from_pylist([last], module.INPUT)]]:
            make().run(batch, pm)
        return sum(len(found.get_all(key)) for found in families(pm).values() for key in found)


TIMED = [name for name in OPERATORS if name != "top_k"]


@pytest.mark.parametrize("name", TIMED)
def test_what_is_over_is_forgotten(name: str) -> None:
    """The watermark, the last row, its timer in two maps, or its second window are what may remain."""
    assert kept(name, example(name)[1]) <= 4


def test_top_k_keeps_the_last_of_each_key() -> None:
    module, operator = example("top_k")
    rng = random.Random(5)
    with quire.PageManager() as pm:
        for batch in cut(rng, module.generate(rng, 300), module.INPUT):
            operator().run(batch, pm)
        scores = quire.State(pm).map("scores", "key string", "score double")
        assert {len(scores.get_all(key)) for key in scores} <= set(range(1, module.N + 1))


# ---------------------------------------------------------------------------------------------- planted bugs


def broken(name: str) -> dict[str, Make]:
    """Operators with a bug each."""
    module, operator = example(name)

    class EmitsTwice(operator):  # type: ignore[misc,valid-type]
        def flush(self) -> Any:
            found = super().flush()
            return [found, found]

        def process(self, batch: pa.RecordBatch) -> Any:
            found = super().process(batch)
            return [found, found]

    class SkipsRows(operator):  # type: ignore[misc,valid-type]
        def process(self, batch: pa.RecordBatch) -> Any:
            return super().process(batch.slice(0, max(1, batch.num_rows - 1)))

    class RemembersInAttributes(operator):  # type: ignore[misc,valid-type]
        memory = quire.PageManager()

        def open(self, state: quire.State) -> None:
            super().open(quire.State(self.memory))

    found: dict[str, Make] = {"skips rows": SkipsRows, "remembers in attributes": RemembersInAttributes}
    if name == "top_k":
        return {**found, "keeps too many": lambda: operator(n=module.N + 1)}
    found["emits twice"] = EmitsTwice
    if name in ("sessions", "windowed_aggregate"):
        found["closes too early"] = lambda: operator(delay=timedelta(0))
    elif name == "deduplicate":
        found["forgets too early"] = lambda: operator(keep=module.KEEP - timedelta(minutes=5))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    """The canary: comparisons that pass whatever is compared would prove nothing."""
    for bug in broken(name):
        print(bug)
        with pytest.raises(AssertionError, match=f"{name}, seed"):
            for seed in range(10):
                compare(name, broken(name)[bug], seed, tmp_path / bug / str(seed))


@pytest.mark.parametrize("name", ["interval_join", "window_join"])
def test_an_operator_that_forgets_to_expire_is_found(name: str) -> None:
    class KeepsAll(example(name)[1]):  # type: ignore[misc]
        def flush(self) -> None:
            pass

    assert kept(name, KeepsAll) > 100


# ---------------------------------------------------------------------------------------------- the guide

GUIDE = EXAMPLES.parent / "docs" / "operators-guide.md"


def blocks() -> list[tuple[int, str, str]]:
    """Line, kind and source of each block of Python in the guide."""
    text = GUIDE.read_text()
    found = re.finditer(r"^```(python[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(2)].count("\n"), match[1], match[2]) for match in found]


def guide() -> dict[str, Any]:
    """What the blocks define that need no Spark; the others are compiled."""
    names: dict[str, Any] = {"__name__": "guide"}
    for line, kind, source in blocks():
        assert kind in ("python", "python spark"), f"{GUIDE}:{line}: {kind!r}"
        code = compile("\n" * line + source, str(GUIDE), "exec")
        if kind == "python":
            exec(code, names)
    return names


def test_the_guide_runs() -> None:
    names = guide()
    tests = [names[name] for name in names if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_operator_of_the_guide_gives_the_reference(tmp_path: Path) -> None:
    for seed in range(4):
        compare("sessions", guide()["Sessions"], seed, tmp_path / str(seed))
