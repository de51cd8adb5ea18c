"""Results as text: tables in Markdown, one HTML page with plots, and the comparison of two runs.

Ratios are a peer's number over Quire's of the same run, taken repetition by repetition: 2.0 says that the peer takes
twice as long (or twice the memory), below 1 that Quire is behind.
"""

import base64
import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from quire.bench.peers import PEERS, peer_class
from quire.bench.runner import BENCHMARKS, FORMAT
from quire.bench.spark import FOR_SCALE

Document = dict[str, Any]
Result = dict[str, Any]

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}img{max-width:100%}code{background:#f3f3f3}"""


def load(file: Path) -> Document:
    """A saved run."""
    try:
        document: Document = json.loads(file.read_text())
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"{file} is no saved run: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SystemExit(f"{file} is no saved run of format {FORMAT}")
    return document


# ------------------------------------------------------------------------------------------------ what is told


@dataclass
class Table:
    """A heading, a table below it, and notes below that; plots are for HTML only."""

    title: str
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    level: int = 3
    results: list[Result] = field(default_factory=list)


def number(value: float) -> str:
    """Three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def spread(result: Result) -> str:
    """The median, and in brackets the least and the greatest."""
    middle = number(result["median"])
    return middle if len(result["values"]) == 1 else f"{middle} ({number(result['min'])}..{number(result['max'])})"


def ratio(peer: Result, quire: Result) -> float | None:
    """How many times Quire's number the peer's is; None if they cannot be compared."""
    mine = dict(zip(quire["repetitions"], quire["values"], strict=True))
    theirs = zip(peer["repetitions"], peer["values"], strict=True)
    found = [value / mine[repetition] for repetition, value in theirs if mine.get(repetition)]
    return statistics.median(found) if found else None


def within_spread(a: Result, b: Result) -> bool:
    """True if the two ranges of numbers overlap."""
    return bool(a["min"] <= b["max"] and b["min"] <= a["max"])


def unique(items: Iterable[str]) -> list[str]:
    """Each once, in the order of first appearance."""
    return list(dict.fromkeys(items))


def reference(benchmark: str) -> str:
    """The peer that ratios of a benchmark refer to."""
    return next((each.reference for each in BENCHMARKS if each.name == benchmark), "quire")


def size_text(benchmark: str, size: int) -> str:
    """A size with its unit."""
    unit = next((each.size_unit for each in BENCHMARKS if each.name == benchmark), "records")
    return f"{size:,} {unit}"


def place_text(result: Result) -> str:
    """Which benchmark, variant and size a result or failure belongs to."""
    return f"{result['benchmark']} {result['variant']}, {size_text(result['benchmark'], result['size'])}"


def table_of(results: list[Result]) -> Table:
    """One table: the measures of one variant and size down, the peers across."""
    first = results[0]
    peers, measures = unique(each["peer"] for each in results), unique(each["measure"] for each in results)
    found = {(each["measure"], each["peer"]): each for each in results}
    table = Table(f"{first['variant']}, {size_text(first['benchmark'], first['size'])}", results=results)
    table.header = ["", *peers]
    for measure in measures:
        row = [f"{measure}, {next(each['unit'] for each in results if each['measure'] == measure)}"]
        base = found.get((measure, reference(first["benchmark"])))
        for peer in peers:
            result = found.get((measure, peer))
            times = None if result is None or base is None or result is base else ratio(result, base)
            text = "" if result is None else spread(result)
            row.append(text if times is None else f"{text} **{number(times)}x**")
        table.rows.append(row)
    return table


def calls_of(results: list[Result]) -> list[str]:
    """Which call each peer was measured with."""
    notes: dict[str, list[str]] = {}
    for peer in unique(each["peer"] for each in results):
        calls: dict[str, list[str]] = {}
        for result in results:
            if result["peer"] == peer:
                calls.setdefault(" or ".join(sorted(result["calls"])), []).append(result["measure"])
        text = "; ".join(f"{', '.join(unique(names))}: `{call}`" for call, names in calls.items())
        notes.setdefault(text, []).append(peer)
    return [f"{', '.join(peers)}: {text}" for text, peers in notes.items()]


def is_for_scale(peer: str) -> bool:
    """True for peers that are no stores."""
    base = peer.split(" ")[0].partition(":")[0]
    return peer in FOR_SCALE or (base in PEERS and peer_class(peer).for_scale)


def behind(results: list[Result]) -> list[str]:
    """Where a store did better than Quire."""
    found = {
        (each["benchmark"], each["variant"], each["size"], each["measure"], each["peer"]): each for each in results
    }
    lines = []
    for (benchmark, variant, size, measure, peer), result in found.items():
        base = found.get((benchmark, variant, size, measure, "quire"))
        times = None if base is None or result is base else ratio(result, base)
        if base is not None and times is not None and times < 1 and not is_for_scale(peer):
            doubt = ", within the spread" if within_spread(result, base) else ""
            lines.append(f"{place_text(result)}, {measure}: {peer} at {number(times)} of Quire's number{doubt}")
    return lines


def listed(facts: dict[str, Any]) -> str:
    """Facts in a line."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if not isinstance(value, list)
    )


