"""Rows go to the ranks that hold their experts, and come back: the contract of libraries that do that, and two that define correct.

`launch_` starts and gives a handle, which is a value; `wait` consumes it. Nothing is kept between the two but in the handle, so
several may be under way. Weights are applied where the rows came from, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sglcore.runtime.parallel.group import AnyGroup
from sglcore.runtime.parallel.handle import Handle, wait_all


class CapacityExceeded(RuntimeError):
    """A rank has more rows than a dispatcher with fixed places can take."""


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """Rows [R, H] for the experts of this rank, and int32 [R]: which of them each is for, by its place on this rank. With fixed
    places some rows are nobody's: they hold zeros, and what becomes of them is not read."""

    rows: Tensor
    experts: Tensor


class Dispatched(Protocol):
    """Rows on their way to their experts."""

    def wait(self) -> ExpertInput:
        """What came here; once."""
        ...


class Combining(Protocol):
    """Rows on their way back."""

    def wait(self) -> Tensor:
        """[T, K, H]: of each row that this rank sent, what each of its K experts made of it; zeros for none. Once."""
        ...


class Dispatcher(Protocol):
    """Takes rows to their experts. `max_rows`: what a rank may bring at most (None: any number), `is_fixed`: equally many places
    whatever is sent. Every rank calls the same in the same order, with no rows too."""

    @property
    def max_rows(self) -> int | None:
        """Rows that a rank may bring."""
        ...

    @property
    def is_fixed(self) -> bool:
        """No shape depends on the routing, and the host waits for nothing."""
        ...

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """Send rows [T, H] to the places int [T, K] of their experts, counted over all ranks; -1 is no expert."""
        ...

    def launch_combine(self, made: Tensor, dispatched: Dispatched) -> Combining:
        """Send [R, H], what the experts here made of what `dispatched` brought, back."""
        ...


class MakeDispatcher(Protocol):
    """What makes dispatchers; `is_fixed` is theirs."""

    @property
    def is_fixed(self) -> bool:
        """See `Dispatcher`."""
        ...

    def __call__(self, group: AnyGroup, each: int, max_rows: int) -> Dispatcher:
        """One among the ranks of `group`, which have places for `each` experts and bring `max_rows` rows at most."""
        ...


@dataclass(slots=True)
class _Ragged:
    """What was sent: `order` int64 [S] are the choices, of T * K, in the order of sending; `sent` and `received` count rows by rank."""

    rows: Handle
    experts: Handle
    order: Tensor
    sent: list[int]
    received: list[int]
    shape: tuple[int, int]

    def wait(self) -> ExpertInput:
        return ExpertInput(*wait_all(self.rows, self.experts))


@dataclass(slots=True)
class _RaggedBack:
    """What comes back, and to which choices."""

    back: Handle
    dispatched: _Ragged

    def wait(self) -> Tensor:
        back, (tokens, choices) = self.back.wait(), self.dispatched.shape
        found = back.new_zeros(tokens * choices, back.shape[1])
        found[self.dispatched.order] = back
        return found.view(tokens, choices, back.shape[1])


class RaggedDispatcher:
    """Each rank sends what there is, a copy for each choice: by any back end that has all-to-all. The host waits for the counts."""

    is_fixed: ClassVar[bool] = False
    max_rows = None

    def __init__(self, group: AnyGroup, each: int, max_rows: int) -> None:
        """See `MakeDispatcher`."""
        self._group, self._each = group, each

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """See `Dispatcher`."""
        flat = places.reshape(-1).long()
        ranks = torch.where(flat < 0, self._group.size, flat // self._each)
        order = torch.argsort(ranks, stable=True)
        counts = torch.bincount(ranks, minlength=self._group.size + 1)[: self._group.size]
        received = self._group.all_to_all(counts).tolist()
        sent = counts.tolist()
        order = order[: sum(sent)]
        given = self._group.launch_all_to_all(rows[order // places.shape[1]], sent, received)
        experts = self._group.launch_all_to_all((flat[order] % self._each).int(), sent, received)
        return _Ragged(given, experts, order, sent, received, (len(rows), places.shape[1]))

    def launch_combine(self, made: Tensor, dispatched: Dispatched) -> Combining:
        """See `Dispatcher`."""
        assert isinstance(dispatched, _Ragged)
        back = self._group.launch_all_to_all(made.contiguous(), dispatched.received, dispatched.sent)
        return _RaggedBack(back, dispatched)


@dataclass(slots=True)
class _Fixed:
    """Rows by the rank that they are for, under way, and int32 [R]: whose each of those that come is."""

    rows: Handle
    experts: Tensor
    places: Tensor

    def wait(self) -> ExpertInput:
        return ExpertInput(self.rows.wait(), self.experts)


@dataclass(slots=True)
class _FixedBack:
    """What comes back, of how many rows of each rank."""

    back: Handle
    places: Tensor
    max_rows: int

    def wait(self) -> Tensor:
        back, places = self.back.wait(), self.places
        row = torch.arange(len(places), device=back.device).unsqueeze(1).expand_as(places)
        found = back.view(-1, self.max_rows, back.shape[-1])[places.clamp(min=0).long(), row]
        return found.masked_fill((places < 0).unsqueeze(-1), 0)


class FixedDispatcher:
    """Every expert has a place for each row of each rank, as libraries for few rows have it: equal shapes in every step, and an end
    of what they hold."""

    is_fixed: ClassVar[bool] = True

    def __init__(self, group: AnyGroup, each: int, max_rows: int) -> None:
        """See `MakeDispatcher`."""
        self._group, self._each, self.max_rows = group, each, max_rows

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """See `Dispatcher`. Raises CapacityExceeded for one row too many, before anything is sent."""
        count, size = len(rows), self._group.size
        if count > self.max_rows:
            raise CapacityExceeded(
                f"rank {self._group.rank} of {size} has {count} rows for experts, and the fixed dispatcher takes"
                f" {self.max_rows}; lower max_batch_tokens or max_requests, or set expert_dispatch to ragged"
            )
        every = rows.new_zeros(size * self._each + 1, self.max_rows, rows.shape[1])
        row = torch.arange(count, device=rows.device).unsqueeze(1).expand_as(places)
        every[places.long(), row] = rows.unsqueeze(1)  # none is the last, which stays here
        experts = torch.arange(self._each, dtype=torch.int32, device=rows.device)
        every_expert = experts.repeat_interleave(self.max_rows).repeat(size)
        return _Fixed(self._exchanged(every[:-1]), every_expert, places)

    def launch_combine(self, made: Tensor, dispatched: Dispatched) -> Combining:
        """See `Dispatcher`."""
        assert isinstance(dispatched, _Fixed)
        return _FixedBack(self._exchanged(made), dispatched.places, self.max_rows)

    def _exchanged(self, rows: Tensor) -> Handle:
        """[..., H], in the order of [ranks, each, max_rows] by the rank that it is for, to [R, H] in that by the rank that it is from."""
        return self._group.launch_all_to_all(rows.reshape(-1, rows.shape[-1]).contiguous())
