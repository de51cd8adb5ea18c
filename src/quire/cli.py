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
        "demo", help="show the core at work: counting, snapshots, a crash and the recovery from it"
    )
    demo.add_argument("--batches", type=int, default=24, help="how many batches of clicks to count (default 24)")
    demo.add_argument("--clicks", type=int, default=100_000, help="clicks in a batch (default 100000)")
    demo.add_argument("--arena", type=Path, help="keep the arena in this file; default: a temporary one")
    commands.add_parser("bench", help="run the benchmarks; quire bench --help says more", add_help=False)
    options = parser.parse_args(arguments)
    if options.batches < 4 or options.clicks < 1:
        parser.error("the demo needs at least 4 batches of at least 1 click")

    from quire.demo import run

    return run(options.batches, options.clicks, options.arena)


if __name__ == "__main__":
    sys.exit(main())
