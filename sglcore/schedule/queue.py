"""Waiting requests by priority, and in order of arrival; a retracted one returns to its place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sglcore.schedule.request import Request


def by_turn(request: Request) -> tuple[int, int]:
    """The order in which requests are served: a total one that never changes, so the first always comes to its end."""
    return request.params.priority, request.arrival


class WaitingQueue:
    """Requests sorted by their turn."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place; O(1) for a new arrival of the last priority."""
        insort(self._requests, request, key=by_turn)

    def first_of(self, most: int, tokens: int) -> list[Request]:
        """The first requests, at most so many, whose prompts have at most so many tokens together."""
        found: list[Request] = []
        for request in self._requests[:most]:
            tokens -= len(request.prompt_ids)
            if tokens < 0:
                break
            found.append(request)
        return found

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits."""
        del self._requests[bisect_left(self._requests, by_turn(request), key=by_turn)]
