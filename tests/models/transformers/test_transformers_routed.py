"""Experts of classes that read the chosen experts on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sglcore.models.transformers_backend import host_routed_experts
from sglcore.models.transformers_backend.host_routed_experts import take_routed
from tests.models.transformers_cases import compare, load, sizes_of, tiny_model

KINDS = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts", "jetmoe": "JetMoeParallelExperts"}


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_such_experts_give_what_their_own_forward_gives(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) < 2e-4


def both(kind: str, x: Tensor, *given: Any, overflows: int | None = None) -> tuple[Tensor, Tensor]:
    """The output of a type's experts by its class and by our replacement. `overflows`: an expert
    with infinite weights."""
    model = tiny_model(kind, sizes_of(kind))
    experts: Any = next(each for each in model.modules() if type(each).__name__ == KINDS[kind])
    with torch.no_grad():
        for parameter in experts.parameters() if overflows is not None else ():
            (parameter if parameter.dim() == 3 else parameter.view(4, -1))[overflows] = float("inf")
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


@pytest.mark.parametrize("kind", ["dbrx", "longcat_flash"])
def test_an_expert_that_overflows_is_in_no_row_that_did_not_choose_it(kind: str) -> None:
    chosen, x = torch.tensor([[0, 2], [2, 3], [0, 3], [3, 2]]), torch.randn(1, 4, 64)
    wanted, found = both(kind, x if kind == "dbrx" else x[0], chosen, torch.rand(4, 2), overflows=1)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_rows_in_their_order_have_nothing_of_an_expert_that_overflows() -> None:
    wanted, found = both("jetmoe", torch.randn(6, 64), torch.tensor([3, 0, 1, 2]), overflows=1)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_stacked_experts_one_after_the_other_leave_out_one_that_overflows(tmp_path: Path) -> None:
    loaded = load(tiny_model("mixtral", {**sizes_of("mixtral"), "hidden_act": "gelu"}), tmp_path)
    experts, chosen = loaded._decoder.layers[0].mlp.experts, torch.tensor([[0, 2], [2, 3], [3, 0]])
    assert experts.sglcore_moe is None
    with torch.no_grad():
        given = torch.randn(3, 64), chosen, torch.rand(3, 2)
        wanted = experts(*given)
        experts.gate_up_proj[1] = float("inf")
        torch.testing.assert_close(experts(*given), wanted)


def test_rows_in_the_order_of_their_experts_some_of_which_have_none() -> None:
    wanted, found = both("jetmoe", torch.randn(6, 64), torch.tensor([3, 0, 1, 2]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_only_modules_that_read_counts_on_the_host_are_changed() -> None:
    model = tiny_model("jetmoe", sizes_of("jetmoe"))
    before = {module: type(module) for module in model.modules()}
    take_routed(model)
    changed = {kind.__name__ for module, kind in before.items() if type(module) is not kind}
    assert changed == {"JetMoeTopKGating"}
    assert {type(module).__name__ for module in model.modules() if "forward" in vars(module)} == {KINDS["jetmoe"]}
    plain = tiny_model("llama", sizes_of("llama"))
    kinds = [type(module) for module in plain.modules()]
    take_routed(plain)
    assert [type(module) for module in plain.modules()] == kinds


def test_experts_whose_rows_are_lost_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(module: nn.Module, inputs: Tensor, expert_size: Tensor) -> Tensor:
        return linear(inputs, module.weight[0])  # pyright: ignore[reportIndexIssue, reportArgumentType]

    monkeypatch.setattr(host_routed_experts, "_by_order", first)
    assert compare(tiny_model("jetmoe", sizes_of("jetmoe")), tmp_path) > 1e-2
