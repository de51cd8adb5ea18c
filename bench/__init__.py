"""The microbenchmark suite: ``quire bench list | run | report | compare``.

``data`` makes records, ``peers`` wraps the stores, ``core``, ``checkpoint`` and ``spark`` hold the benchmarks,
``runner`` runs them, ``report`` shows results.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.bench import report, runner


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="quire bench", description="Measures Quire beside other stores.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("list", help="name the benchmarks")
    run = commands.add_parser("run", help="run benchmarks, save the numbers and print tables")
    run.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or families; default: all")
    mode = run.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="up to 1M records, about 10 to 15 minutes (default)")
    mode.add_argument("--full", action="store_true", help="up to 10M records and 4 GB; says how long it takes")
    run.add_argument("--json", type=Path, metavar="FILE", help="where to save the numbers; default: a new file here")
    run.add_argument("--repeat", type=int, metavar="N", help="repetitions of each case (default 3)")
    run.add_argument("--seed", type=int, help=f"of the random numbers (default {runner.QUICK.seed})")
    show = commands.add_parser("report", help="tables and plots of a run")
    show.add_argument("file", type=Path, metavar="FILE.json")
    show.add_argument("--markdown", type=Path, metavar="FILE", help="write tables")
    show.add_argument("--html", type=Path, metavar="FILE", help="write one page with tables and plots")
    compare = commands.add_parser("compare", help="what changed from one run to another")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives the exit code; without arguments it says what there is."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser().print_help(sys.stderr)
        return 2
    options = parser().parse_args(arguments)
    if options.command == "list":
        for benchmark in runner.BENCHMARKS:
            print(f"{benchmark.name:20} {benchmark.summary}")
        return 0
    if options.command == "run":
        return run(options)
    if options.command == "compare":
        print(report.compare(report.load(options.before), report.load(options.after)))
        return 0
    document = report.load(options.file)
    if options.markdown is None and options.html is None:
        print(report.markdown(document))
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(document))
    if options.html is not None:
        options.html.write_text(report.html(document))
    return 0


def run(options: argparse.Namespace) -> int:
    """``quire bench run``"""
    settings = runner.FULL if options.full else runner.QUICK
    if options.repeat is not None:
        if options.repeat < 1:
            raise SystemExit(f"--repeat {options.repeat}: give at least 1")
        settings = replace(settings, repetitions=options.repeat)
    if options.seed is not None:
        settings = replace(settings, seed=options.seed)
    benchmarks = runner.chosen(options.names)
    file: Path = options.json or Path(time.strftime("quire-bench-%Y%m%d-%H%M%S.json"))
    minutes = sum(runner.estimate(case) for _, case in runner.plan(benchmarks, settings)) / 60
    print(
        f"{settings.mode} run of {len(benchmarks)} benchmarks: about {minutes:.0f} min; numbers go to {file}",
        file=sys.stderr,
    )
    document = runner.run(benchmarks, settings, file)
    print(report.markdown(document))
    if document["state"] == "interrupted":
        print(f"Interrupted: {file} holds what was measured until then", file=sys.stderr)
        return 130
    return 0
