"""What cooperative high availability measured ("A Cooperative, Self-Configuring High-Availability Solution for Stream
Processing", Hwang, Xing, Cetintemel and Zdonik, ICDE 2007).

    papers.capture        Figure 7: what a delta of an aggregate costs to capture and to paste, by checkpoint interval
    papers.capture-rate   the same by windows updated or opened since the last capture, beside a full capture

Capture is ``quire.checkpoint.delta.write`` against a snapshot of the last capture, paste is ``delta.apply`` to another
arena: the backup's image. A full capture writes everything and is pasted into an empty image. The scheduling of
captures among servers (min-max, backup assignment) has no counterpart in Quire: Spark places partitions.
"""

from collections.abc import Iterator

import numpy as np

from quire.bench.checkpoint import put, rows
from quire.bench.core import Benchmark, Case, Measurement, Paper, Watch
from quire.bench.data import Ids, WrongResult, keys_of, uniform, values_of, zipf
from quire.checkpoint import delta, pages
from quire.structures import PageManager

WINDOW_SECONDS = 10
CAPTURES = 10
SOURCES = 1600  # different addresses in the skewed input
INPUTS = {"2,000 tuples a second, skewed": (2000, SOURCES), "100 tuples a second, 100 addresses": (100, 100)}


class Counts:
    """Tuples by address in windows of 10 seconds, one of which opens each second."""

    def __init__(self, pm: PageManager) -> None:
        self.windows = pm.ordered_map("windows")
        self.model: dict[int, dict[int, int]] = {}  # by start and address

    def second(self, now: int, addresses: Ids) -> None:
        """The tuples of one second."""
        found, counts = np.unique(addresses, return_counts=True)
        keys, values = [], []
        self.model[now] = {}
        for start in sorted(self.model):
            window = self.model[start]
            for address, count in zip(found.tolist(), counts.tolist(), strict=True):
                window[address] = window.get(address, 0) + count
                keys.append(key_of(start, address))
                values.append(window[address].to_bytes(8, "big"))
        self.windows.put_many(keys, values)
        if (closed := now - WINDOW_SECONDS + 1) in self.model:
            del self.model[closed]
            self.windows.remove_range(hi=key_of(closed + 1, 0))

    def check(self, image: PageManager) -> None:
        """Refuses an image that is not this state."""
        expected = {
            key_of(start, address): count.to_bytes(8, "big")
            for start, window in self.model.items()
            for address, count in window.items()
        }
        if dict(image.ordered_map("windows").items()) != expected:
            raise WrongResult(f"the image is not the state of {len(expected)} windows")


def key_of(start: int, address: int) -> bytes:
    """The key of a window."""
    return start.to_bytes(8, "big") + address.to_bytes(4, "big")


def capture(case: Case) -> Iterator[Measurement]:
    """papers.capture; size: seconds from one capture to the next."""
    rate, sources = INPUTS[case.variant]
    random, captures = case.random(), (CAPTURES if case.operations_max >= 10_000 else 2)
    captured, pasted, records = [], [], 0
    with PageManager() as pm, PageManager() as image:
        counts, now = Counts(pm), 0

        def second() -> None:
            nonlocal now
            drawn = zipf(sources, rate, random) if sources == SOURCES else random.integers(0, sources, rate)
            counts.second(now, drawn)
            now += 1

        for _ in range(WINDOW_SECONDS):  # all windows open
            second()
        for payload in delta.write(pm):
            delta.apply(image, payload)
        image.commit()
        pm.commit()
        for _ in range(captures):
            with pm.snapshot() as older:
                for _ in range(case.size):
                    second()
                taking, putting = Watch(), Watch()
                payloads = taking.time(delta.write, pm, older if case.peer == "quire" else None)
                pm.commit()
            if case.peer == "quire":
                for payload in payloads:
                    putting.time(delta.apply, image, payload)
                putting.time(image.commit)
                counts.check(image)
            else:
                with PageManager() as other:
                    for payload in payloads:
                        putting.time(delta.apply, other, payload)
                    putting.time(other.commit)
                    counts.check(other)
            captured.append(taking.seconds)
            pasted.append(putting.seconds)
            records += sum(1 for payload in payloads for record in delta.records(payload) if record.key)
    call = f"median of {captures} captures"
    yield Measurement("capture", float(np.median(captured)) * 1e3, "ms", captures, call)
    yield Measurement("paste", float(np.median(pasted)) * 1e3, "ms", captures, call)
    yield Measurement("windows in a capture", records / captures, "windows", captures, call)
    yield Measurement("capture of a window", sum(captured) * 1e6 / records, "µs", records, call)
    yield Measurement("paste of a window", sum(pasted) * 1e6 / records, "µs", records, call)


