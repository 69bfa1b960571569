"""A prompt by slices of layers: what its layers hand on, while decode steps run between two
slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sglcore.step.rows import RowPlan
from sglcore.step.sampling import SamplingInputs
from sglcore_mlx.forward import Extend
from sglcore_mlx.models.contract import SlicedModel
from sglcore_mlx.pool import DeviceState


@dataclass(slots=True)
class OpenPrompt:
    """A prompt of which `done` layers have run, with what its draw needs."""

    extend: Extend
    rows: RowPlan
    inputs: SamplingInputs
    arrived: dict[str, mx.array]
    carried: Any
    done: int = 0

    def run(self, model: SlicedModel, state: DeviceState, first: int, last: int) -> mx.array | None:
        """The layers first <= i < last; with the last one its hidden states [T, H]. Raises
        ValueError for layers that are not the next ones. Queues only."""
        if first != self.done or not first < last <= model.sliced_layers:
            ran = f"{self.done} of {model.sliced_layers} have run"
            raise ValueError(f"a slice wants the layers from {first} to {last} of a prompt; {ran}")
        self.extend.continue_on(state)
        self.carried, self.done = model.run_layers(self.carried, first, last), last
        if last < model.sliced_layers:
            return None
        hidden = model.finish(self.carried)
        state.states.settle()
        self.extend.leave(state)
        return hidden

    def arrays(self) -> list[mx.array]:
        """All that the next slice reads, so that it holds nothing of what made them."""
        hidden = [each for each in self.carried if isinstance(each, mx.array)]
        return [*hidden, *(array for layer in self.extend.step.states for array in layer)]
