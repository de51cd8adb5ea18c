"""The benchmarks of operators in Python at a tiny size: every peer's result is right, in one of the two at least.

QUIRE_BENCH=all  every peer, not one for each benchmark.
"""

import os
import subprocess
import sys

import pytest

from quire.bench import operators

pytest.importorskip("pyspark")

pytestmark = pytest.mark.slow

VARIANT = "50,000 rows a batch"
# Each case has a Spark of its own, so in a process of its own, as `quire bench run` has it.
CASE = """
import pathlib, sys
from quire.bench.core import Case
from quire.bench.operators import operators
for found in operators(Case(sys.argv[1], "x", sys.argv[2], 1000, 500, 7, pathlib.Path(sys.argv[3]))):
    print("measured", found.value > 0)
"""


ALL = os.environ.get("QUIRE_BENCH") == "all"
TRIED = [
    ("python.count", "quire"),
    ("python.recent", "transformWithStateInPandas"),
    ("python.held", "quire"),
]
MORE = [
    ("python.count", "limit"),
    ("python.count", "transformWithState"),
    ("python.recent", "quire"),
    ("python.recent", "quire-plain"),
    ("python.recent", "applyInPandasWithState"),
]


def test_every_benchmark_and_every_peer_is_tried():
    assert {name for name, _ in TRIED} == {each.name for each in operators.BENCHMARKS}
    peers = {peer for each in operators.BENCHMARKS for peer in each.variants[VARIANT]}
    assert {peer for _, peer in TRIED + MORE} == peers


@pytest.mark.parametrize(("benchmark", "peer"), TRIED + MORE if ALL else TRIED)
def test_a_peer_gives_the_right_result(benchmark, peer, tmp_path):
    command = [sys.executable, "-c", CASE, benchmark, peer, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[-2:] == ["measured True", ""], done.stderr[-2000:]
