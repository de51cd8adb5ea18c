"""The command ``quire``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quire

# As the shell tells of a program that the signal of a closed pipe has ended.
ENDED_BY_PIPE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives the exit code.

    >>> main(["demo", "--batches", "none"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115, for the whole of the program
    try:
        code = command(arguments)
        sys.stdout.flush()
    except OSError as error:
        # Nothing may be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return ENDED_BY_PIPE  # whoever read the output has seen enough
        print(f"quire: {error}", file=sys.stderr)
        return 2
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
    demo.add_argument("--clicks", type=int, default=120_000, help="clicks in a batch (default 120000)")
    demo.add_argument("--checkpoint", type=Path, help="keep the checkpoint in this folder; default: a temporary one")
    commands.add_parser("bench", help="run the benchmarks; quire bench --help says more", add_help=False)
    jar = commands.add_parser("jar", help="build the jar for a Spark, if it is not there yet, and print its path")
    jar.add_argument("--jars", type=Path, metavar="DIR", help="the jars of that Spark; default: PySpark's")
    jar.add_argument("--output", type=Path, metavar="FILE", help="where to put the jar; default: in the user's cache")
    add_checkpoint_commands(commands)
    add_repartition(commands)
    options = parser.parse_args(arguments)
    if options.command in CHECKPOINT_COMMANDS:
        return run_checkpoint_command(options)
    if options.command == "repartition":
        return run_repartition(options)
    if options.command == "jar":
        return print_jar(options.jars, options.output)
    if options.batches < 4 or options.clicks < 1:
        demo.error("the demo needs at least 4 batches of at least 1 click")

    from quire.demo import run

    return run(options.batches, options.clicks, options.checkpoint)


CHECKPOINT_COMMANDS = ("inspect", "verify", "dump")


def add_checkpoint_commands(commands: Any) -> None:
    """The commands that read checkpoints; docs/tools.md shows them."""
    inspect = commands.add_parser("inspect", help="show the operators, partitions and versions in a checkpoint")
    verify = commands.add_parser("verify", help="read a checkpoint and name every damaged file; exit code 1 if any")
    dump = commands.add_parser("dump", help="print a version's records, or what changed between two versions")
    for parser in (inspect, verify, dump):
        parser.add_argument(
            "url", help="a query's checkpoint folder or one below it: a path, webhdfs://host:port/path, s3://..."
        )
    for parser in (inspect, verify):
        parser.add_argument("--json", action="store_true", help="for programs")
    verify.add_argument("--all", action="store_true", help="every file, not only what the newest versions need")
    dump.add_argument("--operator", type=operator, metavar="N", help="number, or name in Python; needed if several")
    dump.add_argument("--partition", type=count, metavar="N", help="needed if there are several")
    dump.add_argument("--store", metavar="NAME", help="default: the one named default, or the only one")
    dump.add_argument("--version", metavar="V", help="number, or number_id of checkpoint format 2; default: the newest")
    dump.add_argument("--since", metavar="V", help="print in what the version differs from this one")
    dump.add_argument("--family", metavar="F", help="this column family only")
    dump.add_argument("--format", choices=["table", "json", "csv", "parquet"], default="table", help="default: table")
    dump.add_argument("--json", action="store_const", const="json", dest="format", help="for programs: --format json")
    dump.add_argument("--limit", type=count, metavar="N", help="stop after so many records")


def add_repartition(commands: Any) -> None:
    """The command that moves the state of an operator in Python to other partitions."""
    parser = commands.add_parser(
        "repartition", help="move the state of an operator in Python to another number of partitions; stop its query"
    )
    parser.add_argument("url", help="the query's checkpoint folder: a path, webhdfs://host:port/path, s3://...")
    parser.add_argument("--operator", required=True, metavar="NAME", help="the operator, by its name in stateful()")
    parser.add_argument("--partitions", required=True, type=count, metavar="N", help="how many there are to be")
    parser.add_argument("--least", action="append", default=[], metavar="VALUE", help="give a value's least to all")
    parser.add_argument("--drop", action="append", default=[], metavar="STRUCTURE", help="forget a structure")


def run_repartition(options: argparse.Namespace) -> int:
    """Runs it, with a Spark of its own to say where keys belong."""
    from quire.checkpoint import tools

    def run() -> int:
        from pyspark.sql import SparkSession

        from quire.statestore.repartition import repartition

        builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.log.level", "ERROR").getOrCreate()
        try:
            moved = repartition(
                options.url, options.operator, options.partitions, spark=spark, least=options.least, drop=options.drop
            )
        finally:
            spark.stop()
        print(f"{options.operator}: {moved} records are in {options.partitions} partitions now")
        return tools.FINE

    return tools.guarded("repartition", run)


def operator(text: str) -> int | str:
    """The number of one of Spark's operators, or the name of one in Python."""
    return int(text) if text.isdecimal() else text


def count(text: str) -> int:
    """A whole number, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def run_checkpoint_command(options: argparse.Namespace) -> int:
    """Runs one of the commands that read checkpoints."""
    from quire.checkpoint import tools

    def run() -> int:
        if options.command == "inspect":
            return tools.inspect(options.url, options.json)
        if options.command == "verify":
            return tools.verify(options.url, options.json, options.all)
        return tools.dump(
            options.url,
            options.operator,
            options.partition,
            options.store,
            options.version,
            options.since,
            options.family,
            options.format,
            options.limit,
        )

    return tools.guarded(options.command, run)


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
