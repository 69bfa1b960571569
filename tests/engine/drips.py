"""A stream that delivers one byte at a time, with its own clock."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from sglcore.engine import timed_read


class Drips:
    """Delivers one byte every quarter of a second on its own clock, which replaces `time` in
    `reading` and in the given modules."""

    def __new__(cls, *_: object) -> Any:
        """Return type Any, so that tests can pass it as a socket."""
        return super().__new__(cls)

    def __init__(self, data: bytes, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.data, self.now = data, 0.0
        for module in (timed_read, *modules):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(timed_read, "is_readable", self._is_readable)

    def monotonic(self) -> float:
        """The time on this clock: the seconds spent waiting for bytes."""
        return self.now

    def recv_into(self, rest: memoryview) -> int:
        """Read the next byte into `rest`; returns 1."""
        rest[0], self.data = self.data[0], self.data[1:]
        return 1

    def _is_readable(self, _: object, seconds: float) -> bool:
        self.now += min(seconds, 0.25)
        return seconds >= 0.25
