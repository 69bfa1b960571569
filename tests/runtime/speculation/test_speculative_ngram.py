"""N-gram drafts: the tokens after an earlier occurrence of the text's last tokens, against a search
by hand."""

from __future__ import annotations

import random

import pytest
import torch

from sglcore.runtime.speculative.drafter import NONE
from sglcore.runtime.speculative.ngram_drafts import propose


def by_hand(text: list[int], tokens: int, least: int, most: int) -> list[int]:
    """Continue the latest earlier occurrence of the longest suffix; repeat the continuation if it
    is too short."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                found = text[end:]
                return [found[place % len(found)] for place in range(tokens)]
    return [NONE] * tokens


@pytest.mark.parametrize("seed", range(40))
def test_proposals_are_those_of_a_search_by_hand(seed: int) -> None:
    rnd = random.Random(seed)
    texts = [[rnd.randint(0, rnd.choice([1, 3, 9])) for _ in range(rnd.randint(1, 30))] for _ in range(5)]
    least = rnd.randint(1, 3)
    most, tokens = rnd.randint(least, 5), rnd.randint(1, 6)
    known = torch.full((5, 31), 7, dtype=torch.int32)
    for row, text in enumerate(texts):
        known[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    last = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    found = propose(known, last, tokens, least, most)
    assert found.tolist() == [by_hand(text, tokens, least, most) for text in texts]
