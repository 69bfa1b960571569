"""A prompt by slices of layers: what its layers hand on stays here between two slices, while other steps run.

It has an attention backend of its own over the same pools, so that a decode step between two slices plans elsewhere. The plan
is made once; a slice whose batch is not as it was planned is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.staging import StagedArrays
from sglcore.step.rows import RowPlan
from sglcore.step.sampling import SamplingInputs


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
    """A prompt of which `done` layers have run: the batch that opened it, what was staged and planned of it, and the state that the
    next layer takes."""

    host: ScheduleBatch
    rows: RowPlan
    staged: ForwardBatch
    arrays: StagedArrays | None
    inputs: SamplingInputs
    view: ForwardBatch
    state: Any
    done: int = 0


class Slices:
    """Runs the open prompt's layers. One prompt is open at a time; the next one that opens takes its place."""

    def __init__(self, runner: ModelRunner, model: SlicedModel, attention: AttentionBackend) -> None:
        """`attention` is not the runner's own, and over the same pools."""
        self._runner, self._model, self._attention = runner, model, attention
        self._open: OpenPrompt | None = None

    def open(
        self,
        host: ScheduleBatch,
        rows: RowPlan,
        staged: ForwardBatch,
        arrays: StagedArrays | None,
        inputs: SamplingInputs,
    ) -> None:
        """Embed and plan a prompt, which is the open one from now on. Does not wait."""
        view = self._runner.prepared(replace(staged, plan_record=None))
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
        with forward_context(self._runner.context(prompt.view, self._attention)):
            prompt.state = self._model.run_layers(prompt.state, first, last)
            prompt.done = last
            if last < self._model.sliced_layers:
                return prompt, None
            self._open = None
            return prompt, self._model.finish(prompt.state)
