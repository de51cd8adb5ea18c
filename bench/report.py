"""Results as text: Markdown with plots beside it, and one HTML page that needs nothing else.

Ratios are taken repetition by repetition between numbers of the same run: 2x says that the peer takes twice as long (or
twice the memory, or gives half the rate) of the one that the benchmark refers to, below 1 that it is better.
"""

import base64
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from quire.bench import plots
from quire.bench.core import ALIKE, Benchmark, Paper
from quire.bench.peers import PEERS, peer_class
from quire.bench.runner import BENCHMARKS, FAMILIES, FORMAT, duration
from quire.bench.spark import FOR_SCALE

Document = dict[str, Any]
Result = dict[str, Any]

# Of the papers' family, what is not made of Quire's code.
FOREIGN = ("objects", "arrays", "pickled", "WebHDFS")

STYLE = """:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:76em;margin:2em auto;padding:0 1.2em;color:#222}
h1,h2,h3,h4{line-height:1.25}h2{border-bottom:2px solid #d1495b;padding-bottom:.2em;margin-top:2.2em}
h3{margin-top:2em}nav{columns:18em;background:#f7f5f2;padding:.8em 1.2em;margin:1em 0}
nav ul{margin:0;padding-left:1.1em}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto;font-size:13.5px}
td,th{border:1px solid #d5d5d5;padding:.2em .6em;text-align:right;white-space:nowrap}th{background:#f7f5f2}
td:first-child,th:first-child{text-align:left}td.text,th.text{text-align:left;white-space:normal}
figure{margin:1em 0}img{max-width:100%;height:auto}code{background:#f3f1ee;padding:0 .2em}
details{margin:.6em 0}summary{cursor:pointer;color:#8f2d56}.failed{color:#b00020}
blockquote{border-left:4px solid #ed8b00;margin:1em 0;padding:.1em 1em;background:#fdf8ef}"""


def load(file: Path) -> Document:
    """A saved run."""
    try:
        document: Document = json.loads(file.read_text())
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"{file} is no saved run: {error}") from None
    parts = ("started", "seconds", "state", "machine", "versions", "settings", "results", "failures", "cases")
    if (
        not isinstance(document, dict)
        or document.get("format") != FORMAT
        or any(part not in document for part in parts)
    ):
        raise SystemExit(f"{file} is no saved run of format {FORMAT}")
    set_aside(document)
    return document


def set_aside(document: Document) -> None:
    """Tells results without a number, as an interrupted or failed run of other code may have left them, as failed."""
    names = ("median", "min", "max")
    whole: list[Result] = []
    lacking: dict[str, tuple[Result, list[str]]] = {}
    for each in document["results"]:
        numbers = [each.get(name) for name in names] if each.get("values") else [None]
        if all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
            whole.append(each)
        else:
            place = {name: each.get("case", each)[name] for name in ("benchmark", "variant", "size", "peer")}
            lacking.setdefault(json.dumps(place), (place, []))[1].append(each["measure"])
    document["results"] = whole
    for place, measures in lacking.values():
        reason = f"incomplete, no median of {', '.join(unique(measures))}"
        document["failures"].append({**place, "repetition": 0, "reason": reason, "missing": False})


# ------------------------------------------------------------------------------------------------ numbers


def number(value: float) -> str:
    """Three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def spread(result: Result) -> str:
    """The median, and in brackets the least and the greatest."""
    middle = number(result["median"])
    return middle if len(result["values"]) == 1 else f"{middle} ({number(result['min'])}..{number(result['max'])})"


def more_is_better(result: Result) -> bool:
    """True for rates; all other numbers are costs."""
    return str(result["unit"]).endswith("/s")


def ratio(peer: Result, base: Result) -> float | None:
    """How many times worse than the base the peer is; None if they cannot be compared."""
    mine = dict(zip(base["repetitions"], base["values"], strict=True))
    theirs = zip(peer["repetitions"], peer["values"], strict=True)
    found = [value / mine[repetition] for repetition, value in theirs if mine.get(repetition)]
    middle = statistics.median(found) if found else None
    return 1 / middle if middle and more_is_better(peer) else middle


def within_spread(a: Result, b: Result) -> bool:
    """True if the two ranges of numbers overlap."""
    return bool(a["min"] <= b["max"] and b["min"] <= a["max"])


def unique(items: Iterable[Any]) -> list[Any]:
    """Each once, in the order of first appearance."""
    return list(dict.fromkeys(items))


def benchmark_of(name: str) -> Benchmark:
    """The benchmark of that name; a stand-in for one that is gone since the run was saved."""
    known = next((each for each in BENCHMARKS if each.name == name), None)
    return known or Benchmark(name, "no longer measured", lambda case: iter(()), {}, (), ())


def size_text(benchmark: Benchmark, size: int) -> str:
    """A size with its unit."""
    unit = benchmark.size_unit
    return f"{size:,}{unit}" if unit.startswith("x ") else f"{size:,} {unit}"


def place_text(result: Result) -> str:
    """Which benchmark, variant and size a result or failure belongs to."""
    return f"{result['benchmark']} {result['variant']}, {size_text(benchmark_of(result['benchmark']), result['size'])}"


def is_for_scale(peer: str) -> bool:
    """True for peers that are no stores."""
    base = peer.split(" ")[0].partition(":")[0]
    return peer in FOR_SCALE or (base in PEERS and peer_class(peer).for_scale)


def is_ours(result: Result) -> bool:
    """Whether a number is one of Quire's code."""
    if result["peer"].startswith("quire"):
        return True
    ours_only = benchmark_of(result["benchmark"]).family in ("papers", "checkpoint")
    return ours_only and not result["peer"].startswith(FOREIGN)


