"""Sums of ranks between the kernels of a recorded step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import llama, save
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

pytestmark = pytest.mark.needs("graphs.native")


def test_sums_that_are_left_out_of_replays_are_caught(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=128)
    with RankedEngine(save(oracle, tmp_path), defects.not_replayed) as engine:
        results = engine.run(random_prompts(5, (5, 17)), 8)
        assert any(path.startswith("native") for path in engine.paths)
    with pytest.raises(AssertionError):
        check_logprobs(results, oracle, 1e-4)
