"""The ModelWorker of every torch device.

It takes a ScheduleBatch, returns a ticket, and gives host results at `collect`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.page_bytes import PoolPages
from sglcore.runtime.memory.pools import MHATokenToKVPool
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.readback import ReadbackQueue
from sglcore.runtime.sample_step import SampleStep
from sglcore.runtime.staging import RING, StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.torch_fields import retained
from sglcore.sampling.state import SampledTokens
from sglcore.step.emitting_rows import plan_rows
from sglcore.step.hidden_rows import HiddenRows, hidden_rows, take_states
from sglcore.step.sampling_arrays import SamplingInputs
from sglcore.step.step_output import StepOutput
from sglcore.step.tickets import Tickets, check_hidden_states, take_payload
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.page_transfer import PageMemory
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch


class Arriving(Protocol):
    """Results of a step on their way to the host, such as a `Readback`."""

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that the device may still write or read for these results."""
        ...

    def read(self) -> list[NDArray]:
        """Wait until the results are on the host and return them."""
        ...


@dataclass(slots=True)
class Pending:
    """What a ticket holds until `collect`: everything that the device still reads.

    The readback, the staged batch with its plan, and the staged arrays.
    """

    batch: ForwardBatch
    arrays: StagedArrays | None
    output: StepOutput[Tensor]
    readback: Arriving

    @property
    def kept(self) -> list[Tensor]:
        """Every tensor that the device may still read or write."""
        sent = () if self.arrays is None else self.arrays.arrived.values()
        return [*retained(self.batch), *sent, *self.readback.kept]


class StepKind(Protocol):
    """Runs the steps of one optional feature, such as embedding, that are not a forward and a draw.
    The worker offers each batch to its kinds in order, until one starts it.
    """

    def start(self, worker: TpModelWorker, batch: ScheduleBatch) -> Ticket | None:
        """Start this step on the current stream; None: it is not of this kind.

        Does not wait.
        """
        ...


