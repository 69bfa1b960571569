"""One HTTP request and its answer, as the log and the metrics know it. It never holds what was asked or answered."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore.serving.replicas.metrics import RequestClock


@dataclass(slots=True)
class Exchange:
    """Fills up while the request is answered. `clocks` has one for each prompt that went to an engine."""

    request_id: str
    method: str
    path: str
    client: str = "-"
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    clocks: list[RequestClock] = field(default_factory=list)

    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started


CURRENT: ContextVar[Exchange | None] = ContextVar("sglcore_exchange", default=None)
"""The exchange in whose task, or in a task of whose, the code runs."""
