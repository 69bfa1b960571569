"""Which residual sums wait for the norm after them: the fused kernel overwrites both operands, so
nothing else may have a part in them; and which layer made the heads that are turned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sglcore.models.transformers_backend.deferred_sums import Addend, Sum, added
from sglcore.models.transformers_backend.kernel_layers import Norm, NormForm, PackedLinear
from sglcore.models.transformers_backend.kernel_replacement import _join
from sglcore.models.transformers_backend.layer_trace import Trace

Run = Callable[[Tensor, PackedLinear, Norm], object]
SHAPE = (1, 3, 8)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the walk."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Holds(nn.Module):
    """A module with a parameter of the shape of hidden states, and a buffer that is one."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(*SHAPE), requires_grad=False)
        self.register_buffer("rows", empty(*SHAPE))


HELD = Holds()


def is_addend(run: Run) -> bool:
    """Whether the linear layer's result is an addend of a sum that waits, in the walk `run`."""
    linear = PackedLinear(nn.Linear(8, 8, bias=False, device="meta"), "linear")
    norm, trace = Norm("norm", empty(8), NormForm(1e-5, None)), Trace()
    with trace.watching([HELD, linear, norm]):
        run(empty(*SHAPE), linear, norm)
    for each, heads in trace.heads().items():
        each.heads, each.is_transposed = next(iter(heads))
    found = trace.addends()
    assert found <= {linear}
    return bool(found)


def twice(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
    """Add two results of one layer, each before a norm."""
    first = x + linear(x * 2)
    norm(first)
    norm(first * 1 + linear(first * 3))


def once_of_two(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
    """Add one of two results of a layer before a norm."""
    first, second = x * 2, x * 3
    norm(x + linear(first))
    linear(second)


def read_later(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
    """Use the residual after the sum."""
    norm(x + linear(x * 2))
    torch.mul(x, 2)


def read_before(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
    """Use the residual, but before the sum."""
    made = linear(x * 2)
    torch.mul(x, 3)
    norm(x + made)


def addend_read(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
    """Use the addend before the sum."""
    made = linear(x * 2)
    torch.mul(made, 3)
    norm(x + made)


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda x, linear, norm: norm(x + linear(x * 2)), True),
        (lambda x, linear, norm: norm(linear(x * 2) + x), True),
        (lambda x, linear, norm: norm(linear(x * 2)), False),
        (lambda x, linear, norm: x + linear(x * 2), False),
        (lambda x, linear, norm: norm((x + linear(x * 2)) * 1), False),
        (lambda x, linear, norm: norm(x - linear(x * 2)), False),
        (lambda x, linear, norm: norm(torch.add(x, linear(x * 2), alpha=2)), False),
        (lambda x, linear, norm: norm(linear(x * 2) + 1.0), False),
        (lambda x, linear, norm: norm(x + linear(x * 2) * 0.5), False),
        (twice, True),
        (once_of_two, False),
        (read_later, False),
        (read_before, True),
        (addend_read, False),
    ],
)
def test_a_sum_waits_if_a_norm_alone_reads_it(run: Run, waits: bool) -> None:
    assert is_addend(run) is waits


@pytest.mark.parametrize(
    ("residual", "waits"),
    [
        (empty(*SHAPE), True),
        (empty(2, 3, 8)[:1], False),
        (empty(1, 4, 8)[:, :3], False),
        (empty(1, 8, 3).transpose(1, 2), False),
        (empty(1, 1, 8), False),
        (empty(1, 1, 8).expand(*SHAPE), False),
        (empty(*SHAPE, dtype=torch.bfloat16), False),
        (HELD.weight, False),
        (HELD.rows, False),
        (HELD.rows.view(*SHAPE), False),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value),
)
def test_a_residual_that_is_overwritten_is_whole_and_no_weight(residual: Tensor, waits: bool) -> None:
    assert is_addend(lambda x, linear, norm: norm(residual + linear(x * 2))) is waits


def test_a_result_is_not_added_to_itself() -> None:
    def run(x: Tensor, linear: PackedLinear, norm: Norm) -> None:
        made = linear(x * 2)
        norm(made + made)

    assert not is_addend(run)


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ([empty(*SHAPE)], (None, False)),
        ([empty(1, 3, 2, 8)], (2, False)),
        ([empty(1, 3, 2, 8), empty(1, 5, 2, 8)], (2, False)),
        ([empty(1, 3, 2, 8).transpose(1, 2)], (2, True)),
        ([empty(1, 3, 2, 8), empty(1, 3, 4, 8)], (None, False)),
        ([empty(1, 3, 4, 8), empty(1, 3, 2, 8)], (None, False)),
        ([empty(1, 3, 2, 8), empty(*SHAPE)], (None, False)),
        ([empty(1, 3, 2, 8), empty(1, 3, 2, 8).transpose(1, 2)], (None, False)),
    ],
    ids=str,
)
def test_a_norm_has_heads_if_all_its_calls_have_as_many(given: list[Tensor], heads: tuple[int | None, bool]) -> None:
    norm, trace = Norm("norm", empty(8), NormForm(1e-5, None)), Trace()
    with trace.watching([norm]):
        for each in given:
            norm(each)
    _join(trace)
    assert (norm.heads, norm.is_transposed) == heads


