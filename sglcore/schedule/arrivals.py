"""Requests that another engine prefills (disaggregated prefill), and the pages that they hold here.

A page has two owners, the request and the other engine. It is free when both have released it, so
pages may stay in use after their request has ended.
"""

from __future__ import annotations

from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Request, State
from sglcore.schedule.waiting_queue import WaitingQueue


class Arrivals:
    """Requests that another engine prefills, by state.

    `waiting`: no pages yet. `arriving`: the other engine writes their pages. `written`: prefilled,
    waiting for a request slot. `lent`: ended, but the other engine may still access their pages.
    """

    def __init__(self, memory: Memory) -> None:
        self.waiting = WaitingQueue()
        self.arriving: list[Request] = []
        self.written: list[Request] = []
        self.lent: list[Request] = []
        self._memory = memory

    @property
    def holders(self) -> list[Request]:
        """Requests that hold pages but no request slot."""
        return [*self.arriving, *self.written, *self.lent]

    @property
    def num_elsewhere(self) -> int:
        """Number of requests that no step of this engine can advance."""
        return len(self.waiting) + len(self.arriving)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not in any step yet."""
        return self.num_elsewhere + len(self.written)

    @property
    def holds_up(self) -> bool:
        """Whether requests wait for their prefill by another engine, or ended requests still lend
        it their pages. Other requests may then have to wait for these pages.
        """
        return bool(self.num_elsewhere or self.lent)

    def reserve(self, promised: int) -> Request | None:
        """Allocate the prompt's pages for the first request in `waiting`, move it to `arriving` and
        return it. None if there is no such request, or if it must wait for pages.

        The pages of a cached prefix are among them and already written. `promised` more pages must
        stay free or evictable, and one for each request in `arriving` and `written`, this one
        included. Later requests wait for the first one, even if they are smaller.
        """
        request = next(iter(self.waiting), None)
        if request is None or not self._memory.admit(request, promised + len(self.arriving) + len(self.written) + 1):
            return None
        missing = self._memory.pages_for(len(request.prompt_ids)) - len(request.held.pages)
        if not self._memory.grow(request, missing):
            raise AssertionError(f"request {request.rid!r} was admitted, but {missing} pages are missing")
        self.waiting.remove(request)
        request.state, request.is_lent = State.ARRIVING, True
        self.arriving.append(request)
        return request

    def take_written(self, request: Request) -> None:
        """Mark the prompt of a request in `arriving` as prefilled; it then waits in `written` for a
        request slot. The other engine no longer writes its pages, so other requests may share them.
        Raises ValueError for a request that is not in `arriving`.
        """
        self.arriving.remove(request)
        self.written.append(request)
        request.is_remote = request.is_lent = False
        request.held.fill(len(request.prompt_ids))
        self._memory.publish(request, len(request.prompt_ids))

    def leave(self, request: Request) -> None:
        """Remove a request that ends in `arriving` or `written`, without a request slot. Its pages
        are freed, or lent until `let_go`. Its `finish_reason` must be set before.
        """
        (self.arriving if request in self.arriving else self.written).remove(request)
        self.give_back(request)

    def give_back(self, request: Request) -> None:
        """Release the pages of a request. They stay allocated until `let_go` if it has ended and
        the other engine may still access them. A preempted request has not ended and never lends
        its pages. Pages of a failed request do not enter the prefix cache.
        """
        if request.is_lent and request.finish_reason is not None:
            self.lent.append(request)
            return
        has_failed = request.held.is_broken or request.finish_reason == "error"
        self._memory.release(request, 0 if has_failed else request.held.num_cells)

    def let_go(self, request: Request) -> None:
        """Note that the other engine no longer reads or writes the pages of a request. If the
        request has ended, they are freed.
        """
        request.is_lent = False
        if request in self.lent:
            self.lent.remove(request)
            self.give_back(request)
