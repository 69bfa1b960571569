"""Layers of transformers' classes with states: a prompt may come in chunks of any size, also of two
tokens, in one batch with others."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.models.steps import Steps
from tests.models.transformers_cases import load, sizes_of, tiny_model

CHUNKS = tuple(product((1, 2, 3), repeat=2))
"""Tokens of two requests in each step; single-token requests come first, as the scheduler orders
them."""


@pytest.mark.parametrize("kind", ["jamba", "mamba2", "qwen3_next"])
def test_chunks_of_one_two_and_three_tokens_beside_each_other_give_what_whole_prompts_give(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_model(kind, sizes_of(kind))
    length = sum(size for size, _ in CHUNKS)
    ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits.log_softmax(-1)
    steps, done = Steps(load(model, tmp_path)), [0, 0]
    for sizes in CHUNKS:
        places = sorted((0, 1), key=lambda row: sizes[row] > 1)
        given = {row + 1: ids[row, done[row] : done[row] + sizes[row]].tolist() for row in places}
        expected = [wanted[row, done[row] : done[row] + sizes[row]] for row in places]
        torch.testing.assert_close(steps.logprobs(given), torch.cat(expected), rtol=0, atol=2e-4)
        done = [before + size for before, size in zip(done, sizes, strict=True)]
    assert done == [length, length]
