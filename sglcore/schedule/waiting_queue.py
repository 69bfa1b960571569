"""Waiting requests by priority, then by arrival. A preempted request returns to its old
position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sglcore.schedule.request import Request


def by_turn(request: Request) -> tuple[int, int]:
    """Return the sort key of a request: its priority, lower values first, then its arrival. The
    order is total and never changes, so the first request always finishes.
    """
    return request.params.priority, request.arrival


class WaitingQueue:
    """Requests sorted by priority, then by arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request at its position. O(1) for a new request of the last priority."""
        insort(self._requests, request, key=by_turn)

    def first_of(self, most: int, tokens: int) -> list[Request]:
        """Return the first requests in order: at most `most`, and only up to the first one with
        which their prompts have more than `tokens` tokens in total; that one and all later ones are
        left out.
        """
        found: list[Request] = []
        for request in self._requests[:most]:
            tokens -= len(request.prompt_ids)
            if tokens < 0:
                break
            found.append(request)
        return found

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it is not in the queue."""
        place = bisect_left(self._requests, by_turn(request), key=by_turn)
        if place == len(self._requests) or self._requests[place] is not request:
            raise ValueError(f"request {request.rid!r} does not wait")
        del self._requests[place]
