"""The examples on a cluster of two executors, in which tasks, workers, executors, queries and arenas come and go."""

import os
import pickle
import signal
from collections import Counter
from pathlib import Path

import pytest
from spark import examples_child, harness, processes
from spark.harness import QUIRE, SEED

ALL = os.environ.get("QUIRE_OPERATORS") == "all"
CHILD = Path(__file__).with_name("examples_child.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QUIRE != harness.REAL, reason="QUIRE_TEST_PROVIDER stands in for the JVM's part alone"),
]


@pytest.mark.parametrize("seed", range(SEED, SEED + (5 if ALL else 1)))
def test_the_examples_give_their_reference_whatever_happens(folder, seed):
    """Each is compared with a batch computation in plain Python, which knows nothing of state."""
    names = list(examples_child.EXAMPLES)
    conf = {
        "seed": str(seed),
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.task.maxFailures": "12",
    }
    killed: Counter[str] = Counter()
    with processes.Driver(folder, QUIRE, names, "local-cluster[2,1,1024]", conf, CHILD) as driver:
        ended, batches = False, 0
        for words in driver.lines():
            ended = words == ["end"]
            batches += words[0] in names
            if words[0] in names and batches % 7 == 3:
                running = processes.executors(driver.jvm)
                executor = running[batches % len(running)]
                workers = processes.workers(executor)
                victim = executor if batches % 14 == 3 or not workers else workers[-1]
                killed["executor" if victim == executor else "worker"] += 1
                os.kill(victim, signal.SIGKILL)
        driver.process.wait()
        assert ended, driver.errors()
    from local_spark import multiset

    for name in names:
        module, rows = examples_child.input_of(name, seed)
        output = pickle.loads((folder / name / "output.pickle").read_bytes())
        made = [row for number in sorted(output) for row in output[number]]
        final = module.latest(made) if hasattr(module, "latest") else made
        assert made and multiset(final) == multiset(module.reference(rows)), f"{name}, seed {seed}"
    # A comparison of what nothing happened to would say little.
    events = Counter((folder / "events").read_text().split())
    kinds = {event.partition(":")[0] for event in events} | set(killed)
    assert kinds == {"raise", "kill", "arenas", "stop", "executor", "worker"}, (events, killed)
    assert sum(count for event, count in events.items() if ":" in event) >= 10, events
