"""Disaggregated prefill in the scheduler: reserve pages, then the prompt arrives from another
engine, or fails.
"""

from __future__ import annotations

from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler import Scheduler
from sglcore.worker.model_worker import TokenLogprobs


class RemotePrompts:
    """A scheduler's interface for requests that another engine prefills: `reserve` pages, then take
    the prompt (`arrive`) or its failure (`fail`).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._running = scheduler, scheduler.running
        self.arrivals = scheduler.running.arrivals

    @property
    def only_waits(self) -> bool:
        """Whether all requests wait for another engine and no step is in flight. Also True without
        any request."""
        return not len(self._running.in_flight) and len(self._scheduler.requests) == self.arrivals.num_elsewhere

    def reserve(self) -> Request | None:
        """Allocate the prompt's pages for the first request that another engine will prefill.
        Returns None if none waits or the pages do not fit.
        """
        return self._running.reserve()

    def arrive(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        """Take a prompt after another engine has written its pages and sampled its first token.

        Returns the output with `token`; the request then waits for a request slot, or has ended.
        `logprobs` has one entry; None: not requested. Raises ValueError for a request that
        `reserve` has not returned, or that has ended.
        """
        self.arrivals.take_written(request)
        self._running.limit(request)
        return self._scheduler.take_run(request, [token], logprobs, 0)

    def fail(self, rid: str, error: str, *, refused: bool = False, is_unserved: bool = False) -> EngineOutput | None:
        """End a request that another engine could not prefill, for the reason `error`. Returns its
        last output, with finish_reason "error" and the other engine's `refused` and `is_unserved`;
        None if the request is unknown or has ended.
        """
        request = self._scheduler.requests.get(rid)
        if request is None:
            return None
        output = self._scheduler.end(request, "error", error=error)
        output.refused = output.refused or refused
        output.is_unserved = is_unserved
        return output
