"""Choose the number of draft tokens per step that gives the most tokens per second, from measured
acceptance and step times.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.model_worker import BatchResult

LENGTHS = (0, 1, 3, 5, 7)
"""Draft lengths among which the controller chooses, in addition to the largest allowed one."""
MEMORY = 0.96
"""Factor of the older counts of accepted draft tokens in each step: the last 25 steps dominate."""
MARGIN = 1.05
"""Factor by which another length must be better before it is chosen."""
DWELL = 8
"""Minimum number of steps between two changes."""
PROBE = 64
"""Every this many steps, two steps use the length that was not tried for longest. The first also
proposes the draft tokens that the second verifies.
"""
TIMES = 8
"""Number of recent step times kept for each length. Their lower quartile is the cost: it ignores
the fastest step and steps that waited for other work.
"""
TRIES = 2
"""Number of steps with a length before it is judged."""
PRIOR = 0.25
"""Weight of the prior: each draft position is accepted as often as the one before it, the first one
in half of the cases.
"""


def lengths_of(tokens: int | None, most: int) -> tuple[int, ...]:
    """Return the draft lengths to choose from, ascending: only `tokens` if configured (not None),
    otherwise those of LENGTHS below `most`, and `most` itself.
    """
    return (tokens,) if tokens is not None else (*(each for each in LENGTHS if each < most), most)


@dataclass(slots=True)
class _Evidence:
    """Acceptance counts and times of the steps with a similar number of requests.

    For each draft position: `reached` counts requests with all draft tokens before it accepted, and
    `right` those with the draft token there accepted too. For each length: `seconds` of its recent
    steps, and the `last` step that used it.
    """

    reached: NDArray[np.float64]
    right: NDArray[np.float64]
    seconds: dict[int, deque[float]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


class LengthController:
    """Chooses the draft length among `lengths`, ascending. With one length there is no choice.

    `tokens` is the number of draft tokens to propose and verify. The choice maximises (1 + sum over
    j <= k of the product over i <= j of a_i) / c(B, k): the expected tokens per request of a step
    with B requests and k draft tokens, divided by the time of such a step. a_i is the acceptance
    rate at draft position i if all earlier positions were accepted. Both are kept by the power of
    two in which B lies. Never waits.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.tokens = lengths[-1]
        self._settled = self.tokens
        self._steps = self._changed = 0
        self._evidence: dict[int, _Evidence] = {}

    def fitting(self, tokens: int) -> int:
        """Return the smallest length of at least `tokens` draft tokens. 0 is always available.
        `tokens` must not exceed the largest length.
        """
        return next(each for each in (0, *self.lengths) if each >= tokens)

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        """Record a step that verified `tokens` draft tokens of each request in `seconds`, and
        accepted `accepted` int32[B] of them. `seconds` None: the step proposed another number for
        the next step, so its time says nothing.
        """
        if len(self.lengths) == 1:
            return
        known = self._of(requests)
        known.reached *= MEMORY
        known.right *= MEMORY
        counts = np.bincount(accepted, minlength=tokens + 1)[: tokens + 1]
        at_least = counts[::-1].cumsum()[::-1]
        known.reached[:tokens] += at_least[:tokens]
        known.right[:tokens] += at_least[1:]
        if seconds is not None:
            known.seconds.setdefault(tokens, deque(maxlen=TIMES)).append(seconds)

    def choose(self, requests: int) -> None:
        """Set `tokens` once per decode step of `requests` requests: how many draft tokens the step
        proposes and the next one verifies.
        """
        if len(self.lengths) == 1:
            return
        self._steps += 1
        known = self._of(requests)
        untried = [each for each in self.lengths if len(known.seconds.get(each, ())) < TRIES]
        if untried:
            self.tokens = untried[-1]
        elif self._steps % PROBE == 0:
            self.tokens = min(self.lengths, key=lambda each: known.last.get(each, 0))
        elif self._steps % PROBE > 1:
            self._settle(known)
            self.tokens = self._settled
        known.last[self.tokens] = self._steps

    def _settle(self, known: _Evidence) -> None:
        if self._steps - self._changed < DWELL:
            return
        emitted = self._emitted(known)
        values = {each: emitted[each] / _lower_quartile(known.seconds[each]) for each in self.lengths}
        best = max(values, key=values.__getitem__)
        if values[best] > MARGIN * values[self._settled]:
            self._settled, self._changed = best, self._steps

    def _emitted(self, known: _Evidence) -> list[float]:
        """Return the expected tokens per request of a step with 0, 1, ... draft tokens, one entry
        for each number up to the largest length."""
        found, rate, product = [1.0], 0.5, 1.0
        for reached, right in zip(known.reached.tolist(), known.right.tolist(), strict=True):
            rate = (right + PRIOR * rate) / (reached + PRIOR)
            product *= rate
            found.append(found[-1] + product)
        return found

    def _of(self, requests: int) -> _Evidence:
        most = self.lengths[-1]
        return self._evidence.setdefault(requests.bit_length(), _Evidence(np.zeros(most), np.zeros(most)))


class Started(NamedTuple):
    """A submitted verification of `tokens` draft tokens per request; `begin` is
    `time.perf_counter()` at its submit. `is_steady`: the step proposes the same number for the next
    step.
    """

    step: int
    requests: int
    tokens: int
    begin: float
    is_steady: bool


class StepTimes:
    """Times verifications from their submit (`begin`) to their result (`end`), and passes time and
    accepted draft tokens to a `LengthController`.
    """

    def __init__(self) -> None:
        self._started = deque[Started]()
        self._last_collect = 0.0

    def begin(self, started: Started) -> None:
        """Note a submitted verification, so that `took` can time it. Call it in the order of the
        steps."""
        self._started.append(started)

    def end(self, result: BatchResult, length: LengthController) -> None:
        """Let `length` learn from the result of a verification step that was just collected, as
        `took` does."""
        self.took(result.step, accepted_of(result), length)

    def took(self, step: int, accepted: NDArray[np.int32], length: LengthController) -> None:
        """Let `length` learn from step number `step`, which has just ended with `accepted` int32[B]
        accepted draft tokens. Its time is counted from its submit or from the previous collect,
        whichever is later. Ignores a step that was not noted with `begin`. Never waits.
        """
        now, before = time.perf_counter(), self._last_collect
        self._last_collect = now
        while self._started and self._started[0].step <= step:
            started = self._started.popleft()
            if started.step == step:
                seconds = now - max(before, started.begin) if started.is_steady else None
                length.learn(started.requests, started.tokens, accepted, seconds)


def accepted_of(result: BatchResult) -> NDArray[np.int32]:
    """Return int32[B]: the number of accepted draft tokens of each row of a verification step."""
    return result.token_offsets[1:] - result.token_offsets[:-1] - 1


def _lower_quartile(values: deque[float]) -> float:
    return sorted(values)[len(values) // 4]
