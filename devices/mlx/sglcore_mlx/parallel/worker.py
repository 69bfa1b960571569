"""The worker of one rank."""

from __future__ import annotations

from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore_mlx.parallel.ranks import raise_as_lost
from sglcore_mlx.worker import MlxWorker


class RankWorker(MlxWorker):
    """A worker of one of several ranks. All ranks run the same batches in the same order, and have
    the same results."""

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and return its results. Raises CollectiveError if another rank has ended,
        and the step's own exceptions."""
        try:
            return super().collect(ticket)
        except RuntimeError as error:
            raise_as_lost(error)
