"""The seed of random input.

QUIRE_TEST_SEED  a number, or "random" for one never tried before. Without it 0 or 1: known input, so that a run is red
                 for what changed in the code. Every failure shows it.
"""

import os
import random


def _seed() -> int:
    wanted = os.environ.get("QUIRE_TEST_SEED", "")
    if wanted.isdigit():
        return int(wanted)
    return random.SystemRandom().randrange(1 << 32 if wanted == "random" else 2)


SEED = _seed()
# The same for every process that takes part.
os.environ["QUIRE_TEST_SEED"] = str(SEED)