HELD = 200_000
UPDATED, OPENED = "windows updated", "windows opened"


def capture_rate(case: Case) -> Iterator[Measurement]:
    """papers.capture-rate; size: windows that changed since the last capture, of HELD."""
    held = min(HELD, case.operations_max)
    changed = min(case.size, held)
    random = case.random()
    with PageManager() as pm:
        store = pm.map("bench")
        put(store, np.arange(held), 0)
        pm.commit()
        with image_of(pm, case.peer) as image:
            ids = uniform(held, changed, random) if case.variant == UPDATED else np.arange(held, held + changed)
            taking, putting, since = Watch(), Watch(), pm.epoch
            with pm.snapshot() as older:
                put(store, ids, 1)
                if case.peer == "pages":
                    payloads = taking.time(pages.write, pm, since)
                else:
                    payloads = taking.time(delta.write, pm, older if case.peer == "quire" else None)
            apply = pages.apply if case.peer == "pages" else delta.apply
            for payload in payloads:
                putting.time(apply, image, payload)
            putting.time(image.commit)
            total = held if case.variant == UPDATED else held + changed
            versions = np.zeros(total, np.int64)
            versions[ids] = 1
            everything = np.arange(total)
            found = image.map("bench").get_many(rows(keys_of(everything)))
            if found.null_count or found.to_pylist() != [each.tobytes() for each in values_of(everything, versions)]:
                raise WrongResult("the image is not the state")
    call = f"of {held} windows"
    yield Measurement("capture", taking.seconds * 1e3, "ms", changed, call)
    yield Measurement("paste", putting.seconds * 1e3, "ms", changed, call)
    yield Measurement("bytes of a capture", sum(map(len, payloads)) / 1e6, "MB", changed, call)
    yield Measurement("capture of a changed window", taking.seconds * 1e6 / changed, "µs", changed, call)
    yield Measurement("paste of a changed window", putting.seconds * 1e6 / changed, "µs", changed, call)


def image_of(pm: PageManager, peer: str) -> PageManager:
    """The image that a capture is pasted into: what the last capture left, or nothing for a full one."""
    image = PageManager()
    if peer == "pages":
        for payload in pages.write(pm, 0):
            pages.apply(image, payload)
    elif peer == "quire":
        for payload in delta.write(pm):
            delta.apply(image, payload)
    image.commit()
    return image


def per_window(variant: str, capture: float, paste: float) -> dict[tuple[str, str, int, str], float]:
    """The paper's costs of a window, which do not depend on how many there are."""
    return {
        (variant, "quire", size, f"{what} of a changed window"): value
        for size in (100, 1000, 10_000, 100_000)
        for what, value in (("capture", capture), ("paste", paste))
    }


SET_UP = "five AMD Sempron 2800+, 1 GB; tuples counted by source address each second over 10 seconds"

BENCHMARKS = (
    Benchmark(
        "papers.capture",
        "what a delta of an aggregate costs to capture and to paste, by checkpoint interval, beside a full capture",
        capture,
        dict.fromkeys(INPUTS, ("quire", "full")),
        (1, 10),
        (1, 2, 5, 10, 20),
        size_unit="s",
        axis="checkpoint interval, s",
        unplotted=("capture of a window", "paste of a window"),
        paper=Paper(
            "Cooperative HA, Figure 7",
            "rises with the interval up to the window of 10 s, then flat; with 100 addresses flat from 1 s on; a paste "
            "costs more than a capture (heights of the curves: no values in text)",
            f"{SET_UP}; the first input was a trace (LBL-TCP-3), here Zipf's law over {SOURCES:,} addresses",
        ),
    ),
    Benchmark(
        "papers.capture-rate",
        "capture and paste by the number of windows that changed: delta, pages, and everything",
        capture_rate,
        dict.fromkeys((UPDATED, OPENED), ("quire", "pages", "full")),
        (1000, 100_000),
        (100, 1000, 10_000, 100_000),
        size_unit=f"windows of {HELD:,}",
        axis=f"windows changed, of {HELD:,}",
        rivals=("full",),
        paper=Paper(
            "Cooperative HA, section on delta checkpointing (regression of Figure 7)",
            "a window that is new costs 18.6 µs to capture and 30.2 to paste, one that was updated 7.3 and 7.2",
            SET_UP,
            per_window(OPENED, 18.6, 30.2) | per_window(UPDATED, 7.3, 7.2),
        ),
    ),
)


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    if case.benchmark == "papers.capture":
        return 0.6 + CAPTURES * case.size * (0.009 if case.variant.startswith("2,000") else 0.001)
    return 0.8
