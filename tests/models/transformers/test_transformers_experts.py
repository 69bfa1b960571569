"""Stacked experts of transformers' classes, one after another: every option of transformers' own
interface for them, compared with one token and one expert at a time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sglcore.models.transformers_backend.host_routed_experts import _by_order, _routed
from sglcore.models.transformers_backend.moe_adapter import _experts, _kernel, has_experts, turned_weights
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable

EXPERTS, HIDDEN, INNER, TOKENS = 4, 6, 5, 7


def doubled(x: Tensor) -> Tensor:
    """A norm after each expert."""
    return 2 * x + 1


def gated(x: Tensor) -> Tensor:
    """An activation of gate and up."""
    gate, up = x.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def stacked(has_gate: bool, has_bias: bool, is_transposed: bool, has_norm: bool) -> Any:
    """Experts with random weights, as transformers' classes have them."""
    torch.manual_seed(0)
    inner = 2 * INNER if has_gate else INNER
    first, down = torch.randn(EXPERTS, inner, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    name = "gate_up_proj" if has_gate else "up_proj"
    made = {name: first.mT if is_transposed else first, "down_proj": down.mT if is_transposed else down}
    if has_bias:
        made |= {f"{name}_bias": torch.randn(EXPERTS, inner), "down_proj_bias": torch.randn(EXPERTS, HIDDEN)}
    options = {"has_gate": has_gate, "has_bias": has_bias, "is_transposed": is_transposed}
    functions = {"_apply_gate": gated, "act_fn": torch.tanh, "post_expert_norm": doubled, "sglcore_moe": None}
    return SimpleNamespace(**made, **options, **functions, has_post_expert_norm=has_norm)


def one(own: Any, expert: int, x: Tensor) -> Tensor:
    """One token [H] through one expert."""
    name = "gate_up_proj" if own.has_gate else "up_proj"
    first, down = (getattr(own, each)[expert] for each in (name, "down_proj"))
    inner = first.T @ x if own.is_transposed else first @ x
    inner = inner + getattr(own, f"{name}_bias")[expert] if own.has_bias else inner
    inner = gated(inner) if own.has_gate else torch.tanh(inner)
    out = down.T @ inner if own.is_transposed else down @ inner
    out = out + own.down_proj_bias[expert] if own.has_bias else out
    return doubled(out) if own.has_post_expert_norm else out


def routed(count: int) -> tuple[Tensor, Tensor]:
    """Random weights [T, 2], and two different experts for each token."""
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(TOKENS)])
    return torch.rand(TOKENS, 2), ids


@pytest.mark.parametrize("options", list(itertools.product((False, True), repeat=4)), ids=str)
def test_stacked_experts_compute_what_single_ones_do(options: tuple[bool, bool, bool, bool]) -> None:
    own, hidden = stacked(*options), torch.randn(TOKENS, HIDDEN)
    weights, ids = routed(EXPERTS)
    wanted = [sum(float(weights[t, k]) * one(own, int(ids[t, k]), hidden[t]) for k in range(2)) for t in range(TOKENS)]
    found = _experts(own, hidden, ids, weights)
    torch.testing.assert_close(found, torch.stack([torch.as_tensor(each) for each in wanted]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("has_gate", "has_norm"), [(False, False), (True, True), (False, True)])
def test_experts_of_another_form_than_the_kernels_have_none(has_gate: bool, has_norm: bool) -> None:
    build: Any = None  # nothing is asked for
    assert _kernel(stacked(has_gate, False, False, has_norm), build) is None


class Chosen:
    """Stands for a build: notes the kernel that is asked for, and its last numbers."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, tuple[float, ...]]] = []

    def rows(self, size: int) -> None:
        """Rows of a size."""

    indices = rows

    def kernel(self, entry: Any, *given: Any) -> Any:
        """Choose a kernel."""
        self.kernels.append((entry, tuple(each for each in given if isinstance(each, float))))
        return None


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("has_bias", "gate", "wanted"),
    [
        (False, reference_kernels.silu_and_mul, [(KernelTable.moe, ())]),
        (True, reference_kernels.silu_and_mul, []),
        (True, lambda x: reference_kernels.clamped_swiglu(x, 1.7, 7.0), [(KernelTable.clamped_moe, (1.7, 7.0))]),
        (False, lambda x: reference_kernels.clamped_swiglu(x, 1.7, 7.0), []),
        (True, lambda x: reference_kernels.clamped_swiglu(x, 1.5, 7.0), []),
        (False, gated, []),
        (True, gated, []),
    ],
)
def test_a_kernel_is_that_of_the_gate_and_of_the_bias(
    has_bias: bool, gate: Any, wanted: list[Any], is_transposed: bool
) -> None:
    own, build = stacked(True, has_bias, is_transposed, False), Chosen()
    own._apply_gate, own.alpha, own.limit, own.other = gate, 1.7, 7.0, 0.02
    assert (_kernel(own, cast("Any", build)) is not None) is bool(wanted)
    assert build.kernels == wanted


def test_a_kernel_gets_weights_of_its_rows_type_and_narrow_indices() -> None:
    seen: list[torch.dtype] = []

    def kernel(hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        seen.extend((hidden.dtype, weights.dtype, ids.dtype))
        return hidden

    own = stacked(True, False, False, False)
    own.sglcore_moe = kernel
    weights, ids = routed(EXPERTS)
    _experts(own, torch.randn(TOKENS, HIDDEN).bfloat16(), ids, weights)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.int32]
    assert _experts(own, torch.empty(TOKENS, HIDDEN, device="meta"), ids, weights).shape == (TOKENS, HIDDEN)


def stack(is_transposed: bool) -> nn.Module:
    """A module of stacked experts with a bias."""
    made: Any = nn.Module()
    made.first, made.bias = nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2, 3))
    made.register_parameter("absent", None)
    made.is_concatenated, made.is_transposed = True, is_transposed
    return made


def test_only_transposed_weights_of_experts_are_turned() -> None:
    turned, plain, other = stack(True), stack(False), nn.Linear(3, 4)
    assert [has_experts(each) for each in (turned, plain, other)] == [True, True, False]
    assert turned_weights(nn.Sequential(turned, plain, other)) == {id(turned.first)}


@pytest.mark.parametrize("shape", [(TOKENS, HIDDEN), (1, TOKENS, HIDDEN)])
def test_a_missing_expert_passes_the_row_itself(shape: tuple[int, ...]) -> None:
    def scaled(module: Any, expert: int, x: Tensor) -> Tensor:
        return x * (expert + 2)

    hidden = torch.randn(shape)
    weights, ids = routed(5)
    module: Any = None
    found = _routed(module, scaled, lambda module: 3, hidden, ids, weights)
    factors = torch.where(ids < 3, ids + 2, 1) * weights
    assert found.shape == shape
    torch.testing.assert_close(found, hidden * factors.sum(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [[2, 0, 3, 2], [0, 0, 0, 7], [7, 0, 0, 0], [1, 2, 3, 1]])
def test_rows_sorted_by_expert_each_meet_their_own(counts: list[int]) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(4, HIDDEN, INNER), torch.randn(TOKENS, INNER)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    found = _by_order(SimpleNamespace(weight=weight), rows, torch.tensor(counts))
    wanted = torch.stack([weight[expert] @ row for expert, row in zip(experts, rows, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
