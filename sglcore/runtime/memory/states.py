"""What layers keep of each request as a whole, where attention keeps cells of each token: recurrent matrices, the tails of
convolutions, shifted tokens.

A slot's state belongs to all tokens of its request so far. Slot 0 belongs to nobody: padding rows read and write it.
"""

from __future__ import annotations

from collections import Counter
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
    lens: Tensor
    rows: Tensor


class Replays(KeepsState, Protocol):
    """A layer whose state can take the same tokens in again."""

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """`taken` [T, n] of rows as the kernel table's recurrent entries take them: the states go on."""
        ...


PoolRows = tuple[Tensor, Tensor | None, Tensor | None]
"""`slots`, `starts` and `lengths` as the kernel table's recurrent entries take them."""


def trial_bytes(layers: Sequence[KeepsState], rows: int) -> int:
    """Bytes, of one request, of what verifications of so many rows work with: a state beside its own, and what the rows bring."""
    taken = sum(prod(each.shape) * each.dtype.itemsize for layer in layers if (each := layer.taken_in) is not None)
    return state_bytes(layers) + rows * taken


def state_bytes(layers: Sequence[KeepsState]) -> int:
    """Bytes of one request's state over all layers."""
    return sum(prod(each.shape) * each.dtype.itemsize for layer in layers for each in layer.kept.values())


class StatePool:
    """For each layer and name one tensor [rows, *shape]: row s is slot s's state, row max_requests + n is snapshot n, and where
    proposals are verified, behind those come as many rows as slots, in which verifications go on. `generation` changes whenever an
    address does."""

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
        self._max_requests, self._trials = max_requests, 1 + max_requests + num_snapshots
        self._rows = self._trials + (1 + max_requests if verified else 0)
        self._device, self._poison, self._verified = device, poison, verified * max_requests
        self._places = torch.arange(self._verified, dtype=torch.int32, device=device)
        self._stacks, self._states, self._taken = self._allocate()

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
        for stack in self._stacks:
            if entering is not None:
                stack[:, entering] = torch.nan
            if zeroed is not None:
                stack[:, zeroed] = 0
        self._copy(arrived, "state_sources", "state_restored")

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """After the forward: copy slots to the snapshots that `changes` named. Does not wait."""
        self._copy(arrived, "state_kept", "state_copies")

    def begin_trial(self, slots: Tensor, width: int) -> Runs:
        """Before a decode of `width` rows of each request, of `slots` int32[T], 0 for nobody's: where its states go on, which are
        copies of the requests' own if there are several rows. Does not wait."""
        places = self._places[: len(slots)]
        if width == 1:
            return Runs(slots, (slots > 0).int(), places + 1)
        of_requests = slots.view(-1, width)
        first, length = of_requests[:, 0], (of_requests > 0).sum(1, dtype=torch.int32)
        self.write(first + self._trials, self.read(first))
        begins = torch.zeros(2, *of_requests.shape, dtype=torch.int32, device=slots.device)
        begins[0, :, 0], begins[1, :, 0] = (first + self._trials) * (first > 0), length
        return Runs(begins[0].flatten(), begins[1].flatten(), places + 1)

    def places(self, count: int) -> Tensor:
        """The first `count` numbers, int32."""
        return self._places[:count]

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        """What a layer's states take in of tokens, [T, n], at their places `rows` int32[T] of `Runs`. Does not wait."""
        self._taken[layer_id][rows] = taken

    def end_trial(self, slots: Tensor, counts: Tensor, width: int) -> None:
        """After a decode of `width` rows of each request, of `slots` int32[T], 0 for nobody's: the states take in the first `counts`
        int32[T / width] rows of each. Does not wait."""
        if width == 1:
            return
        first, tokens = slots.view(-1, width)[:, 0].contiguous(), slice(1, 1 + len(slots))
        rows = first, self._places[: len(first)] * width, counts * (first > 0)
        for layer in cast("Sequence[Replays]", self.layers):
            layer.advance(self._taken[layer.layer_id][tokens], rows, self.states(layer.layer_id))

    def read(self, rows: Tensor) -> list[Tensor]:
        """The states of rows int[N], copied: of those of one shape and type together, [n, N, *shape]."""
        return [stack.index_select(1, rows) for stack in self._stacks]

    def write(self, rows: Tensor, states: Sequence[Tensor]) -> None:
        """The inverse of `read`; rows are distinct, but for those that are nobody's."""
        for stack, values in zip(self._stacks, states, strict=True):
            stack[:, rows] = values

    def replace_storage(self) -> None:
        """Move to new memory, as `KVPool.replace_storage`: graphs that were made before are refused."""
        self._stacks, self._states, self._taken = self._allocate()
        self.generation += 1

    def _copy(self, arrived: Mapping[str, Tensor], sources: str, targets: str) -> None:
        if sources in arrived:
            self.write(arrived[targets], self.read(arrived[sources]))

    def _allocate(self) -> tuple[list[Tensor], list[dict[str, Tensor]], list[Tensor]]:
        """Tensors [n, rows, *shape] of all that are of one kind, so that one copy is of all; each layer's own of them; and of each what
        its states take in of a verification's tokens, one of which is nobody's."""
        counts = Counter(kept for layer in self.layers for kept in layer.kept.values())
        stacks = {kept: self._make((count, self._rows, *kept.shape), kept.dtype) for kept, count in counts.items()}
        parts = {kept: iter(stack) for kept, stack in stacks.items()}
        states = [{name: next(parts[kept]) for name, kept in layer.kept.items()} for layer in self.layers]
        taken = [layer.taken_in for layer in self.layers] if self._verified else []
        rows = 1 + self._verified
        kept_rows = [self._make((rows, *each.shape), each.dtype) for each in taken if each is not None]
        return [*stacks.values()], states, kept_rows

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan if self._poison else 0, dtype=dtype, device=self._device)
