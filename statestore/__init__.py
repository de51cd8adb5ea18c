"""The versioned store behind Spark's state-store contract, operators in Python, and the configuration of sessions."""

from quire.statestore.operator import Operator
from quire.statestore.read import read_state
from quire.statestore.session import configure
from quire.statestore.state import State
from quire.statestore.stateful import stateful

__all__ = ["Operator", "State", "configure", "read_state", "stateful"]
