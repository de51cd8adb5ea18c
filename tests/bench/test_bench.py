"""Every benchmark at a tiny size: that it runs, checks its results and can be reported. No test looks at a time."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from quire import bench
from quire.bench import compare, core, data, machine, peers, plots, report, runner

# Other stores and processes of their own: nothing here is about memory errors of the core.
pytestmark = pytest.mark.slow

SIZE = 1000
TINY = runner.Settings("quick", repetitions=2, seed=7, operations_max=500)


def tiny(benchmark):
    size = 2 if benchmark.size_unit == "MB" else SIZE
    return dataclasses.replace(benchmark, quick=(size,))


def really_failed(document):
    return [each for each in document["failures"] if not each["missing"]]


def save(document, file):
    file.write_text(json.dumps(document))
    return str(file)


@pytest.fixture(scope="module")
def document():
    return runner.run([tiny(each) for each in core.BENCHMARKS], TINY, None, isolate=False)


@pytest.mark.parametrize("benchmark", core.BENCHMARKS, ids=lambda each: each.name)
def test_every_benchmark_gives_numbers_for_quire(document, benchmark):
    assert really_failed(document) == []
    found = [each for each in document["results"] if each["benchmark"] == benchmark.name]
    assert {each["variant"] for each in found} == set(benchmark.variants)
    for result in found:
        assert len(result["values"]) == min(TINY.repetitions, benchmark.repetitions_max)
        assert result["min"] <= result["median"] <= result["max"]
        assert result["calls"] and all(result["calls"])
    assert benchmark.reference in {each["peer"] for each in found}


def test_all_peers_that_are_installed_take_part(document):
    absent = {each["peer"] for each in document["failures"]}
    present = {each["peer"].split(" ")[0].partition(":")[0] for each in document["results"]}
    assert present | absent == set(peers.PEERS)


def test_pages_are_copied_once_while_a_snapshot_is_open(document):
    copies = {each["measure"]: each["median"] for each in document["results"] if each["unit"] == "pages"}
    assert 1 <= copies["copies per touched page"] < 2
    assert copies["more copies on updating again"] < 0.5


def test_run_in_processes_of_their_own_saves_all_that_a_result_needs(tmp_path):
    file = tmp_path / "run.json"
    chosen = [tiny(each) for each in runner.chosen(["core.map-each"])]
    runner.run(chosen, dataclasses.replace(TINY, repetitions=1), file)
    saved = report.load(file)
    assert really_failed(saved) == []
    assert saved["state"] == "complete"
    assert {"cpu", "cores", "memory_gb", "kernel"} <= set(saved["machine"])
    assert {"python", "quire", "lmdb", "rocksdict", "sqlite", "sortedcontainers"} <= set(saved["versions"])
    assert saved["settings"]["seed"] == TINY.seed
    assert {"quire", "sqlite", "dict"} <= {each["peer"] for each in saved["results"]}


def test_the_way_that_is_fastest_once_all_are_warm_is_taken_and_named():
    tried = []

    def way(name, *seconds):
        def call(sample):
            tried.append(name)
            time.sleep(seconds[min(tried.count(name), len(seconds)) - 1])

        return call

    ways = {"cold": way("cold", 0.2, 0.001), "steady": way("steady", 0.05), "slow": way("slow", 0.1)}
    assert core.fastest(ways, None) == ("cold, faster than steady, slow", ways["cold"])
    assert tried == [*ways, *reversed(ways)] * 2
    assert core.fastest({"only": ways["slow"]}, None) == ("only", ways["slow"])


class Broken(peers.Dict):
    def put_each(self, keys, values):
        super().put_each(keys, values[::-1])


class Absent(peers.Dict):
    def open(self):
        peers.load("quire_no_such_module")


@pytest.mark.parametrize(("peer", "reason"), [(Broken, "WrongResult"), (Absent, "is not installed")])
def test_a_peer_that_fails_is_reported_with_the_reason_and_has_no_times(monkeypatch, peer, reason):
    monkeypatch.setitem(peers.PEERS, "dict", peer)
    chosen = [tiny(each) for each in runner.chosen(["core.map-each"])]
    failing = runner.run(chosen, TINY, None, isolate=False)
    assert [reason in each["reason"] for each in failing["failures"] if each["peer"] == "dict"] == [True]
    assert "dict" not in {each["peer"] for each in failing["results"]}
    text = report.markdown(failing)
    assert reason in text
    # In the table of results, too, it is told in place of a time.
    assert ("| failed |" if peer is Broken else "| not installed |") in text


@pytest.mark.parametrize(
    ("given", "reason"), [([], "without a number"), ([core.timed("get", float("nan"), 1, "get")], "no number for get")]
)
def test_a_case_without_a_number_is_reported_as_failed(monkeypatch, given, reason):
    monkeypatch.setattr(runner, "run_case", lambda case: given)
    failing = runner.run([tiny(each) for each in runner.chosen(["core.map-each"])], TINY, None, isolate=False)
    assert failing["results"] == []
    assert all(reason in each["reason"] for each in failing["failures"]) and failing["failures"]


@pytest.mark.parametrize("left", [{"values": [], "repetitions": []}, {"median": None}, {"median": float("nan")}, {}])
def test_a_result_without_a_median_is_reported_as_failed(document, tmp_path, capsys, left):
    cut = json.loads(json.dumps(document))
    for result in cut["results"]:
        if (result["benchmark"], result["peer"], result["measure"]) == ("core.map-each", "sqlite", "get"):
            for name in ("median", "min", "max"):
                del result[name]
            result |= left
    file = save({**cut, "state": "running"}, tmp_path / "cut.json")
    page = tmp_path / "cut.html"
    assert bench.main(["report", file, "--html", str(page), "--markdown", str(tmp_path / "cut.md")]) == 0
    text = (tmp_path / "cut.md").read_text()
    assert "core.map-each map, 1,000 records, sqlite: failed: incomplete, no median of get\n" in text
    assert "killed or still running after" in text and "| failed |" in text
    assert bench.main(["compare", file, file]) == 0


class BrokenLater(peers.Dict):
    times = 0

    def put_each(self, keys, values):
        BrokenLater.times += 1
        super().put_each(keys, values[::-1] if BrokenLater.times > 2 else values)


def test_a_peer_that_fails_in_a_later_repetition_has_no_times_either(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "dict", BrokenLater)
    chosen = [tiny(each) for each in runner.chosen(["core.map-each"])]
    failing = runner.run(chosen, TINY, None, isolate=False)
    assert [each["repetition"] for each in failing["failures"] if each["peer"] == "dict"] == [1]
    assert "dict" not in {each["peer"] for each in failing["results"]}
    assert "quire" in {each["peer"] for each in failing["results"]}


def test_where_quire_loses_is_told_by_ratio(document):
    better = moved(document, 1e-6, ["sqlite"])
    for result in better["results"]:
        result["values"] = [result["median"]] * len(result["values"])
    table = report.losses(better["results"])
    assert {"sqlite"} <= {row[2] for row in table.rows}
    assert not {"dict", "sorteddict"} & {row[2] for row in table.rows}
    assert "## Where Quire loses" in report.markdown(better)
    alone = {**better, "results": [each for each in better["results"] if each["peer"].startswith("quire")]}
    assert "No rival was measured" in report.markdown(alone)


@pytest.mark.parametrize("ordered", [False, True])
def test_quire_from_bytes_takes_and_gives_what_other_stores_do(tmp_path, ordered):
    ids = np.arange(1000)
    keys, values = data.keys_of(ids), data.values_of(ids, ids)
    opened = [peers.peer_class(name)(tmp_path, ordered, 1000) for name in ("quire-from-bytes", "sorteddict")]
    ours, theirs = opened
    assert ours.pairs_in(keys, values) == theirs.pairs_in(keys, values)
    assert ours.keys_in(keys) == theirs.keys_in(keys)
    for peer in (ours, theirs):
        peer.put(peer.pairs_in(keys, values))
        peer.remove(peer.keys_in(keys[:10]))
    found = [way(peer.keys_in(keys[10:])) for peer in (ours, theirs) for way in peer.get_ways().values()]
    assert found == [data.to_list(values[10:])] * 2
    scanned = [[pair for block in peer.scan() for pair in block] for peer in (ours, theirs)]
    assert sorted(scanned[0]) == scanned[1] and (scanned[0] == scanned[1] or not ordered)
    bounds = [(scanned[1][20][0], scanned[1][30][0])]
    ways = [way for peer in (ours, theirs) for way in peer.range_ways().values()] if ordered else []
    assert all(way(bounds) == [scanned[1][20:30]] for way in ways)
    for peer in opened:
        peer.close()


def test_lmdb_is_told_that_keys_ascend(tmp_path):
    pytest.importorskip("lmdb")
    ids = data.in_key_order(np.arange(10_000))
    held, scanned = [], []
    for how in ("put", "put_ascending"):
        (tmp_path / how).mkdir()
        peer = peers.Lmdb(tmp_path / how, True, 10_000)
        peer.begin()
        getattr(peer, how)(peer.pairs_in(data.keys_of(ids), data.values_of(ids, ids)))
        peer.commit()
        held.append(peer.held_bytes())
        scanned.append(list(peer.scan()))
        peer.close()
    assert scanned[0] == scanned[1]
    assert held[1] <= held[0]
    case = core.Case("core.ordered", "ordered", "lmdb", 1000, 1000, 7, tmp_path)
    found = {each.measure: each.call for each in core.bulk_ordered(case)}
    assert "append=True" in found["put in ascending order"] and "append" not in found["put in random order"]


def test_rivals_stand_beside_quire_called_as_they_are_too(document):
    rows = [row[:2] for row in report.in_short(document["results"]).rows]
    rivals = {
        name: [[rival for benchmark, rival in rows if benchmark == name + how] for how in ("", " (quire-from-bytes)")]
        for name in ("core.map", "core.ordered", "core.curve")
    }
    assert all(theirs == beside for theirs, beside in rivals.values())
    assert rivals["core.map"][0] and rivals["core.ordered"][0]  # SQLite at least; the others may not be installed
    slow = moved(document, 1e6, ["quire-from-bytes"])
    for result in slow["results"]:
        result["values"] = [result["median"]] * len(result["values"])
    lost = report.losses(slow["results"]).rows
    assert {row[2].split(" ")[0] for row in lost if "(quire-from-bytes)" in row[4]} >= {"sqlite"}


def test_a_process_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    case = core.Case("core.map-each", "map", "dict", SIZE, SIZE, 1, tmp_path)
    with pytest.raises(runner.CaseFailed, match="exit code 1"):
        runner.run_isolated(case, runner.Interrupt())


@pytest.mark.parametrize("allowed", [True, False])
def test_memory_is_compacted_before_each_case_where_it_may_be(tmp_path, monkeypatch, allowed):
    file = tmp_path / ("compact" if allowed else "none/compact")
    monkeypatch.setattr(machine, "COMPACT", file)
    told = []
    real = runner.run_isolated

    def run_isolated(case, interrupt):
        told.append(file.exists())
        file.unlink(missing_ok=True)
        return real(case, interrupt)

    monkeypatch.setattr(runner, "run_isolated", run_isolated)
    chosen = [tiny(each) for each in runner.narrowed(runner.chosen(["core.map-each"]), ["quire", "dict"], [], [])]
    done = runner.run(chosen, dataclasses.replace(TINY, repetitions=1), None)
    assert done["failures"] == [] and told == [allowed] * 2
    assert done["settings"]["memory_compacted_before_each_case"] is allowed
    assert f"memory compacted before each case {allowed}" in report.markdown(done)


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    file = tmp_path / "run.json"
    command = [sys.executable, "-m", "quire", "bench", "run", "core.map-each", "--repeat", "50", "--json", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (file.exists() and json.loads(file.read_text())["results"]):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    told, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    saved = report.load(file)
    assert saved["state"] == "interrupted"
    assert saved["results"]
    assert "interrupted" in told
    assert list(machine.storage(0).glob(f"quire-bench-{process.pid}-*")) == []


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    # Peers that are installed everywhere: one that is missing is not run.
    found = (tiny(each) for each in runner.chosen(["core.map-each"]))
    chosen = [dataclasses.replace(each, variants={"map": ("quire", "sqlite")}) for each in found]
    whole = runner.run(chosen, TINY, None, isolate=False)
    places = [(each["peer"], each["repetition"]) for each in whole["cases"]]
    file = tmp_path / "run.json"
    ran = []
    real = runner.run_case

    def until(limit):
        def run_case(case):
            if len(ran) == limit:
                signal.raise_signal(signal.SIGINT)
            ran.append(case.peer)
            return real(case)

        return run_case

    monkeypatch.setattr(runner, "run_case", until(2))
    runner.run(chosen, TINY, file, isolate=False)
    part = report.load(file)
    assert part["state"] == "interrupted" and len(ran) == 3  # a case that has begun is done
    monkeypatch.setattr(runner, "run_case", until(None))
    rest = runner.run(chosen, TINY, file, isolate=False, before=part)
    assert (rest["state"], len(ran)) == ("complete", len(places))
    assert [(each["peer"], each["repetition"]) for each in rest["cases"]] == places
    shapes = [
        {(each["peer"], each["measure"]): each["repetitions"] for each in document["results"]}
        for document in (whole, rest)
    ]
    assert shapes[0] == shapes[1]
    assert "complete after" in report.markdown(rest) and "in 2 sittings" in report.markdown(rest)
    again = runner.run(chosen, TINY, file, isolate=False, before=report.load(file))
    assert len(ran) == len(places) and again["results"] == rest["results"]
    with pytest.raises(SystemExit, match="another seed: 7, now 2"):
        runner.run(chosen, dataclasses.replace(TINY, seed=2), file, isolate=False, before=part)


def test_a_run_can_be_narrowed_and_others_added_to_its_file(tmp_path, capsys):
    file = tmp_path / "some.json"
    command = ["run", "--repeat", "1", "--size", "500", "--json", str(file)]
    assert bench.main([*command, "core.map-each", "--peer", "quire"]) == 0
    assert bench.main([*command, "core.map-each", "core.ordered-each", "--peer", "sqlite", "--go-on"]) == 0
    saved = report.load(file)
    cases = [(each["benchmark"], each["peer"], each["size"]) for each in saved["cases"]]
    others = [(name, "sqlite", 500) for name in ("core.map-each", "core.ordered-each")]
    assert cases == [("core.map-each", "quire", 500), *others]
    assert saved["settings"]["benchmarks"] == ["core.map-each", "core.ordered-each"]
    one = [tiny(each) for each in runner.chosen(["spark.restart"])]
    (left,) = runner.narrowed(one, [], ["local disk"], [])
    assert left.variants == {"local disk": one[0].variants["local disk"]} and left.quick == one[0].quick
    for wrong, message in (
        (["--peer", "postgres"], "--peer postgres: not in what is run; there are dict, lmdb, quire"),
        (["--variant", "disk"], "--variant disk: not in what is run; there are map"),
        (["--size", "0"], "--size 0: give a whole number from 1"),
    ):
        with pytest.raises(SystemExit, match=message):
            bench.main(["run", "core.map-each", "--json", str(tmp_path / "other.json"), *wrong])
    capsys.readouterr()


def test_command_line_reports_and_compares(document, tmp_path, capsys):
    first = save(document, tmp_path / "first.json")
    slower = json.loads(json.dumps(document))
    for result in slower["results"]:
        if result["peer"] == "quire" and result["measure"] == "get":
            result |= {name: result[name] * 1000 for name in ("median", "min", "max")}
    second = save(slower, tmp_path / "second.json")

    assert bench.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(each.name in listed for each in runner.BENCHMARKS)
    assert "SGuard, Table 5" in listed
    assert bench.main(["report", first, "--markdown", str(tmp_path / "report.md")]) == 0
    text = (tmp_path / "report.md").read_text()
    for benchmark in core.BENCHMARKS:
        assert f"### {benchmark.name}" in text
    assert bench.main(["compare", first, first, "--fail-on-regression"]) == 0
    assert " 0 worse and 0 better" in capsys.readouterr().out
    assert bench.main(["compare", first, second]) == 0
    assert "| 1,000x |" in capsys.readouterr().out
    assert bench.main(["compare", first, second, "--fail-on-regression"]) == 1
    assert bench.main(["compare", second, first, "--fail-on-regression"]) == 0


def test_a_report_says_what_a_number_rests_on(document, tmp_path):
    pytest.importorskip("matplotlib")
    assert "Load of the machine before a case" in report.markdown(document)
    once = moved(document, 1e-6, ["sqlite"])
    for result in once["results"]:
        result["values"], result["repetitions"] = [result["median"]], [0]
    assert {row[6] for row in report.losses(once["results"]).rows} == {"measured once"}
    results = [each for each in document["results"] if each["benchmark"] == "core.map"]
    assert b"core.map, 1,000 records" in plots.svg(report.benchmark_of("core.map"), results)


def test_a_put_of_the_curve_counts_the_records_that_it_puts(tmp_path):
    case = core.Case("core.curve", "map", "quire", 1000, 500, 7, tmp_path)
    assert {each.measure: each.operations for each in core.curve(case)} == {"put": 1000, "get": 500, "update": 500}


def test_html_is_one_page_with_plots(document, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert bench.main(["report", save(document, tmp_path / "run.json"), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:image/svg+xml;base64,") == len(core.BENCHMARKS)
    assert "http://" not in text and "https://" not in text


def moved(document, factor, peers):
    """The same run on a machine of which some peers' times, by name, are other ones."""
    other = json.loads(json.dumps(document))
    for result in other["results"]:
        if compare.is_time(result) and any(result["peer"].startswith(peer) for peer in peers):
            result |= {name: result[name] * factor for name in ("median", "min", "max")}
    return other


