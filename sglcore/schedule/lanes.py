"""How much of a prompt runs between two decode steps: total functions of numbers, and what is measured of steps.

A slice is an interval of a model's layers, over the tokens of one chunk; its cost is counted in token·layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

DEFAULT_BUDGET = 65_536
"""Token·layers of a slice where nothing is measured and none is asked for."""


def layers_now(tokens: int, budget: int, done: int, total: int) -> int:
    """Layers of the next slice of a prompt of `tokens`, of which `done` of `total` layers have run: 0 when none is left, else
    as many as the `budget` of token·layers holds, at least one. Total: no numbers make it raise."""
    left = max(0, total - done)
    return min(max(1, budget // max(tokens, 1)), left)


@dataclass(slots=True)
class Pace:
    """Slices by the clock: each takes at most `SHARE` of what a decode step takes alone, so that a running request waits at most
    1 + SHARE times as long for its next token. Seconds are running means; until both are known a slice is as small as one can be."""

    SHARE: ClassVar[float] = 0.7
    WEIGHT: ClassVar[float] = 0.3
    LEAST_TOKENS: ClassVar[int] = 64

    decode_seconds: float = 0.0
    token_layer_seconds: float = 0.0

    @property
    def budget(self) -> int:
        """Token·layers of a slice."""
        if not self.decode_seconds or not self.token_layer_seconds:
            return self.LEAST_TOKENS
        return max(1, int(self.SHARE * self.decode_seconds / self.token_layer_seconds))

    def tokens(self, most: int) -> int:
        """Of a chunk of at most `most` tokens, those of which one layer fits in a slice; no fewer than LEAST_TOKENS, with which a
        layer's weights are read for too little."""
        return min(most, max(self.LEAST_TOKENS, self.budget))

    def saw_decode(self, seconds: float) -> None:
        """A step of decode rows alone took so long."""
        self.decode_seconds = self._mean(self.decode_seconds, seconds)

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """So many layers over so many tokens took so long."""
        self.token_layer_seconds = self._mean(self.token_layer_seconds, seconds / max(1, tokens * layers))

    def _mean(self, mean: float, value: float) -> float:
        return value if not mean else mean + self.WEIGHT * (value - mean)


@dataclass(slots=True)
class Fixed:
    """Slices of a budget that was asked for, whatever they take."""

    budget: int = DEFAULT_BUDGET

    def tokens(self, most: int) -> int:
        """All of them: layers are divided, tokens are not."""
        return most

    def saw_decode(self, seconds: float) -> None:
        """Nothing follows from it."""

    def saw_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """Nothing follows from it."""
