"""Waiting requests in order of arrival; a retracted one returns to its place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sglcore.schedule.request import Request


def by_arrival(request: Request) -> int:
    """The order in which requests are served."""
    return request.arrival


class WaitingQueue:
    """Requests sorted by arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place; O(1) for a new arrival."""
        insort(self._requests, request, key=by_arrival)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits."""
        del self._requests[bisect_left(self._requests, request.arrival, key=by_arrival)]
