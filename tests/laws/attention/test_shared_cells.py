"""Layers that attend to keys and values of another layer: chunks, prefix hits and graphs change
nothing, with poisoned buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths
from tests.models.transformers.test_transformers_models import sizes_of
from tests.models.transformers_cases import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = tiny_model("gemma4_text", sizes_of("gemma4_text"))
    yield save(oracle, tmp_path_factory.mktemp("shared")), oracle


def test_keys_and_values_that_layers_share_are_served_as_any_other(checkpoint: tuple[Path, Any], graph: str) -> None:
    folder, oracle = checkpoint
    settings = {"graph": graph, "poison": True, "max_batch_tokens": 8, "graph_token_buckets": (8,), "max_requests": 3}
    engine = TokenEngine(folder, model_impl="transformers", max_model_len=48, **settings)
    base = random_prompts(8, (21,))[0]
    check_logprobs(engine.run([base, *random_prompts(9, (5, 11))], 6, stagger=1), oracle)
    check_logprobs(engine.run([base[:13] + tail for tail in random_prompts(10, (3, 5))], 6), oracle)
    assert engine.scheduler.stats().hit_tokens
    check_paths(engine, graph)
    assert engine.worker.runner.attn_backend.token_to_kv_pool.num_layers == 2 < oracle.config.num_hidden_layers
