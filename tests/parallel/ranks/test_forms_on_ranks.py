"""Every model form gives transformers' log-probabilities on several ranks: parts that are divided,
replicated and summed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from tests import checkpoints, deepseek_v4, latent
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

SEED = 5
Make = Callable[..., Any]

FORMS: MappingProxyType[str, tuple[Make, tuple[int, ...], dict[str, Any]]] = MappingProxyType(
    {
        "gpt-oss: sinks, and experts with biases": (checkpoints.gpt_oss, (2, 4), {}),
        "olmo2: a norm of all heads": (checkpoints.olmo2, (2, 4), {}),
        "granite: experts in one tensor": (checkpoints.granite_moe, (2, 4), {}),
        "deepseek-v2: latent attention, experts in groups": (latent.deepseek_v2, (2, 4), {}),
        "deepseek-v3: queries of low rank": (latent.deepseek_v3, (2, 4), {}),
        "deepseek-v3.2: an indexer": (latent.deepseek_v32, (2, 4), {}),
        "glm-5: an indexer for several layers": (latent.glm_moe_dsa, (2, 4), {}),
        "deepseek-v4: blocks, streams, experts within a limit": (deepseek_v4.deepseek_v4, (2,), {"page_size": 16}),
        "qwen3-next: the delta rule, gates of attention": (checkpoints.qwen3_next, (2,), {}),
        "qwen3.5: the delta rule, dense": (checkpoints.qwen35, (2,), {}),
        "qwen4-exp: streams, tables of n-grams": (checkpoints.qwen4_exp, (2,), {}),
        "lfm2: short convolutions": (checkpoints.lfm2, (2, 4), {}),
        "lfm2, sparse": (checkpoints.lfm2_moe, (2, 4), {}),
        "granite hybrid: a group of heads on several ranks": (checkpoints.granite_hybrid, (2, 4), {}),
        "nemotron-h: states, experts without gates": (checkpoints.nemotron_h, (2, 4), {}),
    }
)
"""{name: (model, tensor parallel sizes, settings)}"""
CASES = [(name, width) for name, (_, widths, _) in FORMS.items() for width in widths]


@pytest.mark.parametrize(("name", "width"), CASES)
def test_ranks_give_the_logprobs_of_transformers(name: str, width: int, tmp_path: Path) -> None:
    """Chunks, arrivals while others run, and prefix cache hits."""
    make, _, settings = FORMS[name]
    oracle = make()
    chunk = int(np.random.default_rng(SEED).integers(6, 12))
    with RankedEngine(checkpoints.save(oracle, tmp_path), tp=width, max_batch_tokens=chunk, **settings) as engine:
        prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
        check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, 1e-4)
        check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 6), oracle, 1e-4)
        assert engine.scheduler.stats().hit_tokens > 15


OTHERS: MappingProxyType[str, tuple[Make, dict[str, Any]]] = MappingProxyType(
    {
        "gemma: one head of keys, scaled embeddings": (checkpoints.gemma, {}),
        "gemma2: caps": (checkpoints.gemma2, {}),
        "gemma3": (checkpoints.gemma3, {}),
        "glm: rotated pairs are neighbours": (checkpoints.glm, {}),
        "granite": (checkpoints.granite, {}),
        "phi3: fused projections, fused gates": (checkpoints.phi3, {}),
        "qwen2, sparse: a gate of the shared block": (checkpoints.qwen2_moe, {}),
        "qwen3, sparse": (checkpoints.qwen3_moe, {}),
        "qwen3.5, sparse": (checkpoints.qwen35_moe, {}),
        "mixtral": (checkpoints.mixtral, {}),
        "olmo3": (checkpoints.olmo3, {}),
        "glm-4.7-flash": (latent.glm4_moe_lite, {}),
        "lfm2: biases of convolutions": (checkpoints.lfm2, {"conv_bias": True}),
        "granite hybrid: biases around states": (checkpoints.granite_hybrid, {"mamba_proj_bias": True}),
        "nemotron-h: experts in a narrower space": (checkpoints.nemotron_h, {"moe_latent_size": 12}),
        "deepseek-v2: queries of low rank, biases": (latent.deepseek_v2, {"q_lora_rank": 16, "attention_bias": True}),
        "deepseek-v4: four groups": (deepseek_v4.deepseek_v4, {"o_groups": 4}),
    }
)
"""{name: (model, changes of its configuration)}"""


@pytest.mark.parametrize("name", OTHERS)
def test_so_does_every_other_model(name: str, tmp_path: Path) -> None:
    make, changes = OTHERS[name]
    oracle, is_v4 = make(**changes), make is deepseek_v4.deepseek_v4
    settings: dict[str, Any] = {"page_size": 16, "tp": 4} if is_v4 else {}
    with RankedEngine(checkpoints.save(oracle, tmp_path), max_batch_tokens=9, **settings) as engine:
        check_logprobs(engine.run(random_prompts(SEED, (5, 17)), 8, score_prompts=True, stagger=2), oracle, 1e-4)


@pytest.mark.parametrize(
    ("defect", "make", "width"),
    [
        (defects.bias_on_every_rank, checkpoints.gpt_oss, 2),
        (defects.neighbours_in_halves, checkpoints.gpt_oss, 2),
        (defects.own_norms, checkpoints.olmo2, 2),
        (defects.own_norms, checkpoints.granite_hybrid, 4),
        (defects.first_heads, latent.deepseek_v3, 2),
        (defects.first_heads, checkpoints.qwen35, 2),
        (defects.one_run, checkpoints.qwen3_next, 2),
        (defects.one_run, checkpoints.nemotron_h, 2),
        (defects.one_run, checkpoints.lfm2, 2),
    ],
)
def test_a_defect_of_what_is_divided_is_caught(
    defect: Callable[[int], None], make: Make, width: int, tmp_path: Path
) -> None:
    oracle = make()
    with RankedEngine(checkpoints.save(oracle, tmp_path), defect, tp=width) as engine, pytest.raises(AssertionError):
        check_logprobs(engine.run(random_prompts(SEED, (5, 17)), 8), oracle, 1e-4)


def test_a_rank_keeps_the_rows_of_its_own_heads_and_states_and_of_what_all_share(tmp_path: Path) -> None:
    """Bytes of a page and of a state: latent rows are replicated on every rank, heads are
    divided."""
    found = {}
    for make in (latent.deepseek_v3, checkpoints.qwen3_next):
        folder = checkpoints.save(make(), tmp_path / make.__name__)
        for width in (1, 2):
            engine = TokenEngine(folder) if width == 1 else RankedEngine(folder, tp=width)
            limits = engine.worker.limits
            found[make.__name__, width] = limits.kv_bytes / limits.num_pages, limits.state_bytes / limits.max_requests
            engine.worker.close()
    assert found["deepseek_v3", 1] == found["deepseek_v3", 2]
    whole, half = found["qwen3_next", 1], found["qwen3_next", 2]
    assert (whole[0], whole[1]) == (2 * half[0], 2 * half[1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (deepseek_v4.deepseek_v4, "tp is 4, and this model has 2 groups of attention heads; wanted one of 1, 2"),
        (checkpoints.qwen35, "tp is 4, and this model has 2 key heads of linear attention; wanted one of 1, 2"),
    ],
)
def test_a_width_that_does_not_divide_is_refused_with_those_that_do(make: Make, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RankedEngine(checkpoints.save(make(), tmp_path), tp=4)
    assert said in str(caught.value)
