"""Per-request state of recurrent layers: recurrent matrices, tails of convolutions, shifted tokens.

A slot's state summarises all tokens of its request so far. Slot 0 is a scratch slot: padding rows
read and write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.step.snapshot_copies import entering_slots, state_moves
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Shape, without the slot dimension, and dtype of one tensor of a layer's recurrent state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class KeepsState(Protocol):
    """A layer with a recurrent state.

    `layer_id` is its index among such layers, `kept` the tensors that it keeps for each request, by
    name. `taken_in` is the input of the state for each token; None: the state cannot be replayed
    from it.
    """

    layer_id: int
    kept: Mapping[str, StateTensor]
    taken_in: StateTensor | None

    @property
    def remark(self) -> str:
        """A note for the user on how prompts run in this layer; empty if there is none."""
        ...


class Runs(NamedTuple):
    """The fields `run_*` of `ForwardInputs`, int32[T] each: in a decode with several rows per
    request, which state each run of consecutive rows reads (`slots`) and writes (`targets`), and
    its number of rows (`lens`, 0 if no run begins at the row). `rows` is each row's place in the
    buffer of `StatePool.keep`.
    """

    slots: Tensor
    targets: Tensor
    lens: Tensor
    rows: Tensor


class Replays(KeepsState, Protocol):
    """A layer with a state that can be advanced over the same tokens again."""

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Advance the states of `rows`, in place, by their inputs `taken` [T, n], as the kernel
        table's recurrent entries do; return their outputs [T, m].
        """
        ...


PoolRows = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""`slots`, `starts`, `lengths` and `targets`, as the kernel table's recurrent entries take them."""


def taken_bytes(layers: Sequence[KeepsState]) -> int:
    """Return the bytes of the state inputs of one token, over all layers."""
    return sum(prod(each.shape) * each.dtype.itemsize for layer in layers if (each := layer.taken_in) is not None)


def state_bytes(layers: Sequence[KeepsState]) -> int:
    """Return the bytes of one request's state, over all layers."""
    return sum(prod(each.shape) * each.dtype.itemsize for layer in layers for each in layer.kept.values())


