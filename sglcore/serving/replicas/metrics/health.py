"""The state for probes: alive, ready, and the progress of a start."""

from __future__ import annotations

import time

from sglcore.serving.replicas.server_errors import ENDS, GOES_ON, RESTARTS, NotReady, ShuttingDown


class Health:
    """The server's state. `phase` is a step of the start, or "ready", "draining", "dead"."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.reason = ""
        self._done = self._total = 0
        self._begin = time.monotonic()
        self._started_s: float | None = None

    @property
    def live(self) -> bool:
        """Whether the process answers and is not about to end by an error."""
        return self.phase != "dead"

    @property
    def ready(self) -> bool:
        """Whether requests will be answered."""
        return self.phase == "ready"

    @property
    def started(self) -> bool:
        """Whether it has been ready once."""
        return self._started_s is not None

    @property
    def takes_requests(self) -> bool:
        """Whether requests will be answered, at once or by an engine that is being restarted."""
        return self.started and self.phase not in ("draining", "dead")

    @property
    def remedy(self) -> str:
        """What a client can do without an answer or with a part of one."""
        if self.phase in ("draining", "dead"):
            return ENDS
        return GOES_ON if self.ready else RESTARTS

    def refusal(self) -> NotReady:
        """Return the error for a request that arrives when none can be answered."""
        if self.phase == "draining":
            return ShuttingDown("the server was told to stop, and takes no more requests")
        if self.phase == "dead":
            return ShuttingDown(f"the server has no engine left: {self.reason}")
        what = f"{self.phase}: {self.reason}" if self.reason else self.phase
        return NotReady(f"the model is not ready (phase: {what})")

    def begin(self, phase: str, done: int = 0, total: int = 0, reason: str = "") -> None:
        """Set a phase of the start, or a state in place of "ready" with its reason. Changes nothing
        while the server drains or is dead."""
        if self.phase not in ("draining", "dead"):
            self.phase, self._done, self._total, self.reason = phase, done, total, reason

    def become_ready(self) -> None:
        """Set the state "ready", after a token came out of the path that serves."""
        self.begin("ready", 1, 1)
        if self._started_s is None and self.ready:
            self._started_s = time.monotonic() - self._begin

    def drain(self) -> None:
        """Set the state "draining": no more requests are accepted."""
        if self.phase != "dead":
            self.phase = "draining"

    def die(self, reason: str) -> None:
        """Set the state "dead": no more requests will be answered."""
        self.phase, self.reason = "dead", reason

    def snapshot(self) -> dict[str, object]:
        """Return phase, done, total, elapsed_s since the process began (or the time of the start),
        and the reason of an end or of a missing part."""
        elapsed = self._started_s if self._started_s is not None else time.monotonic() - self._begin
        found: dict[str, object] = {
            "phase": self.phase,
            "done": self._done,
            "total": self._total,
            "elapsed_s": round(elapsed, 3),
        }
        return {**found, "reason": self.reason} if self.reason else found