def test_what_the_machine_did_to_all_is_no_regression(document):
    slower = moved(document, 2.0, [""])
    found = compare.compare(document, slower)
    assert found.worse == found.better == []
    assert found.drift == pytest.approx(2.0)


def test_a_regression_is_told_where_the_machine_was_slower_too(document):
    slower = moved(moved(document, 2.0, [""]), 50.0, ["quire"])
    found = compare.compare(document, slower)
    assert found.worse and found.better == []
    assert all(each.after["peer"].startswith("quire") for each in found.worse)


def test_changes_no_larger_than_the_noise_of_peers_are_no_regression(document):
    noisy = moved(document, 2.0, ["quire"])
    # Whichever peers are installed, their numbers went up and down in turns.
    for number, result in enumerate(each for each in noisy["results"] if not report.is_ours(each)):
        result |= {name: result[name] * (3.0 if number % 2 else 1 / 3.0) for name in ("median", "min", "max")}
    assert compare.compare(document, noisy).worse == []


def test_a_rate_that_falls_is_worse():
    rate = {"benchmark": "papers.dfs", "variant": "loopback", "size": 1, "peer": "quire", "measure": "read"}
    rate |= {"unit": "MB/s", "operations": 1, "repetitions": [0], "values": [100.0]}
    rate |= {"median": 100.0, "min": 100.0, "max": 100.0}
    facts = {"machine": {}, "versions": {}, "settings": {}, "failures": [], "state": "complete"}
    slower = {**rate, "median": 50.0, "min": 50.0, "max": 50.0}
    found = compare.compare({**facts, "results": [rate]}, {**facts, "results": [slower]})
    assert [each.factor for each in found.worse] == [2.0]


