"""Every form of a model gives transformers' log-probabilities on several ranks: what is divided, what is whole, what is summed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.device.errors import ConfigError
from tests import checkpoints, deepseek_v4, latent
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

CONTEXT = 128
SEED = 5
Make = Callable[..., Any]

FORMS: MappingProxyType[str, tuple[Make, dict[str, Any], int]] = MappingProxyType(
    {
        "gpt-oss: sinks, and experts with biases": (checkpoints.gpt_oss, {}, 2),
        "olmo2: a norm of all heads": (checkpoints.olmo2, {}, 4),
        "granite: experts in one tensor": (checkpoints.granite_moe, {}, 2),
        "deepseek-v2: latent attention, experts in groups": (latent.deepseek_v2, {}, 2),
        "deepseek-v3: queries of low rank": (latent.deepseek_v3, {}, 4),
        "deepseek-v3.2: an indexer": (latent.deepseek_v32, {}, 2),
        "glm-5: an indexer for several layers": (latent.glm_moe_dsa, {}, 4),
        "deepseek-v4: blocks, streams, experts within a limit": (deepseek_v4.deepseek_v4, {"page_size": 16}, 2),
        "qwen3-next: the delta rule, gates of attention": (checkpoints.qwen3_next, {}, 2),
        "qwen3.5: the delta rule, dense": (checkpoints.qwen35, {}, 2),
        "lfm2: short convolutions": (checkpoints.lfm2, {}, 2),
        "lfm2, sparse": (checkpoints.lfm2_moe, {}, 4),
        "granite hybrid: a group of heads on several ranks": (checkpoints.granite_hybrid, {}, 2),
        "nemotron-h: states, experts without gates": (checkpoints.nemotron_h, {}, 2),
    }
)


@pytest.mark.parametrize("name", FORMS)
def test_ranks_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    make, settings, width = FORMS[name]
    oracle = make()
    chunk = int(np.random.default_rng(SEED).integers(6, 12))
    with RankedEngine(checkpoints.save(oracle, tmp_path), tp=width, max_batch_tokens=chunk, **settings) as engine:
        prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
        check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, 1e-4)
