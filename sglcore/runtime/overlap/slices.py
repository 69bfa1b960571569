"""A prompt by slices of layers: what its layers hand on stays here between two slices, while other steps run.

It has an attention backend of its own over the same pools, so that a decode step between two slices plans elsewhere. The plan
is made once; a slice whose batch is not as it was planned is an error.

On a lane, a stream of their own, slices run beside decode steps. The lane waits for the inputs, steps behind the last slice for
the lane; between them neither waits for the other: they write to cells, states and slots of different requests. Where the device is
divided, each prompt has the lane of one part, by how many rows decode beside it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.streams import Streams, entered
from sglcore.step.rows import RowPlan
from sglcore.step.sampling import SamplingInputs
from sglcore.step.shares import share


class SlicedModel(Protocol):
    """A model whose forward is `embed`, `run_layers` over all layers, and `finish`."""

    @property
    def sliced_layers(self) -> int:
        """How many layers it has."""
        ...

    def embed(self, batch: ForwardBatch) -> Any:
        """What the first layer starts from."""
        ...

    def run_layers(self, state: Any, first: int, last: int) -> Any:
        """The state after the layers first <= i < last; the one before is used up."""
        ...

    def finish(self, state: Any) -> Tensor:
        """Hidden states [T, H] after the last norm."""
        ...


@dataclass(slots=True)
class OpenPrompt:
    """A prompt that is computed layer by layer. `Slices.open` makes it."""

    host: ScheduleBatch
    """The batch that opened it."""
    rows: RowPlan
    """Which of its rows sample a token."""
    staged: ForwardBatch
    """The batch as it was staged."""
    arrays: StagedArrays | None
    """Further staged arrays. None: there are none."""
    inputs: SamplingInputs
    """The inputs of sampling."""
    view: ForwardBatch
    """The batch with which its layers run, with the plan of attention."""
    state: Any
    """What the next layer takes."""
    done: int = 0
    """Layers that have run."""


class Slices:
    """Runs the open prompt's layers. One prompt is open at a time; the next one that opens takes its place."""

    def __init__(
        self, runner: ModelRunner, model: SlicedModel, attention: AttentionBackend, streams: Streams = Streams()
    ) -> None:
        """`attention` is not the runner's own, and over the same pools. Slices run on the lane of `streams`, if it has one, or its parts."""
        self._runner, self._model, self._attention = runner, model, attention
        self._forward, self._lane, self._parts = streams.forward, streams.lane, streams.parts
        self._open: OpenPrompt | None = None

    def forget(self) -> None:
        """Nobody wants the open prompt any more. What is queued from here on waits until the device has done with its inputs."""
        if self._open is not None:
            self._open = None
            self._join()

    def end(self) -> Passed | None:
        """The end of what was queued last, for which no other step waits. None without streams."""
        stream = self._forward if self._lane is None else self._lane
        return None if stream is None else Passed(stream)

    def open(
        self,
        host: ScheduleBatch,
        rows: RowPlan,
        staged: ForwardBatch,
        arrays: StagedArrays | None,
        inputs: SamplingInputs,
    ) -> None:
        """Embed and plan a prompt, which is the open one from now on. All of its slices run on one stream. Does not wait."""
        if self._parts:
            self._lane = self._parts[share(host.decode_rows)].stream
        if self._lane is not None and self._forward is not None:
            self._lane.wait_stream(self._forward)
        with self._running():
            view = self._runner.prepared(staged)
            view.mark_forward_metadata_ready(self._attention.plan(view))
            with forward_context(self._runner.context(view, self._attention)):
                state = self._model.embed(view)
        self._open = OpenPrompt(host, rows, staged, arrays, inputs, view, state)

    def run(self, first: int, last: int) -> tuple[OpenPrompt, Tensor | None]:
        """The layers first <= i < last of the open prompt; with the last one its hidden states [T, H], and it is open no more.

        Raises ValueError for layers that are not the next ones, and StalePlanError where batch or pools are not those of
        the plan. Does not wait.
        """
        prompt = self._open
        if prompt is None or first != prompt.done or not first < last <= self._model.sliced_layers:
            found = "none is open" if prompt is None else f"{prompt.done} of {self._model.sliced_layers} have run"
            raise ValueError(f"a slice wants the layers from {first} to {last} of a prompt; {found}")
        prompt.view.needs_forward_metadata_init(self._attention)
        with self._running(), forward_context(self._runner.context(prompt.view, self._attention)):
            prompt.state, prompt.done = self._model.run_layers(prompt.state, first, last), last
            if last < self._model.sliced_layers:
                return prompt, None
            hidden = self._model.finish(prompt.state)
        self._open = None
        self._join()
        return prompt, hidden

    def _running(self) -> AbstractContextManager[object]:
        return nullcontext() if self._lane is None else entered(self._lane)

    def _join(self) -> None:
        """What runs from here on on the forward stream waits for the lane."""
        if self._lane is not None and self._forward is not None:
            self._forward.wait_stream(self._lane)


class Passed:
    """The end of what was queued on a stream, where a step's results would be: there are none."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.Stream) -> None:
        self._event = torch.Event(stream.device)
        self._event.record(stream)

    @property
    def kept(self) -> list[Tensor]:
        """Nothing: what layers hand on is used on this stream alone."""
        return []

    def read(self) -> list[NDArray]:
        """No tokens. Waits for the stream to come here."""
        self._event.synchronize()
        return [np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool)]
