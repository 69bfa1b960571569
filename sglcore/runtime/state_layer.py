"""A layer that keeps a state of each request: how it finds its states, and where it runs in forwards that are captured."""

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
    """A function of the rows of a forward and of their requests' states, in the pool of the context.

    `layer_id` is its number among the model's layers with states; `kept`, what it keeps of each request, by name.
    """

    taken_in: StateTensor | None = None

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


class ReplayedLayer(StateLayer):
    """A layer that is three functions: of rows alone what its states take in, the states' own, and of rows alone again. So states can
    take the same tokens in again, without what comes before and after."""

    def __init__(self, layer_id: int, kept: Mapping[str, StateTensor], taken_in: StateTensor) -> None:
        super().__init__(layer_id, kept)
        self.taken_in = taken_in

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """hidden [T, H] to [T, H]; what a verification takes in is kept."""
        taken = self.take(hidden)
        if batch.run_rows is not None and batch.forward_mode.is_decode:
            get_state_pool().keep(self.layer_id, taken, batch.run_rows)
        return self.finish(self.advance(taken, pool_rows(batch), states), taken)

    @abstractmethod
    def take(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] to what the states take in, [T, *taken_in.shape]."""

    @abstractmethod
    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """`taken` [T, n] to what the states make of it, [T, m]; the states of the rows' slots go on. No host reads."""

    @abstractmethod
    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """What `advance` made [T, m] of `taken` [T, n], to [T, H]."""


def pool_rows(batch: ForwardBatch) -> PoolRows:
    """Of a batch; on decode steps each row is one token, or one of a run of those of its request."""
    if not batch.forward_mode.is_decode:
        return batch.req_pool_indices, batch.extend_start_loc, batch.extend_seq_lens, None
    if batch.run_slots is None:
        return batch.req_pool_indices, None, None, None
    return batch.run_slots, get_state_pool().places(batch.num_tokens), batch.run_lens, batch.run_targets


@torch.library.custom_op("sglcore::state_layer", mutates_args=())
def state_layer_op(hidden: Tensor, layer_id: int) -> Tensor:
    """A layer with states as one operation that a compiler does not look into; the context says on what it works."""
    layer = get_state_pool().layers[layer_id]
    assert isinstance(layer, StateLayer)
    return layer(hidden)


@state_layer_op.register_fake
def _(hidden: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(hidden)
