"""`python -m sglcore` is the command `sglcore`: launchers take a module."""

from __future__ import annotations

from sglcore.cli.__main__ import command

if __name__ == "__main__":
    command()
