"""Packing weights in panels and reading rows back, from any address and on every instruction set;
refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded, guarded_copy
from sglcore_cpu.kernels.panels import ALIGNMENT, TYPES, PanelForm, pack
from sglcore_cpu.native import Engine

EXAMPLES = settings(derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
TYPE = st.sampled_from(tuple(TYPES))
FEATURES = st.integers(1, 90)


def weight_of(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(out_features * 101 + in_features)
    return torch.randn(out_features, in_features, generator=source).to(dtype)


def panels_of(weight: Tensor) -> Tensor:
    """Return the panel layout, computed by torch: [out / 16, in / p, 16, p], with p consecutive
    inputs of one row (1 in float32, 2 in bf16)."""
    pair, multiple = (1, 1) if weight.dtype is torch.float32 else (2, 32)
    outs, inputs = (-(-size // to) * to for size, to in zip(weight.shape, (16, multiple), strict=True))
    padded = weight.new_zeros(outs, inputs)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(outs // 16, 16, inputs // pair, pair).permute(0, 2, 1, 3).contiguous()


def form_of(engine: Engine, weight: Tensor) -> PanelForm:
    form = pack(engine, weight).form
    assert isinstance(form, PanelForm)
    return form


@EXAMPLES
@given(FEATURES, FEATURES, TYPE, TYPE, st.integers(0, 7), st.integers(0, 3))
def test_panels_are_laid_out_as_documented(
    engine: Engine, outs: int, inputs: int, found_in: torch.dtype, dtype: torch.dtype, offset: int, gap: int
) -> None:
    source = weight_of(outs, inputs + gap, found_in)
    held, check_source = guarded((source.nbytes,), torch.uint8, offset)
    held.copy_(source.view(-1).view(torch.uint8))
    expected = panels_of(source[:, :inputs].to(dtype))
    panels, check = guarded(expected.shape, dtype)
    engine.kernel("pack_panels").bind()(
        source=held.data_ptr(),
        source_stride=inputs + gap,
        source_type=TYPES[found_in],
        panels=panels.data_ptr(),
        type=TYPES[dtype],
        out_features=outs,
        in_features=inputs,
    )
    assert torch.equal(panels, expected)
    check()
    check_source()


@EXAMPLES
@given(st.integers(0, 20), FEATURES, FEATURES, TYPE, TYPE, st.sampled_from((torch.int32, torch.int64)))
def test_rows_come_back_as_they_were(
    engine: Engine, tokens: int, outs: int, inputs: int, dtype: torch.dtype, asked: torch.dtype, kind: torch.dtype
) -> None:
    weight = weight_of(outs, inputs, dtype)
    ids = torch.randint(0, outs, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(kind)
    placed, check = guarded_copy(ids)
    form = form_of(engine, weight)
    with GuardedResults():
        found = form.rows(placed, asked)
    assert torch.equal(found, weight[ids.long()].to(asked))
    check()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_there_is_nan(engine: Engine, dtype: torch.dtype) -> None:
    weight = weight_of(20, 7, dtype)
    found = form_of(engine, weight).rows(torch.tensor([19, 20, -1, 2**40, 0]), dtype)
    assert bool(found[1:4].isnan().all())
    assert torch.equal(found[[0, 4]], weight[[19, 0]])


def test_a_packed_weight_looks_like_the_one_it_was_made_of(engine: Engine) -> None:
    weight = weight_of(17, 33, torch.bfloat16)
    made = pack(engine, weight)
    assert made.shape == weight.shape and made.dtype is torch.bfloat16
    assert made.nbytes == 32 * 64 * 2 and made.form.name == "bf16 panels"
    assert form_of(engine, weight).address % ALIGNMENT == 0


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4),
        torch.zeros(4, 0),
        torch.zeros(3, 4).T,
    ],
    ids=["a type without panels", "one dimension", "no inputs", "columns"],
)
def test_a_weight_that_has_no_panels_is_refused(engine: Engine, weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"found a weight .*; wanted \[out, in\]"):
        pack(engine, weight)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 7), torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8), torch.zeros(8, 2).T],
    ids=["other inputs", "another type", "one dimension", "columns"],
)
def test_inputs_that_do_not_fit_are_refused(engine: Engine, x: Tensor) -> None:
    form = form_of(engine, weight_of(32, 8, torch.float32))
    for multiply in (lambda: form.multiply(x, None), lambda: form.multiply_gated(x)):
        with pytest.raises(ValueError, match=r"found x .*; wanted \[T, 8\]"):
            multiply()


def test_a_bias_or_ids_that_do_not_fit_are_refused(engine: Engine) -> None:
    form = form_of(engine, weight_of(32, 8, torch.float32))
    with pytest.raises(ValueError, match=r"found a bias \[31\]"):
        form.multiply(torch.zeros(1, 8), torch.zeros(31))
    with pytest.raises(ValueError, match="found ids"):
        form.rows(torch.zeros(2), torch.float32)
    with pytest.raises(ValueError, match="found rows requested as"):
        form.rows(torch.zeros(2, dtype=torch.int64), torch.float16)
