"""The scheduler's door for prompts that another engine computes: pages are reserved, the prompt arrives or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglcore.device.worker import TokenLogprobs
from sglcore.schedule.output import EngineOutput
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests

TakeRun = Callable[[Request, list[int], TokenLogprobs | None, int], EngineOutput]


class RemotePrompts:
    """Of one scheduler, whose `requests` have not ended; `take_run` takes in tokens that one emitted, `end` ends one."""

    def __init__(
        self,
        running: RunningRequests,
        requests: Mapping[str, Request],
        take_run: TakeRun,
        end: Callable[..., EngineOutput],
    ) -> None:
        self._running, self._requests, self._take_run, self._end = running, requests, take_run, end
        self.arrivals = running.arrivals

    @property
    def only_waits(self) -> bool:
        """No step can help one of the requests, and none is in flight: another engine has to write, or let go."""
        return not len(self._running.in_flight) and len(self._requests) == self.arrivals.num_elsewhere

    @property
    def holds_up(self) -> bool:
        """Another engine has pages of this one, or requests, so that what waits here may be waiting for it."""
        return bool(self.arrivals.num_elsewhere or self.arrivals.lent)

    def reserve(self) -> Request | None:
        """Give the first request that is to come from another engine pages for its prompt; None: none waits, or it has no room."""
        return self._running.reserve()

    def arrive(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        """Another engine has written the prompt's pages, and drew the first token, whose log-probabilities are one entry."""
        self.arrivals.take_written(request)
        request.final_seq_len = self._running.final_len(request)
        return self._take_run(request, [token], logprobs, 0)

    def fail(self, rid: str, error: str, *, refused: bool = False, is_unserved: bool = False) -> EngineOutput | None:
        """End a request that can not come from another engine; None if it is unknown or has ended. What the others say is
        told with it."""
        request = self._requests.get(rid)
        if request is None:
            return None
        output = self._end(request, "error", error=error)
        output.refused = output.refused or refused
        output.is_unserved = is_unserved
        return output
