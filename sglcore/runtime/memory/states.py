"""What layers keep of each request as a whole, where attention keeps cells of each token: recurrent matrices, the tails of
convolutions, shifted tokens.

A slot's state belongs to all tokens of its request so far. Slot 0 belongs to nobody: padding rows read and write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.step.states import entering_slots, state_moves


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state of one request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class KeepsState(Protocol):
    """A layer with a state: its number among those of the model, what it keeps of each request, by name, and what its state takes
    in of each token (None: that can not be taken in again)."""

    layer_id: int
    kept: Mapping[str, StateTensor]
    taken_in: StateTensor | None

    @property
    def remark(self) -> str:
        """What a person should know of how its prompts run; empty: nothing."""
        ...


class Runs(NamedTuple):
    """As the `run_*` of `ForwardInputs`, int32[T] each."""

    slots: Tensor
    targets: Tensor
    lens: Tensor
    rows: Tensor


class Replays(KeepsState, Protocol):
    """A layer whose state can take the same tokens in again."""

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """`taken` [T, n] of rows as the kernel table's recurrent entries take them: the states go on."""
        ...


PoolRows = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""`slots`, `starts`, `lengths` and `targets` as the kernel table's recurrent entries take them."""


def taken_bytes(layers: Sequence[KeepsState]) -> int:
    """Bytes of what the states of all layers take in of one token."""
    return sum(prod(each.shape) * each.dtype.itemsize for layer in layers if (each := layer.taken_in) is not None)


def state_bytes(layers: Sequence[KeepsState]) -> int:
    """Bytes of one request's state over all layers."""
    return sum(prod(each.shape) * each.dtype.itemsize for layer in layers for each in layer.kept.values())


class StatePool:
    """For each layer and name one tensor [1 + max_requests + num_snapshots, *shape]: row s is slot s's state, row
    max_requests + n is snapshot n. `generation` changes whenever an address does."""

    def __init__(
        self,
        layers: Sequence[KeepsState],
        max_requests: int,
        num_snapshots: int,
        device: str,
        poison: bool = False,
        verified: int = 0,
    ) -> None:
        """`poison`: a slot that is given to a request holds NaN until it is zeroed or restored, and so does what was never
        written, so that a copy that is missing is seen. `verified`: rows of a request in a verification at most; 0: there is none."""
        self.layers = tuple(layers)
        self.generation = 0
        self._max_requests, self._rows = max_requests, 1 + max_requests + num_snapshots
        self._device, self._poison, self._verified = device, poison, verified * max_requests
        self._places = torch.arange(self._verified, dtype=torch.int32, device=device)
        self._states, self._taken = self._allocate()

    def states(self, layer_id: int) -> Mapping[str, Tensor]:
        """A layer's tensors, each [rows, *shape]."""
        return self._states[layer_id]

    def changes(self, batch: ScheduleBatch) -> dict[str, NDArray]:
        """The rows that a step moves, for `copy_in` and `copy_out` once they are on the device."""
        moves = state_moves(batch, self._max_requests)
        if self._poison:
            moves |= {"state_entering": slots} if len(slots := entering_slots(batch)) else {}
        return moves

    def copy_in(self, arrived: Mapping[str, Tensor]) -> None:
        """Before the forward: zero or restore the slots that `changes` named. Does not wait."""
        entering, zeroed = arrived.get("state_entering"), arrived.get("state_zeroed")
        for state in self._tensors():
            if entering is not None:
                state[entering] = torch.nan
            if zeroed is not None:
                state[zeroed] = 0
        self._copy(arrived, "state_sources", "state_restored")

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """After the forward: copy slots to the snapshots that `changes` named. Does not wait."""
        self._copy(arrived, "state_kept", "state_copies")

    def runs(self, slots: Tensor, width: int) -> Runs:
        """Of a decode of `width` rows of each request, of `slots` int32[T], 0 for nobody's. States stay as they are: `take_in` is told
        later how many rows were right. Does not wait."""
        of_requests = slots.view(-1, width)
        parts = torch.zeros(2, *of_requests.shape, dtype=torch.int32, device=slots.device)
        parts[0, :, 0], parts[1, :, 0] = of_requests[:, 0], width
        return Runs(parts[0].flatten(), torch.zeros_like(slots), parts[1].flatten(), self.places(len(slots)) + 1)

    def places(self, count: int) -> Tensor:
        """The first `count` numbers, int32."""
        return self._places[:count]

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        """What a layer's states take in of tokens, [T, n], at their places `rows` int32[T] of `Runs`. Does not wait."""
        self._taken[layer_id][rows] = taken

    def rows_of(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where `keep` writes at places `rows` int32[T]: each layer's tensor, and the rows of it."""
        return [(taken, rows) for taken in self._taken]

    def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
        """After a decode of `width` rows of each request, of `slots` int32[T], 0 for nobody's: the states take in the first `counts`
        int32[T / width] rows of each. Does not wait."""
        first, tokens = slots.view(-1, width)[:, 0].contiguous(), slice(1, 1 + len(slots))
        rows = first, self.places(len(first)) * width, counts, None
        for layer in cast("Sequence[Replays]", self.layers):
            layer.advance(self._taken[layer.layer_id][tokens], rows, self.states(layer.layer_id))

    def read(self, rows: Tensor) -> list[Tensor]:
        """Every layer's states of rows int[N], copied."""
        return [state.index_select(0, rows) for state in self._tensors()]

    def write(self, rows: Tensor, states: Sequence[Tensor]) -> None:
        """The inverse of `read`; rows are distinct, but for 0."""
        for state, values in zip(self._tensors(), states, strict=True):
            state[rows] = values

    def replace_storage(self) -> None:
        """Move to new memory, as `KVPool.replace_storage`: graphs that were made before are refused."""
        self._states, self._taken = self._allocate()
        self.generation += 1

    def _copy(self, arrived: Mapping[str, Tensor], sources: str, targets: str) -> None:
        if sources in arrived:
            self.write(arrived[targets], self.read(arrived[sources]))

    def _tensors(self) -> list[Tensor]:
        return [state for states in self._states for state in states.values()]

    def _allocate(self) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Each layer's states; and of each what they take in of a verification's tokens, the first of which is nobody's."""
        states = [{name: self._make(self._rows, kept) for name, kept in layer.kept.items()} for layer in self.layers]
        taken = [layer.taken_in for layer in self.layers if layer.taken_in is not None] if self._verified else []
        return states, [self._make(1 + self._verified, each) for each in taken]

    def _make(self, rows: int, kept: StateTensor) -> Tensor:
        fill = torch.nan if self._poison else 0
        return torch.full((rows, *kept.shape), fill, dtype=kept.dtype, device=self._device)