def is_rival(benchmark: Benchmark, peer: str) -> bool:
    """Whether Quire loses where this peer is better."""
    if benchmark.rivals is not None:
        return peer in benchmark.rivals
    return benchmark.reference.startswith("quire") and not peer.startswith("quire") and not is_for_scale(peer)


def in_order(results: Sequence[Result]) -> list[Result]:
    """The results with the peers of each place as their benchmark has them: they ran in an order that was drawn."""
    places = unique((each["benchmark"], each["variant"], each["size"]) for each in results)

    def order(result: Result) -> tuple[int, int]:
        peers = benchmark_of(result["benchmark"]).variants.get(result["variant"], ())
        peer = result.get("case", result)["peer"]
        place = places.index((result["benchmark"], result["variant"], result["size"]))
        return place, peers.index(peer) if peer in peers else len(peers)

    return sorted(results, key=order)


# ------------------------------------------------------------------------------------------------ what is told


@dataclass
class Table:
    """Rows of text; the first column says what, the others are numbers unless they are texts."""

    header: list[str]
    rows: list[list[str]]
    texts: tuple[int, ...] = ()


@dataclass
class Part:
    """A heading and what stands below it, in this order."""

    title: str
    level: int = 2
    quotes: list[str] = field(default_factory=list)
    plot: tuple[Benchmark, list[Result]] | None = None
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Its name in links."""
        return "".join(letter for letter in self.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def measures_of(results: Sequence[Result], failed: Sequence[dict[str, Any]]) -> Table:
    """One table: the measures of one variant and size down, the peers across, those that failed among them."""
    first, benchmark = results[0], benchmark_of(results[0]["benchmark"])
    failures = {each["peer"]: "not installed" if each.get("missing") else "failed" for each in failed}
    peers = unique([*(each["peer"] for each in results), *failures])
    measures = unique(each["measure"] for each in results)
    found = {(each["measure"], each["peer"]): each for each in results}
    table = Table([f"{first['variant']}, {size_text(benchmark, first['size'])}", *peers], [])
    for measure in measures:
        unit = next(each["unit"] for each in results if each["measure"] == measure)
        row, papers = [f"{measure}, {unit}"], [f"the paper: {measure}, {unit}"]
        base = found.get((measure, benchmark.reference))
        for peer in peers:
            result = found.get((measure, peer))
            times = None if result is None or base is None or result is base else ratio(result, base)
            text = failures.get(peer, "") if result is None else spread(result)
            row.append(text if times is None else f"{text} **{number(times)}x**")
            theirs = None if result is None else benchmark.of_paper(result)
            papers.append("" if theirs is None else number(theirs))
        table.rows.append(row)
        if any(papers[1:]):
            table.rows.append(papers)
    return table


def calls_of(results: Sequence[Result]) -> list[str]:
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


def rival_ratios(results: Sequence[Result]) -> list[tuple[Result, Result, float]]:
    """Each number of a rival with Quire's, and how many times worse the rival is; also beside Quire called alike."""
    found = {
        (each["benchmark"], each["variant"], each["size"], each["measure"], each["peer"]): each for each in results
    }
    ratios = []
    for (name, variant, size, measure, peer), result in found.items():
        benchmark = benchmark_of(name)
        for ours in filter(None, (benchmark.reference, benchmark.alike)):
            base = found.get((name, variant, size, measure, ours))
            if base is not None and is_rival(benchmark, peer) and (times := ratio(result, base)) is not None:
                ratios.append((result, base, times))
    return ratios


