"""Engines in half precision, for attention libraries that support no other dtype: log-probabilities
compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import llama, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts

TOLERANCE = 0.01
"""Tolerance of a log-probability in float16 over two layers, against float32; a wrong mask or page
changes it by tenths."""

SIZES = {"head_dim": 64, "max_position_embeddings": 128, "initializer_range": 0.1}


def checkpoint(folder: Path, make: Callable[..., Any] = llama) -> tuple[Any, Path]:
    """Return a random model with a head size that every library supports, rounded to float16, as
    oracle, and its saved checkpoint."""
    oracle = make(**SIZES)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.half().float())
    return oracle, save(oracle, folder)


def check(folder: Path, oracle: Any, device: str, attention: str, graph: str, **settings: Any) -> set[str]:
    """Run ragged requests that join late, in chunks, and compare every log-probability; returns the
    paths of the steps."""
    engine = TokenEngine(
        folder,
        device=device,
        dtype="float16",
        attention_backend=attention,
        graph=graph,
        page_size=settings.pop("page_size", 16),
        max_batch_tokens=24,
        graph_buckets=(1, 2, 4),
        **settings,
    )
    try:
        results = engine.run(random_prompts(5, (3, 19, 33)), 6, score_prompts=True, stagger=2)
    finally:
        engine.worker.close()
    check_logprobs(results, oracle, TOLERANCE)
    return engine.paths
