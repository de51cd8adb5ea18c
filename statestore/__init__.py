"""The versioned store behind Spark's state-store contract, the configuration of sessions, the state of operators."""

from quire.statestore.session import configure
from quire.statestore.state import State

__all__ = ["State", "configure"]
