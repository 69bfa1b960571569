"""Prefill in slices of layers: keeps the state between two slices while other steps run.

Slices have an attention backend of their own over the same pools, so that a decode step between two
slices does not overwrite the plan. The plan is made once; a slice with a changed batch is an error.

With a lane, slices run on a stream of their own, concurrently with decode steps. The lane waits for
the inputs, and steps after the last slice wait for the lane. In between neither waits, because they
write to KV slots, states and slots of different requests. On a partitioned device each prompt uses
the stream of one part, chosen by the number of decode rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.streams import Streams, entered
from sglcore.runtime.tp_worker import TpModelWorker, no_tokens, read_back
from sglcore.step.compute_shares import share
from sglcore.step.emitting_rows import RowPlan, plan_rows
from sglcore.step.hidden_rows import HiddenRows, hidden_rows
from sglcore.step.sampling_arrays import SamplingInputs
from sglcore.step.step_output import StepOutput
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ScheduleBatch


class SlicedModel(Protocol):
    """A model with a forward in parts: `embed`, `run_layers` over all layers, and
    `finish_both`."""

    @property
    def sliced_layers(self) -> int:
        """Number of layers."""
        ...

    def embed(self, batch: ForwardBatch) -> Any:
        """Return the input state of the first layer."""
        ...

    def run_layers(self, state: Any, first: int, last: int) -> Any:
        """Run the layers first <= i < last and return the new state.

        The old one must not be used again.
        """
        ...

    def finish_both(self, state: Any) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, H] after the last norm, and before it."""
        ...


@dataclass(slots=True)
class OpenPrompt:
    """A prompt that is computed layer by layer. `Slices.open` makes it."""

    host: ScheduleBatch
    """The host batch that opened the prompt."""
    rows: RowPlan
    """The rows that sample a token."""
    staged: ForwardBatch
    """The staged batch."""
    arrays: StagedArrays | None
    """Further staged arrays. None: there are none."""
    inputs: SamplingInputs
    """Sampling inputs."""
    view: ForwardBatch
    """The batch with which the layers run, with its attention plan."""
    state: Any
    """Input state of the next layer."""
    wanted: HiddenRows | None = None
    """The hidden states that the prompt's step returns. None: it returns none."""
    done: int = 0
    """Number of layers that have run."""


class Slices:
    """Runs the layers of the open prompt.

    One prompt is open at a time; opening another replaces it.
    """

    def __init__(
        self, runner: ModelRunner, model: SlicedModel, attention: AttentionBackend, streams: Streams = Streams()
    ) -> None:
        """`attention` is not the runner's own backend, and has the same pools.

        Slices run on the lane of `streams` or on its parts, if it has any.
        """
        self._runner, self._model, self._attention = runner, model, attention
        self._forward, self._lane, self._parts = streams.forward, streams.lane, streams.parts
        self._open: OpenPrompt | None = None

    def forget(self) -> None:
        """Drop the open prompt, if there is one.

        The forward stream then waits for the lane, where queued work may still read the prompt's
        inputs.
        """
        if self._open is not None:
            self._open = None
            self._join()

    def end(self) -> Passed | None:
        """Return an event recorded after the work that is queued so far on the stream of the
        slices; None without streams.

        No other step waits for it.
        """
        stream = self._forward if self._lane is None else self._lane
        return None if stream is None else Passed(stream)

    def open(
        self,
        host: ScheduleBatch,
        rows: RowPlan,
        staged: ForwardBatch,
        arrays: StagedArrays | None,
        inputs: SamplingInputs,
        wanted: HiddenRows | None = None,
    ) -> None:
        """Embed and plan a prompt and make it the open one. All its slices run on one stream.

        Does not wait.
        """
        if self._parts:
            self._lane = self._parts[share(host.decode_rows)].stream
        if self._lane is not None and self._forward is not None:
            self._lane.wait_stream(self._forward)
        with self._running():
            view = self._runner.prepared(staged)
            view.mark_forward_metadata_ready(self._attention.plan(view))
            with forward_context(self._runner.context(view, self._attention)):
                state = self._model.embed(view)
        self._open = OpenPrompt(host, rows, staged, arrays, inputs, view, state, wanted)

    def run(self, first: int, last: int) -> tuple[OpenPrompt, tuple[Tensor, Tensor] | None]:
        """Run the layers first <= i < last of the open prompt; return the prompt, and after the
        model's last layer hidden states [T, H] after the last norm and before it, otherwise None.

        After the last layer the prompt is closed. Raises ValueError if these are not the next
        layers, and StalePlanError if batch or pools changed since the plan. Does not wait.
        """
        prompt = self._open
        if prompt is None or first != prompt.done or not first < last <= self._model.sliced_layers:
            found = "no prompt is open" if prompt is None else f"{prompt.done} of {self._model.sliced_layers} have run"
            raise ValueError(f"a slice requests layers {first} to {last} of a prompt; {found}")
        prompt.view.needs_forward_metadata_init(self._attention)
        with self._running(), forward_context(self._runner.context(prompt.view, self._attention)):
            prompt.state, prompt.done = self._model.run_layers(prompt.state, first, last), last
            if last < self._model.sliced_layers:
                return prompt, None
            both = self._model.finish_both(prompt.state)
        self._open = None
        self._join()
        return prompt, both

    def _running(self) -> AbstractContextManager[object]:
        return nullcontext() if self._lane is None else entered(self._lane)

    def _join(self) -> None:
        """Make the forward stream wait for the lane."""
        if self._lane is not None and self._forward is not None:
            self._forward.wait_stream(self._lane)


