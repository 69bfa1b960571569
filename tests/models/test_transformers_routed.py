"""Experts of classes that ask the host which of them were chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sglcore.models import transformers_routed
from sglcore.models.transformers_routed import take_routed
from tests.models.transformers_cases import compare, sizes_of, tiny_model

KINDS = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts", "jetmoe": "JetMoeParallelExperts"}


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_such_experts_give_what_their_own_forward_gives(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) < 2e-4


def both(kind: str, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """What the experts of a type give by their class, and here."""
    model = tiny_model(kind, sizes_of(kind))
    experts: Any = next(each for each in model.modules() if type(each).__name__ == KINDS[kind])
    with torch.no_grad():
        wanted = experts(x, *(each.tolist() if kind == "jetmoe" else each for each in given))
        take_routed(model)
        return wanted, experts(x, *given)


@pytest.mark.parametrize("kind", ["dbrx", "longcat_flash"])
def test_experts_that_nobody_chose_and_those_that_are_not_there_are_as_in_the_class(kind: str) -> None:
    most = 5 if kind == "longcat_flash" else 3
    chosen = torch.tensor([[0, 2], [2, 3], [0, most], [most, 3]])
    x, weights = torch.randn(1, 4, 64), torch.rand(4, 2)
    wanted, found = both(kind, x if kind == "dbrx" else x[0], chosen, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_rows_in_the_order_of_their_experts_some_of_which_have_none() -> None:
    wanted, found = both("jetmoe", torch.randn(6, 64), torch.tensor([3, 0, 1, 2]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_experts_whose_rows_are_lost_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(module: nn.Module, inputs: Tensor, expert_size: Tensor) -> Tensor:
        return linear(inputs, module.weight[0])  # pyright: ignore[reportIndexIssue, reportArgumentType]

    monkeypatch.setattr(transformers_routed, "_by_order", first)
    assert compare(tiny_model("jetmoe", sizes_of("jetmoe")), tmp_path) > 1e-2
