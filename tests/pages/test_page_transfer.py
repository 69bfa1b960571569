"""Prompts that one engine computes and another goes on from are the same texts as on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import llama, save
from tests.laws.engine import TOLERANCE, random_prompts
from tests.pages.pair import Pair, Single, Text

LENGTHS = (5, 4, 8, 13, 1, 30)
"""Within a page, at its end, of several, one token, and of several chunks where they are short."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Single]:
    engine = Single(folder, prefix_cache=False)
    yield engine
    engine.engine.close()


def check_same(found: dict[str, Text], wanted: dict[str, Text]) -> None:
    """Tokens are equal, log-probabilities within the tolerance of the laws."""
    assert found.keys() == wanted.keys()
    for name, text in found.items():
        other = wanted[name]
        assert (text.tokens, text.reason, text.error) == (other.tokens, other.reason, other.error), name
        np.testing.assert_allclose(text.logprobs, other.logprobs, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(text.prompt_logprobs, other.prompt_logprobs, atol=TOLERANCE, rtol=0)


def run_both(pair: Pair, alone: Single, prompts: list[list[int]], **sampling: Any) -> dict[str, Text]:
    """The same requests on both; what came of them on the pair."""
    for engine in (pair.decode, alone):
        for place, prompt in enumerate(prompts):
            engine.add(f"r{place}", prompt, **sampling)
    found = pair.run()
    check_same(found, alone.run())
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_one_engine(folder: Path, alone: Single, overlap: bool) -> None:
    with Pair(folder, overlap=overlap) as pair:
        run_both(pair, alone, random_prompts(1, LENGTHS))
