"""The files that a store leaves in its folder, and who writes them."""

import pytest
from spark import harness, workloads
from spark.harness import HDFS, QUIRE, REAL, Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire"),
]

SPARKS_OTHER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def query(**settings):
    return Workload("files", workloads.by_key, "update", conf=settings)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoint" / "state" / "0").glob("[0-9]*/*") if path.is_file())


def test_a_folder_whose_name_needs_escaping(spark, folder):
    expected = harness.run(spark, query(), HDFS, folder / "plain")
    odd = folder / "häufig 100%25 = a+b ☃"
    assert not harness.difference(harness.run(spark, query(), QUIRE, odd), expected)
    assert names(odd)
    assert all(name.endswith((".qdelta", ".qbase")) for name in names(odd))


def test_a_file_manager_that_was_set_is_used(spark, folder):
    setting = {"spark.sql.streaming.checkpointFileManagerClass": SPARKS_OTHER}
    expected = harness.run(spark, query(), HDFS, folder / "plain")
    assert not harness.difference(harness.run(spark, query(**setting), QUIRE, folder / "set"), expected)
    # It keeps Hadoop's checksums beside each file; Quire's own choice for a local disk does not.
    assert any(name.endswith(".crc") for name in names(folder / "set"))
