"""Choose the number of draft tokens of a step once for all shards (DP ranks), from the results of
all shards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from sglcore.schedule.data_parallel.dp_plan import Proposals
from sglcore.step.draft_length import LengthController, Started, StepTimes, accepted_of
from sglcore.worker.model_worker import BatchResult, Limits
from sglcore.worker.schedule_batch import ScheduleBatch


class AgreedLength:
    """One draft-length controller for all shards.

    If each shard chose its own length, all would have to run either the largest or the smallest
    choice, and one of them would lose. All shards wait for the slowest one anyway, so the
    controller compares the step's time with the tokens of all shards together, and the plan carries
    its choice.
    """

    def __init__(self, limits: Limits) -> None:
        self._length = LengthController(limits.draft_lengths or (limits.draft_tokens,))
        self._times = StepTimes()
        self._numbers = count(1)

    def begin(self, batches: Sequence[ScheduleBatch | None]) -> tuple[int, Proposals]:
        """Return a number for the step that is about to be submitted, and the draft tokens that it
        verifies and proposes. `batches` holds each shard's batch; None is an idle shard.
        """
        number, verified = next(self._numbers), self._length.tokens
        busy = [batch for batch in batches if batch is not None]
        decodes = [batch for batch in busy if batch.forward_mode.is_decode]
        if decodes:
            requests = sum(batch.batch_size for batch in decodes)
            self._length.choose(requests)
            # The time of a step that also prefills says nothing about draft tokens.
            is_steady = len(decodes) == len(busy) and self._length.tokens == verified
            self._times.begin(Started(number, requests, verified, time.perf_counter(), is_steady))
        return number, Proposals(verified, self._length.tokens)

    def end(self, number: int, results: Sequence[BatchResult]) -> None:
        """Take the collected step `number`; `results` has one result for each shard that verified
        draft tokens.
        """
        accepted = [np.zeros(0, np.int32), *(accepted_of(result) for result in results)]
        self._times.took(number, np.concatenate(accepted), self._length)
