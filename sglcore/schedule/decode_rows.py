"""The requests that decode, in a stable order, with what a steady step needs in arrays that are updated in place."""

from __future__ import annotations

import numpy as np

from sglcore.schedule.request import Request, State

COLUMNS = 6


class DecodeRows:
    """`requests[i]` is row i; the arrays are live int32[B] views of one table.

    `seq_lens`: cells written once all submitted steps ran; `rooms`: cells that fit in the pages held; `last_lens`: the
    `seq_lens` at which the last token is emitted; `last_steps`: the last step that named the row; `page_counts`:
    page-table entries that the device has; `version` changes with the rows or their order. Views taken before rows were
    removed stay as they were.
    """

    __slots__ = (
        "_table",
        "last_lens",
        "last_steps",
        "page_counts",
        "requests",
        "rooms",
        "seq_lens",
        "slots",
        "version",
    )

    def __init__(self, capacity: int) -> None:
        self.requests: list[Request] = []
        self.version = 0
        self._table = np.zeros((COLUMNS, capacity), dtype=np.int32)
        self._view()

    def append(self, request: Request, page_size: int) -> None:
        """A request has been submitted up to its last known token and decodes from now on."""
        row = len(self.requests)
        self.requests.append(request)
        request.state = State.DECODING
        self._table[:, row] = (
            request.slot,
            request.num_cells,
            len(request.pages) * page_size,
            request.last_len,
            request.last_step,
            request.sent_pages,
        )
        self._view()

    def remove(self, request: Request) -> None:
        """Take one request out."""
        self.remove_rows([self.requests.index(request)])

    def remove_rows(self, rows: list[int]) -> None:
        """Take rows (ascending) out; their progress goes back into the requests, the others keep their order."""
        for row in rows:
            request = self.requests[row]
            request.num_cells = int(self.seq_lens[row])
            request.last_step = int(self.last_steps[row])
        count = len(self.requests)
        keep = np.ones(count, dtype=bool)
        keep[rows] = False
        table = np.zeros_like(self._table)
        table[:, : count - len(rows)] = self._table[:, :count][:, keep]
        self._table = table
        for row in reversed(rows):
            del self.requests[row]
        self._view()

    def _view(self) -> None:
        self.version += 1
        table = self._table[:, : len(self.requests)]
        self.slots, self.seq_lens, self.rooms, self.last_lens, self.last_steps, self.page_counts = table
