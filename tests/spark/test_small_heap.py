"""A state that is many times the heap: kept, committed, written whole in the background and loaded again.

QUIRE_LARGE_STATE  megabytes of state (default 560).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spark.harness import QUIRE, REAL
from spark.large import PER_BATCH

SCRIPT = Path(__file__).with_name("large.py")
MEGABYTES = int(os.environ.get("QUIRE_LARGE_STATE", "560"))


@pytest.mark.slow
@pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire")
def test_a_state_larger_than_the_heap(folder):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "checkpoint"), str(MEGABYTES)],
        capture_output=True,
        text=True,
        check=False,
    )
    told = {words[0]: list(map(int, words[1:])) for words in map(str.split, done.stdout.splitlines()) if words}
    assert set(told) == {"held", "known"}, done.stderr[-3000:]
    (held, held_bytes), (known, new) = told["held"], told["known"]
    print(f"{held} rows, {held_bytes / 2**20:.0f} MB")
    assert held_bytes > 0.9 * MEGABYTES * 2**20
    assert known == held and held % PER_BATCH == 0
    assert new == 0
