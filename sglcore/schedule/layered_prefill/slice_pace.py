"""Choose how much of a prompt runs between two decode steps, from measured times. Pure arithmetic
that never raises.

A slice is an interval of the model's layers over the tokens of one chunk. Its cost is counted in
token·layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


def layers_now(tokens: int, budget: int, done: int, total: int) -> int:
    """Return the number of layers in the next slice of a chunk of `tokens` tokens, after `done` of
    `total` layers: those that fit in `budget` token·layers, at least 1, or 0 if no layer is left.
    Defined for all numbers.
    """
    left = max(0, total - done)
    return min(max(1, budget // max(tokens, 1)), left)


FLAT = 1.2
"""If twice the tokens take at most this many times as long, the time of a layer does not depend on
the tokens.
"""


@dataclass(slots=True)
class Pace:
    """Slices limited by time: a slice takes at most `SHARE` of the time of a decode step that runs
    alone. A running request then waits about 1 + SHARE times as long for its next token.

    Until both times are known, a slice has the minimum size.
    """

    SHARE: ClassVar[float] = 0.7
    """The time of a slice as a fraction of a decode step's, at most."""
    WEIGHT: ClassVar[float] = 0.3
    """The weight of a new measurement in a running mean."""
    KNOWN: ClassVar[int] = 16
    """A known layer time has the weight of this many layers. A slice may overlap two decode steps;
    either may appear longer, and only the sum is correct."""
    SURELY: ClassVar[int] = 4
    """A layer time is implausible if it is more than this many times that of half the tokens."""
    LEAST_TOKENS: ClassVar[int] = 64
    """The smallest chunk that is cut into slices."""
    LASTS: ClassVar[int] = 64
    """Slices after which the time of a decode step alone is measured again."""

    decode_seconds: float = 0.0
    """Running mean of a decode step that runs alone, in seconds. 0: not known."""
    layer_seconds: dict[int, float] = field(default_factory=dict)
    """Running mean of a layer, in seconds, by powers of two of tokens: more tokens cost nothing
    while the launch of a layer takes longer than its arithmetic."""
    slices: int = 0
    """Slices since the time of a decode step alone was measured."""

    def budget(self, tokens: int) -> int:
        """Return the token·layers of the next slice of a chunk of `tokens` tokens: the layers that
        the measured times allow, at least one; one layer while a time is unknown."""
        seconds = self.seconds_of(tokens)
        return max(1, tokens) * max(1, int(self.SHARE * self.decode_seconds / seconds)) if seconds else max(1, tokens)

    def tokens(self, most: int) -> int:
        """Return the chunk size: a power of two from LEAST_TOKENS up, at most `most`.

        It grows while one layer fits in a slice, or takes at most FLAT times as long as over half
        the tokens: larger chunks amortise launches and weight reads. A size is tried once half of
        it was measured.
        """
        chosen, limit = self.LEAST_TOKENS, self.SHARE * self.decode_seconds
        while chosen < most and chosen in self.layer_seconds:
            if self.layer_seconds.get(2 * chosen, 0.0) > max(limit, FLAT * self.layer_seconds[chosen]):
                break
            chosen *= 2
        return min(most, chosen)

    def seconds_of(self, tokens: int) -> float:
        """Return the time of a layer over `tokens` tokens, if measured, or else an upper bound: the
        time of fewer tokens in proportion, or the time of more tokens. 0: nothing is known.
        """
        place = bucket(tokens)
        if place in self.layer_seconds:
            return self.layer_seconds[place]
        fewer = max((size for size in self.layer_seconds if size < place), default=0)
        bounds = [seconds for size, seconds in self.layer_seconds.items() if size > place]
        bounds += [self.layer_seconds[fewer] * place / fewer] if fewer else []
        return min(bounds, default=0.0)

    @property
    def wants_quiet(self) -> bool:
        """Whether a decode step must run alone to be measured: its time is unknown or old."""
        return not self.decode_seconds or self.slices >= self.LASTS

    def saw_decode(self, seconds: float) -> None:
        """Record the time of a decode step that ran without a slice."""
        self.decode_seconds += (self.WEIGHT if self.decode_seconds else 1.0) * (seconds - self.decode_seconds)
        self.slices = 0
        self._ask_again()

    def _ask_again(self) -> None:
        """Forget implausible layer times, more than `SURELY` times that of half the tokens, so that
        they are measured again. Causes are the compilation of a kernel, or a busy machine.
        """
        for size, seconds in list(self.layer_seconds.items()):
            if seconds > self.SURELY * self.layer_seconds.get(size // 2, seconds):
                del self.layer_seconds[size]

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """Record that `layers` layers over `tokens` tokens took `seconds`, or made a decode step
        that much longer. A slice counts as at least 1/100 of a decode step.
        """
        place, took = bucket(tokens), max(seconds, self.decode_seconds / 100)
        known = self.KNOWN if place in self.layer_seconds else 0
        total = known * self.layer_seconds.get(place, 0.0) + took
        self.layer_seconds[place] = total / (known + max(1, layers))
        self.slices += 1


def bucket(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`."""
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(slots=True)
class Fixed:
    """Slices of the configured size `asked`, in token·layers, with the interface of `Pace` and
    without measurements.
    """

    asked: int
    decode_seconds: float = 0.0

    def budget(self, tokens: int) -> int:
        """Return the configured size."""
        return self.asked

    def tokens(self, most: int) -> int:
        """Return `most`: slices divide layers, not tokens."""
        return most

    @property
    def wants_quiet(self) -> bool:
        """False: nothing is measured."""
        return False

    def saw_decode(self, seconds: float) -> None:
        """Ignore the time."""

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """Ignore the time."""
