"""Norms and activations of the native kernels match the reference, for all memory layouts of rows,
and write nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.operations import Operations
from sglcore_cpu.native import Engine

REFERENCE = KernelTable()
EXAMPLES = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
"""Bound of the relative error; in bfloat16 one rounding step, which a sum in another order can
cause."""

ROWS = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([0, 1, 2, 5, 40]),
        "width": st.sampled_from([1, 2, 15, 16, 17, 48, 63, 64, 130, 896, 2050]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "offset": st.integers(0, 17),
        "gap": st.sampled_from([0, 1, 16, 37]),
        "scale": st.sampled_from([1e-3, 1.0, 150.0]),
        "seed": st.integers(0, 1 << 20),
    }
)


def values(*shape: int, case: dict[str, Any], salt: int = 0) -> Tensor:
    """Return random values of the case's dtype and scale."""
    generator = torch.Generator().manual_seed(case["seed"] + salt)
    return (torch.randn(*shape, generator=generator) * case["scale"]).to(case["dtype"])


def close(found: Tensor, expected: Tensor, scale: float = 1.0, casts: bool = True) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(found, expected, rtol=2 * rounding, atol=rounding * scale / 8)
    if casts and found.dtype is torch.bfloat16:
        # A missing cast changes a quarter of all values by one rounding step; another order of sums
        # changes few.
        assert int((found != expected).sum()) <= 3 + found.numel() // 32


def norm_weight(case: dict[str, Any], size: int, wide: bool) -> torch.Tensor:
    """Return a norm's weight in the case's dtype, or in float32 with values that bfloat16 can not
    hold."""
    weight = values(size, case=case | {"scale": 1.0}, salt=1)
    return weight.float() * (1 + 2**-9) if wide else weight


def placed(tensor: Tensor, case: dict[str, Any]) -> tuple[Tensor, Any]:
    return guarded_copy(tensor, case["offset"], case["gap"])


@EXAMPLES
@given(case=ROWS, wide=st.booleans())
def test_rms_norm_is_the_reference(engine: Engine, case: dict[str, Any], wide: bool) -> None:
    weight = norm_weight(case, case["width"], wide)
    x, check = placed(values(case["rows"], case["width"], case=case), case)
    before = x.clone()
    with GuardedResults():
        found = Operations(engine).rms_norm(x, weight, 1e-6)
        close(found, REFERENCE.rms_norm(x, weight, 1e-6))
    check()
    assert torch.equal(x, before)


@EXAMPLES
@given(case=ROWS, heads=st.sampled_from([0, 1, 3]), size=st.sampled_from([16, 20, 64]))
def test_rms_norm_of_heads_within_a_wider_row_is_the_reference(
    engine: Engine, case: dict[str, Any], heads: int, size: int
) -> None:
    weight = values(size, case=case | {"scale": 1.0}, salt=1)
    x, check = placed(values(case["rows"], heads * size, case=case), case)
    with GuardedResults():
        found = Operations(engine).rms_norm(x.unflatten(1, (heads, size)), weight, 1e-5)
        close(found, REFERENCE.rms_norm(x.unflatten(1, (heads, size)), weight, 1e-5))
    check()


@EXAMPLES
@given(case=ROWS, apart=st.booleans(), wide=st.booleans())
def test_add_rms_norm_writes_sum_and_norm_over_its_arguments(
    engine: Engine, case: dict[str, Any], apart: bool, wide: bool
) -> None:
    weight = norm_weight(case, case["width"], wide)
    first, second = (values(case["rows"], case["width"], case=case, salt=salt) for salt in (2, 3))
    x, check = placed(first, case)
    residual, check_residual = placed(second, case | ({"gap": 0, "offset": 3} if apart else {}))
    normed, total = Operations(engine).add_rms_norm(x, residual, weight, 1e-6)
    expected, sums = REFERENCE.add_rms_norm(first, second, weight, 1e-6)
    close(normed, expected)
    assert torch.equal(total, sums)
    check()
    check_residual()


