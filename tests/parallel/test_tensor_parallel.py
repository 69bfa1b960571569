"""A model on several ranks gives transformers' log-probabilities, whatever is divided, replicated or padded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe, save
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel.engine import RankedEngine

CONTEXT = 128
SEED = 5


def noted(make: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    return lambda: make(max_position_embeddings=CONTEXT, **changes)


MODELS: MappingProxyType[str, tuple[Callable[[], Any], int]] = MappingProxyType(
    {
        "llama: heads of keys are divided, the vocabulary is uneven": (noted(llama), 2),
        "llama: heads of keys are held twice": (noted(llama), 4),
        "qwen2: biases": (noted(qwen2), 2),
        "qwen3: norms of heads, a tied output layer": (noted(qwen3, tie_word_embeddings=True), 4),
        "qwen3: experts": (noted(qwen3_moe), 2),
        "glm4: experts, some shared": (noted(glm4_moe), 2),
        "mistral: windows": (noted(mistral, sliding_window=6), 2),
    }
)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    """Chunks, arrivals while others run, hits of the prefix cache, and retraction: all in one engine."""
    make, width = MODELS[name]
    oracle = make()
    rng = np.random.default_rng(SEED)
    with RankedEngine(
        save(oracle, tmp_path), tp=width, max_batch_tokens=int(rng.integers(6, 12)), poison=True
    ) as engine:
        prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
        check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle)
        check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 6), oracle)
        assert engine.scheduler.stats().hit_tokens > 20
