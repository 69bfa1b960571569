"""The kernel tables of third: a few functions of its own over the reference, and the core's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.device.errors import DeviceError
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.table import KernelTable, Limited
from sglcore_third.capability import Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning

COMPILER = "third"
"""What the vendor's Triton calls its compiler, in `triton.backends`."""
TRITON = "install the Triton that compiles for third"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """By the entry's meaning."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """By the entry's meaning."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def takes_pairs(x: Tensor) -> str:
    """Rows whose halves are whole pairs."""
    return "" if x.shape[-1] % 4 == 0 else f"rows of {x.shape[-1]} elements; it takes multiples of 4"


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
) -> Tensor:
    """An optional entry, of its parts."""
    table = KernelTable()
    rotated, keys = table.rotary(q, k, positions, cos_sin_cache, head_dim)
    shape = (q.shape[0], -1, head_dim)
    table.store_kv(keys.view(shape), v.view(shape), k_cache, v_cache, out_cache_loc)
    return rotated


def kernels() -> KernelTable:
    """The table that serves."""
    return KernelTable().replace(
        rms_norm=rms_norm, silu_and_mul=Limited(silu_and_mul, takes_pairs), rotary_and_store=rotary_and_store
    )


def triton_table() -> KernelTable:
    """The core's Triton kernels; raises `DeviceError` if no Triton that compiles for it is installed."""
    if missing := triton_gap(COMPILER):
        raise DeviceError(f"the kernels of this device can not be used: {missing}", remedy=TRITON)
    from sglcore.runtime.kernels.triton import triton_kernels

    return triton_kernels(tuning(read_capability()))


def tuning(capability: Capability) -> Tuning:
    """How kernels are launched: as many programs as fill the device twice."""
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    return Tuning(
        lanes=capability.lanes,
        programs=2 * capability.cores,
        decode=LaunchConfig(128, 1),
        extend=LaunchConfig(256, 1, options={"third_scratch": "large"}),
    )
