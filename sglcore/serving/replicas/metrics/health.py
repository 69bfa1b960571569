"""The server's state, for probes and for errors: alive, ready, and the progress of a start."""

from __future__ import annotations

import time

from sglcore.serving.replicas.server_errors import ENDS, GOES_ON, RESTARTS, NotReady, ShuttingDown


class Health:
    """The server's state. `phase`: "starting" or a later phase of the start, "ready", "restarting",
    "draining", "dead", or, if no replica accepts requests, the state of the last one that changed,
    such as "silent"; `reason`: why the server is dead, or what a replica lacks (empty: no
    reason)."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.reason = ""
        self._done = self._total = 0
        self._begin = time.monotonic()
        self._started_s: float | None = None

    @property
    def live(self) -> bool:
        """Whether the server is not dead: it answers, and will not end because of an error. True
        while it drains."""
        return self.phase != "dead"

    @property
    def ready(self) -> bool:
        """Whether the phase is "ready", so that requests are answered without waiting for an engine
        to start."""
        return self.phase == "ready"

    @property
    def started(self) -> bool:
        """Whether the server has been ready once."""
        return self._started_s is not None

    @property
    def takes_requests(self) -> bool:
        """Whether requests are accepted: the server has been ready, and neither drains nor is dead.
        They may wait for an engine that is being restarted."""
        return self.started and self.phase not in ("draining", "dead")

    @property
    def remedy(self) -> str:
        """The remedy, a text, for a client that got no answer, or only a part of one: whether this
        server goes on, restarts an engine, or ends."""
        if self.phase in ("draining", "dead"):
            return ENDS
        return GOES_ON if self.ready else RESTARTS

    def refusal(self) -> NotReady:
        """Return (not raise) the error for a request that arrives while none is accepted:
        ShuttingDown while the server drains or is dead, else NotReady with the phase."""
        if self.phase == "draining":
            return ShuttingDown("the server was told to stop, and takes no more requests")
        if self.phase == "dead":
            return ShuttingDown(f"the server has no engine left: {self.reason}")
        what = f"{self.phase}: {self.reason}" if self.reason else self.phase
        return NotReady(f"the model is not ready (phase: {what})")

    def begin(self, phase: str, done: int = 0, total: int = 0, reason: str = "") -> None:
        """Set the phase, with `done` of `total` units of it complete: a phase of the start, or a
        state in place of "ready" with its reason. Changes nothing while the server drains or is
        dead."""
        if self.phase not in ("draining", "dead"):
            self.phase, self._done, self._total, self.reason = phase, done, total, reason

    def become_ready(self) -> None:
        """Set the phase "ready", unless the server drains or is dead; the first time also fixes the
        duration of the start. Called after an engine has generated a token by the path that
        serves."""
        self.begin("ready", 1, 1)
        if self._started_s is None and self.ready:
            self._started_s = time.monotonic() - self._begin

    def drain(self) -> None:
        """Set the phase "draining": no more requests are accepted. Changes nothing if the server is
        dead."""
        if self.phase != "dead":
            self.phase = "draining"

    def die(self, reason: str) -> None:
        """Set the phase "dead", also while the server drains: no more requests will be answered.
        `reason`: a text for clients."""
        self.phase, self.reason = "dead", reason

    def snapshot(self) -> dict[str, object]:
        """Return `phase`, `done` and `total` (units of the phase), and `elapsed_s`: seconds since
        this object was made, or the duration of the start once it has been ready.

        `reason` is present only if it is not empty: why the server is dead, or what a replica
        lacks.
        """
        elapsed = self._started_s if self._started_s is not None else time.monotonic() - self._begin
        found: dict[str, object] = {
            "phase": self.phase,
            "done": self._done,
            "total": self._total,
            "elapsed_s": round(elapsed, 3),
        }
        return {**found, "reason": self.reason} if self.reason else found
