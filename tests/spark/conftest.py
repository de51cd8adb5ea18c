"""Sessions for the tests of the Spark provider; see harness.py for the environment variables."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from spark import harness

HERE = Path(__file__).parent


def pytest_report_header():
    return f"Spark tests: provider {harness.QUIRE}"


def pytest_collection_modifyitems(items):
    for item in items:
        # PySpark leaves sockets to the garbage collector and uses what pandas calls deprecated: not ours to fix.
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One session for all tests that need no other: providers are chosen query by query."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = harness.session(conf={"spark.sql.warehouse.dir": str(warehouse)})
    yield session
    session.stop()


@pytest.fixture(scope="session")
def peer(spark, tmp_path_factory):
    """Results of a workload on the provider it is compared with, each run once."""
    results = {}

    def result(workload):
        name = workload.name
        if name not in results:
            path = tmp_path_factory.mktemp("peer")
            results[name] = harness.run(spark, workload, workload.peer, path)
            shutil.rmtree(path, ignore_errors=True)
        return results[name]

    return result
