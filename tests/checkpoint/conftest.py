"""What the tests of checkpoints share."""

import pytest

from quire.checkpoint import reader, storage


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No waits between attempts."""
    monkeypatch.setattr(reader, "RELIST_WAITS_SECONDS", (0, 0, 0))
    monkeypatch.setattr(storage, "RETRY_WAITS_SECONDS", (0, 0, 0))
