"""What changed from one run to another, as far as it is more than noise.

The peers' code is the same in both runs: the middle of their changes is what the machine did, and how far they scatter
around it is its noise. A number of Quire's counts as changed if it moved by more than that, by more than the threshold,
and out of the range of its own repetitions.
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
    remarks: list[str]

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
        for title, changes in (("Worse", self.worse), ("Better", self.better)):
            lines += [f"## {title}: {len(changes)}", ""]
            lines += [*header, *(row_text(each.row) for each in changes), ""] if changes else ["Nothing.", ""]
        quiet = [each for each in self.changes if not each.beyond_noise]
        lines += [f"## Within the noise: {len(quiet)}", "", *header, *(row_text(each.row) for each in quiet), ""]
        lines += [
            f"{len(self.changes)} numbers in both runs, {len(self.worse)} worse and {len(self.better)} better beyond "
            f"the noise. The peers, whose code is the same, moved by {number(self.drift)}x in the middle, which is "
            f"taken out, and scatter by {number(self.noise)}x; changes below {number(1 + self.threshold)}x do not "
            "count.",
            *self.remarks,
        ]
        return "\n".join(lines)


def identity(result: Result) -> tuple[Any, ...]:
    """What makes two numbers comparable."""
    return tuple(result[name] for name in ("benchmark", "variant", "size", "peer", "measure", "operations"))


def worsening(before: Result, after: Result) -> float | None:
    """How many times worse a number has become; None if that cannot be said."""
    if not before["median"] or not after["median"]:
        return None
    factor = float(after["median"] / before["median"])
    return 1 / factor if more_is_better(after) else factor


def compare(before: Document, after: Document, threshold: float = 0.1) -> Comparison:
    """Compares what both runs have."""
    earlier = {identity(each): each for each in before["results"]}
    pairs = [(earlier[identity(each)], each) for each in after["results"] if identity(each) in earlier]
    factors = [(old, new, factor) for old, new in pairs if (factor := worsening(old, new)) is not None]
    peers = [factor for _, new, factor in factors if not is_ours(new)]
    drift = statistics.median(peers) if len(peers) >= FEW_PEERS else 1.0
    noise = scatter(peers, drift) if len(peers) >= FEW_PEERS else 1.0
    least = max(noise, 1 + threshold)
    changes = []
    for old, new, factor in factors:
        corrected = factor / drift
        moved = drift if not more_is_better(new) else 1 / drift
        expected = {**old, "min": old["min"] * moved, "max": old["max"] * moved}
        beyond = abs(math.log(corrected)) > math.log(least) and not within_spread(expected, new)
        changes.append(Change(old, new, corrected, beyond and is_ours(new)))
    return Comparison(changes, drift, noise, threshold, remarks(before, after, factors))


def scatter(factors: Sequence[float], middle: float) -> float:
    """The factor within which most changes of the peers lie around their middle."""
    distances = sorted(abs(math.log(factor / middle)) for factor in factors)
    return math.exp(distances[min(len(distances) - 1, int(NOISE_QUANTILE * len(distances)))])


def remarks(before: Document, after: Document, factors: Sequence[tuple[Result, Result, float]]) -> list[str]:
    """What a reader should know besides."""
    found = []
    once = sum(min(len(old["values"]), len(new["values"])) < 2 for old, new, _ in factors)
    if once:
        found.append(f"{once} of them were measured once in one of the runs: their own spread is not known.")
    for name in ("machine", "versions", "settings"):
        differing = [key for key in after[name] if after[name][key] != before[name].get(key) and key != "load_at_start"]
        if differing:
            found.append(f"Not alike in {name}: {', '.join(differing)}.")
    return found
