"""Plots of results: one figure a benchmark, a small picture for each variant and measure.

Lines where a benchmark has at least three sizes, else bars. A peer has the same colour in all pictures of a figure,
Quire's are warm; peers that differ in a number alone have colours in its order, from dark to bright. Hollow marks are
a paper's numbers.
"""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.bench.core import Benchmark

Result = dict[str, Any]

COLUMNS = 3
PANEL_WIDTH, PANEL_HEIGHT = 4.0, 2.9  # inches
LINES_FROM = 3  # sizes
LOG_FROM = 15  # times the least, from which on an axis is logarithmic
OURS = ("#d1495b", "#ed8b00", "#b5651d", "#f2b134", "#8f2d56", "#e76f51", "#c9a227", "#7f4f24")
OTHERS = ("#00798c", "#4c956c", "#5f5aa2", "#2d3142", "#7a9cc6", "#86a873", "#a0a0a0", "#30638e")
ORDERED, BRIGHTEST = "plasma", 0.9  # beyond it, too pale on white
ORDERED_FROM = 3  # peers
MARKERS = "osD^vP*X"
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "quire",  # the same results give the same file
}


def load() -> Any:
    """Matplotlib, drawing to files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}); pip install matplotlib, or 'quire[bench]'") from None
    matplotlib.use("agg")
    return matplotlib


def svg(benchmark: Benchmark, results: Sequence[Result]) -> bytes:
    """A figure for a page."""
    file = io.BytesIO()
    with load().rc_context(SETTINGS):
        drawn(benchmark, results).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def png(benchmark: Benchmark, results: Sequence[Result], file: Path) -> None:
    """A figure as a file."""
    with load().rc_context(SETTINGS):
        drawn(benchmark, results).savefig(file, dpi=110)


def unique(items: Iterable[Any]) -> list[Any]:
    """Each once, in the order of first appearance."""
    return list(dict.fromkeys(items))


def short(value: float) -> str:
    """A number as an axis has it."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def colours(peers: Sequence[str]) -> dict[str, str]:
    """A colour for each peer."""
    ours = [peer for peer in peers if peer.startswith("quire")]
    others = [peer for peer in peers if not peer.startswith("quire")]
    found = {peer: OURS[place % len(OURS)] for place, peer in enumerate(ours)}
    return found | {peer: OTHERS[place % len(OTHERS)] for place, peer in enumerate(others)} | ordered(peers)


def ordered(peers: Sequence[str]) -> dict[str, str]:
    """A colour for each of the peers that differ in a number alone, if they are at least three."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    series: dict[str, dict[str, float]] = {}
    for peer in peers:
        if match := re.fullmatch(r"(.*[:= ])(\d+(?:\.\d+)?)", peer):
            series.setdefault(match[1], {})[peer] = float(match[2])
    found: dict[str, str] = {}
    for numbers in (each for each in series.values() if len(each) >= ORDERED_FROM):
        steps = [BRIGHTEST * place / (len(numbers) - 1) for place in range(len(numbers))]
        colours = [to_hex(colour) for colour in colormaps[ORDERED](steps)]
        found |= dict(zip(sorted(numbers, key=lambda peer: numbers[peer]), colours, strict=True))
    return found


def drawn(benchmark: Benchmark, results: Sequence[Result]) -> Any:
    """The figure of a benchmark."""
    from matplotlib.figure import Figure

    shown = [each for each in results if each["measure"] not in benchmark.unplotted]
    panels = unique((each["variant"], each["measure"]) for each in shown)
    peers = unique(each["peer"] for each in shown)
    sizes = unique(each["size"] for each in shown)
    by_size = len(sizes) >= LINES_FROM
    most = max(sum(1 for variant, _ in panels if variant == each) for each, _ in panels)
    columns = min(most, COLUMNS)
    # Each variant begins a row, but where there is one picture for each.
    places = placed(panels, columns) if most > 1 else list(range(len(panels)))
    columns = columns if most > 1 else min(COLUMNS, len(panels))
    rows = places[-1] // columns + 1
    height = PANEL_HEIGHT if by_size else 0.9 + 0.2 * most_bars(shown)
    figure = Figure(figsize=(PANEL_WIDTH * columns, height * rows + 0.4), layout="constrained")
    palette = colours(peers)
    several = len({variant for variant, _ in panels}) > 1
    papers_shown = False
    for place, (variant, measure) in zip(places, panels, strict=True):
        axes = figure.add_subplot(rows, columns, place + 1)
        mine = [each for each in shown if (each["variant"], each["measure"]) == (variant, measure)]
        if by_size:
            papers_shown |= draw_lines(axes, benchmark, mine, peers, palette)
        else:
            draw_bars(axes, benchmark, mine, palette)
        title = f"{measure}, {mine[0]['unit']}" + (f"\n{variant}" if several else "")
        width = 44 if by_size else 28  # bars have their names beside them
        axes.set_title("\n".join(textwrap.fill(line, width) for line in title.split("\n")), loc="left")
    if by_size:
        add_legend(figure, peers, palette, papers_shown, columns)
    elif len(sizes) == 1:
        figure.suptitle(f"{benchmark.name}, {sizes[0]:,} {benchmark.size_unit}", x=0.01, ha="left", fontsize=9)
    return figure


def placed(panels: Sequence[tuple[str, str]], columns: int) -> list[int]:
    """Where each picture goes, row by row."""
    places: list[int] = []
    for number, (variant, _) in enumerate(panels):
        following = places[-1] + 1 if places else 0
        if number and variant != panels[number - 1][0]:
            following = -(-following // columns) * columns
        places.append(following)
    return places


def most_bars(results: Sequence[Result]) -> int:
    """How many bars the fullest picture has."""
    panels: dict[tuple[str, str], int] = {}
    for each in results:
        panel = (each["variant"], each["measure"])
        panels[panel] = panels.get(panel, 0) + 1
    return max(panels.values())


def add_legend(figure: Any, peers: Sequence[str], palette: dict[str, str], papers: bool, columns: int) -> None:
    """One legend for all pictures of a figure, above them."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=palette[peer], marker=mark(peers, peer), markersize=4, label=peer) for peer in peers]
    if papers:
        marks.append(
            Line2D([], [], color="0.4", marker="o", markerfacecolor="white", linestyle=":", label="the paper's numbers")
        )
    wide = max(len(peer) for peer in peers) > 18
    figure.legend(handles=marks, loc="outside upper left", ncols=(1 if wide else 2) * columns, frameon=False)


