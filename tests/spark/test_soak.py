"""Many small batches: memory, files and pinned pages stay where they are.

QUIRE_SOAK  how many batches (default 100).
"""

import json
import os

import pytest
from spark import harness, processes
from spark.harness import QUIRE, REAL, STORE

pytestmark = pytest.mark.slow

BATCHES = int(os.environ.get("QUIRE_SOAK", "100"))
# The heap is touched in full at the start, so that what grows later is native memory.
CONF = {
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-Xms512m -XX:+AlwaysPreTouch -XX:+UseSerialGC",
    "spark.sql.streaming.minBatchesToRetain": "5",
    STORE + "minDeltasForSnapshot": "5",
}


def test_many_small_batches_leave_no_trace(folder):
    """Windows come and go, so the number of keys is steady; samples of the first third are held against the last."""
    rows = harness.rows("soak", count=20 * BATCHES, minutes=BATCHES // 6)
    harness.release(folder / "soak" / "source0", (rows[low : low + 20] for low in range(0, len(rows), 20)))
    with processes.Driver(folder, QUIRE, ["soak"], conf=CONF) as driver:
        ended = False
        samples = []
        for words in driver.lines():
            ended = words == ["end"]
            if words[0] == "sample":
                samples.append({**json.loads(" ".join(words[1:])), "resident": processes.resident(driver.jvm)})
        driver.process.wait()
        assert ended, driver.errors()
    assert samples[-1]["batch"] >= BATCHES - 10
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[-third:]

    def highest(part, name):
        return max(sample[name] for sample in part)

    print({name: (highest(early, name), highest(late, name)) for name in ("resident", "files", "rows", "memory")})
    assert highest(late, "rows") <= 2 * highest(early, "rows") + 100
    assert highest(late, "files") <= 1.5 * highest(early, "files") + 10
    # Compiled code and Spark's own notes grow a little for a long time.
    assert highest(late, "resident") <= highest(early, "resident") + 96 * 2**20
    pages = {name for name in samples[-1]["metrics"] if any(word in name.lower() for word in ("pinned", "pages"))}
    if QUIRE == REAL:
        assert any("pinned" in name.lower() for name in pages)
    for name in pages:
        before, after = (max(sample["metrics"][name] for sample in part) for part in (early, late))
        assert after <= 2 * before + 64, f"{name} went from {before} to {after}"