def tables(document: Document) -> list[Table]:
    """Everything there is to tell of a run."""
    results: list[Result] = document["results"]
    told = Table("Quire benchmarks", level=1)
    told.notes = [
        f"Run of {document['started']}, {document['state']} after {document['seconds']:.0f} s",
        f"Machine: {listed(document['machine'])}",
        f"Versions: {listed(document['versions'])}",
        f"Settings: {listed(document['settings'])}",
        "Numbers: median of the repetitions (least..greatest), less is better; **2x**: the peer's number is twice "
        "Quire's of the same run. Each case runs in a process of its own, the repetitions of all peers interleaved. "
        f"dict, sorteddict, {', '.join(FOR_SCALE)} are no stores, they are there for scale. In the family core Quire "
        "reads and writes Arrow arrays in bulk, peers lists of bytes.",
    ]
    failures = [f"{place_text(each)}, {each['peer']}: {each['reason']}" for each in document["failures"]]
    parts = [told, Table("Failed", notes=failures or ["nothing"], level=2)]
    parts.append(Table("Where Quire is behind a store", notes=behind(results) or ["nowhere"], level=2))
    for benchmark in unique(each["benchmark"] for each in results):
        mine = [each for each in results if each["benchmark"] == benchmark]
        summary = next((each.summary for each in BENCHMARKS if each.name == benchmark), "")
        parts.append(Table(f"{benchmark}: {summary}", level=2, notes=calls_of(mine)))
        places = list(dict.fromkeys((each["variant"], each["size"]) for each in mine))
        groups = [[each for each in mine if (each["variant"], each["size"]) == place] for place in places]
        parts += [table_of(group) for group in groups]
        if len({each["size"] for each in mine}) > 2:
            parts[-len(groups) - 1].results = mine
            for part in parts[-len(groups) :]:
                part.results = []
    return parts


# ------------------------------------------------------------------------------------------------ Markdown


def markdown(document: Document) -> str:
    """The run as Markdown."""
    lines = []
    for part in tables(document):
        lines += ["#" * part.level + " " + part.title, ""]
        if part.header:
            lines += row_text(part.header), "|" + "---|" * len(part.header)
            lines += [row_text(row) for row in part.rows]
            lines.append("")
        if part.notes:
            lines += [*(f"- {note}" for note in part.notes), ""]
    return "\n".join(lines)


