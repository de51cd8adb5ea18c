"""What changed from one run to another, as far as it is more than noise.

The peers' code is the same in both runs: the middle of the changes in their times is what the machine did, and how far
they scatter around it is its noise. A time of Quire's counts as changed if it moved by more than that, by more than the
threshold, and out of the range of its own repetitions. Bytes and counts do not depend on the machine's speed. A number
of Quire's that the later run should have and has not counts as worse.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.report import (
    Document,
    Result,
    is_ours,
    more_is_better,
    number,
    place_text,
    row_text,
    spread,
    within_spread,
)

FEW_PEERS = 5  # fewer changes of peers say nothing about the machine
NOISE_QUANTILE = 0.9


@dataclass(frozen=True)
class Change:
    """One number of both runs. factor: how many times worse it has become, the machine's part taken out."""

    before: Result
    after: Result
    factor: float
    beyond_noise: bool

    @property
    def row(self) -> list[str]:
        """As a row of a table."""
        name = f"{place_text(self.after)}, {self.after['measure']}, {self.after['unit']}"
        return [name, self.after["peer"], spread(self.before), spread(self.after), f"{number(self.factor)}x"]


@dataclass(frozen=True)
class Comparison:
    """All changes. drift: what the machine did to the peers; noise: how far their changes scatter, as a factor."""

    changes: list[Change]
    drift: float
    noise: float
    threshold: float
    gone: list[Result]
    remarks: list[str]

    @property
    def ours(self) -> list[Change]:
        """What is Quire's."""
        return [each for each in self.changes if is_ours(each.after)]

    @property
    def worse(self) -> list[Change]:
        """What became worse, the most first."""
        return sorted((each for each in self.changes if each.beyond_noise and each.factor > 1), key=lambda c: -c.factor)

    @property
    def better(self) -> list[Change]:
        """What became better, the most first."""
        return sorted((each for each in self.changes if each.beyond_noise and each.factor < 1), key=lambda c: c.factor)

    def text(self) -> str:
        """Everything, as Markdown."""
        header = [row_text(["", "peer", "before", "after", "times worse"]), "|---|---|---|---|---|"]
        lines = []
        if self.gone:
            lines += [f"## Gone: {len(self.gone)}", "", "Numbers of Quire's that the later run has not:", ""]
            lines += [*(f"- {place_text(each)}, {each['measure']}" for each in self.gone), ""]
        for title, changes in (("Worse", self.worse), ("Better", self.better)):
            lines += [f"## {title}: {len(changes)}", ""]
            lines += [*header, *(row_text(each.row) for each in changes), ""] if changes else ["Nothing.", ""]
        quiet = [each for each in self.changes if not each.beyond_noise]
        lines += [f"## Within the noise: {len(quiet)}", "", *header, *(row_text(each.row) for each in quiet), ""]
        lines += [
            f"{len(self.changes)} numbers in both runs, {len(self.worse)} worse and {len(self.better)} better beyond "
            f"the noise{f', {len(self.gone)} gone' if self.gone else ''}. The times of the peers, whose code is the "
            f"same, moved by {number(self.drift)}x in the middle, which is taken out of times, and scatter by "
            f"{number(self.noise)}x; changes below {number(1 + self.threshold)}x do not count.",
            *self.remarks,
        ]
        return "\n".join(lines)


def identity(result: Result) -> tuple[Any, ...]:
    """What makes two numbers comparable: operations, too, since a quick run looks up a part of what a full one does."""
    names = ("benchmark", "variant", "size", "peer", "measure", "unit", "operations")
    return tuple(result[name] for name in names)


def worsening(before: Result, after: Result) -> float | None:
    """How many times worse a number has become; None if that cannot be said."""
    old, new = before["median"], after["median"]
    if min(old, new) < 0:  # a difference that is next to nothing
        return None
    if more_is_better(after):
        old, new = new, old
    return 1.0 if old == new else math.inf if old == 0 else float(new / old)


def is_time(result: Result) -> bool:
    """Whether a number depends on the speed of the machine: a time, or so many in a time."""
    unit: str = result["unit"]
    return unit.split("/")[0] in ("ns", "µs", "ms", "s") or unit.endswith("/s")


def distance(factor: float) -> float:
    """How far a factor is from 1, the same for twice as much and half as much."""
    return math.inf if factor in (0, math.inf) else abs(math.log(factor))


def compare(before: Document, after: Document, threshold: float = 0.1) -> Comparison:
    """Compares what both runs have."""
    earlier = {identity(each): each for each in before["results"]}
    pairs = [(earlier[identity(each)], each) for each in after["results"] if identity(each) in earlier]
    if not pairs:
        raise SystemExit(
            "the two runs have no number in common: give two that ran the same benchmarks at the same sizes"
        )
    factors = [(old, new, factor) for old, new in pairs if (factor := worsening(old, new)) is not None]
    peers = [factor for _, new, factor in factors if not is_ours(new) and is_time(new) and 0 < factor < math.inf]
    drift = statistics.median(peers) if len(peers) >= FEW_PEERS else 1.0
    noise = scatter(peers, drift) if len(peers) >= FEW_PEERS else 1.0
    changes = []
    for old, new, factor in factors:
        machine, least = (drift, max(noise, 1 + threshold)) if is_time(new) else (1.0, 1 + threshold)
        moved = machine if not more_is_better(new) else 1 / machine
        expected = {**old, "min": old["min"] * moved, "max": old["max"] * moved}
        beyond = distance(factor / machine) > math.log(least) and not within_spread(expected, new)
        changes.append(Change(old, new, factor / machine, beyond and is_ours(new)))
    there = {identity(each) for each in after["results"]}
    asked = set(after["settings"].get("benchmarks", []))
    sizes = {(each["benchmark"], each["size"]) for each in [*after["results"], *after["failures"]]}
    gone = [
        each
        for each in before["results"]
        if is_ours(each) and identity(each) not in there and each["benchmark"] in asked
        if after["state"] == "complete" and (each["benchmark"], each["case"]["size"]) in sizes
    ]
    return Comparison(changes, drift, noise, threshold, gone, remarks(before, after, factors))


def scatter(factors: Sequence[float], middle: float) -> float:
    """The factor within which most changes of the peers lie around their middle."""
    distances = sorted(distance(factor / middle) for factor in factors)
    return math.exp(distances[min(len(distances) - 1, int(NOISE_QUANTILE * len(distances)))])


def remarks(before: Document, after: Document, factors: Sequence[tuple[Result, Result, float]]) -> list[str]:
    """What a reader should know besides."""
    found = []
    if not any(is_ours(old) for old, _, _ in factors):
        found.append("No number of Quire's is in both runs: this says nothing of Quire.")
    once = sum(min(len(old["values"]), len(new["values"])) < 2 for old, new, _ in factors)
    if once:
        found.append(f"{once} of them were measured once in one of the runs: their own spread is not known.")
    for name in ("machine", "versions", "settings"):
        differing = [key for key in after[name] if after[name][key] != before[name].get(key) and key != "load_at_start"]
        if differing:
            found.append(f"Not alike in {name}: {', '.join(differing)}.")
    return found