def ours(document, measure):
    return [each for each in document["results"] if report.is_ours(each) and each["measure"] == measure]


def test_memory_does_not_depend_on_the_speed_of_the_machine(document):
    slower = moved(document, 1.5, [""])
    after_load = next(each for each in document["results"] if report.is_ours(each) and each["unit"] == "bytes/byte")
    for result in ours(slower, after_load["measure"]):
        result |= {name: result[name] * 1.4 for name in ("median", "min", "max")}
    found = compare.compare(document, slower)
    assert found.worse and {each.after["unit"] for each in found.worse} == {"bytes/byte"} and not found.better


def test_numbers_that_are_gone_count_as_worse(document, tmp_path):
    first, second = save(document, tmp_path / "first.json"), json.loads(json.dumps(document))
    second["results"] = [each for each in second["results"] if each not in ours(second, "get")]
    later = save(second, tmp_path / "second.json")
    assert compare.compare(document, second).gone == ours(document, "get")
    assert "## Gone: " in compare.compare(document, second).text()
    assert bench.main(["compare", first, later, "--fail-on-regression"]) == 1
    theirs = [each for each in document["results"] if not each["peer"].startswith("quire")]
    without = save({**document, "results": theirs, "state": "interrupted"}, tmp_path / "without.json")
    assert bench.main(["compare", first, without, "--fail-on-regression"]) == 1
    nothing = save({**document, "results": []}, tmp_path / "nothing.json")
    with pytest.raises(SystemExit, match="no number in common"):
        bench.main(["compare", first, nothing])


