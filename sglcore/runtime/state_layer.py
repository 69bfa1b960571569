"""A layer that keeps a state of each request: how it finds its states, and where it runs in forwards that are captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.forward_context import get_forward_context, get_state_pool
from sglcore.runtime.memory.states import StateTensor

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch


class StateLayer(ABC):
    """A function of the rows of a forward and of their requests' states, in the pool of the context.

    `layer_id` is its number among the model's layers with states; `kept`, what it keeps of each request, by name.
    """

    def __init__(self, layer_id: int, kept: Mapping[str, StateTensor]) -> None:
        self.layer_id = layer_id
        self.kept = kept

    def __call__(self, hidden: Tensor, batch: object = None) -> Tensor:
        """[T, H] to [T, H]; states are read and written. A forward that is captured in pieces runs it between two of them,
        and a compiler does not look into it: the batch is the context's, whatever a model hands on."""
        if torch.compiler.is_compiling():
            return torch.ops.sglcore.state_layer(hidden, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, hidden)
        assert context.batch is not None
        return self.mix(hidden, context.batch, get_state_pool().states(self.layer_id))

    @property
    def remark(self) -> str:
        """What a person should know of how its prompts run; empty: nothing."""
        return ""

    @abstractmethod
    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """hidden [T, H] of the batch's rows, and each state [rows, *shape], row s of which is slot s's. Begins with what a
        row's slot holds and leaves there what holds after its tokens. On decode steps it runs inside graphs: no host reads.
        Padding rows are of slot 0, whose state may hold anything."""


@torch.library.custom_op("sglcore::state_layer", mutates_args=())
def state_layer_op(hidden: Tensor, layer_id: int) -> Tensor:
    """A layer with states as one operation that a compiler does not look into; the context says on what it works."""
    layer = get_state_pool().layers[layer_id]
    assert isinstance(layer, StateLayer)
    return layer(hidden)


@state_layer_op.register_fake
def _(hidden: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(hidden)
