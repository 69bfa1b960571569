"""How much of a prompt runs between two decode steps: total functions of numbers, and what is measured of steps.

A slice is an interval of a model's layers, over the tokens of one chunk; its cost is counted in token·layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


def layers_now(tokens: int, budget: int, done: int, total: int) -> int:
    """Layers of the next slice of a prompt of `tokens`, of which `done` of `total` layers have run: 0 when none is left, else
    as many as the `budget` of token·layers holds, at least one. Total: no numbers make it raise."""
    left = max(0, total - done)
    return min(max(1, budget // max(tokens, 1)), left)


FLAT = 1.2
"""A layer over twice as many tokens that takes no more than so many times as long is bound by something else than tokens."""


@dataclass(slots=True)
class Pace:
    """Slices by the clock: each takes at most `SHARE` of what a decode step takes alone, so that a running request waits about
    1 + SHARE times as long for its next token. Seconds are running means, those of a layer for each power of two of tokens: where
    launching a layer costs more than its arithmetic, more tokens cost no more. Until both are known a slice is as small as one can
    be. What a decode step takes alone is asked again after `LASTS` slices. What is known of a layer counts as much as `KNOWN` layers:
    of a slice that ran beside two steps, either may be seen to have been longer, and their sum is right."""

    SHARE: ClassVar[float] = 0.7
    WEIGHT: ClassVar[float] = 0.3
    KNOWN: ClassVar[int] = 16
    SURELY: ClassVar[int] = 4
    LEAST_TOKENS: ClassVar[int] = 64
    LASTS: ClassVar[int] = 64

    decode_seconds: float = 0.0
    layer_seconds: dict[int, float] = field(default_factory=dict)
    slices: int = 0

    def budget(self, tokens: int) -> int:
        """Token·layers of a slice of a chunk of `tokens`."""
        seconds = self.seconds_of(tokens)
        return max(1, tokens) * max(1, int(self.SHARE * self.decode_seconds / seconds)) if seconds else max(1, tokens)

    def tokens(self, most: int) -> int:
        """Of a chunk of at most `most` tokens, those of which one layer fits in a slice, or costs hardly more than one over half of
        them: more tokens make better use of a launch, and of reading weights. A size that was not tried is tried once half of it was. No
        fewer than LEAST_TOKENS."""
        chosen, limit = self.LEAST_TOKENS, self.SHARE * self.decode_seconds
        while chosen < most and chosen in self.layer_seconds:
            if self.layer_seconds.get(2 * chosen, 0.0) > max(limit, FLAT * self.layer_seconds[chosen]):
                break
            chosen *= 2
        return min(most, chosen)

    def seconds_of(self, tokens: int) -> float:
        """A layer over so many tokens, at most: by what fewer took for each of them, or by what more took. 0: nothing is known."""
        place = bucket(tokens)
        if place in self.layer_seconds:
            return self.layer_seconds[place]
        fewer = max((size for size in self.layer_seconds if size < place), default=0)
        bounds = [seconds for size, seconds in self.layer_seconds.items() if size > place]
        bounds += [self.layer_seconds[fewer] * place / fewer] if fewer else []
        return min(bounds, default=0.0)

    @property
    def wants_quiet(self) -> bool:
        """What a decode step takes alone is not known, or was long ago."""
        return not self.decode_seconds or self.slices >= self.LASTS

    def saw_decode(self, seconds: float) -> None:
        """A step of decode rows with no slice beside it took so long."""
        self.decode_seconds += (self.WEIGHT if self.decode_seconds else 1.0) * (seconds - self.decode_seconds)
        self.slices = 0
        self._ask_again()

    def _ask_again(self) -> None:
        """Forget what a layer over more tokens took where that can not be how long it takes, more than `SURELY` times as long as one
        over half of them: a kernel was compiled, or the machine was busy."""
        for size, seconds in list(self.layer_seconds.items()):
            if seconds > self.SURELY * self.layer_seconds.get(size // 2, seconds):
                del self.layer_seconds[size]

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """So many layers over so many tokens took so long, or made a decode step so much longer: it counts as a hundredth of that at
        least."""
        place, took = bucket(tokens), max(seconds, self.decode_seconds / 100)
        known = self.KNOWN if place in self.layer_seconds else 0
        total = known * self.layer_seconds.get(place, 0.0) + took
        self.layer_seconds[place] = total / (known + max(1, layers))
        self.slices += 1


def bucket(tokens: int) -> int:
    """The power of two at or above `tokens`."""
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(slots=True)
class Fixed:
    """Slices of as many token·layers as were asked for, whatever they take."""

    asked: int
    decode_seconds: float = 0.0

    def budget(self, tokens: int) -> int:
        """What was asked for."""
        return self.asked

    def tokens(self, most: int) -> int:
        """All of them: layers are divided, tokens are not."""
        return most

    @property
    def wants_quiet(self) -> bool:
        """Nothing is measured."""
        return False

    def saw_decode(self, seconds: float) -> None:
        """Nothing follows from it."""

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """Nothing follows from it."""
