"""What checkpoints are made of: ``delta``, the changes between two states, and ``container``, the files they lie in."""

from quire.checkpoint import container, delta

__all__ = ["container", "delta"]
