"""The vendor's operators equal the reference for any number of tokens; the blocked layout is used
only for weights where it pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore_npu import kernels as npu_kernels
from sglcore_npu.kernels import LARGE, kernels, takes_nz

DEVICE = "npu:0"
TOKENS = pytest.mark.parametrize("tokens", [0, 1, 7])
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS))


def compare(entry: str, *given: Any) -> None:
    """Compare an entry of the device's table with the reference, on the same values."""
    dtype = given[0].dtype
    placed = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in given]
    found = getattr(kernels(), entry)(*placed)
    wanted = getattr(KernelTable(), entry)(*given)
    for one, other in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (found, wanted)), strict=True):
        assert one.dtype == other.dtype and one.device.type == "npu"
        torch.testing.assert_close(one.cpu(), other, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Make random values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@TOKENS
def test_norms_and_activation(tokens: int, dtype: torch.dtype) -> None:
    x, weight = values(tokens, 48, dtype=dtype), values(48, dtype=dtype, seed=1)
    compare("rms_norm", x, weight, 1e-5)
    compare("rms_norm", values(tokens, 3, 48, dtype=dtype), weight, 1e-5)
    compare("add_rms_norm", x, values(tokens, 48, dtype=dtype, seed=2), weight, 1e-5)
    compare("silu_and_mul", x)


@DTYPES
@TOKENS
def test_rotary_of_whole_heads_in_strided_rows(tokens: int, dtype: torch.dtype) -> None:
    heads = values(tokens, 5 * 16, dtype=dtype)
    q, k = heads[:, : 3 * 16], heads[:, 3 * 16 :]
    positions = torch.arange(tokens, dtype=torch.int32) + 2
    angles = torch.rand(32, 8, generator=torch.Generator().manual_seed(3)) * 6
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    compare("rotary", q, k, positions, cache, 16)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotated", "reason"),
    [
        (32, 128, 128, ""),
        (32, 128, 64, "64 of 128 elements of a head are rotated"),
        (2, 896, 896, "2 heads of 896; it takes less than 1000 of less than 896"),
        (1000, 16, 16, "1000 heads of 16; it takes less than 1000 of less than 896"),
    ],
)
def test_rotary_says_which_heads_it_takes(heads: int, head_dim: int, rotated: int, reason: str) -> None:
    q, positions = torch.empty(1, heads * head_dim, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    cache, refusals = torch.empty(8, rotated, device="meta"), Refusals()
    chosen = choose(kernels(), KernelTable.rotary, (q, q, positions, cache, head_dim), refusals=refusals)
    assert (chosen is KernelTable().rotary) == bool(reason)
    assert [row.reason.partition("; found")[0] for row in refusals.rows() if row.downgrade] == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("cells", "dtype"), [(torch.int32, torch.float16), (torch.int64, torch.float16), (torch.int32, torch.float32)]
)
@TOKENS
def test_keys_and_values_lie_in_their_cells_and_nothing_else_changes(
    tokens: int, cells: torch.dtype, dtype: torch.dtype
) -> None:
    rows = values(tokens, 2, 16, dtype=torch.float32)
    where = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:tokens]
    keys, kept = torch.full((24, 2, 16), 7.0, dtype=dtype, device=DEVICE), torch.full((24, 2, 16), 7.0)
    found = keys.clone()
    call = rows.to(DEVICE), -rows.to(DEVICE), keys, found, where.to(cells).to(DEVICE)
    store = choose(kernels(), KernelTable.store_kv, call)
    assert (store is KernelTable().store_kv) == (dtype is torch.float32)
    store(*call)
    for cache, sign in ((keys, 1), (found, -1)):
        wanted = kept.clone().to(dtype)
        wanted[where] = (sign * rows).to(dtype)
        assert torch.equal(cache.cpu(), wanted)


def test_only_large_weights_of_16_bits_in_whole_blocks_are_laid_out_anew() -> None:
    side = int(LARGE**0.5)
    assert takes_nz(torch.empty(side, side, dtype=torch.bfloat16))
    assert not takes_nz(torch.empty(side, side))
    assert not takes_nz(torch.empty(side // 2, side, dtype=torch.float16))
    assert not takes_nz(torch.empty(side + 8, side + 8, dtype=torch.float16))


def test_a_linear_layer_over_a_weight_in_blocks_is_the_plain_one() -> None:
    x, weight = values(3, 1024, dtype=torch.float16), values(1040, 1024, dtype=torch.float16, seed=1) / 32
    table = kernels()
    packed = table.pack_linear(weight.to(DEVICE))
    assert packed.shape == weight.shape
    found = table.linear(x.to(DEVICE), packed, None).cpu()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), atol=4e-3, rtol=4e-3)


def test_the_table_says_which_entries_are_the_vendors() -> None:
    own = {name for name, origin in kernels().origin.items() if origin.startswith("sglcore_npu")}
    whole = {"rms_norm", "add_rms_norm", "silu_and_mul", "rotary", "store_kv", "pack_linear"}
    assert own == whole | {"sparse_mqa"}


def test_an_operator_that_is_not_registered_leaves_its_entry_to_the_reference_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu_kernels, "offers", lambda operator: operator != "npu_sparse_flash_attention")
    table = kernels()
    assert table.sparse_mqa is KernelTable().sparse_mqa and table.rotary is not KernelTable().rotary
    (told,) = table.refused
    assert told == (
        "npu_sparse_flash_attention refused for sparse_mqa: this torch_npu does not register it; install a newer one"
    )
