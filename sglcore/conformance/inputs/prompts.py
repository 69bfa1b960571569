"""Random prompts of the kit's vocabulary. Does not use torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCAB = 97
"""Tokens in the vocabulary of the kit's models."""
FIRST_TOKEN = 3
"""Token ids below this have a meaning in some models; the kit draws none of them."""


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int = VOCAB) -> list[list[int]]:
    """Return one prompt for each of `lengths`, lists of random token ids that are not special;
    equal arguments give equal prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(FIRST_TOKEN, vocab_size, size=length).tolist() for length in lengths]
