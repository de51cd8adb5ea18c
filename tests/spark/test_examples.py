"""The examples as a user runs them: a real query, whose result it compares with its own reference.

QUIRE_OPERATORS=all  all six, not two of them; test_example_operators.py has all in any case.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import SEED
from spark import harness

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = os.environ.get("QUIRE_OPERATORS") == "all"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main" in path.read_text())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(harness.QUIRE != harness.REAL, reason="QUIRE_TEST_PROVIDER stands in for the JVM's part alone"),
]


def test_there_are_six_of_them():
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES if ALL else NAMES[SEED % 3 :: 3])
def test_an_example_gives_what_its_reference_says(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "equal" in done.stdout, done.stdout