def called(base: Result) -> str:
    """Quire's way to be called, where a rival's number is compared with another than the reference."""
    return "" if base["peer"] == benchmark_of(base["benchmark"]).reference else f" ({base['peer']})"


def losses(results: Sequence[Result]) -> Table:
    """Where a rival did better than Quire, the worst first."""
    table = Table(["", "measure", "rival", "the rival's", "Quire's", "ratio", ""], [], texts=(1, 2, 6))
    for result, base, times in sorted(rival_ratios(results), key=lambda each: each[2]):
        if times < 1:
            once = min(len(result["values"]), len(base["values"])) < 2
            doubt = "measured once" if once else "within the spread" if within_spread(result, base) else ""
            numbers = [spread(result), spread(base) + called(base), f"**{number(times)}x**"]
            measure = f"{result['measure']}, {result['unit']}"
            table.rows.append([place_text(result), measure, result["peer"], *numbers, doubt])
    return table


def in_short(results: Sequence[Result]) -> Table:
    """For each benchmark and rival the middle of all ratios, and the ends."""
    groups: dict[tuple[str, str], list[float]] = {}
    order = unique(each["benchmark"] for each in results)
    ratios = sorted(rival_ratios(results), key=lambda each: (order.index(each[0]["benchmark"]), called(each[1])))
    for result, base, times in ratios:
        groups.setdefault((result["benchmark"] + called(base), result["peer"]), []).append(times)
    table = Table(["benchmark", "rival", "times as much", "least", "most", "numbers"], [], texts=(1,))
    for (name, peer), found in groups.items():
        ends = [number(statistics.median(found)), number(min(found)), number(max(found))]
        table.rows.append([name, peer, *ends, str(len(found))])
    return table


def beside_papers(results: Sequence[Result]) -> Table:
    """Each number that a paper gives in its text, beside ours."""
    header = ["paper", "measure", "at", "way", "ours", "the paper's", "ours, of the base", "the paper's, of the base"]
    table = Table(header, [], texts=(1, 2, 3))
    found = {
        (each["benchmark"], each["variant"], each["size"], each["measure"], each["peer"]): each for each in results
    }
    for (name, variant, size, measure, peer), result in found.items():
        benchmark = benchmark_of(name)
        paper, theirs = benchmark.paper, benchmark.of_paper(result)
        if paper is None or theirs is None:
            continue
        base = found.get((name, variant, size, measure, paper.base))
        their_base = paper.numbers.get((variant, paper.base, size, measure))
        of_base = ["", ""]
        if base is not None and their_base and base["median"]:
            of_base = [f"{number(result['median'] / base['median'])}x", f"{number(theirs / their_base)}x"]
        at = f"{variant}, {size_text(benchmark, size)}"
        ours = [spread(result), number(theirs)]
        table.rows.append([paper.source, f"{measure}, {result['unit']}", at, peer, *ours, *of_base])
    return table


def paper_quotes(paper: Paper) -> list[str]:
    """What a benchmark says of its paper."""
    base = f" The base of comparison is *{paper.base}*." if paper.base else ""
    return [f"**{paper.source}.** Found there: {paper.finding}. Set-up there: {paper.set_up}.{base}"]


METHOD = (
    "Each case runs in a process of its own (those with Spark in a JVM of its own), the repetitions of all peers "
    "interleaved, in an order that changes from one to the next, so that what the machine does at a moment, or what "
    "the case before left, meets all of them. A result is compared with a model, or with what another provider gives, "
    "before its time counts; a peer that fails that is told as failed and has no times. Peers of the family core are "
    "at their best settings and their fastest call, which are named below each benchmark; Spark's providers have "
    "Spark's settings but for those that docs/benchmarks.md lists.",
    "Numbers are the median of the repetitions (least..greatest); less is better, but of rates. **2x**: the peer's "
    "number is twice as bad as that of the one the benchmark refers to, in the same run; below 1 it is better. "
    "An op is one record, also in scans and ranges; a time of puts and removes has their commit in it. "
    f"dict, sorteddict, {', '.join(FOR_SCALE)} are no stores, they are there for scale. In the family core Quire reads "
    "and writes Arrow arrays in bulk, peers lists of Python's bytes, an object a value: part of their ratio to quire "
    "is the binding's. quire-from-bytes takes and gives the same lists as they do, and the time to turn them into "
    "Arrow arrays and back counts: compare with it for like with like. quire is in memory; quire-file has its arena "
    "where the peers have their files.",
)


