"""The ModelWorker of every torch device: a ScheduleBatch in, a ticket out, host results at collect."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglcore.device.batch import ForwardMode, ScheduleBatch
from sglcore.device.worker import BatchResult, Limits, Ticket
from sglcore.runtime.fields import retained
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.readback import Readback, ReadbackQueue
from sglcore.runtime.sample_step import Sampled, SampleStep
from sglcore.runtime.staging import RING, StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.step.rows import RowPlan, plan_rows


@dataclass(slots=True)
class Pending:
    """What a ticket holds until it is collected: results under way, and the staged batch with its plan, and the arrays sent
    with it, which is all that the device still reads."""

    rows: RowPlan
    path: str
    batch: ForwardBatch
    arrays: StagedArrays | None
    readback: Readback
    sampled: Sampled | None = None

    @property
    def kept(self) -> list[Tensor]:
        """Every tensor that the device may still read or write: the batch's, by its declarations, what was sent, the results."""
        sent = () if self.arrays is None else self.arrays.tensors
        return [*retained(self.batch), *sent, *self.readback.kept]


class TpModelWorker:
    """Generation and embedding on one model runner. Not thread-safe: one scheduler owns it."""

    def __init__(self, runner: ModelRunner, token_table: TokenTable, limits: Limits) -> None:
        self.runner = runner
        self._limits = limits
        self._sampling = SampleStep(runner, token_table, limits.vocab_size)
        self._streams = runner.streams
        self._readbacks = ReadbackQueue(runner.streams, token_table.last.device, runner.staging_ring.pinned)
        self._out: list[weakref.ref[Ticket]] = []
        self._closed = False
        self._take_over()

    def _take_over(self) -> None:
        """Everything was made on the schedule stream; from here on the forward stream uses it."""
        schedule, forward = self._streams.schedule, self._streams.forward
        if schedule is None or forward is None:
            return
        forward.wait_stream(schedule)
        for registry in (self.runner.decode_registry, self.runner.prefill_registry):
            for name in registry.slot_names:
                buffer = registry.slot(name).buffer
                if buffer is not None:
                    buffer.record_stream(forward)

    @property
    def limits(self) -> Limits:
        """What this worker can hold; constant."""
        return self._limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Start a step. The worker keeps `batch`, which must be isolated from later changes.

        Raises RuntimeError if RING tickets are out: the host's mirrors of the input buffers would be overwritten. A
        ticket that was dropped counts no more.
        """
        self._out = [ref for ref in self._out if (ticket := ref()) is not None and ticket.payload is not None]
        if len(self._out) >= RING:
            raise RuntimeError(f"{RING} steps are in flight; collect the oldest before submitting another")
        if self._closed:
            raise RuntimeError("this worker is closed; start another")
        embeds = batch.forward_mode is ForwardMode.EMBED
        start = self.forward_batch_embedding if embeds else self.forward_batch_generation
        if self._streams.forward is None:
            ticket = start(batch)
        else:
            with self._streams.running():
                ticket = start(batch)
        self._out.append(weakref.ref(ticket))
        return ticket

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> Ticket:
        """One forward on the current stream, and one sampled token for each row that emits."""
        if batch.capture_hidden_mode.is_set or batch.return_hidden_states_before_norm.is_set:
            raise ValueError(f"step {batch.step} asks for hidden states; this worker hands back tokens and scores only")
        rows = plan_rows(batch)
        order = self._sampling.order(batch, rows)
        arrays = None if order is None else order.arrays
        staged = self.runner.init_batch(batch, arrays)
        hidden, path = self.runner.forward(staged)
        sampled = self._sampling.run(batch, staged, rows, hidden, order)
        readback = self._readbacks.post(sampled.tensors())
        return Ticket(batch.step, Pending(rows, path, staged, arrays, readback, sampled))

    @torch.inference_mode()
    def forward_batch_embedding(self, batch: ScheduleBatch) -> Ticket:
        """One forward of whole prompts; each row's embedding is the mean of its hidden states, of length 1."""
        arrays = StagedArrays()
        staged = self.runner.init_batch(batch, arrays)
        hidden, path = self.runner.forward(staged)
        readback = self._readbacks.post([mean_pool(hidden, staged)])
        return Ticket(batch.step, Pending(plan_rows(batch), path, staged, arrays, readback))

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and give its results; a ticket is collected once."""
        pending = ticket.payload
        if not isinstance(pending, Pending):
            raise ValueError(f"step {ticket.step} was collected before; a ticket is collected once")
        ticket.payload = None
        rows, arrays = pending.rows, pending.readback.read()
        if pending.sampled is None:
            (embeddings,) = arrays
            none = np.zeros(0, dtype=np.int32)
            bad = np.logical_not(np.isfinite(embeddings).all(axis=1))
            return BatchResult(ticket.step, rows.token_offsets, none, bad, embeddings=embeddings, path=pending.path)
        tokens, bad, logprobs, prompt = pending.sampled.read_results(arrays)
        bad = rows.scatter_bad(bad)
        return BatchResult(ticket.step, rows.token_offsets, tokens, bad, logprobs, prompt, path=pending.path)

    def close(self) -> None:
        """Wait for the device, free the graphs, and let go of weights and pools. Idempotent."""
        if not self._closed:
            self._closed = True
            for stream in (self._streams.forward, self._streams.schedule):
                if stream is not None:
                    stream.synchronize()
            self.runner.close()
            del self.runner, self._sampling


def mean_pool(hidden: Tensor, batch: ForwardBatch) -> Tensor:
    """float32 [B, H] of hidden [T, H]: each request's mean, scaled to length 1."""
    assert batch.extend_seq_lens is not None
    lengths = batch.extend_seq_lens
    owners = torch.repeat_interleave(
        torch.arange(batch.batch_size, device=hidden.device), lengths, output_size=batch.num_tokens
    )
    sums = torch.zeros(batch.batch_size, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    sums.index_add_(0, owners, hidden.float())
    return torch.nn.functional.normalize(sums / lengths[:, None], dim=-1)
