"""A layer with recurrent state: how it finds its states, and how it runs in captured forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.forward_context import get_forward_context, get_state_pool
from sglcore.runtime.memory.states import PoolRows, StateTensor

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch


class StateLayer(ABC):
    """The base of layers with a recurrent state: a callable from hidden states to hidden states
    that also reads and writes the requests' states in the pool of the forward context.

    `layer_id` is its index among the model's layers with states; `kept` are the tensors that it
    keeps for each request, by name.
    """

    taken_in: StateTensor | None = None

    def __init__(self, layer_id: int, kept: Mapping[str, StateTensor]) -> None:
        self.layer_id = layer_id
        self.kept = kept

    def __call__(self, hidden: Tensor, batch: object = None) -> Tensor:
        """Map hidden [T, H] to [T, H]; reads and writes states.

        A forward captured in pieces runs this layer between two pieces, and a compiler treats it as
        opaque. The batch comes from the forward context; the parameter is ignored.
        """
        if torch.compiler.is_compiling():
            return torch.ops.sglcore.state_layer(hidden, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, hidden)
        assert context.batch is not None
        return self.mix(hidden, context.batch, get_state_pool().states(self.layer_id))

    @property
    def remark(self) -> str:
        """A note for the user on how prompts run in this layer; empty if there is none."""
        return ""

    @abstractmethod
    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Map hidden [T, H] to [T, H], given each state as [slots, *shape].

        Row s of a state belongs to slot s. Starts from the state of each request's slot and leaves
        there the state after the request's tokens. Decode steps run inside graphs: no host reads.
        Padding rows have slot 0; its state may hold anything.
        """


class ReplayedStates(StateLayer):
    """The base of state layers in parts: one makes the inputs of the states, `advance` updates the
    states, and `finish` makes the result.

    Only `advance` depends on other tokens. After a verification, states can thus be advanced over
    the accepted tokens again without the other parts.
    """

    def __init__(self, layer_id: int, kept: Mapping[str, StateTensor], taken_in: StateTensor) -> None:
        super().__init__(layer_id, kept)
        self.taken_in = taken_in

    def replayed(self, taken: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Map the inputs of the states [T, *taken_in.shape] to the layer's result; keeps those of
        verified tokens."""
        if batch.run_rows is not None and batch.forward_mode.is_decode:
            get_state_pool().keep(self.layer_id, taken, batch.run_rows)
        return self.finish(self.advance(taken, pool_rows(batch), states), taken)

    @abstractmethod
    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Map `taken` [T, n] to [T, m] and advance the states of the rows' slots. No host reads."""

    @abstractmethod
    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """Map `mixed` [T, m], the output of `advance`, and `taken` [T, n] to [T, H]."""


class ReplayedLayer(ReplayedStates):
    """The base of state layers with hidden states as the only inputs of their states, in three
    parts: `take`, `advance` and `finish`."""

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Map hidden [T, H] to [T, H]; keeps the output of `take` for verified tokens."""
        return self.replayed(self.take(hidden), batch, states)

    @abstractmethod
    def take(self, hidden: Tensor) -> Tensor:
        """Map hidden [T, H] to the inputs of the states, [T, *taken_in.shape]."""


def pool_rows(batch: ForwardBatch) -> PoolRows:
    """Return slots, starts, lengths and targets of a batch, int32, as the state kernels take them.

    Starts and lengths are None in a decode of one row per request; targets are None except in a
    decode with runs of rows (`batch.run_slots`): each state is written back to its own slot.
    """
    if not batch.forward_mode.is_decode:
        return batch.req_pool_indices, batch.extend_start_loc, batch.extend_seq_lens, None
    if batch.run_slots is None:
        return batch.req_pool_indices, None, None, None
    return batch.run_slots, get_state_pool().places(batch.num_tokens), batch.run_lens, batch.run_targets


@torch.library.custom_op("sglcore::state_layer", mutates_args=())
def state_layer_op(hidden: Tensor, layer_id: int) -> Tensor:
    """Run a layer with states on hidden [T, H] as one operation that is opaque to a compiler;
    return [T, H].

    `layer_id` is its index in the state pool of the forward context, which has the batch too.
    """
    layer = get_state_pool().layers[layer_id]
    assert isinstance(layer, StateLayer)
    return layer(hidden)


@state_layer_op.register_fake
def _(hidden: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(hidden)
