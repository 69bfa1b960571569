"""The decoding requests in a stable order. A steady step updates its inputs in place, in arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request import Ints, Request, State


def _column(begin: Callable[[Request, int], int]) -> Any:
    """Declare a column. `begin` returns its value for a request that starts to decode, from the
    request and the page size.
    """
    return field(metadata={"begin": begin})


@dataclass(init=False, eq=False, slots=True)
class DecodeRows:
    """The requests that decode. The columns are live int32[B] views of one table, updated in place
    at each step.

    Views taken before rows were removed stay as they were.
    """

    requests: list[Request]
    """The request of each row."""
    version: int
    """Changes with the rows or their order."""
    _table: Ints
    """int32[columns, capacity]: the table."""

    slots: Ints = _column(lambda request, _: request.run.slot)
    """The request slot."""
    seq_lens: Ints = _column(lambda request, _: request.held.num_cells)
    """Number of KV slots that are written once all submitted steps have run. A lower bound if steps
    may emit several tokens."""
    drafted_lens: Ints = _column(lambda request, _: 0)
    """KV slots that steps in flight may have written in addition."""
    allocated_lens: Ints = _column(lambda request, page_size: len(request.held.pages) * page_size)
    """KV slots in the pages held."""
    final_seq_lens: Ints = _column(lambda request, _: request.run.final_seq_len)
    """The `seq_lens` with which the last possible token is sampled."""
    most_cells: Ints = _column(lambda request, _: request.run.most_cells)
    """Maximum KV slots of the row: `final_seq_lens`, plus those of a draft tree after it."""
    last_steps: Ints = _column(lambda request, _: request.run.last_step)
    """The last step that contains the row."""
    page_counts: Ints = _column(lambda request, _: request.run.sent_pages)
    """Number of page-table entries that the device has."""
    window_starts: Ints = _column(lambda request, page_size: request.held.windows.first * page_size)
    """Number of tokens before the first sliding-window page."""
    sent_window_starts: Ints = _column(lambda request, page_size: request.run.sent_window_first * page_size)
    """The `window_starts` of the list that the device has."""

    def __init__(self, capacity: int) -> None:
        self.requests = []
        self.version = 0
        self._table = np.zeros((len(COLUMNS), capacity), dtype=np.int32)
        self._view()

    def room_for(self, reach: int) -> Ints:
        """Return int32[B]: the KV slots that each row needs for a step that may write `reach` more,
        limited to the most that the row can ever need.
        """
        if reach == 1:
            return self.seq_lens + 1
        return np.minimum(self.seq_lens + self.drafted_lens + reach, self.most_cells)

    @property
    def any_final(self) -> bool:
        """Whether a row has emitted its last token, or will in a step in flight."""
        return bool((self.seq_lens >= self.final_seq_lens).any())

    def begin_step(self, chosen: NDArray[np.intp] | slice, drafts: int) -> None:
        """Account for a planned step: each chosen row emits one token, and up to `drafts` more."""
        self.seq_lens[chosen] += 1
        if drafts:
            self.drafted_lens[chosen] += drafts

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        """Account for a collected decode step that verified draft tokens: the rows with the request
        slots `slots` emitted `counts` int32[N] tokens. `drafts`: the number that `begin_step` got
        for this step. Rows that have left are ignored.
        """
        if len(slots) == len(self.slots) and (slots == self.slots).all():
            gained, drafted = counts - 1, drafts
        else:
            by_slot = np.zeros((2, int(max(slots.max(), self.slots.max(initial=0))) + 1), dtype=np.int32)
            by_slot[0, slots], by_slot[1, slots] = counts - 1, drafts
            gained, drafted = by_slot[:, self.slots]
        # A step that was planned before these results were known may have had no token left to
        # emit.
        np.minimum(self.seq_lens + gained, self.final_seq_lens, out=self.seq_lens)
        self.drafted_lens -= drafted

    def append(self, request: Request, page_size: int) -> None:
        """Add a request that has submitted all its known tokens as the last row, and set its state
        to DECODING. `page_size`: tokens in a page."""
        row = len(self.requests)
        self.requests.append(request)
        request.state = State.DECODING
        self._table[:, row] = [begin(request, page_size) for begin in _BEGIN]
        self._view()

    def remove(self, request: Request) -> None:
        """Remove the row of one request; its progress is written back to the request. Raises
        ValueError if it has no row."""
        self.remove_rows([self.requests.index(request)])

    def remove_rows(self, rows: list[int]) -> None:
        """Remove rows (ascending). Their progress is written back to the requests; the other rows
        keep their order.
        """
        for row in rows:
            self.requests[row].held.fill(int(self.seq_lens[row]))
            self.requests[row].run.join(int(self.last_steps[row]))
        count = len(self.requests)
        keep = np.ones(count, dtype=bool)
        keep[rows] = False
        table = np.empty_like(self._table)
        np.compress(keep, self._table[:, :count], axis=1, out=table[:, : count - len(rows)])
        self._table = table
        for row in reversed(rows):
            del self.requests[row]
        self._view()

    def _view(self) -> None:
        self.version += 1
        for name, values in zip(COLUMNS, self._table[:, : len(self.requests)], strict=True):
            setattr(self, name, values)


_DECLARED = tuple(item for item in fields(DecodeRows) if item.metadata)
COLUMNS = tuple(item.name for item in _DECLARED)
_BEGIN = tuple(item.metadata["begin"] for item in _DECLARED)
