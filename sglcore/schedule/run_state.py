"""Where a running request stands: its request slot, its limits, and its steps in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunState:
    """One run of a request, from its admission to the release of its request slot. Only the methods
    here change it. A preempted request starts another run.
    """

    slot: int = 0
    """Request slot in the device tables. 0: the request does not run."""
    target: int = 0
    """Number of known tokens at admission. The request prefills up to here and then samples."""
    final_seq_len: int = 0
    """The `num_cells` with which the last possible token is sampled."""
    most_cells: int = 0
    """Maximum KV slots of the request: `final_seq_len`, plus those of a draft tree after it."""
    last_step: int = -1
    """The last step with a row of the request. -1: none since its admission. For a decode row,
    `DecodeRows` has this number instead."""
    sent_pages: int = 0
    """Number of entries of `Held.pages` that the device has."""
    sent_window_first: int = 0
    """The `WindowList.first` of the list that the device has."""
    leaving: bool = False
    """Request slot and pages are released when the last step with a row of the request is
    collected."""

    def limit(self, final_seq_len: int, most_cells: int) -> None:
        """Set the most KV slots of the request, without and with those of a draft tree."""
        self.final_seq_len, self.most_cells = final_seq_len, most_cells

    def begin(self, slot: int, target: int) -> None:
        """Admit the request to request slot `slot`: it prefills up to `target` tokens."""
        self.slot, self.target, self.sent_pages, self.last_step = slot, target, 0, -1

    def send(self, pages: int, window_first: int) -> None:
        """Note that the device gets the first `pages` pages and the list of window pages from page
        `window_first` on."""
        self.sent_pages, self.sent_window_first = pages, window_first

    def join(self, step: int) -> None:
        """Note that step number `step` is the last one with a row of the request."""
        self.last_step = step

    def leave(self) -> None:
        """Note that no later step will have a row of the request."""
        self.leaving = True

    def end(self) -> None:
        """Note that the request slot was released."""
        self.slot, self.leaving = 0, False
