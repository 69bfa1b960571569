"""Share a common prefix among prompts that arrive together: one request prefills it, the others
wait until it is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Ints, Request, State

LEAST_TOKENS = 64
"""Shorter common prefixes are not worth the wait: to prefill them costs less than to wait for the
end of a step.
"""
LEAST_SHARE = 0.25
"""Share of a request's own prefill that waiting must save."""
MOST_COMPARED = 8
"""Number of running prompts, the youngest ones, with which a waiting prompt is compared."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a waiting request waits for: the running `request` prefills the first `pages` pages of
    their common prefix.
    """

    request: Request
    pages: int


class InBatchPrefixes:
    """Tells which waiting requests should wait until a running one has prefilled their common
    prefix (`must_wait`). Knows the running requests that `add` noted and whose prompts are not
    cached yet, and what each waiting request waits for.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._computing: list[Request] = []
        self._version = 0
        self._awaited: dict[Request, Awaited] = {}
        # The `_version` at which each request was last compared with the running prompts. It stays
        # until the request ends, because a preempted one is compared only with newer ones.
        self._compared: dict[Request, int] = {}

    def awaited(self, request: Request) -> Awaited | None:
        """Return what the request waits for, or None."""
        return self._awaited.get(request)

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._awaited.pop(request, None)
        self._compared.pop(request, None)

    def audit(self) -> None:
        """Raise AssertionError if a request that does not wait still waits for another one, or if
        one that has ended is still known."""
        kept = [request.rid for request in self._awaited if request.state is not State.WAITING]
        kept += [request.rid for request in self._compared if request.state is State.FINISHED]
        assert not kept, f"requests {kept} still wait for a common prefix"

    def add(self, request: Request) -> None:
        """Note that an admitted request starts its prefill and waits no longer."""
        self._awaited.pop(request, None)
        self._computing = [*(other for other in self._computing if other is not request and _computes(other)), request]
        self._version += 1

    def must_wait(self, request: Request) -> bool:
        """Return whether a waiting request should wait until a running one has prefilled their
        common prefix. It then has an `awaited`, and the running request is asked to keep what
        the prefix needs. A request is compared at most once for each admission.
        """
        awaited, compared = self._awaited.get(request), self._compared.get(request, 0)
        if awaited is not None and self._goes_on(awaited):
            return True
        if compared == self._version:
            return False
        # Compare only with requests that are new: an older one that was not worth the wait has less
        # left to share now.
        new = MOST_COMPARED if awaited else min(self._version - compared, MOST_COMPARED)
        self._compared[request] = self._version
        found = self._find(request, self._computing[-new:])
        if found is None:
            self._awaited.pop(request, None)
            return False
        self._awaited[request] = found
        return True

    def _goes_on(self, awaited: Awaited) -> bool:
        return _computes(awaited.request) and self._memory.will_share(awaited.request, awaited.pages)

    def _find(self, request: Request, among: list[Request]) -> Awaited | None:
        computing = [other for other in among if _computes(other)]
        if not computing:
            return None
        tokens = request.tokens(0, request.num_tokens)
        pages, first = max(
            (self._memory.offered_pages(other, self._common_pages(tokens, other.prompt_ids)), -place)
            for place, other in enumerate(computing)
        )
        if pages * self._memory.page_size < LEAST_TOKENS:
            return None
        cached = self._memory.cached_pages(request)
        saved = (pages - cached) * self._memory.page_size
        rest = len(tokens) - cached * self._memory.page_size
        if saved < max(LEAST_TOKENS, LEAST_SHARE * rest):
            return None
        leader = computing[-first]
        self._memory.ask(leader, pages)
        return Awaited(leader, pages)

    def _common_pages(self, tokens: Ints, other: Ints) -> int:
        """Return the number of leading pages of `tokens` that a request can take from the cache
        once the prompt `other` is prefilled; at least one token stays to compute."""
        size, lookahead = self._memory.page_size, self._memory.cache.lookahead
        if not np.array_equal(tokens[:size], other[:size]):
            return 0
        length = min(len(tokens), len(other))
        differ = np.flatnonzero(tokens[:length] != other[:length])
        common = int(differ[0]) if len(differ) else length
        return max(0, min(common - lookahead, len(tokens) - max(1, lookahead))) // size


def _computes(request: Request) -> bool:
    """Return whether the prompt of a request will enter the cache: it is still prefilling, or its
    last chunk is in flight. If that chunk emits the last token, the prompt enters the cache at the
    request's end.
    """
    is_running = request.state is State.EXTENDING or request.state is State.DECODING
    return is_running and not request.held.prompt_published
