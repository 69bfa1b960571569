"""A model with its own attention in its class: chunks, ragged arrivals and graphs change
nothing."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import falcon, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths


def test_a_class_that_attends_by_itself_is_served_as_any_other(graph: str, tmp_path: Path) -> None:
    oracle = falcon()
    folder = save(oracle, tmp_path)
    engine = TokenEngine(
        folder, graph=graph, poison=True, max_model_len=96, max_batch_tokens=8, graph_token_buckets=(8,)
    )
    check_logprobs(engine.run(random_prompts(5, (21, 5, 30)), 8, stagger=1, score_prompts=True), oracle)
    check_paths(engine, graph)
