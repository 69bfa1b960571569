"""An event loop whose clock runs only while it waits: a machine that is slow to run it uses up
nobody's time limit."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

TICK = 0.005
"""Seconds that are waited for an event before as many have passed."""


class _Selector(selectors.DefaultSelector):
    """Counts what it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Events that are there; else a wait of at most a tick, which counts if nothing came."""
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
        """Seconds that this loop has waited."""
        return self._waited.now


def run(work: Coroutine[Any, Any, None], limit: float) -> None:
    """Run it to its end on such a loop; an error after `limit` seconds of waiting."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(asyncio.wait_for(work, limit))
