"""Rows that a checkpoint has in another order: plain weights through a model, quantised ones by
their codes and their values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglcore.models.quantized import QuantizedWeight, ScaledFloats, Stored, fill
from sglcore.models.reordered import ReorderedWeight
from tests.checkpoints import glm, oracle_logprobs, save
from tests.models.steps import Steps, load

IDS = [3, 17, 60, 5, 88, 41, 12, 9, 33]


def test_rows_in_the_checkpoints_order_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = glm()
    folder = save(oracle, tmp_path)
    assert (Steps(load(folder)).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().max() < 1e-4
    monkeypatch.setattr("sglcore.layers.build.halves_first", lambda heads, size, turned: np.arange(heads * size))
    assert (Steps(load(folder)).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().max() > 1e-2


CODES = torch.randint(0, 16, (6, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
SCALES = torch.rand(6, 2, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.mark.parametrize(
    "weight",
    [
        QuantizedWeight(CODES, SCALES, None, 4, 32),
        QuantizedWeight(CODES, SCALES, SCALES * 8, 4, 32),
        ScaledFloats(CODES.float().to(torch.float8_e4m3fn), SCALES[:3], (2, 32)),
    ],
    ids=["codes", "codes with zeros", "floats"],
)
def test_a_quantised_weight_has_its_rows_in_the_new_order(weight: Stored) -> None:
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    found, wanted = ReorderedWeight(weight, order), weight.values(slice(0, 6))[order]
    target = torch.empty(6, 64)
    fill(found, target)
    codes = found.as_codes()
    assert found.shape == (6, 64) and found.form == weight.form
    assert torch.equal(target, wanted) and torch.equal(found.values(slice(1, 3)), wanted[1:3])
    assert (codes is None) == (weight.as_codes() is None)
    assert codes is None or torch.equal(codes.values(slice(0, 6)), wanted)
