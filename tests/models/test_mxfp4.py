"""gpt-oss's experts in MXFP4 as published: read exactly, refused by name if shapes do not fit, and
reported in the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sglcore.core.errors import CheckpointError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.mxfp4 import dequantized
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import gpt_oss, oracle_logprobs, save, with_mxfp4_experts
from tests.models.steps import Steps, load

IDS = [3, 17, 60, 5, 88, 41, 12, 9, 33]


@pytest.fixture
def published(tmp_path: Path):
    """A checkpoint with experts as codes, and transformers' model with their values."""
    oracle = gpt_oss(hidden_size=64, intermediate_size=96)
    return oracle, with_mxfp4_experts(oracle, tmp_path)


def test_published_experts_are_read_exactly_and_the_ledger_says_what_they_take(published) -> None:
    oracle, folder = published
    ledger = DecisionLedger()
    found = Steps(load(folder, ledger=ledger)).logprobs({1: IDS})
    assert (found - oracle_logprobs(oracle, IDS)).abs().max() < 1e-4
    (row,) = [row for row in ledger.rows if row.topic == "weights"]
    assert "4 weights dequantised, being outside linear layers" in row.reason
    experts = 2 * 5 * 3 * 64 * 96
    grown = experts * 4 - experts * 17 // 32
    assert f"; weights outside linear layers take {grown / 2**20:.1f} MiB more than in the files" in row.reason


TABLE = KernelTable().replace(mxfp4_moe=reference_kernels.mxfp4_moe)


def test_experts_stay_in_4_bits_where_kernels_read_them(published) -> None:
    oracle, folder = published
    ledger = DecisionLedger()
    model = load(folder, kernels=TABLE, ledger=ledger)
    assert (Steps(model).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().max() < 1e-4
    (row,) = [row for row in ledger.rows if row.topic == "weights"]
    assert "4 weights of experts kept in 4-bit floats" in row.reason and "dequantised" not in row.reason
    plain = sum(parameter.nbytes for parameter in load(folder).weights.parameters)
    experts = 2 * 5 * 3 * 64 * 96
    assert plain - sum(parameter.nbytes for parameter in model.weights.parameters) == experts * 4 - experts * 17 // 32


def test_kernels_that_read_codes_read_plain_experts_too(tmp_path: Path) -> None:
    oracle = gpt_oss()
    found = Steps(load(save(oracle, tmp_path), kernels=TABLE)).logprobs({1: IDS})
    assert (found - oracle_logprobs(oracle, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda codes: codes[:, :1].contiguous(), r"has the shape \[5, 1, 3\]; wanted \[5, 64, 3\]"),
        (lambda codes: codes.float(), "has the type F32; wanted U8"),
    ],
)
def test_codes_that_do_not_fit_the_kernels_are_named(published, change, text: str) -> None:
    _, folder = published
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**weights, name: change(weights[name])}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        load(folder, kernels=TABLE)


def test_every_code_and_exponent_is_transformers_own_in_bfloat16() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for scale in (0, 1, 100, 127, 200, 254):
        scales = torch.full((1, 1, 16), scale, dtype=torch.uint8)
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(dequantized(blocks[0], scales[0]).T.bfloat16()[None], wanted)


def test_swapped_nibbles_would_be_noticed(published, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, folder = published
    monkeypatch.setattr(
        "sglcore.models.weights.mxfp4_experts.dequantized", lambda b, s: dequantized(b << 4 | b >> 4, s)
    )
    found = Steps(load(folder)).logprobs({1: IDS})
    assert (found - oracle_logprobs(oracle, IDS)).abs().max() > 1e-2


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_half_of_a_weight_is_named_by_what_is_missing(published, part: str) -> None:
    _, folder = published
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    del weights[f"{name}_{part}"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}_{part}' is not in the checkpoint, which has the other part"):
        load(folder)


def test_codes_of_another_shape_are_named(published) -> None:
    _, folder = published
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**weights, name: weights[name][:, :1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"down_proj_scales' in model.safetensors is U8 \[5, 1, 3\]; wanted U8 \[5, 64, 3\]"
    ):
        load(folder)
