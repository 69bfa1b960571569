"""Keys and values become 8-bit codes with a scale for each KV slot and head; no other KV slot
changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import guarded, guarded_copy
from sglcore_cpu.kernels.kv_pool import Int8Store, read_int8
from sglcore_cpu.native import Engine

CELLS = 40
SHAPES = ((1, 1, 8), (3, 2, 20), (17, 2, 64), (33, 8, 128), (5, 1, 256), (2, 3, 2))


def stored(engine: Engine, key: Tensor, value: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Store keys and values in caches of ones [CELLS, kv_heads, dim + 4], and return the caches."""
    caches = [guarded((CELLS, key.shape[1], key.shape[2] + 4), torch.uint8) for _ in range(2)]
    for cache, _ in caches:
        cache.fill_(1)
    Int8Store(engine)(key, value, caches[0][0], caches[1][0], where)
    for _, check in caches:
        check()
    return caches[0][0], caches[1][0]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales by the format's definition."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale.clamp(min=1e-38)).round(), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "kv_heads", "dim"), SHAPES)
def test_codes_and_scales_are_those_of_the_format(
    engine: Engine, tokens: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    rows = torch.randn(tokens, 2 * kv_heads * dim + 3).mul_(torch.logspace(-6, 6, tokens)[:, None]).to(dtype)
    held, check = guarded_copy(rows, 1, 5)
    key = held[:, : kv_heads * dim].unflatten(1, (kv_heads, dim))
    value = held[:, kv_heads * dim : -3].unflatten(1, (kv_heads, dim))
    where = torch.randperm(CELLS)[:tokens]
    for cache, x in zip(stored(engine, key, value, where), (key, value), strict=True):
        codes, scales = quantized(x)
        found = cache[where]
        torch.testing.assert_close(found[..., dim:].contiguous().view(torch.float32), scales, rtol=1e-6, atol=0)
        away = (found[..., :dim].contiguous().view(torch.int8) - codes).abs()
        assert away.max() <= 1 and (away != 0).float().mean() < 0.01, "only ties may round another way"
        error = (read_int8(found) - x.float()).abs()
        assert (error <= scales * 0.5001).all()
        others = torch.ones(CELLS, dtype=torch.bool)
        others[where] = False
        assert (cache[others] == 1).all()
    check()


def test_zero_stays_zero_and_what_is_not_a_number_is_seen(engine: Engine) -> None:
    x = torch.zeros(4, 1, 24)
    x[1, 0, 5], x[2, 0, 23], x[3, 0, 0] = torch.nan, torch.inf, -3.0
    cells = stored(engine, x, x, torch.arange(4))[0][:4]
    found = read_int8(cells)
    assert not cells[0].any(), "codes and scale of a head of zeros are zero"
    assert found[1].isnan().any() and found[2].isnan().any()
    assert found[3, 0, 0] == -3.0 and not found[3, 0, 1:].any()


def test_rows_and_cells_of_no_token_are_left_alone(engine: Engine) -> None:
    none = torch.zeros(0, 2, 8)
    assert (stored(engine, none, none, torch.zeros(0, dtype=torch.int64))[0] == 1).all()