def row_text(cells: list[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ------------------------------------------------------------------------------------------------ HTML


def html(document: Document) -> str:
    """The run as one page that needs nothing else."""
    body = []
    for part in tables(document):
        body.append(f"<h{part.level}>{escape(part.title)}</h{part.level}>")
        if part.results:
            body.append(picture(part.results))
        if part.header:
            rows = [("th", part.header), *(("td", row) for row in part.rows)]
            cells = ("".join(f"<{tag}>{rich_text(cell)}</{tag}>" for cell in row) for tag, row in rows)
            body.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
        if part.notes:
            body.append("<ul>" + "".join(f"<li>{rich_text(note)}</li>" for note in part.notes) + "</ul>")
    head = f"<meta charset='utf-8'><title>Quire benchmarks</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def rich_text(text: str) -> str:
    """Text with the two marks that the tables use, bold and code."""
    for mark, tag in (("**", "b"), ("`", "code")):
        parts = escape(text).split(mark) if mark == "**" else text.split(mark)
        text = "".join(f"<{tag}>{part}</{tag}>" if index % 2 else part for index, part in enumerate(parts))
    return text


def picture(results: list[Result]) -> str:
    """A plot inside the page: lines over many sizes, else bars."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"HTML needs matplotlib for its plots ({error}); pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    measures = unique(each["measure"] for each in results)
    columns = min(3, len(measures))
    lines = -(-len(measures) // columns)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8}):
        figure = Figure(figsize=(4 * columns, 2.6 * lines), layout="constrained")
        for place, measure in enumerate(measures):
            axes = figure.add_subplot(lines, columns, place + 1)
            chosen = [each for each in results if each["measure"] == measure]
            (draw_lines if len({each["size"] for each in chosen}) > 1 else draw_bars)(axes, chosen)
            axes.set_title(f"{measure}, {chosen[0]['unit']}")
        file = io.BytesIO()
        figure.savefig(file, format="svg")
    data = base64.b64encode(file.getvalue()).decode()
    names = ", ".join(measures)
    return f"<p><img alt='Plot of {escape(names, quote=True)}' src='data:image/svg+xml;base64,{data}'></p>"


def errors_of(results: Sequence[Result]) -> list[list[float]]:
    """How far the least and the greatest lie from the median."""
    return [[each["median"] - each["min"] for each in results], [each["max"] - each["median"] for each in results]]


def draw_lines(axes: Any, results: list[Result]) -> None:
    """One line for each variant and peer over the sizes."""
    for variant, peer in dict.fromkeys((each["variant"], each["peer"]) for each in results):
        line = sorted(
            (each for each in results if (each["variant"], each["peer"]) == (variant, peer)), key=lambda r: r["size"]
        )
        sizes, medians = [each["size"] for each in line], [each["median"] for each in line]
        axes.errorbar(sizes, medians, errors_of(line), marker="o", markersize=3, capsize=2, label=f"{variant} {peer}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(size_text(results[0]["benchmark"], 0).split(" ")[1])
    axes.legend(fontsize=6)


def draw_bars(axes: Any, results: list[Result]) -> None:
    """One bar for each peer, Quire's in its own colour."""
    peers = [each["peer"] for each in results]
    colours = ["tab:orange" if peer.startswith("quire") else "0.6" for peer in peers]
    axes.barh(
        range(len(peers)), [each["median"] for each in results], xerr=errors_of(results), color=colours, capsize=2
    )
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()


# ------------------------------------------------------------------------------------------------ two runs


def compare(before: Document, after: Document) -> str:
    """Each number of both runs: later over earlier, marked where the two ranges do not overlap."""
    earlier = {identity(each): each for each in before["results"]}
    rows, peers_moved = [], []
    for result in after["results"]:
        old = earlier.get(identity(result))
        if old is None or not old["median"]:
            continue
        change = result["median"] / old["median"]
        if not result["peer"].startswith("quire"):
            peers_moved.append(change)
        mark = "" if within_spread(old, result) else ("**more**" if change > 1 else "**less**")
        name = f"{place_text(result)}, {result['measure']}, {result['unit']}"
        rows.append([name, result["peer"], spread(old), spread(result), f"{number(change)}x", mark])
    lines = [row_text(["", "peer", "before", "after", "after / before", "beyond the spread"]), "|" + "---|" * 6]
    lines += [row_text(row) for row in rows]
    marked = sum(1 for row in rows if row[-1])
    lines += ["", f"{len(rows)} numbers in both runs, {marked} changed beyond their spread."]
    if peers_moved:
        middle = number(statistics.median(peers_moved))
        lines.append(f"The peers, whose code is the same, moved by {middle}x in the middle: so much is the machine.")
    for name in ("machine", "versions", "settings"):
        differing = [key for key in after[name] if after[name][key] != before[name].get(key) and key != "load_at_start"]
        if differing:
            lines.append(f"Not alike in {name}: {', '.join(differing)}.")
    return "\n".join(lines)


def identity(result: Result) -> tuple[Any, ...]:
    """What makes two numbers comparable."""
    return tuple(result[name] for name in ("benchmark", "variant", "size", "peer", "measure", "operations"))
