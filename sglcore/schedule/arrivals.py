"""Requests whose prompts another engine computes: who waits for pages here, whose pages are being written, and pages that
another may still read or write although their request has ended.

Pages have two owners, the request and the other engine, and are free when both have let go.
"""

from __future__ import annotations

from sglcore.schedule.memory import Memory
from sglcore.schedule.queue import WaitingQueue
from sglcore.schedule.request import Request, State


class Arrivals:
    """`waiting` have no pages yet; `arriving` have them, and they are being written; `written` wait for a slot; `lent` have ended,
    and their pages have not come back."""

    def __init__(self, memory: Memory) -> None:
        self.waiting = WaitingQueue()
        self.arriving: list[Request] = []
        self.written: list[Request] = []
        self.lent: list[Request] = []
        self._memory = memory

    @property
    def holders(self) -> list[Request]:
        """Those that hold pages and no slot."""
        return [*self.arriving, *self.written, *self.lent]

    @property
    def num_elsewhere(self) -> int:
        """Requests that no step here can help."""
        return len(self.waiting) + len(self.arriving)

    @property
    def num_waiting(self) -> int:
        """Requests that are in no step yet."""
        return self.num_elsewhere + len(self.written)

    def reserve(self, promised: int) -> Request | None:
        """Give the first that waits pages for its prompt, of which those it shares are written already, beside `promised` pages
        and one for each that comes; None: it has to wait. The others come after it, however small."""
        request = next(iter(self.waiting), None)
        if request is None or not self._memory.admit(request, promised + len(self.arriving) + len(self.written) + 1):
            return None
        missing = self._memory.pages_for(len(request.prompt_ids)) - len(request.pages)
        if not self._memory.grow(request, missing):
            raise AssertionError(f"request {request.rid!r} was admitted, and {missing} pages are not there")
        self.waiting.remove(request)
        request.state, request.is_lent = State.ARRIVING, True
        self.arriving.append(request)
        return request

    def take_written(self, request: Request) -> None:
        """The pages of a prompt are there and nobody writes to them any more; others may share them."""
        self.arriving.remove(request)
        self.written.append(request)
        request.is_remote = request.is_lent = False
        request.num_cells = len(request.prompt_ids)
        self._memory.publish(request, request.num_cells)
        request.prompt_published = True

    def leave(self, request: Request) -> None:
        """A request without a slot ends; its pages go back, or are lent until `let_go`."""
        (self.arriving if request in self.arriving else self.written).remove(request)
        self.give_back(request)

    def give_back(self, request: Request) -> None:
        """The request lets go of its pages. A retracted one goes on, so it lends nothing."""
        if request.is_lent and request.finish_reason is not None:
            self.lent.append(request)
            return
        has_failed = request.is_broken or request.finish_reason == "error"
        self._memory.release(request, 0 if has_failed else request.num_cells)

    def let_go(self, request: Request) -> None:
        """The other engine neither reads nor writes a request's pages any more."""
        request.is_lent = False
        if request in self.lent:
            self.lent.remove(request)
            self.give_back(request)
