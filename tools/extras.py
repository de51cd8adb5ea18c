"""Prints what the extras named on the command line ask for, one requirement a line; they install without a rebuild."""

import sys
from importlib.metadata import metadata

for line in metadata("quire").get_all("Requires-Dist") or []:
    requirement, _, condition = line.partition(";")
    if any(f'extra == "{extra}"' in condition.replace("'", '"') for extra in sys.argv[1:]):
        print(requirement.strip())