class StatePool:
    """The recurrent states of all slots and snapshots: one tensor [1 + max_requests +
    num_snapshots, *shape] for each layer and name.

    Row s is the state of slot s, row max_requests + n is snapshot n. `generation` changes when an
    address changes. A `SlotTable`.
    """

    def __init__(
        self,
        layers: Sequence[KeepsState],
        max_requests: int,
        num_snapshots: int,
        device: str,
        poison: bool = False,
        verified: int = 0,
    ) -> None:
        """`poison`: a slot that is given to a request holds NaN until it is zeroed or restored.

        Memory that was never written holds NaN too, so that a missing copy shows. `verified`:
        maximum rows of a request in a verification; 0: there is none.
        """
        self.layers = tuple(layers)
        self.generation = 0
        self._max_requests, self._rows = max_requests, 1 + max_requests + num_snapshots
        self._device, self._poison, self._verified = device, poison, verified * max_requests
        self._places = torch.arange(self._verified, dtype=torch.int32, device=device)
        self._states, self._taken = self._allocate()

    def states(self, layer_id: int) -> Mapping[str, Tensor]:
        """Return a recurrent layer's tensors by name, each [rows, *shape]: row 0 is scratch, then
        slots, then snapshots.
        """
        return self._states[layer_id]

    def changes(self, batch: ScheduleBatch) -> dict[str, NDArray]:
        """Return the rows that a step moves, for `apply` and `copy_out` on the device: the arrays
        int32[N] of `state_moves`, and with `poison` `state_entering`, the slots of new requests.
        Empty if it moves none.
        """
        moves = state_moves(batch, self._max_requests)
        if self._poison:
            moves |= {"state_entering": slots} if len(slots := entering_slots(batch)) else {}
        return moves

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Zero or restore the slots named by `changes`, before the forward. With `poison`, slots of
        new requests are NaN first. Does not wait.
        """
        entering, zeroed = arrived.get("state_entering"), arrived.get("state_zeroed")
        for state in self._tensors():
            if entering is not None:
                state[entering] = torch.nan
            if zeroed is not None:
                state[zeroed] = 0
        self._copy(arrived, "state_sources", "state_restored")

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """Copy slots to the snapshots named by `changes`, after the forward. Does not wait."""
        self._copy(arrived, "state_kept", "state_copies")

    def runs(self, slots: Tensor, width: int) -> Runs:
        """Return the runs of a decode with `width` rows per request, one run for each request.

        `slots` int32[T] are the rows' request slots, 0 for padding. All runs write to slot 0, so
        the states do not change; `take_in` advances them once the accepted rows are known. Does not
        wait.
        """
        of_requests = slots.view(-1, width)
        parts = torch.zeros(2, *of_requests.shape, dtype=torch.int32, device=slots.device)
        parts[0, :, 0], parts[1, :, 0] = of_requests[:, 0], width
        return Runs(parts[0].flatten(), torch.zeros_like(slots), parts[1].flatten(), self.places(len(slots)) + 1)

    def places(self, count: int) -> Tensor:
        """Return int32 [0, 1, ..., count - 1], a view of constants; `count` is at most the rows of
        a verification of all requests (`verified` * `max_requests`).
        """
        return self._places[:count]

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        """Keep a layer's state inputs [T, n] of tokens, at rows int32[T] of `Runs`.

        Does not wait.
        """
        self._taken[layer_id][rows] = taken

    def rows_of(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return where `keep` writes for rows int32[T]: (tensor, rows) for each layer."""
        return [(taken, rows) for taken in self._taken]

    def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
        """Advance the states by the accepted rows of a verification.

        These are the first `counts` int32[T / width] rows of each request. The verification had
        `width` rows per request, with `slots` int32[T], 0 for padding. Does not wait.
        """
        first, tokens = slots.view(-1, width)[:, 0].contiguous(), slice(1, 1 + len(slots))
        rows = first, self.places(len(first)) * width, counts, None
        for layer in cast("Sequence[Replays]", self.layers):
            layer.advance(self._taken[layer.layer_id][tokens], rows, self.states(layer.layer_id))

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return a copy of the states at rows int[N]: one tensor [N, *shape] for each layer and
        name.
        """
        return [state.index_select(0, rows) for state in self._tensors()]

    def write(self, rows: Tensor, states: Sequence[Tensor]) -> None:
        """Write `states`, a result of `read`, to rows int[N], which are distinct except for 0."""
        for state, values in zip(self._tensors(), states, strict=True):
            state[rows] = values

    def replace_storage(self) -> None:
        """Move to new memory, without the old contents. Addresses change, so older graphs are
        refused.
        """
        self._states, self._taken = self._allocate()
        self.generation += 1

    def _copy(self, arrived: Mapping[str, Tensor], sources: str, targets: str) -> None:
        if sources in arrived:
            self.write(arrived[targets], self.read(arrived[sources]))

    def _tensors(self) -> list[Tensor]:
        return [state for states in self._states for state in states.values()]

    def _allocate(self) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Allocate each layer's states, and buffers for the inputs of verified tokens.

        Row 0 of such a buffer is a scratch row for padding.
        """
        states = [{name: self._make(self._rows, kept) for name, kept in layer.kept.items()} for layer in self.layers]
        taken = [layer.taken_in for layer in self.layers if layer.taken_in is not None] if self._verified else []
        return states, [self._make(1 + self._verified, each) for each in taken]

    def _make(self, rows: int, kept: StateTensor) -> Tensor:
        fill = torch.nan if self._poison else 0
        return torch.full((rows, *kept.shape), fill, dtype=kept.dtype, device=self._device)
