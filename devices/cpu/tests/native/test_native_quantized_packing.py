"""Packing a checkpoint's codes, quantising weights, and reading both back; the error of quantised
weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded, guarded_copy
from devices.cpu.tests.native.quantized_cases import layout_of, layouts, make_case, random_x
from sglcore_cpu.kernels.packed import PackedWeight
from sglcore_cpu.kernels.quantized_form import QuantizedForm, QuantizedLayout, pack_quantized, quantize
from sglcore_cpu.native import Engine, Library

SHAPES = st.tuples(st.integers(1, 50), st.integers(1, 300))


def form_of(packed: PackedWeight) -> QuantizedForm:
    assert isinstance(packed.form, QuantizedForm)
    return packed.form


def relative_error(weight: Tensor, packed: PackedWeight) -> float:
    plain = form_of(packed).dequantize(torch.float32)
    return float((plain - weight.float()).norm() / weight.float().norm())


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, layout=st.sampled_from(layouts()), offset=st.integers(0, 5), gap=st.integers(0, 5))
def test_codes_come_back_exactly(
    engine: Engine, shape: tuple[int, int], layout: tuple[int, int, bool], offset: int, gap: int
) -> None:
    case = make_case(*shape, *layout, seed=shape[1])
    codes, check_codes = guarded_copy(case.codes, offset, gap)
    scales, check_scales = guarded_copy(case.scales, offset)
    place = layout_of(case)
    memory, check_memory = guarded((place.num_bytes,), torch.uint8)
    memory.zero_()
    engine.kernel("pack_codes").bind()(
        source=codes.data_ptr(),
        source_stride=codes.stride(0),
        source_scales=scales.data_ptr(),
        source_zeros=0 if case.zeros is None else case.zeros.data_ptr(),
        **place.arguments(memory.data_ptr(), 2.0**-10),
    )
    for check in (check_codes, check_scales, check_memory):
        check()
    form = QuantizedForm(engine, place, memory, 2.0**-10)
    wanted = case.plain()
    assert torch.equal(form.dequantize(torch.float32), wanted.float())
    assert torch.equal(form.dequantize(torch.bfloat16), wanted.float().bfloat16())


def test_scales_of_any_size_are_kept(engine: Engine) -> None:
    for power in (-30, -10, 0, 30):
        case = make_case(20, 64, 8, 32, False, seed=1)
        scaled = pack_quantized(engine, case.codes, case.scales * 2.0**power, None, 8, 32)
        assert torch.equal(form_of(scaled).dequantize(torch.float32), (case.plain() * 2.0**power).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("bits", "group", "has_zeros"), layouts())
def test_rows_are_those_of_the_weight(
    engine: Engine, dtype: torch.dtype, ids_dtype: torch.dtype, bits: int, group: int, has_zeros: bool
) -> None:
    form = make_case(45, 150, bits, group, has_zeros, seed=12).form(engine)
    ids = torch.tensor([44, 0, 17, 17, 16, 1, 31, 32], dtype=ids_dtype)
    with GuardedResults():
        assert torch.equal(form.rows(ids, dtype), form.dequantize(dtype)[ids.long()])
        assert form.rows(ids[:0], dtype).shape == (0, 150)
        outside = form.rows(torch.tensor([45, 3, -1], dtype=ids_dtype), dtype)
    assert outside[[0, 2]].isnan().all()
    assert torch.equal(outside[1], form.dequantize(dtype)[3])


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=SHAPES,
    layout=st.sampled_from(layouts()),
    offset=st.integers(0, 5),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_quantising_stays_inside_its_memory_and_near_the_weight(
    engine: Engine, shape: tuple[int, int], layout: tuple[int, int, bool], offset: int, gap: int, dtype: torch.dtype
) -> None:
    bits, group, has_zeros = layout
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02
    weight, check_weight = guarded_copy(plain.to(dtype), offset, gap)
    place = QuantizedLayout(shape[0], shape[1], bits, group, has_zeros)
    memory, check_memory = guarded((place.num_bytes,), torch.uint8)
    chosen = torch.zeros(1, dtype=torch.float64)
    engine.kernel("quantize_rows").bind()(
        source=weight.data_ptr(),
        source_stride=weight.stride(0),
        source_type=int(dtype == torch.bfloat16),
        chosen=chosen.data_ptr(),
        **place.arguments(memory.data_ptr(), 0.0),
    )
    check_weight()
    check_memory()
    found = QuantizedForm(engine, place, memory, chosen.item()).dequantize(torch.float32)
    step = weight.float().abs().max() / (127 if bits == 8 else 7)
    assert float((found - weight.float()).abs().max()) <= float(step)


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros", "most"),
    [
        (8, 32, False, 0.006),
        (8, 64, False, 0.0065),
        (8, 128, False, 0.007),
        (4, 32, False, 0.083),
        (4, 32, True, 0.074),
    ],
)
def test_normal_weights_lose_little(engine: Engine, bits: int, group: int, has_zeros: bool, most: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    assert relative_error(weight, quantize(engine, weight, bits, group, has_zeros)) < most


def test_four_bits_are_searched_not_rounded(engine: Engine) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    groups = weight.view(64, -1, 32)
    step = groups.abs().amax(dim=-1, keepdim=True) / 7
    plain = ((groups / step).round() * step).view(64, 512)
    simple = float((plain - weight).norm() / weight.norm())
    assert relative_error(weight, quantize(engine, weight, 4)) < 0.9 * simple


def test_a_real_zero_serves_weights_of_one_sign(engine: Engine) -> None:
    weight = 1.0 + 0.5 * torch.rand(32, 128, generator=torch.Generator().manual_seed(0))
    symmetric, with_zero = (relative_error(weight, quantize(engine, weight, 4, 32, zeros)) for zeros in (False, True))
    assert with_zero < 0.3 * symmetric


def test_a_zero_too_far_for_float16_is_not_chosen(engine: Engine) -> None:
    weight = 1.0 + 1e-5 * torch.rand(32, 128, generator=torch.Generator().manual_seed(0))
    assert relative_error(weight, quantize(engine, weight, 4, 32, True)) < 1e-3


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_equal_values_and_zeros_survive(engine: Engine, bits: int, has_zeros: bool) -> None:
    weight = torch.zeros(20, 96)
    weight[1] = 0.5
    weight[2] = -0.25
    weight[3, 40] = 3.0
    found = form_of(quantize(engine, weight, bits, 32, has_zeros)).dequantize(torch.float32)
    torch.testing.assert_close(found, weight, rtol=2e-3, atol=0)


def test_levels_quantise_alike(engine: Engine, library: Library) -> None:
    weight = torch.randn(20, 130, generator=torch.Generator().manual_seed(3)).bfloat16()
    other = library.engine(library.usable()[0], 1)
    for bits, group, has_zeros in layouts():
        one, two = (form_of(quantize(e, weight, bits, group, has_zeros)) for e in (engine, other))
        assert torch.equal(one.memory, two.memory)
        assert one.multiplier == two.multiplier


def test_a_quantised_product_is_near_the_plain_one(engine: Engine) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    x = random_x(1, 512, 5)
    for bits, most in ((8, 0.012), (4, 0.1)):
        found = form_of(quantize(engine, weight, bits)).multiply(x, None)
        wanted = x @ weight.T
        assert float((found - wanted).norm() / wanted.norm()) < most


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(engine: Engine, bad: float) -> None:
    weight = torch.ones(20, 64)
    weight[3, 7] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(engine, weight, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, "3 bits"),
        ({"bits": 4}, "found a code of"),
        ({"group": 48}, "found groups of 48"),
        ({"scales": torch.ones(16, 3)}, "found scales"),
        ({"scales": torch.full((16, 2), torch.nan)}, "not finite"),
        ({"zeros": torch.ones(16, 1)}, "found zeros"),
        ({"codes": torch.zeros(16, 64)}, "wanted uint8"),
    ],
)
def test_bad_codes_are_refused(engine: Engine, change: dict[str, object], words: str) -> None:
    codes = torch.full((16, 64), 200, dtype=torch.uint8)
    given = {"codes": codes, "scales": torch.ones(16, 2), "zeros": None, "bits": 8, "group": 32} | change
    with pytest.raises(ValueError, match=words):
        pack_quantized(engine, **given)  # pyright: ignore[reportArgumentType]


def test_a_packed_weight_says_what_it_is(engine: Engine) -> None:
    packed = quantize(engine, torch.ones(48, 64), 4)
    assert form_of(packed).name == "int4 panels of groups of 32"
    assert (packed.shape, packed.dtype) == ((48, 64), torch.float32)
    assert packed.nbytes == 48 * 64 // 2 + 48 * 2 * 2
