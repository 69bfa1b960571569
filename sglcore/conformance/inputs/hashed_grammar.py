"""A stand-in for a grammar: a hash of all earlier tokens decides which tokens may follow, so that
the mask of another row, another step or another history does not fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PRIME = 0x100000001B3
WORD = (1 << 64) - 1
WINS = 1e6


class HashedMatcher:
    """Allows about `share` of the vocabulary after each token, at least one token. Implements
    `sglcore.schedule.request.Matcher`, and adds to logits by `change`."""

    def __init__(self, seed: int, vocab_size: int, share: float = 0.15) -> None:
        self.error = ""
        self._digests = [seed + 1]
        self._vocab_size, self._share = vocab_size, share

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool [V], a new array: the tokens that may come next, at least one."""
        drawn = np.random.default_rng(self._digests[-1]).random(self._vocab_size)
        return drawn <= max(self._share, drawn.min())

    def accept(self, token_id: int) -> bool:
        """Append a token and return True; if it is not allowed, append nothing, set `error`, and
        return False."""
        if not self.allowed()[token_id]:
            self.error = f"token {token_id} was not allowed"
            return False
        self._digests.append((self._digests[-1] ^ (token_id + 1)) * PRIME & WORD)
        return True

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens, and the error."""
        del self._digests[len(self._digests) - count :]
        self.error = ""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write `allowed` to the words int32 [N] of a mask, lowest bit first; bits after the
        vocabulary are 0."""
        bits = np.zeros(len(words) * 32, dtype=bool)
        bits[: self._vocab_size] = self.allowed()
        words[:] = np.packbits(bits, bitorder="little").view("<i4")

    def change(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the ids int32 [M] of the allowed tokens and what to add to their logits, float32
        [M]: for one of them a value that beats all other logits, 0 for the rest."""
        ids = np.flatnonzero(self.allowed()).astype(np.int32)
        return ids, np.where(np.arange(len(ids)) == self._digests[-1] % len(ids), WINS, 0).astype(np.float32)


def wins(seed: int, vocab_size: int, tokens: list[int]) -> bool:
    """Return whether each token of an output is the one that `change` of the grammar of this seed
    lets win; True for no tokens."""
    matcher = HashedMatcher(seed, vocab_size)
    for token in tokens:
        ids, values = matcher.change()
        if token != ids[values.argmax()]:
            return False
        matcher.accept(token)
    return True


def follows(seed: int, vocab_size: int, tokens: list[int]) -> bool:
    """Return whether every token of an output is one that the grammar of this seed allows at its
    place."""
    matcher = HashedMatcher(seed, vocab_size)
    return all(matcher.accept(token) for token in tokens)
