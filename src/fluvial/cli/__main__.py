"""``python -m fluvial.cli``, for launchers that start a module: ``torchrun -m fluvial.cli``."""

from __future__ import annotations

import sys

from fluvial.cli import main

if __name__ == "__main__":
    sys.exit(main())
