"""How many proposals all shards of requests verify in a step, chosen once for all of them: by what came of all, where all can be seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from sglcore.device.batch import ScheduleBatch
from sglcore.device.draft_length import LengthController, Started, StepTimes, accepted_of
from sglcore.device.worker import BatchResult, Limits
from sglcore.schedule.agree import Proposals


class AgreedLength:
    """One controller for all shards. Were each to choose, the larger or the smaller of two choices would have to be run by both: the
    smaller takes from one what pays there, the larger makes both pay for it. All wait for the slowest anyway, so what is worth its
    time is a question of their tokens together, and its answer comes with the plan."""

    def __init__(self, limits: Limits) -> None:
        self._length = LengthController(limits.draft_lengths or (limits.draft_tokens,))
        self._times = StepTimes()
        self._numbers = count(1)

    def begin(self, batches: Sequence[ScheduleBatch | None]) -> tuple[int, Proposals]:
        """A number for a step that is to be submitted, of what each shard has, and how many proposals it verifies and makes."""
        number, verified = next(self._numbers), self._length.tokens
        busy = [batch for batch in batches if batch is not None]
        decodes = [batch for batch in busy if batch.forward_mode.is_decode]
        if decodes:
            requests = sum(batch.batch_size for batch in decodes)
            self._length.choose(requests)
            # Beside prompts a step's time tells nothing of proposals.
            is_steady = len(decodes) == len(busy) and self._length.tokens == verified
            self._times.begin(Started(number, requests, verified, time.perf_counter(), is_steady))
        return number, Proposals(verified, self._length.tokens)

    def end(self, number: int, results: Sequence[BatchResult]) -> None:
        """The step of this number has been collected; `results` are those of shards that verified."""
        accepted = [np.zeros(0, np.int32), *(accepted_of(result) for result in results)]
        self._times.took(number, np.concatenate(accepted), self._length)
