"""Every form of a model in shards of requests: an idle one keeps its states and rows, and what crosses shards is transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import checkpoints
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel.engine import RankedEngine
from tests.parallel.test_forms_on_ranks import FORMS, SEED


@pytest.mark.parametrize("name", FORMS)
def test_shards_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    """Arrivals while others run, one request alone, and hits of the prefix cache."""
    make, _, settings = FORMS[name]
    oracle = make()
    with RankedEngine(checkpoints.save(oracle, tmp_path), tp=2, dp=2, max_batch_tokens=9, **settings) as engine:
        prompts = random_prompts(SEED, (1, 5, 30))
        check_logprobs(engine.run(prompts, 6, score_prompts=True, stagger=2), oracle, 1e-4)
        check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 4), oracle, 1e-4)
        assert engine.scheduler.stats().hit_tokens > 15
