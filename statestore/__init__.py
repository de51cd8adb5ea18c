"""The versioned store behind Spark's state-store contract, and the configuration of sessions that use it."""

from quire.statestore.session import configure

__all__ = ["configure"]
