"""The command ``quire``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import quire


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives the exit code.

    >>> main(["demo", "--batches", "none"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def command(arguments: Sequence[str]) -> int:
    """As main(), once the arguments are known."""
    if arguments[:1] == ["bench"]:
        # The suite has options of its own and needs packages that the store does not.
        from quire import bench

        return int(bench.main(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="quire", description="A memory-managed state store for Spark Structured Streaming."
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo", help="run a streaming query on local Spark with its state in Quire, kill it, and lose nothing"
    )
    demo.add_argument("--batches", type=int, default=8, help="how many batches of clicks to count (default 8)")
    demo.add_argument("--clicks", type=int, default=250_000, help="clicks in a batch (default 250000)")
    demo.add_argument("--checkpoint", type=Path, help="keep the checkpoint in this folder; default: a temporary one")
    commands.add_parser("bench", help="run the benchmarks; quire bench --help says more", add_help=False)
    jar = commands.add_parser("jar", help="build the jar for a Spark, if it is not there yet, and print its path")
    jar.add_argument("--jars", type=Path, metavar="DIR", help="the jars of that Spark; default: PySpark's")
    jar.add_argument("--output", type=Path, metavar="FILE", help="where to put the jar; default: in the user's cache")
    options = parser.parse_args(arguments)
    if options.command == "jar":
        return print_jar(options.jars, options.output)
    if options.batches < 4 or options.clicks < 1:
        demo.error("the demo needs at least 4 batches of at least 1 click")

    from quire.demo import run

    return run(options.batches, options.clicks, options.checkpoint)


def print_jar(jars: Path | None, output: Path | None) -> int:
    """Builds the jar for a Spark and prints where it is."""
    try:
        print(quire.jar(jars, output))
    except quire.BuildError as error:
        print(f"quire jar: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