@pytest.mark.parametrize(("before", "after", "worse"), [(0.0, 1.0, [float("inf")]), (1.0, 0.0, []), (-1.0, 2.0, [])])
def test_numbers_around_nothing(before, after, worse):
    place = {
        "benchmark": "core.snapshot",
        "variant": "",
        "size": 1,
        "peer": "quire",
        "measure": "copies",
        "unit": "pages",
        "operations": 1,
    }
    facts = {"machine": {}, "versions": {}, "settings": {}, "failures": [], "state": "complete"}
    runs = [
        {**facts, "results": [{**place, "values": [value], "median": value, "min": value, "max": value}]}
        for value in (before, after)
    ]
    assert [each.factor for each in compare.compare(*runs).worse] == worse


def test_bad_arguments_are_told_in_a_line(document, tmp_path):
    saved = save(document, tmp_path / "run.json")
    for arguments, match in (
        (["run", "core.map-each", "--json", saved], "is there already: give --go-on"),
        (["run", "core.map-each", "--seed", "-1"], "--seed -1: give a whole number from 0"),
        (["run", "core.map-each", "--go-on"], "--go-on needs --json"),
        (["run", "core.map-each", "--json", str(tmp_path / "none" / "run.json")], "none/run.json.*: No such file"),
        (["report", saved, "--html", str(tmp_path)], "Is a directory"),
        (["report", str(tmp_path / "missing.json")], "No such file"),
    ):
        with pytest.raises(SystemExit, match=match):
            bench.main(arguments)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_file_that_is_no_run_is_refused(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match="no saved run"):
        bench.main(["report", str(file)])


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(SystemExit, match=r"no benchmark named nonsense; there are checkpoint, "):
        runner.chosen(["nonsense"])


