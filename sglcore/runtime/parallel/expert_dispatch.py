"""Expert dispatch: sends token rows to the ranks of their experts and back.

The contract and two references. `launch_` functions start and return a handle; `wait` consumes it.
The handle is the only state, so several dispatches may be in progress. Routing weights are applied
on the source rank, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sglcore.runtime.parallel.pending_collective import Handle, wait_all
from sglcore.runtime.parallel.process_group import AnyGroup


class CapacityExceeded(RuntimeError):
    """A rank has more rows than a dispatcher with fixed places can take."""


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """Rows [R, H] for the experts of this rank, and int32 [R]: each row's expert.

    Experts are numbered by their place on this rank. With fixed places some rows are padding: they
    are zero, and results for them are ignored.
    """

    rows: Tensor
    experts: Tensor


class Dispatched(Protocol):
    """The handle of a launched dispatch: rows in transit to their experts."""

    def wait(self) -> ExpertInput:
        """Return the rows that arrived here; call once."""
        ...


class Combining(Protocol):
    """The handle of a launched combine: expert outputs in transit back to the rows' ranks."""

    def wait(self) -> Tensor:
        """Return [T, K, H]: for each row of this rank the output of its K experts, 0 for no expert.

        Call once.
        """
        ...


class Dispatcher(Protocol):
    """Sends token rows to the ranks of their experts, and the experts' outputs back.

    Every rank makes the same calls in the same order, even with no rows.
    """

    @property
    def max_rows(self) -> int | None:
        """Maximum rows per rank; None: any number."""
        ...

    @property
    def is_fixed(self) -> bool:
        """True if no shape depends on the routing and the host does not wait."""
        ...

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """Send rows [T, H] to the places int [T, K] of their experts, counted over all ranks.

        -1: no expert.
        """
        ...

    def launch_combine(self, made: Tensor, dispatched: Dispatched) -> Combining:
        """Send expert outputs [R, H] back to the rows' ranks; R and the order are those of the
        `ExpertInput` that `dispatched` returned. They are not weighted yet.
        """
        ...


class MakeDispatcher(Protocol):
    """A callable that makes the dispatcher of a group, such as the class `RaggedDispatcher`;
    `is_fixed` is that of its dispatchers.
    """

    @property
    def is_fixed(self) -> bool:
        """True if no shape of its dispatchers depends on the routing and the host does not wait."""
        ...

    def __call__(self, group: AnyGroup, each: int, max_rows: int) -> Dispatcher:
        """Return a dispatcher for the ranks of `group`.

        Each rank has `each` expert places and sends at most `max_rows` rows.
        """
        ...


@dataclass(slots=True)
class _Ragged:
    """The `Dispatched` of a `RaggedDispatcher`.

    `order` int64 [S] are indices of the T * K choices in send order; `sent` and `received` count
    rows by rank. `shape` is (T, K). `rows` and `experts` are the exchanges in progress.
    """

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
    """The `Combining` of a `RaggedDispatcher`, with the dispatch that it answers."""

    back: Handle
    dispatched: _Ragged

    def wait(self) -> Tensor:
        back, (tokens, choices) = self.back.wait(), self.dispatched.shape
        found = back.new_zeros(tokens * choices, back.shape[1])
        found[self.dispatched.order] = back
        return found.view(tokens, choices, back.shape[1])


class RaggedDispatcher:
    """A `Dispatcher` that sends one copy of a row per choice, by any backend with all-to-all.

    The host waits for the counts.
    """

    is_fixed: ClassVar[bool] = False
    max_rows = None

    def __init__(self, group: AnyGroup, each: int, max_rows: int) -> None:
        """Parameters as in `MakeDispatcher.__call__`; `max_rows` is ignored."""
        self._group, self._each = group, each

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """Implements `Dispatcher.launch_dispatch`. Waits until the host knows the counts of all
        ranks.
        """
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
        """Implements `Dispatcher.launch_combine`: send each row back to the rank it came from, by
        the counts of the dispatch.
        """
        assert isinstance(dispatched, _Ragged)
        back = self._group.launch_all_to_all(made.contiguous(), dispatched.received, dispatched.sent)
        return _RaggedBack(back, dispatched)


@dataclass(slots=True)
class _Fixed:
    """The `Dispatched` of a `FixedDispatcher`.

    `experts` int32 [R] are the experts of all rows that arrive, padding included, numbered on this
    rank; R = ranks * experts per rank * `max_rows`. `places` [T, K] is what was dispatched, kept
    for the combine.
    """

    rows: Handle
    experts: Tensor
    places: Tensor

    def wait(self) -> ExpertInput:
        return ExpertInput(self.rows.wait(), self.experts)


@dataclass(slots=True)
class _FixedBack:
    """The `Combining` of a `FixedDispatcher`, with `max_rows` rows of each rank."""

    back: Handle
    places: Tensor
    max_rows: int

    def wait(self) -> Tensor:
        back, places = self.back.wait(), self.places
        row = torch.arange(len(places), device=back.device).unsqueeze(1).expand_as(places)
        found = back.view(-1, self.max_rows, back.shape[-1])[places.clamp(min=0).long(), row]
        return found.masked_fill((places < 0).unsqueeze(-1), 0)


class FixedDispatcher:
    """A `Dispatcher` with a place at every expert for each row of each rank, as in low-latency
    libraries.

    Shapes are the same in every step; capacity is limited.
    """

    is_fixed: ClassVar[bool] = True

    def __init__(self, group: AnyGroup, each: int, max_rows: int) -> None:
        """Parameters as in `MakeDispatcher.__call__`; each expert has `max_rows` places for every
        rank.
        """
        self._group, self._each, self.max_rows = group, each, max_rows

    def launch_dispatch(self, rows: Tensor, places: Tensor) -> Dispatched:
        """Implements `Dispatcher.launch_dispatch`.

        Raises CapacityExceeded before anything is sent if there are more than `max_rows` rows.
        """
        count, size = len(rows), self._group.size
        if count > self.max_rows:
            raise CapacityExceeded(
                f"rank {self._group.rank} of {size} has {count} rows for experts, and the fixed dispatcher takes"
                f" {self.max_rows}; lower max_batch_tokens or max_requests, or set expert_dispatch to ragged"
            )
        every = rows.new_zeros(size * self._each + 1, self.max_rows, rows.shape[1])
        row = torch.arange(count, device=rows.device).unsqueeze(1).expand_as(places)
        every[places.long(), row] = rows.unsqueeze(1)  # place -1 (no expert) is the last row, which is not sent
        experts = torch.arange(self._each, dtype=torch.int32, device=rows.device)
        every_expert = experts.repeat_interleave(self.max_rows).repeat(size)
        return _Fixed(self._exchanged(every[:-1]), every_expert, places)

    def launch_combine(self, made: Tensor, dispatched: Dispatched) -> Combining:
        """Implements `Dispatcher.launch_combine`: send the rows of all places back, padding
        included.
        """
        assert isinstance(dispatched, _Fixed)
        return _FixedBack(self._exchanged(made), dispatched.places, self.max_rows)

    def _exchanged(self, rows: Tensor) -> Handle:
        """Exchange [..., H], ordered by target rank, to [R, H], ordered by source rank.

        The order within is that of [ranks, each, max_rows].
        """
        return self._group.launch_all_to_all(rows.reshape(-1, rows.shape[-1]).contiguous())
