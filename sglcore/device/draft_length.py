"""How many proposals a step verifies: as many as bring the most tokens a second, by what was right and what steps took."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglcore.device.worker import BatchResult

LENGTHS = (0, 1, 3, 5, 7)
"""Numbers of proposals between which a start changes, besides its largest."""
MEMORY = 0.96
"""What a step leaves of the evidence before it: that of the last 25 steps counts most."""
MARGIN = 1.05
"""How much better another length must be."""
DWELL = 8
"""Steps after a change in which there is no other."""
PROBE = 64
"""Every so many steps two take the length that was not tried for longest: the first also makes so many proposals for the second."""
TIMES = 8
"""Steps of a length, of which all but the fastest and what waited for something else say what it costs: the lower quartile."""
TRIES = 2
"""Steps that a length is tried for before it is judged."""
PRIOR = 0.25
"""Weight of the guess that a place is right as often as the one before it, the first one every second time."""


def lengths_of(tokens: int | None, most: int) -> tuple[int, ...]:
    """The lengths of a start, ascending: the one that was asked for, or those up to `most`."""
    return (tokens,) if tokens is not None else (*(each for each in LENGTHS if each < most), most)


@dataclass(slots=True)
class _Evidence:
    """Of steps with about as many requests. At each place, of the requests whose proposals before it were right: how many there
    were, and how many whose proposal there was right too. By length: seconds of its last steps, and the step that took it."""

    reached: NDArray[np.float64]
    right: NDArray[np.float64]
    seconds: dict[int, deque[float]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


class LengthController:
    """Chooses among `lengths`, ascending; of one only there is nothing to choose.

    `tokens` is the number of proposals to make and verify. The choice maximises (1 + sum over j <= k of the product over i <= j of
    a_i) / c(B, k): the tokens that a step of B requests with k proposals is expected to emit for each, a_i being how often the
    proposal at place i is right where those before it are, over what such a step takes. Both are kept by the power of two in which
    B lies. Waits for nothing.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.tokens = lengths[-1]
        self._settled = self.tokens
        self._steps = self._changed = 0
        self._evidence: dict[int, _Evidence] = {}

    def fitting(self, tokens: int) -> int:
        """The least length of at least so many proposals; none need no length of their own."""
        return next(each for each in (0, *self.lengths) if each >= tokens)

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        """A step verified `tokens` proposals of each of its requests, of which `accepted` int32[B] were right, in `seconds` (None:
        it made another number of them for the next, so that its time tells nothing)."""
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
        """Set `tokens` for the steps from here on, of about so many requests."""
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
        """Tokens of a request that a step with 0, 1, ... proposals is expected to emit."""
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
    """A verification of so many proposals of each request, and `time.perf_counter()` when it was submitted. `is_steady`: as many
    are made for the next step."""

    step: int
    requests: int
    tokens: int
    begin: float
    is_steady: bool


class StepTimes:
    """Tells a controller what verifications brought and took."""

    def __init__(self) -> None:
        self._started = deque[Started]()
        self._last_collect = 0.0

    def begin(self, started: Started) -> None:
        """A verification was submitted."""
        self._started.append(started)

    def end(self, result: BatchResult, length: LengthController) -> None:
        """A step was collected."""
        self.took(result.step, accepted_of(result), length)

    def took(self, step: int, accepted: NDArray[np.int32], length: LengthController) -> None:
        """A step has ended of whose proposals `accepted` int32[B] were right. What it took is the time since it was submitted, or since
        the one before it was collected: nothing waits for it."""
        now, before = time.perf_counter(), self._last_collect
        self._last_collect = now
        while self._started and self._started[0].step <= step:
            started = self._started.popleft()
            if started.step == step:
                seconds = now - max(before, started.begin) if started.is_steady else None
                length.learn(started.requests, started.tokens, accepted, seconds)


def accepted_of(result: BatchResult) -> NDArray[np.int32]:
    """int32[B]: how many proposals of each row were right."""
    return result.token_offsets[1:] - result.token_offsets[:-1] - 1


def _lower_quartile(values: deque[float]) -> float:
    return sorted(values)[len(values) // 4]
