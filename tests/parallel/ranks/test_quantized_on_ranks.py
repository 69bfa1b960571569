"""Quantised checkpoints on several ranks: scales are cut with their weights, and groups that would
cross ranks are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.checkpoint.model_config import read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.core.errors import ConfigError
from sglcore.layers.rank_part import Cut
from sglcore.models.weights.quantized_weight import QuantizedWeight
from sglcore.models.weights.rank_weight import CutWeight
from sglcore.worker.topology import Topology
from tests import deepseek_v4
from tests.checkpoints import gpt_oss, llama, save, with_mxfp4_experts
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.models import quantized_checkpoints
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

SEED = 5
CASES = quantized_checkpoints.CASES


PLAIN: dict[str, Any] = {"kernels": "reference"}
"""Kernels that do not round activations."""


def check(folder: Path, oracle: Any, defect: Any = None, **settings: Any) -> str:
    """Check the ranks' log-probabilities against the oracle; return the packed form of the
    weights."""
    with RankedEngine(folder, defect, **PLAIN, **settings) as engine:
        check_logprobs(engine.run(random_prompts(SEED, (5, 17)), 6, score_prompts=True), oracle, 1e-4)
        return next((row.reason for row in engine.started.ledger.rows if row.topic == "weights"), "plain")


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_logprobs_of_the_dense_model_that_is_meant(name: str, tmp_path: Path) -> None:
    oracle = quantized_checkpoints.make(CASES[name], tmp_path)
    assert "linear layers dequantised to float32" in check(tmp_path, oracle)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.form is not None])
def test_codes_are_cut_with_their_scales_and_kept(name: str, tmp_path: Path) -> None:
    """With kernels that read the codes."""
    oracle = quantized_checkpoints.make(CASES[name], tmp_path)
    assert "linear layers dequantised" not in check(tmp_path, oracle, defects.reads_codes)


@pytest.mark.parametrize(
    ("name", "defect"), [("gptq", defects.scales_of_the_first), ("float8-blocks", defects.scales_of_one_place)]
)
def test_scales_that_are_not_cut_with_their_weights_are_caught(name: str, defect: Any, tmp_path: Path) -> None:
    oracle = quantized_checkpoints.make(CASES[name], tmp_path)
    with pytest.raises(AssertionError):
        check(tmp_path, oracle, defect)


@pytest.mark.needs("host")
@pytest.mark.parametrize("tp", [2, 4])
def test_weights_are_rounded_by_each_rank(tp: int, tmp_path: Path) -> None:
    """With an error near that of one rank."""
    oracle = llama(hidden_size=128, intermediate_size=512, head_dim=32)
    folder = save(oracle, tmp_path)
    given: dict[str, Any] = {"quantize": "int8"}
    engine = TokenEngine(folder, **given)
    alone = engine.run(random_prompts(SEED, (5, 17)), 6, score_prompts=True)
    with RankedEngine(folder, tp=tp, **given) as ranks:
        divided = ranks.run(random_prompts(SEED, (5, 17)), 6, score_prompts=True)
    errors = [error(found, oracle) for found in (alone, divided)]
    assert 0 < errors[1] < 1.3 * errors[0] < 0.2, errors


def error(results: Any, oracle: Any) -> float:
    """The mean difference from transformers' log-probabilities."""
    found = []
    for result in results:
        ids = result.prompt + result.tokens
        with torch.no_grad():
            logprobs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [float(logprobs[place - 1, ids[place]]) for place in range(1, len(ids))]
        found += [
            abs(mine - theirs) for mine, theirs in zip(result.prompt_logprobs + result.logprobs, wanted, strict=True)
        ]
    return sum(found) / len(found)


@pytest.mark.parametrize("reads", [False, True])
def test_experts_in_4_bit_floats_are_cut_by_groups(reads: bool, tmp_path: Path) -> None:
    oracle = gpt_oss(hidden_size=64, intermediate_size=128)
    folder = with_mxfp4_experts(oracle, tmp_path)
    told = check(folder, oracle, defects.reads_codes if reads else None)
    assert ("4 weights of experts kept in 4-bit floats" in told) == reads


def test_groups_of_experts_that_would_lie_on_two_ranks_are_refused_where_codes_are_read(tmp_path: Path) -> None:
    oracle = gpt_oss(hidden_size=64, intermediate_size=96)
    folder = with_mxfp4_experts(oracle, tmp_path)
    check(folder, oracle)
    with pytest.raises(
        ConfigError, match=r"96 intermediate features of an expert have scales in groups of 32; wanted one of 1"
    ):
        check(folder, oracle, defects.reads_codes)


def test_groups_that_would_lie_on_two_ranks_are_refused_with_the_widths_that_fit(tmp_path: Path) -> None:
    quantized_checkpoints.make(CASES["gptq"], tmp_path)
    config = read_config(tmp_path)
    check_topology(config, Topology(2))
    with pytest.raises(ConfigError, match=r"self_attn.o_proj in groups of 32; wanted one of 1, 2; set --tp"):
        check_topology(config, Topology(4))


def codes(rows: int, columns: int, group: int, zeros: bool) -> QuantizedWeight:
    """Random codes, scales and zero points."""
    drawn = torch.Generator().manual_seed(rows)
    scales = torch.rand(rows, columns // group, generator=drawn)
    offsets = torch.randint(1, 15, scales.shape, generator=drawn).float() if zeros else None
    return QuantizedWeight(
        torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=drawn), scales, offsets, 4, group
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (Cut(0, 12, ((1, 3), (7, 12))), (7, 16)),
        (Cut(0, 12, ((10, 12),)), (5, 16)),
        (Cut(0, 12, ()), (5, 16)),
        (Cut(1, 16, ((4, 12),)), (12, 8)),
        (Cut(1, 16, ((6, 12),)), (12, 6)),
        (Cut(1, 16, ((4, 10),)), (12, 6)),
    ],
    ids=[
        "two ranges of rows",
        "rows behind the end",
        "only padding",
        "whole groups",
        "the end of a group",
        "the start of a group",
    ],
)
def test_a_part_has_the_values_of_its_place(cut: Cut, shape: tuple[int, int], zeros: bool) -> None:
    whole = codes(12, 16, 4, zeros)
    wanted = torch.empty(shape)
    cut.copy(whole.values(slice(None)), wanted)
    part = CutWeight(whole, cut, shape)
    assert torch.equal(part.values(slice(None)), wanted)
    assert torch.equal(torch.cat([part.values(slice(0, 2)), part.values(slice(2, None))]), wanted)
    crosses = cut.dim == 1 and any(place % 4 for part in cut.ranges for place in part)
    assert ("divided between two ranks" in part.form) == crosses
    kept = part.as_codes()
    assert (kept is None) == crosses
    if kept is not None:
        assert torch.equal(kept.values(slice(None)), wanted) and kept.group == 4


def test_blocks_of_8_bit_floats_have_the_values_that_they_stand_for(tmp_path: Path) -> None:
    """For all projections and experts of DeepSeek-V4, with blocks that cross two ranks."""
    whole = deepseek_v4.with_published_names(deepseek_v4.deepseek_v4(), tmp_path)
    coded, plain = deepseek_v4.with_float8(whole)
    found = []
    for folder in (coded, plain):
        with RankedEngine(folder, page_size=16, **PLAIN) as engine:
            found.append(engine.run(random_prompts(SEED, (5, 17)), 6, score_prompts=True))
    coded_told, plain_told = ([(r.tokens, r.logprobs, r.prompt_logprobs) for r in each] for each in found)
    assert coded_told == plain_told