def test_zipf_draws_follow_the_law():
    draws = data.zipf(1000, 200_000, np.random.default_rng(3))
    counts = np.sort(np.bincount(draws, minlength=1000))[::-1]
    again = np.bincount(data.zipf(1000, 200_000, np.random.default_rng(4)), minlength=1000)
    assert np.argmax(again) == np.argmax(np.bincount(draws, minlength=1000))  # the same ones are frequent
    shares = np.arange(1, 1001) ** -data.ZIPF_EXPONENT
    assert abs(counts[0] / len(draws) - shares[0] / shares.sum()) < 0.01
    assert abs(counts[:100].sum() / len(draws) - shares[:100].sum() / shares.sum()) < 0.02


@pytest.mark.parametrize("damage", ["value", "missing", "twice", "order"])
def test_the_model_notices_wrong_scans(damage):
    model, ids = data.Model(100), data.in_key_order(np.arange(100))
    values = model.put(ids)
    rows = list(range(100))
    if damage == "value":
        values[5, 5] ^= 1
    elif damage == "missing":
        rows.pop(50)
    elif damage == "twice":
        rows[50] = 51
    else:
        rows[50], rows[51] = rows[51], rows[50]
    scanned = [(data.keys_of(ids)[rows].tobytes(), values[rows].tobytes())]
    with pytest.raises(data.WrongResult):
        model.check_all(iter(scanned), ordered=True)


def test_storage_with_no_room_in_memory_says_so():
    assert machine.storage(1 << 62) == Path(tempfile.gettempdir())
    for name in ("spark.aggregation", "python.count"):
        case = core.Case(name, "", "quire", 1000, 1, 1, Path())
        assert runner.folder_for(case) == Path(tempfile.gettempdir())
