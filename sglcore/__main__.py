"""`python -m sglcore` is the command `sglcore`, for launchers such as torchrun that start a
module."""

from __future__ import annotations

from sglcore.cli.__main__ import command

if __name__ == "__main__":
    command()