def view(x: Tensor) -> Tensor:
    """[1, T, 8] as two heads of four elements [1, T, 2, 4]."""
    return x.view(1, -1, 2, 4)


def read_since(x: Tensor, linear: PackedLinear, norm: Norm) -> Tensor:
    """Use a layer's result before its heads are turned."""
    made = linear(x)
    torch.mul(made, 2)
    return view(made).transpose(1, 2)


def linear_twice(x: Tensor, linear: PackedLinear, norm: Norm) -> Tensor:
    """Use a layer for something else too."""
    linear(x * 2)
    return view(linear(x)).transpose(1, 2)


def norm_twice(x: Tensor, linear: PackedLinear, norm: Norm) -> Tensor:
    """Use a norm for something else too."""
    norm(view(x * 2))
    return norm(view(linear(x))).transpose(1, 2)


@pytest.mark.parametrize(
    ("run", "giver"),
    [
        (lambda x, linear, norm: view(linear(x)).transpose(1, 2), "linear"),
        (lambda x, linear, norm: linear(x).view(1, 3, 1, 8).transpose(1, 2), "linear"),
        (lambda x, linear, norm: linear(x * 2 + 1).view(1, 3, 4, 2).transpose(1, 2), "linear"),
        (lambda x, linear, norm: linear(x).view(1, 2, 3, 4), None),
        (lambda x, linear, norm: linear(x)[..., :4].view(1, 3, 1, 4).transpose(1, 2), None),
        (lambda x, linear, norm: view(linear(x))[..., :2].transpose(1, 2), None),
        (lambda x, linear, norm: view(linear(x))[:, 1:].transpose(1, 2), None),
        (lambda x, linear, norm: view(linear(x)).transpose(1, 2).contiguous(), None),
        (lambda x, linear, norm: view(linear(x) * 2).transpose(1, 2), None),
        (lambda x, linear, norm: view(x).transpose(1, 2), None),
        (read_since, None),
        (linear_twice, None),
        (lambda x, linear, norm: norm(view(linear(x))).transpose(1, 2), "norm"),
        (lambda x, linear, norm: norm(view(linear(x)).transpose(1, 2)), "norm"),
        (lambda x, linear, norm: norm(view(linear(x)))[:, :, :1].transpose(1, 2), None),
        (lambda x, linear, norm: norm(view(linear(x))).transpose(1, 2) * 2, None),
        (norm_twice, None),
    ],
)
def test_heads_are_a_layers_if_they_are_its_whole_result(
    run: Callable[[Tensor, PackedLinear, Norm], Tensor], giver: str | None
) -> None:
    linear = PackedLinear(nn.Linear(8, 8, bias=False, device="meta"), "linear")
    norm, trace = Norm("norm", empty(4), NormForm(1e-5, None)), Trace()
    with trace.watching([linear, norm]):
        heads = run(empty(*SHAPE), linear, norm)
    assert trace.giver_of(heads) is {"linear": linear, "norm": norm, None: None}[giver]


class Doubles:
    """Stands for the layer of a norm: notes the shapes of its rows, and doubles them."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return x * 2


@pytest.mark.parametrize(
    ("shape", "is_transposed", "rows"),
    [
        ((1, 3, 8), False, (3, 8)),
        ((1, 1, 8), False, (1, 8)),
        ((1, 3, 2, 8), False, (3, 2, 8)),
        ((1, 2, 3, 8), True, (3, 2, 8)),
        ((1, 1, 3, 8), True, (3, 1, 8)),
        ((3, 8), False, (3, 8)),
        ((1, 8), False, (1, 8)),
        ((3, 2, 8), False, (3, 2, 8)),
        ((3, 1, 8), False, (3, 1, 8)),
    ],
)
def test_a_norm_takes_rows_of_tokens_however_they_come(
    shape: tuple[int, ...], is_transposed: bool, rows: tuple[int, ...]
) -> None:
    norm, layer, x = Norm("norm", empty(8), NormForm(1e-5, None)), Doubles(), torch.randn(shape)
    norm._norm, norm.is_transposed = cast("Any", layer), is_transposed
    assert torch.equal(norm(x), x * 2) and layer.shapes == [rows]
    norm.waits = True
    assert norm(x) is x and layer.shapes == [rows]


@pytest.mark.parametrize("is_addend", [False, True])
def test_rows_that_a_norm_makes_may_be_an_addend_themselves(is_addend: bool) -> None:
    """For example of a norm after a block, whose result is added before the next norm."""
    norm, x = Norm("norm", empty(8), NormForm(1e-5, None)), torch.randn(SHAPE)
    norm._norm, norm.is_addend = cast("Any", Doubles()), is_addend
    found = norm(x)
    assert (type(found) is Addend) is is_addend and (type(x + found) is Sum) is is_addend
    torch.testing.assert_close(added(x + found), x * 3)