@EXAMPLES
@given(case=ROWS, mean=st.sampled_from([0.0, 30.0]))
def test_layer_norm_is_the_reference(engine: Engine, case: dict[str, Any], mean: float) -> None:
    weight, bias = (values(case["width"], case=case | {"scale": 1.0}, salt=salt) for salt in (1, 2))
    x, check = placed(values(case["rows"], case["width"], case=case) + mean * case["scale"], case)
    with GuardedResults():
        found = Operations(engine).layer_norm(x, weight, bias, 1e-5)
        close(found, REFERENCE.layer_norm(x, weight, bias, 1e-5), 16 * (1 + mean), casts=False)
    check()


@EXAMPLES
@given(case=ROWS)
def test_activations_are_the_reference(engine: Engine, case: dict[str, Any]) -> None:
    operations = Operations(engine)
    x, check = placed(values(case["rows"], 2 * case["width"], case=case), case)
    with GuardedResults():
        found, passed, tanh = operations.silu_and_mul(x), operations.gelu(x), operations.gelu_tanh_and_mul(x)
        # Far below zero torch's silu is 0, the kernel's 1e-37.
        close(found, REFERENCE.silu_and_mul(x), case["scale"], casts=case["scale"] < 100)
        limited = operations.limited_silu_and_mul(x, 0.7)
        close(limited, REFERENCE.limited_silu_and_mul(x, 0.7), 1.0, casts=case["scale"] < 100)
        # In float32 torch's results are off by 5e-7: 1 + tanh cancels.
        for entry, own in (("gelu", passed), ("gelu_tanh_and_mul", tanh)):
            exact = getattr(REFERENCE, entry)(x.double()).to(x.dtype)
            close(own, exact, case["scale"], casts=False)
    check()


def test_gelu_is_exact_over_its_whole_range(engine: Engine) -> None:
    x = torch.linspace(-13, 13, 5003)
    exact = torch.tensor([each * math.erfc(-each / math.sqrt(2)) / 2 for each in x.tolist()], dtype=torch.float64)
    found = Operations(engine).gelu(x[None])[0].double()
    # For large negative x the error is the rounding of the exponent: 85 * 2^-23.
    torch.testing.assert_close(found, exact, rtol=2e-5, atol=0)
    torch.testing.assert_close(found[x > -2], exact[x > -2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [torch.inf, 1e30, 3e38])
def test_activations_of_huge_values_are_theirs(engine: Engine, value: float) -> None:
    x = torch.tensor([[value, -3e38, torch.nan, 1.0]])
    found = Operations(engine).gelu(x)[0]
    assert found[0] == value and abs(float(found[1])) < 1e-37 and found[2].isnan()
    gated = Operations(engine).silu_and_mul(torch.tensor([[value, torch.nan, 1.0, 1.0]]))[0]
    assert gated[0] == value and gated[1].isnan()
    limited = Operations(engine).limited_silu_and_mul(
        torch.tensor([[value, torch.nan, 1.0, 1.0, 1.0, torch.nan]]), 2.0
    )[0]
    assert 1.7 < limited[0] < 1.8 and limited[1:].isnan().all()


@pytest.mark.parametrize(
    "entry", ["rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "gelu_tanh_and_mul", "gelu"]
)
def test_other_types_and_strided_columns_go_to_torch(engine: Engine, entry: str) -> None:
    operations, generator = Operations(engine), torch.Generator().manual_seed(3)
    half = torch.randn(3, 32, generator=generator).half()
    columns = torch.randn(32, 3, generator=generator).T
    for x in (half, columns):
        ones = torch.ones(32, dtype=x.dtype)
        given_of = {
            "rms_norm": (x, ones, 1e-6),
            "add_rms_norm": (x.clone(), x.clone(), ones, 1e-6),
            "layer_norm": (x, ones, ones, 1e-6),
            "silu_and_mul": (x,),
            "gelu_tanh_and_mul": (x,),
            "gelu": (x,),
        }
        wanted = getattr(REFERENCE, entry)(
            *(part.clone() if isinstance(part, Tensor) else part for part in given_of[entry])
        )
        found = getattr(operations, entry)(*given_of[entry])
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
