"""``python -m quire`` is the command ``quire``."""

import sys

from quire.cli import main

sys.exit(main())
