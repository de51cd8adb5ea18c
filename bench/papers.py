"""The family "papers": what the papers that Quire builds on measured, as far as this project can measure it.

Each benchmark has the axis of a figure or table and names it; the paper's numbers stand beside ours in the report.
They come from other machines and other languages, most of them from before 2010: compare how numbers change along the
axis and from one way to another, not the numbers themselves. ``docs/results.md`` says what has no counterpart here.
"""

from quire.bench import papers_cec, papers_ha, papers_sguard
from quire.bench.core import Benchmark, Case

PARTS = (papers_sguard, papers_cec, papers_ha)
BENCHMARKS: tuple[Benchmark, ...] = tuple(benchmark for part in PARTS for benchmark in part.BENCHMARKS)


def estimate(case: Case) -> float:
    """Roughly how many seconds a case takes."""
    part = next(each for each in PARTS if any(case.benchmark == benchmark.name for benchmark in each.BENCHMARKS))
    seconds: float = part.estimate(case)
    return seconds
