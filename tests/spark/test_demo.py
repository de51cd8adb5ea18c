"""The demo, a small one, from the command line to its last line."""

import re
import subprocess
import sys


def test_the_demo_loses_nothing_and_compares_the_stores():
    command = [sys.executable, "-m", "quire", "demo", "--batches", "4", "--clicks", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stopped the query after batch 1" in done.stdout
    assert "Killed the driver (SIGKILL) in the middle of batch 3" in done.stdout
    for store in ("Quire", "RocksDB, changelog", "HDFSBacked"):
        line = next(line for line in done.stdout.splitlines() if re.match(rf"\W*{store}\W", line) and "/4" not in line)
        seconds, state, _, written = (float(number) for number in re.findall(r"\d+\.\d+", line))
        assert seconds > 0 and state > 0 and written > 0, line
    assert re.search(r"Result: stopped once, killed once, .* all 7,8\d\d counts in the state equal", done.stdout)
