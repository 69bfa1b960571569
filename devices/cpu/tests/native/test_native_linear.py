"""Products with packed panels, plain and gated, against torch in float64, on every instruction set
and with guarded memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded, guarded_copy
from sglcore.runtime.kernels.reference_kernels import silu_and_mul
from sglcore_cpu.kernels.panels import PanelForm, pack
from sglcore_cpu.native import TYPES, Engine

BF16_STEP = 2.0**-8
"""Bound of the relative error of rounding to bf16."""
FIRST_OF_TILES = 5
"""From this many tokens on, the instruction set with tiles uses another algorithm."""
EXAMPLES = settings(derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
TYPE = st.sampled_from(tuple(TYPES))
TOKENS = st.integers(0, 40)
FEATURES = st.integers(1, 90)


@dataclass(frozen=True, slots=True)
class Layer:
    """x [T, in], weight [out, in] and bias [out]; the last input is so large that leaving it out is
    detected."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @staticmethod
    def random(tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> Layer:
        source = torch.Generator().manual_seed(tokens * 10_007 + out_features * 101 + in_features)
        shapes = ((tokens, in_features), (out_features, in_features), (out_features,))
        x, weight, bias = (torch.randn(shape, generator=source) for shape in shapes)
        x[:, -1:], weight[:, -1:] = 3, in_features**0.5
        return Layer(x.to(dtype), weight.to(dtype), bias.to(dtype))

    def exact(self, inputs: int) -> Tensor:
        """Return the float64 result of the first `inputs` inputs."""
        return self.x[:, :inputs].double() @ self.weight[:, :inputs].double().T + self.bias.double()

    def check(self, found: Tensor) -> None:
        """Check that the error is within the rounding of float32 sums in any order, and of the
        result to its dtype."""
        inputs = self.x.shape[1]
        exact = self.exact(inputs)
        sizes = self.x.double().abs() @ self.weight.double().abs().T + self.bias.double().abs()
        allowed = sizes * (inputs + 2) * 2.0**-23
        if self.x.dtype is torch.bfloat16:
            allowed += exact.abs() * BF16_STEP
        assert bool(((found.double() - exact).abs() <= allowed).all())
        if found.numel():
            assert bool(((self.exact(inputs - 1) - exact).abs() > allowed).any()), "one input less would not be seen"


def packed(engine: Engine, weight: Tensor) -> PanelForm:
    form = pack(engine, weight).form
    assert isinstance(form, PanelForm)
    return form


@EXAMPLES
@example(0, 3, 5, torch.bfloat16, 0)
@example(1, 1, 1, torch.float32, 1)
@example(1, 1, 1, torch.bfloat16, 1)
@example(4, 100, 33, torch.bfloat16, 3)
@example(33, 17, 64, torch.bfloat16, 0)
@given(TOKENS, FEATURES, FEATURES, TYPE, st.integers(0, 3))
def test_a_product_has_the_values_of_float64(
    engine: Engine, tokens: int, out_features: int, in_features: int, dtype: torch.dtype, offset: int
) -> None:
    layer = Layer.random(tokens, out_features, in_features, dtype)
    x, check_x = guarded_copy(layer.x, offset, row_gap=offset)
    bias, check_bias = guarded_copy(layer.bias, offset)
    form = packed(engine, layer.weight)
    with GuardedResults():
        found = form.multiply(x, bias)
    layer.check(found)
    assert found.dtype is dtype
    check_x()
    check_bias()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "out_features", "in_features"), [(70, 50, 300), (200, 270, 1100), (460, 20, 1100)])
def test_long_products_are_cut_into_parts(
    engine: Engine, tokens: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    layer = Layer.random(tokens, out_features, in_features, dtype)
    with GuardedResults():
        found = packed(engine, layer.weight).multiply(layer.x, layer.bias)
    layer.check(found)


@EXAMPLES
@given(TOKENS, FEATURES, FEATURES, st.integers(0, 5))
def test_results_go_where_they_are_told(engine: Engine, tokens: int, outs: int, inputs: int, gap: int) -> None:
    layer = Layer.random(tokens, outs, inputs, torch.bfloat16)
    form = packed(engine, layer.weight)
    out, check = guarded((tokens, outs), torch.bfloat16, offset_elements=gap, row_gap=gap)
    engine.kernel("linear").bind()(
        x=layer.x.data_ptr(),
        x_stride=inputs,
        panels=form.address,
        type=form.type,
        bias=0,
        out=out.data_ptr(),
        out_stride=outs + gap,
        out_type=form.type,
        tokens=tokens,
        in_features=inputs,
        out_features=outs,
    )
    assert torch.equal(out, form.multiply(layer.x, None))
    check()


@EXAMPLES
@given(TOKENS, FEATURES, FEATURES)
def test_wide_results_are_the_narrow_ones(engine: Engine, tokens: int, outs: int, inputs: int) -> None:
    layer = Layer.random(tokens, outs, inputs, torch.bfloat16)
    form = packed(engine, layer.weight)
    with GuardedResults():
        wide, narrow = form.multiply(layer.x, layer.bias, wide=True), form.multiply(layer.x, layer.bias)
    assert wide.dtype is torch.float32 and torch.equal(wide, narrow.float())


@EXAMPLES
@given(st.integers(1, 40), st.integers(1, 40), FEATURES, FEATURES, TYPE)
def test_a_row_has_the_same_bits_in_any_batch(
    engine: Engine, first: int, second: int, outs: int, inputs: int, dtype: torch.dtype
) -> None:
    few, many = sorted((first, second))
    if engine.instruction_set == "amx" and few < FIRST_OF_TILES:
        many = min(many, FIRST_OF_TILES - 1)
    layer = Layer.random(many, outs, inputs, dtype)
    form = packed(engine, layer.weight)
    assert torch.equal(form.multiply(layer.x[:few], None), form.multiply(layer.x, None)[:few])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [3, 40])
def test_padded_rows_and_broken_ones_leave_the_others_alone(engine: Engine, tokens: int, dtype: torch.dtype) -> None:
    layer = Layer.random(tokens, 40, 50, dtype)
    form = packed(engine, layer.weight)
    clean = form.multiply(layer.x, layer.bias)
    layer.x[0], layer.x[1] = 0, torch.nan
    found = form.multiply(layer.x, layer.bias)
    assert torch.equal(found[0], layer.bias) and bool(found[1].isnan().all())
    assert torch.equal(found[2:], clean[2:])


@EXAMPLES
@given(TOKENS, st.integers(1, 5), FEATURES, TYPE, st.integers(0, 3))
def test_a_gated_product_is_the_reference_s(
    engine: Engine, tokens: int, units: int, inputs: int, dtype: torch.dtype, gap: int
) -> None:
    layer = Layer.random(tokens, 32 * units, inputs, dtype)
    form = packed(engine, layer.weight * 0.3)
    x, check = guarded_copy(layer.x, gap, row_gap=gap)
    with GuardedResults():
        found = form.multiply_gated(x)
    assert found is not None and found.shape == (tokens, 16 * units)
    expected = silu_and_mul(form.multiply(x, None))
    allowed = 2 * BF16_STEP if dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=allowed, atol=1e-30)
    check()


def test_a_gate_that_shares_a_panel_with_up_is_declined(engine: Engine) -> None:
    layer = Layer.random(2, 24, 8, torch.float32)
    assert packed(engine, layer.weight).multiply_gated(layer.x) is None
