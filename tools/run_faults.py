"""Kills, damage and fuzzing of checkpoints, all there is of them, and how many cases of each mode that was.

    crashes     a writer in Python, killed at each passing of each point (tests/checkpoint/test_crashes.py)
    jvm         Spark's provider in a JVM, the same (tests/spark/test_crashes.py)
    corruption  files of every kind cut off, flipped, exchanged (tests/checkpoint/test_corruption.py)
    fuzz        the readers on changed files under right checksums, under the sanitizers (tests/checkpoint/test_fuzz.py)

Use: run_faults.py [PART ...] [--mode MODE]; without parts all of them, which takes about two hours on two cores.
"""

import argparse
import os
import sys
import time

from run_tests import Ring, run_pytest, sanitized

MODES = ["delta", "pages", "auto", "cec"]
PARTS = {
    "crashes": ("Kills of a writer in Python", "tests/checkpoint/test_crashes.py", {"QUIRE_CRASHES": "all"}),
    "jvm": ("Kills of Spark's provider", "tests/spark/test_crashes.py", {"QUIRE_CRASHES": "all"}),
    "corruption": ("Damaged files", "tests/checkpoint/test_corruption.py", {"QUIRE_CORRUPTION": "all"}),
    "fuzz": ("Fuzzing under the sanitizers", "tests/checkpoint/test_fuzz.py", {"QUIRE_FUZZ": "20000"}),
}


def run(part: str, mode: str | None) -> Ring:
    """One part, in one mode or in all."""
    title, tests, settings = PARTS[part]
    ring = Ring(title + (f", mode {mode}" if mode else ""))
    # A shorter run may be asked for.
    environment = {name: os.environ.get(name, value) for name, value in settings.items()}
    if part == "fuzz":
        watched = sanitized(ring)
        if watched is None:
            return ring
        environment |= watched
    run_pytest(ring, [tests, *(["-k", mode] if mode else [])], environment)
    return ring


def main() -> int:
    """Runs the parts and prints the summary; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--mode", choices=MODES, help="the kills and the damage of one mode only")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    rings = []
    for part in options.parts or PARTS:
        started = time.monotonic()
        # Files to fuzz have kinds, and not all a mode of their own.
        rings.append(run(part, None if part == "fuzz" else options.mode))
        rings[-1].seconds = time.monotonic() - started
    print("\n== Summary")
    for ring in rings:
        for note in ring.notes:
            print(f"   {note}")
        print(ring.line())
        for name, count in sorted(ring.cases.items()):
            print(f"   {name}: {count}")
    return 1 if any(ring.failed or not ring.passed for ring in rings) else 0


if __name__ == "__main__":
    sys.exit(main())
