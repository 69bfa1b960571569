"""A worker in simulated time: each step takes a given time on the host and on a device, which
`collect` waits for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch, offsets_of

LAYERS = 32


@dataclass(frozen=True)
class Costs:
    """Costs in seconds. On the device: `decode` per step, `token` per layer and token. On the host:
    `launch` per layer, `host` per step, `slicing` per slice, `telling` per collected result.
    `is_ahead`: the device runs asynchronously. `has_lane`: prefill runs concurrently with decode,
    each at `share` of its speed while both run."""

    decode: float
    launch: float
    token: float
    host: float = 0.0002
    slicing: float = 0.0
    telling: float = 0.0
    is_ahead: bool = True
    has_lane: bool = False
    share: float = 0.7


@dataclass
class TimedWorker:
    """Emits token 5 for each row that samples."""

    limits: Limits
    costs: Costs
    now: float = 0.0
    free: float = 0.0
    lane: float = 0.0
    rows: int = 0
    ends: dict[int, float] = field(default_factory=dict)

    def clock(self) -> float:
        """The simulated time in seconds."""
        return self.now

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Queue the step; wait for it if the device is not asynchronous."""
        costs, total = self.costs, LAYERS
        first, last = (0, total) if batch.layers is None else batch.layers.tolist()
        is_decode = batch.forward_mode.is_decode
        if batch.num_tokens and not is_decode:
            self.tokens = batch.num_tokens
        device = costs.decode if is_decode else (last - first) * costs.token * self.tokens
        self.now += costs.host + (0.0 if is_decode else costs.slicing + (last - first) * costs.launch)
        on_lane = costs.has_lane and batch.layers is not None
        begin = max(self.now, self.lane if on_lane else self.free)
        other = self.free if on_lane else self.lane
        both = max(0.0, min(other - begin, device / costs.share)) if costs.has_lane else 0.0
        end = begin + device + both * (1 - costs.share)
        if on_lane:
            self.lane = end
            self.free = end if last == total else self.free
        else:
            self.free = end
        self.now = self.now if costs.is_ahead else end
        self.ends[batch.step] = end
        return Ticket(batch.step, self._result(batch, first, last, total))

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait until the step ends."""
        self.now = max(self.now, self.ends.pop(ticket.step))
        assert isinstance(ticket.payload, BatchResult)
        self.now += self.costs.telling if len(ticket.payload.token_ids) else 0.0
        return ticket.payload

    def close(self) -> None:
        """Do nothing."""

    def _result(self, batch: ScheduleBatch, first: int, last: int, total: int) -> BatchResult:
        if batch.layers is not None and first == 0:
            self.emits = batch.emits
        if last < total:
            return self._empty(batch.step)
        emits = batch.emits if batch.layers is None else self.emits
        rows, made = len(emits), int(emits.sum())
        offsets = offsets_of(emits.astype(np.int32))
        return replace(
            self._empty(batch.step),
            token_offsets=offsets,
            token_ids=np.full(made, 5, dtype=np.int32),
            bad_rows=np.zeros(rows, dtype=bool),
        )

    def _empty(self, step: int) -> BatchResult:
        none = np.zeros(0, dtype=np.int32)
        return BatchResult(step, np.zeros(1, dtype=np.int32), none, np.zeros(0, dtype=bool))
