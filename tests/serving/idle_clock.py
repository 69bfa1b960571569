"""An event loop with a clock that runs only while the loop waits: a slow machine does not use up
time limits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

TICK = 0.005
"""Longest wait in seconds for events before the clock advances."""


class _Selector(selectors.DefaultSelector):
    """A selector that sums its waiting time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return pending events; otherwise wait for at most a tick, which counts if no event
        came."""
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        waits = TICK if timeout is None else min(timeout, TICK)
        events = super().select(waits)
        self.now += 0.0 if events else waits
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waited = _Selector()
        super().__init__(self._waited)

    def time(self) -> float:
        """The seconds that this loop has waited."""
        return self._waited.now


def run(work: Coroutine[Any, Any, None], limit: float) -> None:
    """Run `work` on such a loop; raise an error after `limit` seconds of waiting."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(asyncio.wait_for(work, limit))
