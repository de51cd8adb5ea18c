"""The report as a page: opened in a real browser without a network, its plots are there and nothing is missing."""

import itertools

import browser
import pytest

from quire import bench
from quire.bench import plots, report, runner

pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install matplotlib")
pytestmark = pytest.mark.slow

LOADED = (
    "Promise.all([...document.images].map(i => i.decode())).then(() => [...document.images].map(i => i.naturalWidth))"
)
ANCHORS = (
    "[...document.querySelectorAll('nav a')].filter(a => !document.getElementById(a.hash.slice(1))).map(a => a.hash)"
)
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SIZES = "[...document.querySelectorAll('figure img')].map(i => [i.clientWidth, document.body.clientWidth])"


def result(benchmark, variant, size, peer, measure, value):
    return {
        "benchmark": benchmark.name,
        "variant": variant,
        "size": size,
        "peer": peer,
        "measure": measure,
        "unit": "ms",
        "operations": 1,
        "calls": ["call <b>&</b>"],
        "repetitions": [0, 1],
        "values": [value, value * 2],
        "median": value * 1.5,
        "min": value,
        "max": value * 2,
    }


def document_of(benchmarks):
    """Numbers for all peers, variants and sizes of some benchmarks, made up."""
    document = runner.Run(benchmarks, runner.QUICK).document
    document["state"] = "complete"
    for benchmark in benchmarks:
        measures = {place[3] for place in benchmark.paper.numbers} if benchmark.paper else {"a measure"}
        document["results"] += [
            result(benchmark, variant, size, peer, measure, 1.0 + number * 7 + size)
            for variant, peers in benchmark.variants.items()
            for size in benchmark.full
            for number, peer in enumerate(peers)
            for measure in sorted(measures) or ["a measure"]
        ]
    failure = {"benchmark": "core.map", "variant": "map", "size": 1_000_000, "peer": "a <script>", "repetition": 0}
    document["failures"].append({**failure, "reason": "<script>alert(1)</script>", "missing": False})
    return document


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    wanted = ["core.map", "core.page-size", "papers.join", "papers.capture-rate", "papers.dfs"]
    file.write_text(report.html(document_of(runner.chosen(wanted))))
    return file


def test_the_page_works_in_a_browser_without_a_network(page, tmp_path):
    program = browser.installed()
    if program is None:
        pytest.skip("no Chromium to open the page in (Debian: apt-get install chromium)")
    with browser.Browser(program, tmp_path) as opened:
        opened.open(page)
        widths = opened.evaluate(LOADED)
        assert len(widths) == 5
        assert min(widths) > 0
        assert opened.evaluate(ANCHORS) == []
        assert opened.evaluate(WIDE) <= 0
        assert all(shown <= room for shown, room in opened.evaluate(SIZES))
        opened.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert opened.evaluate("document.querySelectorAll('table').length") > 5
        raw = opened.evaluate("fetch(document.querySelector('a[download]').href).then(a => a.json())")
        assert len(raw["results"]) > 100
        opened.picture(tmp_path / "page.png")
        assert opened.complaints == []
        assert opened.requests == []


def test_the_browser_would_notice_what_is_wrong(page, tmp_path):
    """Else the test above would say nothing."""
    program = browser.found()
    if program is None:
        pytest.skip("no Chromium to open the page in (Debian: apt-get install chromium)")
    broken = tmp_path / "broken.html"
    head = "<img src='http://localhost:9/plot.png'><script>console.error('no')</script>"
    broken.write_text(page.read_text().replace("<body>", f"<body>{head}"))
    with browser.Browser(program, tmp_path) as opened:
        opened.open(broken)
        assert opened.evaluate("document.images[0].naturalWidth") == 0
        assert opened.requests == ["http://localhost:9/plot.png"]
        assert opened.complaints


def test_markdown_has_its_plots_beside_it(tmp_path):
    document = document_of(runner.chosen(["papers.join"]))
    (tmp_path / "run.json").write_text(runner.json.dumps(document))
    file = tmp_path / "docs" / "full.md"
    assert bench.main(["report", str(tmp_path / "run.json"), "--markdown", str(file)]) == 0
    text = file.read_text()
    assert "![papers.join](full/papers.join.png)" in text
    assert (tmp_path / "docs" / "full" / "papers.join.png").read_bytes().startswith(b"\x89PNG")
    # Table 5 of the paper, beside ours.
    assert "| SGuard, Table 5 | a tuple, ms | window scanned, as in the paper, 256 KB | quire each:8192 |" in text
    assert "| 605 |" in text and "| 1.02x |" in text


def brightness(colour):
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("name", ["core.page-size", "checkpoint.log"])
def test_colours_of_peers_that_differ_in_a_number_follow_it(name):
    peers = next(iter(next(each for each in runner.BENCHMARKS if each.name == name).variants.values()))
    found = plots.colours(peers)
    numbered = [each for each in peers if each[-1].isdigit()]
    bright = [brightness(found[peer]) for peer in numbered]
    assert all(later - earlier > 12 for earlier, later in itertools.pairwise(bright))
    assert len(set(found.values())) == len(peers)


def test_markdown_asks_for_a_name_that_gives_the_plots_a_folder(tmp_path):
    (tmp_path / "run.json").write_text(runner.json.dumps(document_of(runner.chosen(["papers.join"]))))
    with pytest.raises(SystemExit, match=r"ends with \.md"):
        bench.main(["report", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "full")])