def listed(facts: dict[str, Any]) -> str:
    """Facts in a line."""
    plain = {name: value for name, value in facts.items() if not isinstance(value, (list, dict))}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items())


def parts_of(document: Document) -> list[Part]:
    """Everything there is to tell of a run."""
    results = in_order(document["results"])
    mode = document["settings"].get("mode", "")
    state = {"running": "killed or still running"}.get(document["state"], document["state"])
    told = f"A {mode} run of {document['started']}, {state} after {duration(document['seconds'])}"
    sittings = len(document.get("sittings", []))
    told += f" in {sittings} sittings." if sittings > 1 else "."
    parts = [Part("Quire benchmarks", 1, paragraphs=[told])]
    short = in_short(results)
    if short.rows:
        text = "How many times as much as Quire a rival takes, over all numbers of a benchmark; below 1 Quire loses."
        if any(ALIKE in row[0] for row in short.rows):
            text += f" Rows with {ALIKE} are of Quire called as its rivals are, with lists of Python's bytes."
        parts.append(Part("In short", paragraphs=[text], tables=[short]))
    lost, compared = losses(results), len(list(rival_ratios(results)))
    if lost.rows:
        text = f"{len(lost.rows)} of {compared} numbers: those in which a rival did better in the same run."
    else:
        text = f"In none of {compared} numbers of this run." if compared else "No rival was measured in this run."
    parts.append(Part("Where Quire loses", paragraphs=[text], tables=[lost] if lost.rows else []))
    failures = [
        f"{place_text(each)}, {each['peer']}: {'not installed' if each.get('missing') else 'failed'}: {each['reason']}"
        for each in document["failures"]
    ]
    parts.append(Part("Failed", notes=failures, paragraphs=[] if failures else ["Nothing."]))
    parts.append(Part("Method", paragraphs=list(METHOD)))
    repeated = document["settings"].get("repetitions")
    counts = f"{repeated}" if not isinstance(repeated, dict) else repeated_text(repeated)
    facts = [
        f"Machine: {listed(document['machine'])}",
        f"Versions: {listed(document['versions'])}",
        f"Settings: {listed(document['settings'])}",
        f"Repetitions: {counts}",
    ]
    loads = [case["load_before"] for case in document["cases"] if "load_before" in case]
    if loads:
        told = f"{number(statistics.median(loads))} in the middle, {number(max(loads))} at most"
        facts.append(f"Load of the machine before a case, this run's own included: {told}")
    on_disk = [case for case in document.get("cases", []) if case.get("files") == "on a disk"]
    on_disk = [case for case in on_disk if not case["benchmark"].startswith(("spark.", "python."))]
    if on_disk:
        places = dict.fromkeys(f"{place_text(case)}, {case['peer']}" for case in on_disk)
        facts.append(f"With files on a disk, since there was no room in memory: {'; '.join(places)}")
    parts.append(Part("Machine and settings", notes=facts))
    beside = beside_papers(results)
    if beside.rows:
        text = (
            "The papers' machines are others, most from before 2010, and their operators are in C++: compare how "
            "numbers change along an axis and from one way to another, not the numbers themselves."
        )
        parts.append(Part("The papers beside ours", paragraphs=[text], tables=[beside]))
    for family in FAMILIES:
        names = [name for name in unique(each["benchmark"] for each in results) if benchmark_of(name).family == family]
        if names:
            parts.append(Part(f"Family {family}", paragraphs=[family_summary(family)]))
            parts += [benchmark_part(name, results, document["failures"]) for name in names]
    return parts


def repeated_text(repeated: dict[str, int]) -> str:
    """How often each benchmark was repeated, the benchmarks of a number together."""
    groups = {count: [name for name in repeated if repeated[name] == count] for count in sorted(set(repeated.values()))}
    return "; ".join(f"{count}: {', '.join(names)}" for count, names in groups.items())


def family_summary(family: str) -> str:
    """The first line of what a family's module says of itself."""
    text = (FAMILIES[family].__doc__ or "").strip().splitlines()[0].partition(": ")[2]
    return text[:1].upper() + text[1:]


def benchmark_part(name: str, everything: Sequence[Result], failures: Sequence[dict[str, Any]]) -> Part:
    """All about one benchmark."""
    benchmark = benchmark_of(name)
    results = [each for each in everything if each["benchmark"] == name]
    part = Part(f"{name}: {benchmark.summary}", 3, plot=(benchmark, results), notes=calls_of(results))
    part.quotes = paper_quotes(benchmark.paper) if benchmark.paper else []
    for place in unique((each["variant"], each["size"]) for each in results):
        group = [each for each in results if (each["variant"], each["size"]) == place]
        failed = [each for each in failures if (each["benchmark"], each["variant"], each["size"]) == (name, *place)]
        part.tables.append(measures_of(group, failed))
    return part


