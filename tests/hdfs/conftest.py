"""The cluster that all tests here share, and a folder on it and on the local disk for each."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("hdfs")

from quire.bench.hdfs_cluster import Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def direct():
    """No proxy between this machine and itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "localhost,127.0.0.1")
        yield


@pytest.fixture(scope="module")
def cluster(direct, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hdfs")
    with Cluster(folder) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)
