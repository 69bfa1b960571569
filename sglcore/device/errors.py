"""Errors that a person can act on: what was found, what was wanted, and the remedy, in one line."""

from __future__ import annotations

import errno
from typing import ClassVar

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""What a disk that is full, or a quota, says."""


class SglcoreError(Exception):
    """An error whose one-line text is enough: the command line prints it without a traceback and exits with `exit_code`."""

    exit_code: ClassVar[int] = 2

    def __init__(self, found: str, *, wanted: str = "", remedy: str = "") -> None:
        """Join the parts that are given: `found; wanted ...; remedy`."""
        super().__init__("; ".join(part for part in (found, wanted and f"wanted {wanted}", remedy) if part))
        self.found = found
        self.wanted = wanted
        self.remedy = remedy


class DeviceError(SglcoreError):
    """No device can be chosen, or the chosen one is not what was asked for."""


class ConfigError(SglcoreError):
    """A setting that is unknown or can not be used."""


class BringUpError(SglcoreError):
    """A bring-up order in which some step's needs can not be met."""


class StrictError(SglcoreError):
    """A downgrade was recorded while the ledger is strict."""


class CheckpointError(SglcoreError):
    """A checkpoint that is incomplete, damaged, or not of the model that its configuration names."""


class WorkerLost(SglcoreError):
    """A worker that was running can take no step any more: a part of it has ended, or is silent. Only a new start helps."""

    exit_code = 1


def no_space(error: BaseException) -> str:
    """One line about a disk that is full; empty for any other error."""
    if not isinstance(error, OSError) or error.errno not in NO_SPACE:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; free some space, or write elsewhere"
