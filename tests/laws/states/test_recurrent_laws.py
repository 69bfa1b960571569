"""A model without any attention: chunks, reused request slots, prefix hits and graphs change
nothing, and the KV cache is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import mamba2, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = mamba2()
    yield save(oracle, tmp_path_factory.mktemp("recurrent")), oracle


def test_a_model_without_attention_is_served_as_any_other(checkpoint: tuple[Path, Any], graph: str) -> None:
    folder, oracle = checkpoint
    settings = {"graph": graph, "poison": True, "max_model_len": 96}
    engine = TokenEngine(folder, max_batch_tokens=8, max_requests=3, graph_token_buckets=(8,), **settings)
    base = random_prompts(8, (21,))[0]
    check_logprobs(engine.run([base, *random_prompts(9, (5, 11, 3))], 6, stagger=1, score_prompts=True), oracle)
    for seed in (10, 11):
        check_logprobs(engine.run([base[:13] + tail for tail in random_prompts(seed, (3, 5))], 6), oracle)
    assert engine.scheduler.stats().snapshot_hits > 1
    check_paths(engine, graph)
    assert engine.worker.runner.attn_backend.token_to_kv_pool.num_layers == 0
