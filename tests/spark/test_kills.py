"""Drivers and executors killed with SIGKILL at random moments; the results are those of an undisturbed run.

QUIRE_KILLS  how many times the driver is killed (default 2).
"""

import os
import random
import signal
import time

import pytest
from spark import child, harness, processes
from spark.harness import HDFS, QUIRE, SEED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    """What a query gives if nothing happens, by Spark's own store."""
    results = {}

    def result(name):
        if name not in results:
            folder, output = tmp_path_factory.mktemp("undisturbed"), {}
            with harness.settings(spark, {harness.STORE + "providerClass": HDFS}):
                frame = child.frame_of(spark, folder, name)
                query = harness.start(frame, child.QUERIES[name].mode, folder / "checkpoint", output, forever=True)
            while query.isActive and len(output) < child.BATCHES:
                time.sleep(0.1)
            query.stop()
            harness.finish(query)
            results[name] = wanted(output)
            assert harness.total(results[name])
        return results[name]

    return result


def wanted(output):
    """The batches that every run gets to; some run one more before they are stopped."""
    return {number: rows for number, rows in output.items() if number < child.BATCHES}


def test_a_driver_killed_again_and_again_loses_and_repeats_nothing(undisturbed, folder):
    names = ["counts", "join"]
    rng = random.Random(f"{SEED} kills")
    killed, ended = 0, False
    while not ended:
        # At most one batch of each query further than before, so that there is always something left to kill.
        after, delay = rng.randrange(1, 3), rng.uniform(0, 0.5)
        # In another checkpoint mode each time, which must find its way in what the ones before left.
        mode = rng.choice(harness.MODES)
        with processes.Driver(folder, QUIRE, names, conf={"slow": "4", harness.MODE: mode}) as driver:
            for words in driver.lines():
                ended = words == ["end"]
                after -= words[0] in names
                if killed < child.KILLS and after <= 0 and not ended:
                    time.sleep(delay)
                    driver.kill()
                    killed += 1
                    break
            else:
                driver.process.wait()
                assert ended, driver.errors()
    assert killed == child.KILLS, "the queries ended before they could be killed often enough"
    for name in names:
        found = wanted(processes.written(folder, name))
        assert not harness.difference(found, undisturbed(name)), name


def test_an_executor_killed_in_the_middle_of_a_batch_changes_nothing(undisturbed, folder):
    """Two executor processes; one dies while a batch's rows pass through its stores."""
    name = "counts"
    conf = {"slow": "10", "spark.executor.memory": "512m", "spark.executor.cores": "1"}
    killed = []
    with processes.Driver(folder, QUIRE, [name], master="local-cluster[2,1,1024]", conf=conf) as driver:
        ended = False
        for words in driver.lines():
            ended = words == ["end"]
            if words[0] == name and int(words[1]) in (2, 5):
                time.sleep(0.3)
                running = processes.executors(driver.jvm)
                assert running, "no executor processes found below the driver"
                victim = running[int(words[1]) % len(running)]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
        driver.process.wait()
        assert ended, driver.errors()
    assert len(killed) == 2
    assert not harness.difference(wanted(processes.written(folder, name)), undisturbed(name))
