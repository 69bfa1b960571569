"""8-bit keys and values of window layers in the storage of other layers: the same numbers as in a
pool of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglcore_cpu.kernels.kv_pool import INT8
from tests.checkpoints import gemma3, save
from tests.laws.engine import Result, TokenEngine, random_prompts

pytestmark = pytest.mark.needs("graphs.native")


def run(folder: Path, kv_memory: str, memory: int) -> list[Result]:
    """Run texts that outgrow the window many times, with prefix hits and, in little memory,
    preemption."""
    engine = TokenEngine(
        folder,
        kv_memory=kv_memory,
        kv_cache_memory=memory,
        kv_cache_dtype="int8",
        graph="native",
        max_batch_tokens=8,
        max_model_len=96,
        page_size=4,
    )
    limits, cells = engine.worker.limits, engine.worker.runner.attn_backend.token_to_kv_pool
    assert cells.layout == INT8 and limits.window_unit == (2 if kv_memory == "shared" else 0)
    base = random_prompts(4, (33,))[0]
    texts = [base, *random_prompts(5, (5, 40, 21)), base[:21] + [7, 8]]
    found = [*engine.run(texts, 40, stagger=1), *engine.run(texts, 4)]
    stats = engine.scheduler.stats()
    assert stats.hit_tokens > 0 and (stats.retractions > 0) == (memory < 1 << 20)
    return found


def test_eight_bits_are_the_same_in_either_memory(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    oracle = gemma3(layer_types=kinds, num_hidden_layers=3, max_position_embeddings=96)
    folder, config = save(oracle, tmp_path), oracle.config
    page = 4 * 2 * config.num_key_value_heads * (config.head_dim + 4)
    for shared, split in zip(run(folder, "shared", 38 * page), run(folder, "split", 8 << 20), strict=True):
        assert shared.tokens == split.tokens
        np.testing.assert_allclose(shared.logprobs, split.logprobs, atol=1e-5, rtol=0)
