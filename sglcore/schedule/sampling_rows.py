"""The sampling state of a batch, row by row: each request's row is made once and then selected."""

from __future__ import annotations

from collections.abc import Sequence

from sglcore.sampling.params_batch import SamplingBatch, SamplingRow
from sglcore.schedule.request import Request, State

SLACK = 64


class SamplingRows:
    """Callable from the requests of a batch to their `SamplingBatch`. Each request's row is made at
    its first call and kept. A request's `stop_ids` cannot be sampled before its `min_tokens`.
    """

    def __init__(self) -> None:
        self._pool = SamplingBatch.from_rows([])
        self._places: dict[Request, int] = {}

    def __call__(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return a new batch with the rows of these requests, in order."""
        new = [request for request in requests if request not in self._places]
        if new:
            self._forget_ended()
            self._places.update((request, len(self._pool) + index) for index, request in enumerate(new))
            self._pool = self._pool.append([self._make_row(request) for request in new])
        return self._pool.select([self._places[request] for request in requests])

    def _forget_ended(self) -> None:
        alive = [request for request in self._places if request.state is not State.FINISHED]
        if len(self._pool) > 2 * len(alive) + SLACK:
            self._pool = self._pool.select([self._places[request] for request in alive])
            self._places = {request: place for place, request in enumerate(alive)}

    def _make_row(self, request: Request) -> SamplingRow:
        banned = tuple(request.stop_ids) if request.params.min_tokens else ()
        return SamplingRow(request.params, request.seed, request.sample_index, len(request.prompt_ids), banned)