# ------------------------------------------------------------------------------------------------ Markdown


def row_text(cells: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


def markdown(document: Document, folder: Path | None = None) -> str:
    """Everything as Markdown; with a folder for the plots, which is to lie beside the text."""
    lines: list[str] = []
    parts = parts_of(document)
    for part in parts:
        lines += ["#" * part.level + " " + part.title, ""]
        for paragraph in part.paragraphs:
            lines += [paragraph, ""]
        if part.level == 1:
            lines += [f"- [{each.title}](#{each.anchor})" for each in parts[1:] if each.level == 2] + [""]
        lines += [line for quote in part.quotes for line in (f"> {quote}", "")]
        if part.plot is not None and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            name = part.plot[0].name
            plots.png(*part.plot, folder / f"{name}.png")
            lines += [f"![{name}]({folder.name}/{name}.png)", ""]
        for table in part.tables:
            lines += [row_text(table.header), "|" + "---|" * len(table.header)]
            lines += [*(row_text(row) for row in table.rows), ""]
        lines += [f"- {note}" for note in part.notes] + ([""] if part.notes else [])
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ HTML


def rich_text(text: str) -> str:
    """Text with the marks that are used here: bold, slanted, code."""
    text = escape(text)
    for mark, tag in (("**", "b"), ("`", "code")):
        parts = text.split(mark)
        text = "".join(f"<{tag}>{part}</{tag}>" if index % 2 else part for index, part in enumerate(parts))
    return text.replace(" *", " <i>").replace("*.", "</i>.")


def html(document: Document) -> str:
    """Everything on one page, which needs nothing from elsewhere; the numbers are in it, too."""
    parts = parts_of(document)
    body = [html_part(part, parts, document) for part in parts]
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<link rel='icon' href='data:,'><title>Quire benchmarks</title><style>{STYLE}</style>"
    )
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>{''.join(body)}</body></html>\n"


def html_part(part: Part, parts: Sequence[Part], document: Document) -> str:
    """One part of the page."""
    lines = [f"\n<h{part.level} id='{part.anchor}'>{escape(part.title)}</h{part.level}>"]
    lines += [f"<p>{rich_text(paragraph)}</p>" for paragraph in part.paragraphs]
    if part.level == 1:
        raw = base64.b64encode(json.dumps(document).encode()).decode()
        lines.append(
            f"<p><a download='quire-bench.json' href='data:application/json;base64,{raw}'>All numbers of every "
            "repetition</a> (JSON, for <code>quire bench report</code> and <code>compare</code>)</p>"
        )
        lines.append(contents(parts))
    lines += [f"<blockquote><p>{rich_text(quote)}</p></blockquote>" for quote in part.quotes]
    if part.plot is not None:
        image = base64.b64encode(plots.svg(*part.plot)).decode()
        alt = escape(f"Plots of {part.title}", quote=True)
        lines.append(f"<figure><img alt='{alt}' src='data:image/svg+xml;base64,{image}'></figure>")
    tables = "".join(html_table(table) for table in part.tables)
    notes = "<ul>" + "".join(f"<li>{rich_text(note)}</li>" for note in part.notes) + "</ul>" if part.notes else ""
    if part.plot is not None:
        lines.append(f"<details><summary>The numbers, and how they were measured</summary>{tables}{notes}</details>")
    else:
        lines += [tables, notes]
    return "".join(lines)


def contents(parts: Sequence[Part]) -> str:
    """The table of contents."""
    lines = []
    for part in parts[1:]:
        name = part.title.partition(":")[0] if part.level == 3 else part.title
        text = f"<li><a href='#{part.anchor}'>{escape(name)}</a></li>"
        lines.append(text if part.level == 2 else f"<ul>{text}</ul>")
    return f"<nav><ul>{''.join(lines)}</ul></nav>"


def html_table(table: Table) -> str:
    """A table."""
    header = "".join(
        f"<th{' class=text' if place in table.texts else ''}>{rich_text(cell)}</th>"
        for place, cell in enumerate(table.header)
    )
    rows = []
    for row in table.rows:
        cells = [
            f"<td{' class=text' if place in table.texts else ' class=failed' if cell == 'failed' else ''}>"
            f"{rich_text(cell)}</td>"
            for place, cell in enumerate(row)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
