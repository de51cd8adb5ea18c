"""The microbenchmark suite: ``quire bench list | run | report | compare``.

``data`` makes records, ``peers`` wraps the stores; ``core``, ``papers``, ``checkpoint``, ``spark`` and ``operators``
hold the benchmarks, a family each; ``runner`` runs them, ``report`` and ``plots`` show results, ``compare`` says what
changed between two runs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.bench import compare, report, runner


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="quire bench", description="Measures Quire beside other stores.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("list", help="name the benchmarks by family, with the time that they take")
    run = commands.add_parser(
        "run",
        help="run benchmarks, save the numbers and print tables",
        epilog="Ends with 1 if a case failed, with 130 if it was interrupted; what was measured is saved in any case.",
    )
    run.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or families; default: all")
    mode = run.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="all in at most 15 minutes on two cores (default)")
    mode.add_argument("--full", action="store_true", help="up to 10M records and 4 GB; says how long it takes")
    run.add_argument("--json", type=Path, metavar="FILE", help="where to save the numbers; default: a new file here")
    run.add_argument("--go-on", action="store_true", help="FILE is there already: do what it has not, and add it")
    run.add_argument(
        "--repeat", type=int, metavar="N", help="repetitions of each case; default: up to 3, as the time allows"
    )
    run.add_argument("--peer", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    run.add_argument("--variant", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    run.add_argument(
        "--size", action="append", default=[], type=int, metavar="N", help="this in place of the sizes; may be repeated"
    )
    run.add_argument("--seed", type=int, help=f"of the random numbers (default {runner.QUICK.seed})")
    show = commands.add_parser("report", help="tables and plots of a run")
    show.add_argument("file", type=Path, metavar="FILE.json")
    show.add_argument(
        "--markdown", type=Path, metavar="FILE.md", help="write tables, and plots to a folder of its name beside it"
    )
    show.add_argument("--html", type=Path, metavar="FILE", help="write one page with tables and plots, for any browser")
    differ = commands.add_parser("compare", help="what changed from one run to another beyond the noise")
    differ.add_argument("before", type=Path, metavar="A.json")
    differ.add_argument("after", type=Path, metavar="B.json")
    differ.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="changes by less do not count (default 0.1: 10 %%)",
    )
    differ.add_argument("--fail-on-regression", action="store_true", help="end with 1 if something of Quire's is worse")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives the exit code; without arguments it says what there is."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser().print_help(sys.stderr)
        return 2
    options = parser().parse_args(arguments)
    try:
        return carried_out(options)
    except OSError as error:
        # Output that nobody reads any more is no file to complain of.
        if error.filename is None:
            raise
        raise SystemExit(f"{error.filename}: {error.strerror}") from None


def carried_out(options: argparse.Namespace) -> int:
    """Runs a command that was understood."""
    if options.command == "list":
        print(listing())
        return 0
    if options.command == "run":
        return run(options)
    if options.command == "compare":
        return compared(options)
    document = report.load(options.file)
    if options.markdown is None and options.html is None:
        print(report.markdown(document))
    if options.markdown is not None:
        file: Path = options.markdown
        if file.suffix != ".md":
            raise SystemExit(
                f"--markdown {file}: give a name that ends with .md; the plots go to a folder named without it"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(report.markdown(document, file.with_suffix("")))
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(report.html(document))
    return 0


def listing() -> str:
    """All benchmarks by family; the time of one repetition."""
    lines = ["One repetition takes about, on two quiet cores:                              quick      full", ""]
    totals = [0.0, 0.0]
    for family in runner.FAMILIES:
        lines.append(f"{family}: {report.family_summary(family)}")
        for benchmark in (each for each in runner.BENCHMARKS if each.family == family):
            times = [runner.seconds_once(benchmark, settings) for settings in (runner.QUICK, runner.FULL)]
            totals = [total + seconds for total, seconds in zip(totals, times, strict=True)]
            quick, full = (runner.duration(seconds) if seconds else "-" for seconds in times)
            summary = benchmark.summary + (f" [{benchmark.paper.source}]" if benchmark.paper else "")
            lines.append(f"  {benchmark.name:23} {quick:>9} {full:>9}  {summary}")
        lines.append("")
    quick, full = (runner.duration(total) for total in totals)
    lines.append(
        f"All of them: {quick} and {full}; a run repeats them up to three times, as far as "
        f"{runner.duration(runner.QUICK.seconds_max)} and {runner.duration(runner.FULL.seconds_max)} allow."
    )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """``quire bench run``"""
    settings = runner.FULL if options.full else runner.QUICK
    if options.names:
        settings = replace(settings, everything=True)
    if options.repeat is not None:
        if options.repeat < 1:
            raise SystemExit(f"--repeat {options.repeat}: give at least 1")
        settings = replace(settings, repetitions=options.repeat, seconds_max=float("inf"))
    if options.seed is not None:
        if options.seed < 0:
            raise SystemExit(f"--seed {options.seed}: give a whole number from 0")
        settings = replace(settings, seed=options.seed)
    benchmarks = runner.narrowed(runner.chosen(options.names), options.peer, options.variant, options.size)
    if options.go_on and options.json is None:
        raise SystemExit("--go-on needs --json FILE, the file to go on with")
    file: Path = options.json or Path(time.strftime("quire-bench-%Y%m%d-%H%M%S.json"))
    if file.exists() and not options.go_on:
        raise SystemExit(f"{file} is there already: give --go-on to do what it has not done yet, or another name")
    before = report.load(file) if options.go_on and file.exists() else None
    cases = list(runner.plan(benchmarks, settings))
    if not cases:
        raise SystemExit(f"{', '.join(options.names) or 'what was asked for'}: only in a full run; give --full")
    seconds = sum(runner.estimate(case) for _, case in cases)
    count = len({case.benchmark for _, case in cases})
    print(
        f"{settings.mode} run of {count} benchmarks, {len(cases)} cases: about {runner.duration(seconds)} on two quiet "
        f"cores; numbers go to {file}",
        file=sys.stderr,
    )
    document = runner.run(benchmarks, settings, file, before=before)
    print(report.markdown(document))
    if document["state"] == "interrupted":
        print(f"Interrupted: {file} holds what was measured until then; --go-on does the rest", file=sys.stderr)
        return 130
    failed = [each for each in document["failures"] if not each["missing"]]
    if failed:
        print(f"{len(failed)} cases failed; the report and {file} say why", file=sys.stderr)
    return 1 if failed else 0


def compared(options: argparse.Namespace) -> int:
    """``quire bench compare``"""
    if not options.threshold >= 0:
        raise SystemExit(f"--threshold {options.threshold}: give a share from 0 on, such as 0.1 for 10 %")
    found = compare.compare(report.load(options.before), report.load(options.after), options.threshold)
    print(found.text())
    bad = found.worse or found.gone or not found.ours
    return 1 if options.fail_on_regression and bad else 0
