"""What layers keep of each request as a whole, where attention keeps cells of each token: recurrent matrices, the tails of
convolutions, shifted tokens.

A slot's state belongs to all tokens of its request so far. Slot 0 belongs to nobody: padding rows read and write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

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
    """A layer with a state: its number among those of the model, and what it keeps of each request, by name."""

    layer_id: int
    kept: Mapping[str, StateTensor]

    @property
    def remark(self) -> str:
        """What a person should know of how its prompts run; empty: nothing."""
        ...


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
    ) -> None:
        """`poison`: a slot that is given to a request holds NaN until it is zeroed or restored, and so does what was never
        written, so that a copy that is missing is seen."""
        self.layers = tuple(layers)
        self.generation = 0
        self._max_requests, self._rows = max_requests, 1 + max_requests + num_snapshots
        self._device, self._poison = device, poison
        self._states = self._allocate()

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

    def read(self, rows: Tensor) -> list[Tensor]:
        """Every layer's states of rows int[N], copied."""
        return [state.index_select(0, rows) for state in self._tensors()]

    def write(self, rows: Tensor, states: Sequence[Tensor]) -> None:
        """The inverse of `read`; rows are distinct, but for 0."""
        for state, values in zip(self._tensors(), states, strict=True):
            state[rows] = values

    def replace_storage(self) -> None:
        """Move to new memory, as `KVPool.replace_storage`: graphs that were made before are refused."""
        self._states = self._allocate()
        self.generation += 1

    def _copy(self, arrived: Mapping[str, Tensor], sources: str, targets: str) -> None:
        if sources in arrived:
            self.write(arrived[targets], self.read(arrived[sources]))

    def _tensors(self) -> list[Tensor]:
        return [state for states in self._states for state in states.values()]

    def _allocate(self) -> list[dict[str, Tensor]]:
        fill = torch.nan if self._poison else 0
        return [{name: self._make(each, fill) for name, each in layer.kept.items()} for layer in self.layers]

    def _make(self, kept: StateTensor, fill: float) -> Tensor:
        if not fill:
            return torch.zeros(self._rows, *kept.shape, dtype=kept.dtype, device=self._device)
        return torch.full((self._rows, *kept.shape), fill, dtype=kept.dtype, device=self._device)