class Passed:
    """The `Arriving` of a slice without results: an event on its stream, in place of a readback."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.Stream) -> None:
        self._event = torch.Event(stream.device)
        self._event.record(stream)

    @property
    def kept(self) -> list[Tensor]:
        """Always empty: the state between layers is used on this stream only."""
        return []

    def read(self) -> list[NDArray]:
        """Wait for the stream to reach the event; return no tokens: empty int32 and bool arrays."""
        self._event.synchronize()
        return [np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool)]


class SliceSteps:
    """The `StepKind` of steps that run some layers of a prefill."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def start(self, worker: TpModelWorker, batch: ScheduleBatch) -> Ticket | None:
        """Queue some layers of the open prefill, on the stream of `Slices`, and return the ticket
        of the step; the last slice samples on the current stream. Does not wait.

        The batch that runs the first layers opens the prefill. None for a batch without `layers`,
        which is not run here; if it is not a decode, it also drops the open prefill.
        """
        if batch.layers is None:
            if not batch.forward_mode.is_decode:
                self.slices.forget()
            return None
        (first, last), states = batch.layers.tolist(), worker.runner.state_pool
        if first == 0:
            self._open(worker, batch)
        prompt, both = self.slices.run(first, last)
        path = f"layers {first} to {last}"
        if both is None:
            silent = StepOutput(RowPlan.silent(), path, no_tokens(prompt.staged.input_ids.device))
            return worker.issue(batch, prompt.staged, prompt.arrays, silent, self.slices.end(), is_counted=False)
        hidden, before = both
        arrived = {} if prompt.arrays is None else prompt.arrays.arrived
        if states is not None:
            states.copy_out(arrived)
        tokens, scores = worker.sampling.run(prompt.host, prompt.staged, prompt.rows, hidden, prompt.inputs, arrived)
        given, hisparse = read_back(prompt.wanted, arrived, hidden, before), worker.runner.attn_backend.hisparse
        swaps = None if hisparse is None else hisparse.count(prompt.host)
        output = StepOutput(prompt.rows, path, tokens, scores, hidden=given, swaps=swaps)
        return worker.issue(batch, prompt.staged, prompt.arrays, output)

    def _open(self, worker: TpModelWorker, batch: ScheduleBatch) -> None:
        self.slices.forget()
        rows = plan_rows(batch)
        inputs = worker.sampling.inputs(batch, rows)
        wanted = hidden_rows(batch)
        staged, arrays = worker.stage(batch, inputs, {} if wanted is None else wanted.arrays)
        self.slices.open(batch, rows, staged, arrays, inputs, wanted)
