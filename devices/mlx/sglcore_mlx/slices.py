"""Layered prefill: the state of a prompt between two slices of layers, while decode steps run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sglcore.step.emitting_rows import RowPlan
from sglcore.step.hidden_rows import HiddenRows
from sglcore.step.sampling_arrays import SamplingInputs
from sglcore_mlx.forward import Extend
from sglcore_mlx.models.contract import SlicedModel
from sglcore_mlx.pool import DeviceState


@dataclass(slots=True)
class OpenPrompt:
    """A prompt between two slices of layers. `done` layers have run; `carried` is the input state
    of the next one. `rows` and `inputs`, with `arrived` on the device, are for sampling after the
    last; `wanted`: the hidden states that are returned."""

    extend: Extend
    rows: RowPlan
    inputs: SamplingInputs
    arrived: dict[str, mx.array]
    carried: Any
    wanted: HiddenRows | None = None
    done: int = 0

    def run(self, model: SlicedModel, state: DeviceState, first: int, last: int) -> tuple[mx.array, mx.array] | None:
        """Run the layers first <= i < last. Returns hidden states [T, H] after the last norm, and
        before it, after the model's last layer, otherwise None. Raises ValueError if these are not
        the next layers. Queues only."""
        if first != self.done or not first < last <= model.sliced_layers:
            ran = f"{self.done} of {model.sliced_layers} have run"
            raise ValueError(f"a slice requests layers {first} to {last} of a prompt; {ran}")
        self.extend.continue_on(state)
        self.carried, self.done = model.run_layers(self.carried, first, last), last
        if last < model.sliced_layers:
            return None
        hidden = model.finish_both(self.carried)
        state.states.settle()
        self.extend.leave(state)
        return hidden

    def arrays(self) -> list[mx.array]:
        """Return all arrays that the next slice reads; the caller evaluates them with the step, so
        that the next slice does not hold the graph that made them."""
        hidden = [each for each in self.carried if isinstance(each, mx.array)]
        return [*hidden, *(array for layer in self.extend.step.states for array in layer)]