class TpModelWorker:
    """The worker of one model runner: `submit` starts a step, `collect` returns its results.
    `limits` is constant.

    Not thread-safe: one scheduler owns it.
    """

    def __init__(
        self, runner: ModelRunner, token_table: TokenTable, limits: Limits, kinds: Sequence[StepKind] = ()
    ) -> None:
        """`kinds`: the optional features' steps; each batch is offered to them in this order."""
        self.runner = runner
        self.limits = limits
        self.kinds = tuple(kinds)
        self.sampling = SampleStep(runner, token_table, limits.vocab_size, limits.keeps_history or limits.reads_history)
        self._streams = runner.streams
        self._readbacks = ReadbackQueue(runner.streams, token_table.last.device, runner.staging_ring.pinned)
        self._tickets = Tickets(RING)
        self._closed = False
        self._take_over()

    def _take_over(self) -> None:
        """Hand the buffers, made on the schedule stream, over to the forward stream."""
        schedule, forward = self._streams.schedule, self._streams.forward
        if schedule is None or forward is None:
            return
        forward.wait_stream(schedule)
        for registry in (self.runner.decode_registry, self.runner.prefill_registry):
            for tensor in registry.tensors:
                tensor.record_stream(forward)

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Queue a step and return its ticket, without waiting for it. The worker keeps `batch`; the
        caller must not change it.

        Raises RuntimeError if RING tickets are uncollected, because the host mirrors of the input
        buffers would be overwritten, and after `close`; ValueError for a batch that requests hidden
        states. A dropped ticket does not count, nor does a ticket of a slice without output.
        """
        self._tickets.check_room()
        if self._closed:
            raise RuntimeError("this worker is closed; start another")
        check_hidden_states(batch, self.limits)
        if self._streams.is_host:
            return self._start(batch)
        with self._streams.running():
            return self._start(batch)

    @torch.inference_mode()
    def _start(self, batch: ScheduleBatch) -> Ticket:
        if batch.step_plan is not None and batch.step_plan.is_decode:
            batch.step_plan = self.runner.replayed(batch.step_plan)
        for kind in self.kinds:
            ticket = kind.start(self, batch)
            if ticket is not None:
                return ticket
        if batch.layers is not None:
            raise RuntimeError("this worker takes prompts whole; submit them without layers")
        is_idle = batch.forward_mode is ForwardMode.IDLE
        return self.forward_idle(batch) if is_idle else self.forward_batch_generation(batch)

    def forward_batch_generation(self, batch: ScheduleBatch) -> Ticket:
        """Queue one forward on the current stream and the draw of one token per sampled row;
        return the step's ticket. Does not wait.
        """
        rows, states = plan_rows(batch), self.runner.state_pool
        inputs, wanted = self.sampling.inputs(batch, rows), hidden_rows(batch)
        staged, arrays = self.stage(batch, inputs, {} if wanted is None else wanted.arrays)
        arrived = {} if arrays is None else arrays.arrived
        hidden, before, path = self.runner.forward_both(staged)
        if states is not None:
            states.copy_out(arrived)
        tokens, prompt = self.sampling.run(batch, staged, rows, hidden, inputs, arrived)
        hisparse = self.runner.attn_backend.hisparse
        swaps = None if hisparse is None else hisparse.count(batch)
        given = read_back(wanted, arrived, hidden, before)
        return self.issue(batch, staged, arrays, StepOutput(rows, path, tokens, prompt, hidden=given, swaps=swaps))

    def stage(
        self, batch: ScheduleBatch, inputs: SamplingInputs, more: Mapping[str, NDArray] = MappingProxyType({})
    ) -> tuple[ForwardBatch, StagedArrays | None]:
        """Return the batch on the device, with its prompt embeddings, and the arrays of sampling
        and of `more` there (None: there are none).

        Does not wait.
        """
        sent = {**inputs.arrays, **_prompt_embeds(batch), **more}
        # `copy_out` reads the rows of snapshots from these arrays after the forward.
        has_arrays = sent or batch.state_to is not None
        arrays = StagedArrays(sent, lasting=inputs.new is not None) if has_arrays else None
        staged = self.runner.init_batch(batch, arrays)
        if batch.embed_rows is not None and arrays is not None:
            given = arrays.arrived["prompt_embeds"]
            staged.input_embeds = self.runner.model.embed_ids(staged.input_ids)
            staged.input_embeds[arrays.arrived["embed_rows"]] = given.to(staged.input_embeds.dtype)
        return staged, arrays

    def forward_idle(self, batch: ScheduleBatch) -> Ticket:
        """Queue one forward without rows, so that this rank joins the collectives of the others;
        return the step's ticket. No token is sampled.
        """
        staged, _, output = self._run_idle(batch)
        return self.issue(batch, staged, None, output)

    def _run_idle(self, batch: ScheduleBatch) -> tuple[ForwardBatch, Tensor, StepOutput[Tensor]]:
        """Return the staged batch, hidden [0, H], and the empty output."""
        staged = self.runner.init_batch(batch)
        hidden, path = self.runner.forward(staged)
        return staged, hidden, StepOutput(plan_rows(batch), path, no_tokens(hidden.device))

    def issue(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        arrays: StagedArrays | None,
        output: StepOutput[Tensor],
        readback: Arriving | None = None,
        is_counted: bool = True,
    ) -> Ticket:
        """Return the ticket of a queued step. Does not wait.

        `readback`: the results on their way; None: start their copy to the host. `is_counted`
        False: it is not one of the RING tickets that may be uncollected.
        """
        found = self._readbacks.post(output.arrays()) if readback is None else readback
        pending = Pending(staged, arrays, output, found)
        return self._tickets.issue(batch.step, pending) if is_counted else Ticket(batch.step, pending)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and return its results. Raises ValueError for a ticket that was collected
        before.
        """
        pending = take_payload(ticket, Pending)
        return pending.output.read(ticket.step, pending.readback.read())

    def page_memory(self) -> PageMemory | None:
        """Return the KV pages, for transfer to another engine.

        None if requests also have recurrent state or sliding-window pages, or if the pool is not an
        `MHATokenToKVPool`.
        """
        pool = self.runner.attn_backend.token_to_kv_pool
        has_more = self.limits.keeps_state or self.limits.num_window_pages
        return PoolPages(pool, self._streams) if isinstance(pool, MHATokenToKVPool) and not has_more else None

    def close(self) -> None:
        """Wait for the device, free the graphs, and drop weights and pools. Idempotent."""
        if not self._closed:
            self._closed = True
            for stream in self._streams.all:
                stream.synchronize()
            self.runner.close()
            self._streams.close()
            del self.runner, self.sampling, self.kinds


def no_tokens(device: torch.device) -> SampledTokens[Tensor]:
    """Return the tokens of a step that samples none: no ids, no bad rows, no log-probabilities."""
    ids, bad = (torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int32, torch.bool))
    return SampledTokens(ids, bad)


def read_back(
    wanted: HiddenRows | None, arrived: Mapping[str, Tensor], hidden: Tensor, before: Tensor | None
) -> tuple[HiddenRows, Tensor] | None:
    """Return the requested hidden states float32 [N, H] of a step with their rows, a copy; None:
    the step requests none (`wanted`). `hidden` and `before` [T, H] are those of the whole step.
    Does not wait.
    """
    if wanted is None:
        return None
    return wanted, take_states(arrived, hidden, before, _taken, torch.cat)


def _taken(states: Tensor, indices: Tensor) -> Tensor:
    return states.index_select(0, indices).float()


def _prompt_embeds(batch: ScheduleBatch) -> dict[str, NDArray]:
    """Return the prompt embeddings of a step ("prompt_embeds") and the indices of the tokens that
    they replace ("embed_rows"); empty if it has none.
    """
    if batch.embed_rows is None or batch.prompt_embeds is None:
        return {}
    return {"embed_rows": batch.embed_rows, "prompt_embeds": batch.prompt_embeds}
