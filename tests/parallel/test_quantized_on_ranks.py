"""Quantised checkpoints on several ranks: scales are cut with their weights, and groups that would lie on two ranks are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.checkpoint.config import read_config
from sglcore.checkpoint.shards import check_divisible
from sglcore.device.errors import ConfigError
from sglcore.layers.parallel.cut import Cut
from sglcore.models.cut_weight import CutWeight
from sglcore.models.quantized import QuantizedWeight
from tests.checkpoints import gpt_oss, llama, save, with_mxfp4_experts
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.models import quantized_checkpoints
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

SEED = 5
CASES = quantized_checkpoints.CASES


def kept(engine: RankedEngine) -> str:
    """In which form its ranks keep the weights."""
    return next((row.effective for row in engine.started.ledger.rows if row.topic == "weights"), "plain")


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_logprobs_of_the_dense_model_that_is_meant(name: str, tmp_path: Path) -> None:
    oracle = quantized_checkpoints.make(CASES[name], tmp_path)
    prompts = random_prompts(SEED, (5, 17))
    with RankedEngine(tmp_path) as engine:
        found, form = engine.run(prompts, 6, score_prompts=True), kept(engine)
    check_logprobs(found, oracle, 5e-3 if "groups of" in form else 1e-4)