def mark(peers: Sequence[str], peer: str) -> str:
    """The mark of a peer's line."""
    return MARKERS[list(peers).index(peer) % len(MARKERS)]


def spreads(results: Sequence[Result]) -> list[list[float]]:
    """How far the least and the greatest lie from the median."""
    return [[each["median"] - each["min"] for each in results], [each["max"] - each["median"] for each in results]]


def is_wide(values: Sequence[float]) -> bool:
    """Whether numbers lie so far apart that only a logarithmic axis shows them all."""
    positive = [value for value in values if value > 0]
    return len(positive) == len(values) > 1 and max(positive) / min(positive) >= LOG_FROM


def draw_lines(
    axes: Any, benchmark: Benchmark, results: Sequence[Result], peers: Sequence[str], palette: dict[str, str]
) -> bool:
    """One line for each peer over the sizes; True if a paper's numbers are among them."""
    sizes = sorted({each["size"] for each in results})
    values, papers = [each[end] for each in results for end in ("median", "max")], False
    for peer in unique(each["peer"] for each in results):
        line = sorted((each for each in results if each["peer"] == peer), key=lambda each: each["size"])
        places, medians = [each["size"] for each in line], [each["median"] for each in line]
        style = {"marker": mark(peers, peer), "markersize": 4, "linewidth": 1.4, "color": palette[peer]}
        axes.errorbar(places, medians, spreads(line), capsize=2, elinewidth=0.8, **style)
        told = [(each["size"], theirs) for each in line if (theirs := benchmark.of_paper(each)) is not None]
        if told:
            papers = True
            values += [value for _, value in told]
            axes.plot(*zip(*told, strict=True), linestyle=":", markerfacecolor="white", **style)
    if sizes[-1] / max(1, sizes[0]) >= 8:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" if size < 10_000 else short(size) for size in sizes])
    axes.set_xticks([], minor=True)
    set_scale(axes.yaxis, axes.set_yscale, axes.set_ylim, values)
    axes.set_xlabel(benchmark.axis or benchmark.size_unit)
    axes.set_ylabel(results[0]["unit"] + (", logarithmic" if is_wide(values) else ""))
    return papers


def set_scale(axis: Any, set_scale: Any, set_limits: Any, values: Sequence[float]) -> None:
    """From zero on, or logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not is_wide(values):
        set_limits(0, max(values, default=1) * 1.12 or 1)
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        return
    set_scale("log")
    decades = math.log10(max(values) / min(values))
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 3.0), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def draw_bars(axes: Any, benchmark: Benchmark, results: Sequence[Result], palette: dict[str, str]) -> None:
    """One bar for each peer and size, with its number; points where the axis has no zero."""
    several = len({each["size"] for each in results}) > 1
    places, values = range(len(results)), [each["median"] for each in results]
    errors = {"elinewidth": 0.9, "capsize": 2, "ecolor": "0.25"}
    if is_wide(values):
        axes.errorbar(values, places, xerr=spreads(results), linestyle="none", **errors)
        axes.scatter(values, places, color=[palette[each["peer"]] for each in results], s=28, zorder=3)
    else:
        colour = [palette[each["peer"]] for each in results]
        axes.barh(places, values, xerr=spreads(results), color=colour, height=0.75, error_kw=errors)
    sizes = [f", {short(each['size'])} {benchmark.size_unit}" if several else "" for each in results]
    labels = [textwrap.shorten(each["peer"] + size, 40) for each, size in zip(results, sizes, strict=True)]
    axes.set_yticks(list(places), labels)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(visible=is_wide(values), axis="y")
    axes.set_xlabel(results[0]["unit"] + (", logarithmic" if is_wide(values) else ""))
    set_scale(axes.xaxis, axes.set_xscale, axes.set_xlim, values)
    for place, each in zip(places, results, strict=True):
        style = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        axes.annotate(short(each["median"]), (each["max"], place), **style)
    highest = max(each["max"] for each in results)
    if is_wide(values):
        axes.set_xlim(min(each["min"] for each in results) / 2, highest * 6)
    else:
        axes.set_xlim(0, highest * 1.3 or 1)
