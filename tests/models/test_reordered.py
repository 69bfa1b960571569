"""Weight rows that a checkpoint stores in another order: plain weights through a model, quantised
ones by their codes and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglcore.models.weights.quantized_weight import QuantizedWeight, ScaledFloats, Stored, fill
from sglcore.models.weights.reordered_weight import ReorderedWeight
from tests.checkpoints import glm, oracle_logprobs, save
from tests.models.steps import Steps, load

IDS = [3, 17, 60, 5, 88, 41, 12, 9, 33]


def test_rows_in_the_checkpoints_order_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = glm()
    folder = save(oracle, tmp_path)
    assert (Steps(load(folder)).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().max() < 1e-4
    monkeypatch.setattr("sglcore.layers.torch_layers.halves_first", lambda heads, size, turned: np.arange(heads * size))
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
    assert torch.equal(found.values(slice(3, 6)), wanted[3:6]) and found.values(slice(2, 2)).shape == (0, 64)
    assert (codes is None) == (weight.as_codes() is None)
    assert codes is None or torch.equal(codes.values(slice(0, 6)), wanted)


def test_rows_that_move_within_their_head_are_computed_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = QuantizedWeight(CODES, SCALES, None, 4, 32)
    asked: list[slice] = []

    def values(self: QuantizedWeight, rows: slice) -> torch.Tensor:
        asked.append(rows)
        return torch.zeros(rows.stop - rows.start, 64)

    monkeypatch.setattr(QuantizedWeight, "values", values)
    found = ReorderedWeight(weight, torch.tensor([1, 0, 3, 2, 5, 4]))
    for first in (0, 2, 4):
        found.values(slice(first, first + 2))
    assert asked == [slice(0, 2), slice(2, 4), slice(4, 6)]
