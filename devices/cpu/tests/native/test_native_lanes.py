"""The vectors of sixteen lanes on every instruction set: each function against torch, for ordinary
and extreme numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import guarded, guarded_copy
from sglcore_cpu.native import Engine

NAMES: tuple[str, ...] = (
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "fma",
    "round",
    "exp",
    "silu",
    "rounded",
    "where_less",
    "reduce_add",
    "reduce_max",
    "first",
    "load_first",
    "store_bf16",
    "store_bf16_first",
    "load_bf16",
    "load_bf16_first",
    "load_f16",
    "load_i8",
    "load_i8_first",
    "line_first",
    "pair_first",
    "pair_second",
    "dot_bf16",
    "dot_broadcast",
    "add_i32",
    "mul_i32",
    "to_i32",
    "to_f32",
    "scale_by_power",
    "dot_u8s8",
    "dot_low",
    "dot_high",
    "line",
    "high_line",
)
TINY, INF, NAN = 1e-40, float("inf"), float("nan")
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, TINY, 3.4e38, INF, -INF, NAN, 1e-8, 100.25, -7.75]


class Lanes:
    """Calls the lane functions of one engine by name, on guarded memory."""

    def __init__(self, engine: Engine) -> None:
        self._call = engine.kernel("probe_lanes").bind()

    def __call__(self, name: str, *operands: Tensor, out: torch.dtype = torch.float32, count: int = 16) -> Tensor:
        held = [guarded_copy(operand, offset_elements=1) for operand in operands]
        result, check = guarded((16,), out, offset_elements=1)
        places = [view.data_ptr() for view, _ in held] + [0] * (3 - len(held))
        self._call(
            x=places[0],
            y=places[1],
            z=places[2],
            out=result.data_ptr(),
            function=NAMES.index(name),
            count=count,
        )
        for checked in (check, *(check for _, check in held)):
            checked()
        return result.clone()


def floats(seed: int, scale: float = 4.0) -> Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(seed)) * scale


def edges() -> Tensor:
    return torch.tensor(EDGES)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


PLAIN: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": lambda x, y: torch.where(x > y, x, y),
    "min": lambda x, y: torch.where(x < y, x, y),
    "round": torch.round,
    "rounded": lambda x: x.bfloat16().float(),
    "where_less": lambda x, y, z: torch.where(x < y, z, x),
    "fma": lambda x, y, z: (x.double() * y.double() + z.double()).float(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_arithmetic_is_exact(engine: Engine, name: str) -> None:
    lanes, function = Lanes(engine), PLAIN[name]
    arity = {"round": 1, "rounded": 1, "where_less": 3, "fma": 3}.get(name, 2)
    for operands in ([floats(seed) for seed in range(arity)], [edges().roll(3 * place) for place in range(arity)]):
        if name != "fma" or operands[0].isfinite().all():
            same(lanes(name, *operands), function(*operands))


@pytest.mark.parametrize(("name", "function"), [("exp", torch.exp), ("silu", torch.nn.functional.silu)])
def test_exponentials_are_within_a_few_units(engine: Engine, name: str, function: Any) -> None:
    lanes = Lanes(engine)
    for start in range(-80, 80, 8):
        x = torch.linspace(start, start + 8, 16)
        torch.testing.assert_close(lanes(name, x), function(x.double()).float(), rtol=1e-6, atol=1e-30)


def test_a_very_small_exponential_is_nearly_zero(engine: Engine) -> None:
    assert Lanes(engine)("exp", torch.full((16,), -INF)).max() < 2e-38


def test_reductions(engine: Engine) -> None:
    lanes, x = Lanes(engine), floats(1)
    torch.testing.assert_close(lanes("reduce_add", x)[0], x.double().sum().float(), rtol=1e-5, atol=1e-5)
    same(lanes("reduce_max", x)[0], x.max())


@pytest.mark.parametrize("count", range(17))
def test_only_the_first_lanes_are_touched(engine: Engine, count: int) -> None:
    lanes, x = Lanes(engine), floats(2)
    inside = torch.arange(16) < count
    bf16 = x.bfloat16()
    same(lanes("load_first", x[:count], count=count), torch.where(inside, x, 0.0))
    same(lanes("first", x[:count], count=count), torch.where(inside, x, NAN))
    same(lanes("load_bf16_first", bf16[:count], count=count), torch.where(inside, bf16.float(), 0.0))
    bytes = torch.arange(-128, 127, 16, dtype=torch.int8)
    same(lanes("load_i8_first", bytes[:count], count=count), torch.where(inside, bytes.float(), 0.0))
    pairs = floats(3).bfloat16().repeat_interleave(2)
    same(lanes("line_first", pairs[: 2 * count], count=4 * count), torch.where(inside, pairs[::2].float(), 0.0))
    same(lanes("store_bf16_first", x, out=torch.bfloat16, count=count), torch.where(inside, bf16, NAN))


def test_narrow_types(engine: Engine) -> None:
    lanes = Lanes(engine)
    for x in (floats(3), edges(), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20] * 4)):
        same(lanes("store_bf16", x, out=torch.bfloat16), x.bfloat16())
        same(lanes("load_bf16", x.bfloat16()), x.bfloat16().float())
        same(lanes("load_f16", x.half()), x.half().float())
    bytes = torch.tensor([-128, 127, 0, -1, 1, 100, -100, 64] * 2, dtype=torch.int8)
    same(lanes("load_i8", bytes), bytes.float())


def test_pairs_of_bf16(engine: Engine) -> None:
    lanes = Lanes(engine)
    x, y, z = (torch.cat((floats(seed), floats(seed + 9))).bfloat16() for seed in (4, 5, 6))
    same(lanes("pair_first", x), x[0::2].float())
    same(lanes("pair_second", x), x[1::2].float())
    acc = z[:16].float()
    expected = (acc.double() + (x.double() * y.double()).view(16, 2).sum(1)).float()
    torch.testing.assert_close(lanes("dot_bf16", x, y, acc), expected, rtol=1e-5, atol=1e-5)
    expected = (acc.double() + (x.double() * y[:2].double().repeat(16)).view(16, 2).sum(1)).float()
    torch.testing.assert_close(lanes("dot_broadcast", x, y[:2], acc), expected, rtol=1e-5, atol=1e-5)


def test_integers(engine: Engine) -> None:
    lanes, i32 = Lanes(engine), torch.int32
    x = torch.randint(-(2**30), 2**30, (16,), dtype=i32, generator=torch.Generator().manual_seed(7))
    y = x.roll(5)
    same(lanes("add_i32", x, y, out=i32), x + y)
    same(lanes("mul_i32", x, y, out=i32), x * y)
    same(lanes("to_f32", x), x.float())
    halves = torch.arange(-8, 8) + 0.5
    same(lanes("to_i32", halves, out=i32), halves.round().to(i32))
    powers = torch.tensor([-126, 127, 0, 1, -1, 10, -10, 64] * 2, dtype=i32)
    same(lanes("scale_by_power", torch.full((16,), 0.75), powers), torch.full((16,), 0.75) * 2.0**powers)


@pytest.mark.parametrize("extreme", [False, True])
def test_dots_of_bytes_are_exact(engine: Engine, extreme: bool) -> None:
    lanes, generator = Lanes(engine), torch.Generator().manual_seed(8)
    x = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    y = torch.randint(-128, 128, (64,), dtype=torch.int8, generator=generator)
    if extreme:
        x, y = torch.full_like(x, 255), torch.where(torch.arange(64) < 32, 127, -128).to(torch.int8)
    acc = torch.arange(16, dtype=torch.int32)
    for name, codes in (("dot_u8s8", x), ("dot_low", x & 15), ("dot_high", x >> 4)):
        expected = acc + (codes.int() * y.int()).view(16, 4).sum(1, dtype=torch.int32)
        same(lanes(name, x, y, acc, out=torch.int32), expected)
    for name, codes in (("line", x), ("high_line", x >> 4)):
        same(lanes(name, x, out=torch.int32).view(torch.uint8), codes)
