"""A stream that gives a byte at a time, on a clock of its own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from sglcore.engine import reading


class Drips:
    """Each byte comes a quarter of a second after the one before. Where `reading` and the modules
    ask for the time, it is this one's."""

    def __new__(cls, *_: object) -> Any:
        """What tests give as a socket."""
        return super().__new__(cls)

    def __init__(self, data: bytes, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.data, self.now = data, 0.0
        for module in (reading, *modules):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(reading, "is_readable", self._is_readable)

    def monotonic(self) -> float:
        """Seconds that it has been waited for."""
        return self.now

    def recv_into(self, rest: memoryview) -> int:
        """The byte that came."""
        rest[0], self.data = self.data[0], self.data[1:]
        return 1

    def _is_readable(self, _: object, seconds: float) -> bool:
        self.now += min(seconds, 0.25)
        return seconds >= 0.25
