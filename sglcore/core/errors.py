"""Errors that a user can act on: what was found, what was wanted, and the remedy, in one line."""

from __future__ import annotations

import errno
from typing import ClassVar

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""


class SglcoreError(Exception):
    """An error with a self-contained one-line text: the command line prints it without a traceback
    and exits with `exit_code`.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, found: str, *, wanted: str = "", remedy: str = "") -> None:
        """Join the given parts: `found; wanted ...; remedy`, without the empty ones. Each part is
        also an attribute."""
        super().__init__("; ".join(part for part in (found, wanted and f"wanted {wanted}", remedy) if part))
        self.found = found
        self.wanted = wanted
        self.remedy = remedy


class DeviceError(SglcoreError):
    """No device can be chosen, the chosen one is not the requested one or the parent's, or a device
    package is faulty: its API number, a reference, or its probe.
    """


class ConfigError(SglcoreError):
    """A setting that is unknown or cannot be used."""


class BringUpError(SglcoreError):
    """A bring-up order that cannot run, or an edit of one that cannot be made: a step's needs
    cannot be met, two steps provide the same value, there is no such step, or a parameter has no
    name.
    """


class StrictError(SglcoreError):
    """A downgrade was recorded while the ledger is strict."""


class CheckpointError(SglcoreError):
    """A checkpoint that is incomplete, damaged, or not of the model that its
    configuration names.
    """


class WorkerLost(SglcoreError):
    """A running worker cannot run any further step: a part of it has ended or does not answer. Only
    a restart helps.
    """

    exit_code = 1


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's type and text in one line of at most about `most` characters, as the reason
    of a refused candidate."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}" if text else type(error).__name__


def no_space(error: BaseException) -> str:
    """Return one line about a full disk; empty for any other error."""
    if not isinstance(error, OSError) or error.errno not in NO_SPACE:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; free some space, or write elsewhere"
