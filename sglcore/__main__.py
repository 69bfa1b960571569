"""`python -m sglcore` is the command `sglcore`: launchers take a module."""

from __future__ import annotations

import sys

from sglcore.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
