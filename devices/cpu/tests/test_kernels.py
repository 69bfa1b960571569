"""Every entry that torch's table replaces gives the reference's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglcore.runtime.kernels.kernel_choice import choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.torch_kernels import torch_kernels as kernels

REFERENCE = KernelTable()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOKENS = pytest.mark.parametrize("tokens", [0, 1, 3, 17])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    bound = 2e-5 if found.dtype is torch.float32 else 0.06
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound / 3)


@DTYPES
@TOKENS
@pytest.mark.parametrize("bias", [False, True])
def test_linear_over_packed_weights_is_the_reference(tokens: int, dtype: torch.dtype, bias: bool) -> None:
    table = kernels()
    x, weight = random(tokens, 72, dtype=dtype), random(40, 72, seed=1, dtype=dtype)
    added = random(40, seed=2, dtype=dtype) if bias else None
    packed = table.pack_linear(weight.clone())
    assert packed.shape == weight.shape
    torch.testing.assert_close(table.linear(x, packed, added), REFERENCE.linear(x, weight, added))
    check(table.linear(x, weight, added), REFERENCE.linear(x, weight, added))


@DTYPES
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (17, 48), (3, 4, 10)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 200.0])
def test_norms_are_the_reference_at_every_magnitude(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * scale, random(shape[-1], seed=1, dtype=dtype)
    check(kernels().rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    residual = random(*shape, seed=2, dtype=dtype) * scale
    found = kernels().add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    for mine, expected in zip(found, REFERENCE.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        check(mine / scale, expected / scale)


@DTYPES
@TOKENS
@pytest.mark.parametrize("fused", [True, False])
def test_rotary_is_the_reference_on_neighbours_and_apart(tokens: int, dtype: torch.dtype, fused: bool) -> None:
    head_dim, table = 8, kernels()
    qkv = random(tokens, 7 * head_dim, dtype=dtype)
    q, k = qkv[:, : 4 * head_dim], qkv[:, 4 * head_dim : 6 * head_dim]
    if not fused:
        q, k = q.contiguous(), k.contiguous()
    angles = random(32, head_dim // 2, seed=3)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(tokens, dtype=torch.int32).flip(0)
    before = qkv.clone()
    found = table.rotary(q, k, positions, cache, head_dim)
    expected = REFERENCE.rotary(q, k, positions, cache, head_dim)
    for mine, reference in zip(found, expected, strict=True):
        check(mine, reference)
    assert torch.equal(qkv, before)


def test_rotary_over_two_caches_and_not_of_a_part_of_the_head() -> None:
    table = kernels()
    q, k, positions = random(3, 16), random(3, 8, seed=1), torch.tensor([4, 0, 9], dtype=torch.int32)
    for seed, width in ((5, 4), (6, 8), (7, 8)):
        angles = random(16, width // 2, seed=seed)
        cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        rotary = choose(table, KernelTable.rotary, (q, k, positions, cache, 8))
        assert (rotary is REFERENCE.rotary) == (width == 4)
        found, expected = (kernel(q, k, positions, cache, 8) for kernel in (rotary, REFERENCE.rotary))
        for mine, reference in zip(found, expected, strict=True):
            check(mine, reference)


@DTYPES
@TOKENS
def test_store_kv_is_the_reference(tokens: int, dtype: torch.dtype) -> None:
    key, value = random(tokens, 2, 4), random(tokens, 2, 4, seed=1)
    cells = torch.randperm(32, generator=torch.Generator().manual_seed(2))[:tokens]
    mine, reference = ([torch.zeros(32, 2, 4, dtype=dtype) for _ in range(2)] for _ in range(2))
    kernels().store_kv(key, value, mine[0], mine[1], cells)
    REFERENCE.store_kv(key, value, reference[0], reference[1], cells)
    for stored, expected in zip(mine, reference, strict=True):
        assert torch.equal(stored, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@TOKENS
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_cache_locations_are_the_reference(tokens: int, page_size: int, index_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    table = torch.randint(0, 99, (6, 9), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, 6, (tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 9 * page_size, (tokens,), generator=generator, dtype=torch.int32)
    mine, expected = (torch.full((tokens,), -1, dtype=index_dtype) for _ in range(2))
    kernels().cache_locations(table, slots, positions, page_size, mine)
    REFERENCE.cache_locations(table, slots, positions, page_size, expected)
    assert torch.equal(mine, expected)
    assert expected.tolist() == [
        int(table[s, p // page_size]) * page_size + int(p) % page_size for s, p in zip(slots, positions, strict=True)
    ]


@DTYPES
@TOKENS
@pytest.mark.parametrize("sizes", [(32, 16), (20, 12)])
def test_moe_is_the_reference_for_every_shape(tokens: int, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    hidden_size, inner = sizes
    hidden = random(tokens, hidden_size, dtype=dtype)
    w13 = random(5, 2 * inner, hidden_size, seed=1, dtype=dtype) * 0.2
    w2 = random(5, hidden_size, inner, seed=2, dtype=dtype) * 0.2
    weights, ids = REFERENCE.top_k_routing(random(tokens, 5, seed=3, dtype=dtype), 2, True)
    call = hidden, weights, ids, w13, w2
    moe = choose(kernels(), KernelTable.moe, call)
    assert (moe is REFERENCE.moe) == any(size * dtype.itemsize % 16 for size in sizes)
    found, expected = moe(*call), REFERENCE.moe(*call)
    torch.testing.assert_close(found, expected)
