"""Quantised linear layers: the specified arithmetic to the last bits of float32, on every
instruction set and for every size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from devices.cpu.tests.native.quantized_cases import TINY, Case, layouts, make_case, promised, random_x
from sglcore.runtime.kernels.reference_kernels import silu_and_mul
from sglcore_cpu.kernels.quantized_form import QuantizedForm, pack_quantized
from sglcore_cpu.native import Engine, Library

TOKENS = (0, 1, 2, 3, 5, 8, 9, 16, 17, 33)


def assert_promised(case: Case, x: Tensor, found: Tensor, bias: Tensor | None = None) -> None:
    wanted, tolerance = promised(case, x)
    if bias is not None:
        wanted = wanted + bias.double()
        tolerance = tolerance + 2.0**-23 * (wanted.abs() + bias.abs().double())
    far = (found.double() - wanted).abs() - tolerance
    assert found.shape == wanted.shape
    assert not len(found) or float(far.max()) <= 1e-30, f"{float(far.max())} beyond the tolerance"


@pytest.mark.parametrize(("bits", "group", "has_zeros"), layouts())
def test_a_product_is_the_promised_arithmetic(engine: Engine, bits: int, group: int, has_zeros: bool) -> None:
    case = make_case(37, 200, bits, group, has_zeros, seed=group + bits)
    form = case.form(engine)
    for tokens in TOKENS:
        x = random_x(tokens, 200, tokens)
        assert_promised(case, x, form.multiply(x, None))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 50),
    columns=st.integers(1, 300),
    tokens=st.integers(0, 40),
    layout=st.sampled_from(layouts()),
    gap=st.integers(0, 3),
    offset=st.integers(0, 3),
    has_bias=st.booleans(),
)
def test_every_shape_stays_inside_its_memory(
    engine: Engine,
    rows: int,
    columns: int,
    tokens: int,
    layout: tuple[int, int, bool],
    gap: int,
    offset: int,
    has_bias: bool,
) -> None:
    case = make_case(rows, columns, *layout, seed=rows)
    x, check_x = guarded_copy(random_x(tokens, columns, columns), offset, gap)
    bias, check_bias = guarded_copy(torch.randn(rows), offset)
    form = case.form(engine)
    before = form.memory.clone()
    with GuardedResults():
        found = form.multiply(x, bias if has_bias else None)
        assert_promised(case, x, found, bias if has_bias else None)
    check_x()
    check_bias()
    assert torch.equal(form.memory, before)


@pytest.mark.parametrize(("bits", "group", "has_zeros"), layouts())
def test_levels_and_batches_agree_to_the_last_bit(
    engine: Engine, library: Library, bits: int, group: int, has_zeros: bool
) -> None:
    case = make_case(24, 256, bits, group, has_zeros, seed=5)
    x = random_x(35, 256, 7)
    together = case.form(engine).multiply(x, None)
    plain = case.form(library.engine(library.usable()[0], 1))
    assert torch.equal(together, plain.multiply(x, None))
    for token in (0, 2, 15, 16, 34):
        assert torch.equal(together[token : token + 1], plain.multiply(x[token : token + 1], None))


@pytest.mark.parametrize("bits", [8, 4])
def test_bf16_is_float32_rounded_once(engine: Engine, bits: int) -> None:
    form = make_case(40, 128, bits, 64, False, seed=3).form(engine)
    for tokens in (1, 7, 20):
        x = random_x(tokens, 128, 9).bfloat16()
        bias = torch.randn(40).bfloat16()
        wanted = form.multiply(x.float(), bias.float()).bfloat16()
        assert torch.equal(form.multiply(x, bias), wanted)
        wide = form.multiply(x, bias, wide=True)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, wanted.float())
    x = random_x(3, 128, 9)
    assert torch.equal(form.multiply(x, None, wide=True), form.multiply(x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group", "has_zeros"), [(8, 64, False), (4, 32, True), (4, 128, False)])
def test_gate_over_up_is_one_call(engine: Engine, dtype: torch.dtype, bits: int, group: int, has_zeros: bool) -> None:
    case = make_case(96, 192, bits, group, has_zeros, seed=11)
    form = case.form(engine)
    for tokens in (0, 1, 6, 19):
        x = (random_x(tokens, 192, tokens) * 0.05).to(dtype)
        with GuardedResults():
            found = form.multiply_gated(x)
            assert found is not None
            wanted = silu_and_mul(form.multiply(x, None))
            relative = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-21
            # Below -88 the kernels' silu is x * e^-88, not 0.
            torch.testing.assert_close(found, wanted, rtol=relative, atol=1e-25)


def test_gate_over_up_that_splits_a_panel_is_left_to_others(engine: Engine) -> None:
    assert make_case(48, 64, 8, 64, False, seed=0).form(engine).multiply_gated(torch.zeros(1, 64)) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_value_that_is_not_finite_spoils_its_row_only(
    engine: Engine, bad: float, tokens: int, has_zeros: bool
) -> None:
    form = make_case(33, 130, 8, 64, has_zeros, seed=2).form(engine)
    x = random_x(tokens, 130, 1)
    clean = form.multiply(x, None)
    x[1, 129] = bad
    found = form.multiply(x, None)
    assert not found[1].isfinite().any()
    keep = [token for token in range(tokens) if token != 1]
    assert torch.equal(found[keep], clean[keep])


@pytest.mark.parametrize("scale", [1e-38, 1e-29, 1e-12, 1e12, 1e30])
def test_activations_of_any_size_are_served(engine: Engine, scale: float) -> None:
    case = make_case(16, 64, 8, 32, False, seed=4)
    x = random_x(1, 64, 3) * scale
    found, (wanted, tolerance) = case.form(engine).multiply(x, None).double(), promised(case, x)
    assert bool(((found - wanted).abs() <= tolerance + 1e-34).all())
    assert scale < TINY or bool((found != 0).any())


def test_a_large_prompt_passes_in_pieces(engine: Engine) -> None:
    case = make_case(32, 2048, 4, 32, False, seed=1)
    x = random_x(300, 2048, 1)
    assert_promised(case, x, case.form(engine).multiply(x, None))


def test_a_dropped_column_would_be_seen(engine: Engine) -> None:
    case = make_case(16, 129, 4, 32, True, seed=8)
    x = random_x(2, 129, 8)
    shorter = x.clone()
    shorter[:, -1] = 0
    with pytest.raises(AssertionError):
        assert_promised(case, shorter, case.form(engine).multiply(x, None))


def test_a_call_can_be_replayed_with_new_contents(engine: Engine) -> None:
    form = make_case(20, 96, 4, 32, False, seed=6).form(engine)
    first, second = random_x(4, 96, 1), random_x(4, 96, 2)
    wanted = form.multiply(second, None)
    held = first.clone()
    form.multiply(held, None)
    held.copy_(second)
    assert torch.equal(form.multiply(held, None), wanted)


@pytest.mark.parametrize(
    ("x", "bias", "words"),
    [
        (torch.zeros(2, 63), None, "wanted \\[tokens, 64\\]"),
        (torch.zeros(2, 64).half(), None, "float32 or bfloat16"),
        (torch.zeros(64, 2).T, None, "rows in one piece"),
        (torch.zeros(2, 64), torch.zeros(15), "wanted \\[16\\]"),
        (torch.zeros(2, 64), torch.zeros(16).half(), "a bias"),
    ],
)
def test_bad_activations_are_refused(engine: Engine, x: Tensor, bias: Tensor | None, words: str) -> None:
    form = make_case(16, 64, 8, 64, False, seed=0).form(engine)
    with pytest.raises(ValueError, match=words):
        form.multiply(x, bias)


@pytest.mark.parametrize(
    ("columns", "group", "unit"), [(200, 200, 128), (96, 96, 128), (192, 192, 128), (512, 256, 128)]
)
def test_wider_groups_are_split(engine: Engine, columns: int, group: int, unit: int) -> None:
    case = make_case(18, columns, 8, group, False, seed=group)
    packed = pack_quantized(engine, case.codes, case.scales, None, 8, group)
    assert isinstance(packed.form, QuantizedForm)
    assert packed.form.layout.group == unit
    assert torch.equal(packed.form.dequantize(torch.float32), case.plain().float())
