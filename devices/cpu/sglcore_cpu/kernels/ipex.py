"""A kernel table with operators of Intel's extension for PyTorch: norms, rotary embedding and
linear layers; every other entry is torch's. The extension is imported when the table is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError, DeviceError
from sglcore.runtime.kernels.table import KernelTable, Limited, takes_one_dtype
from sglcore_cpu.kernels.extension import DISTRIBUTION, ENDED, find_extension, release
from sglcore_cpu.kernels.packed import ClosedWeight
from sglcore_cpu.kernels.torch_kernels import takes_whole_heads, torch_kernels

PACKED = (torch.float32, torch.bfloat16)
"""Element types of weights that the extension packs on every processor it supports; float16 needs a
newer processor."""


def ipex_kernels() -> KernelTable:
    """Import the extension and make the table. Raises ConfigError if the extension is not installed
    or was built for another torch, DeviceError if it can not be imported."""
    check_installed()
    try:
        import_module("intel_extension_for_pytorch")
    except Exception as error:
        raise DeviceError(f"{DISTRIBUTION} cannot be imported: {error}", remedy="--kernels auto") from error
    return torch_kernels().replace(
        linear=linear,
        pack_linear=pack_linear,
        rms_norm=Limited(rms_norm, takes_one_dtype),
        add_rms_norm=Limited(add_rms_norm, takes_one_dtype),
        rotary=Limited(rotary, takes_whole_heads),
    )


def check_installed() -> None:
    """Raise ConfigError unless an installed extension fits this torch. Imports nothing."""
    found = find_extension(torch.__version__)
    reason = "is not installed" if found is None else found.gap
    if reason:
        what = DISTRIBUTION if found is None else f"{DISTRIBUTION} {found.version}"
        raise ConfigError(
            f"kernels is 'ipex', but {what} {reason}",
            wanted=f"one that is built for torch {release(torch.__version__)}",
            remedy=f"--kernels auto, which needs no extension (no release of it is newer: {ENDED})",
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `KernelTable.rms_norm` by the extension's operator: x [..., N], weight [N] of x's
    dtype -> [..., N]."""
    return torch.ops.torch_ipex.rmsnorm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.add_rms_norm` by the extension's operator: return the norm of x +
    residual, and the sum, which the operator writes into the residual [T, H]. A strided residual is
    copied first, and the copy is returned."""
    total = residual.contiguous()
    return torch.ops.torch_ipex.add_rmsnorm(x, total, weight, eps, True), total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.rotary` for heads that are rotated whole (the cache's width is
    head_dim): return rotated q and k [T, heads * D]. With no token it returns empty tensors,
    because the operator needs at least one."""
    if not q.shape[0]:
        return torch.empty_like(q), torch.empty_like(k)
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    sin_cos, first = torch.cat((sin, cos), dim=-1), torch.zeros((), dtype=torch.int64)
    return _rotated(q, sin_cos, first, head_dim), _rotated(k, sin_cos, first, head_dim)


def _rotated(x: Tensor, sin_cos: Tensor, first: Tensor, head_dim: int) -> Tensor:
    tokens, width = x.shape
    heads = width // head_dim
    rows = x.unflatten(1, (heads, head_dim)).unsqueeze(0)
    rotate = torch.ops.torch_ipex.rotary_position_embedding
    found, _, _ = rotate(rows, sin_cos, first, heads, head_dim, head_dim // 2, head_dim)
    return found.view(tokens, width)


class Blocks:
    """A weight in the blocked format that the extension chose for this processor; implements
    `packed.Held`. It keeps the extension's `context` alive, because the handle that the linear
    operator takes points to it."""

    name = "blocks of ipex"

    def __init__(self, context: Any) -> None:
        self._context = context
        self._blocks: Tensor = context.get_weight()
        self._handle: Tensor = context.get_data_handle()

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocked weight."""
        return self._blocks.nbytes

    def multiply(self, x: Tensor, out_features: int) -> Tensor:
        """Return x [T, in] times the weight's transpose: [T, out] in x's dtype, without a bias.
        `out_features` is the weight's `out`."""
        return torch.ops.torch_ipex.ipex_linear(x, self._blocks, None, self._handle, out_features)


class BlockedWeight(ClosedWeight):
    """A `ClosedWeight` whose form is `Blocks`, the extension's blocked format."""

    form: Blocks  # pyright: ignore[reportIncompatibleVariableOverride]


def pack_linear(weight: Tensor) -> Tensor:
    """Implement `KernelTable.pack_linear`: return the weight [out, in] in the extension's format,
    for any number of tokens; a weight of another dtype than `PACKED` is returned as it is."""
    if weight.dtype not in PACKED:
        return weight
    context = torch.ops.ipex_prepack.linear_prepack(weight.detach(), None, None)
    return BlockedWeight(Blocks(context), weight.shape, weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `KernelTable.linear`: x [T, in], weight [out, in], bias [out] or None -> [T, out].
    A plain weight goes to torch's function. The extension's operator ignores its bias argument, so
    the bias is added after it."""
    if not isinstance(weight, BlockedWeight):
        return torch.nn.functional.linear(x, weight, bias)
    found = weight.form.multiply(x, weight.shape[0])
    return found if bias is None else found.add_(bias)
