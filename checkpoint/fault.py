"""Named steps at which tests end the process, as a crash would: no handler runs, nothing is flushed.

``QUIRE_FAULT=commit.durable:3`` in the environment kills the process (SIGKILL) when it passes that point the third
time. Without it a point costs one comparison.
"""

import itertools
import os
import signal
from collections.abc import Callable

from quire.pagemgr.errors import InvalidError

# What is called with the name of every point that is passed; several threads may.
hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Passes a point."""
    if hook is not None:
        hook(name)


def killer(spec: str) -> Callable[[str], None]:
    """A hook that ends the process at the nth passing of a point, both as in QUIRE_FAULT.

    >>> killer("write.done")
    Traceback (most recent call last):
    quire.pagemgr.errors.InvalidError: QUIRE_FAULT 'write.done': give a point and a number from 1, as write.done:1
    """
    name, _, number = spec.rpartition(":")
    if not name or not number.isdecimal() or int(number) < 1:
        raise InvalidError(f"QUIRE_FAULT {spec!r}: give a point and a number from 1, as write.done:1")
    passings = itertools.count(1)  # next() of it is atomic

    def kill(passed: str) -> None:
        if passed == name and next(passings) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


if "QUIRE_FAULT" in os.environ:
    hook = killer(os.environ["QUIRE_FAULT"])
