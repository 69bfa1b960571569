"""The kernel table of the native kernels; torch's kernels fill the other entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.reference_kernels import QuantizedCodes
from sglcore.runtime.kernels.table import KernelTable, Limited
from sglcore_cpu.kernels.draw import NativeDraw
from sglcore_cpu.kernels.experts import Experts
from sglcore_cpu.kernels.implements import entries, implements
from sglcore_cpu.kernels.latent import Latent
from sglcore_cpu.kernels.operands import SERVED, takes
from sglcore_cpu.kernels.operations import Operations
from sglcore_cpu.kernels.packed import PackedWeight
from sglcore_cpu.kernels.panels import pack, pack_parts
from sglcore_cpu.kernels.proposals import Proposals
from sglcore_cpu.kernels.quantized_form import pack_quantized, quantize
from sglcore_cpu.kernels.recurrent import Recurrent
from sglcore_cpu.kernels.sparse import SparseAttention
from sglcore_cpu.kernels.torch_kernels import clamped_moe as torch_clamped_moe
from sglcore_cpu.kernels.torch_kernels import linear as torch_linear
from sglcore_cpu.kernels.torch_kernels import moe as torch_moe
from sglcore_cpu.kernels.torch_kernels import relu2_moe as torch_relu2_moe
from sglcore_cpu.kernels.torch_kernels import takes_grouped, takes_plain_grouped, torch_kernels
from sglcore_cpu.kernels.trees import Trees
from sglcore_cpu.native import Engine, recorder

TILED = ("amx",)
"""Instruction sets for which torch's grouped products use tiles and the native experts do not."""
MANY_ROWS = 16
"""Tokens per expert that fill a tile."""
FEW_ROWS = 8
"""Up to this many tokens, a product with an unpacked weight is bound by reading the weight."""
BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4})


class NativeLinear:
    """Linear layers and embeddings. Packed weights use their own kernels. Plain weights go to torch
    for more than `FEW_ROWS` tokens; for fewer, a torch call takes longer than the native kernel."""

    def __init__(self, engine: Engine, operations: Operations, latent: Latent) -> None:
        self.engine = engine
        self._grouped = latent.grouped_linear
        self._embedding = operations.embedding
        self._silu_and_mul = operations.silu_and_mul

    @implements()
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `KernelTable.linear`: x [T, in], plain or packed weight [out, in], bias [out]
        or None -> [T, out] in x's dtype."""
        if isinstance(weight, PackedWeight):
            return weight.form.multiply(x, bias)
        if bias is None and x.shape[0] <= FEW_ROWS and x.dtype in SERVED and takes_plain(x, weight):
            return self._grouped(x.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)
        return torch_linear(x, weight, bias)

    @implements(takes)
    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Implement `KernelTable.gated_linear`: x [T, in], weight [2 * I, in], gate's rows first ->
        silu(gate) * up [T, I]. Takes plain and packed weights; two kernels if the weight's format
        has no fused one."""
        gated = weight.form.multiply_gated(x) if isinstance(weight, PackedWeight) else None
        return self._silu_and_mul(self.linear(x, weight, None)) if gated is None else gated

    @implements()
    def head(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Implement `KernelTable.head`: hidden [N, H], plain or packed weight [vocab, H] -> logits
        float32 [N, vocab]."""
        if isinstance(weight, PackedWeight):
            return weight.form.multiply(hidden, None, wide=True)
        return torch_linear(hidden, weight, None).float()

    @implements()
    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Implement `KernelTable.embedding`: the rows `ids` int [T] of a plain or packed weight
        [vocab, H], as [T, H] of the weight's dtype."""
        if isinstance(weight, PackedWeight):
            return weight.form.rows(ids, weight.dtype)
        return self._embedding(ids, weight)

    @implements()
    def pack_linear(self, weight: Tensor) -> Tensor:
        """Implement `KernelTable.pack_linear` and `pack_head`: return the weight [out, in] packed
        in panels; a weight of a dtype outside `SERVED` is returned as it is."""
        return pack(self.engine, weight) if weight.dtype in SERVED else weight

    pack_head = pack_linear

    @implements()
    def pack_parts(self, parts: Sequence[Tensor], done: Callable[[int], None]) -> Tensor | None:
        """Implement `KernelTable.pack_parts`: return one packed weight of parts [rows, in], or None
        if they do not fit; calls `done(index)` after each part, as `panels.pack_parts` does."""
        return pack_parts(self.engine, parts, done)

    @implements()
    def pack_quantized(self, quantized: QuantizedCodes) -> Tensor:
        """Implement `KernelTable.pack_quantized`: return the packed weight of a checkpoint's 8-bit
        or 4-bit codes. Raises ConfigError for a dtype outside `SERVED`, ValueError for codes that
        `quantized_form.pack_quantized` refuses."""
        check_served(quantized.dtype)
        codes, scales, zeros = quantized.codes, quantized.scales, quantized.zeros
        return pack_quantized(self.engine, codes, scales, zeros, quantized.bits, quantized.group, quantized.dtype)

    @implements()
    def quantize_linear(self, weight: Tensor, kind: str) -> Tensor:
        """Implement `KernelTable.quantize_linear`: return weight [out, in] quantised to `kind`,
        "int8" or "int4". Raises ConfigError for a dtype outside `SERVED`, ValueError for values
        that are not finite."""
        check_served(weight.dtype)
        return quantize(self.engine, weight, BITS[kind])


def takes_plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether the native kernel takes x with a weight that is not packed: x [T, in] and
    weight [out, in] of one dtype with contiguous rows, and the weight not in oneDNN's blocks."""
    return not weight.is_mkldnn and x.dtype is weight.dtype and x.dim() == 2 and x.stride(1) == weight.stride(1) == 1


def check_served(dtype: torch.dtype) -> None:
    """Raise ConfigError for a dtype in which weights of 8 or 4 bits can not be multiplied: any but
    float32 and bfloat16."""
    if dtype not in SERVED:
        raise ConfigError(
            f"weights of 8 or 4 bits are multiplied in bfloat16 or float32; found the dtype {dtype}".replace(
                "torch.", ""
            ),
            remedy="--dtype bfloat16",
        )


class NativeExperts:
    """A mixture of experts by one of two kernels: torch's grouped products from `MANY_ROWS` tokens
    per expert on average, if they take the call, else the native kernel. A recorded step always
    uses the native kernel, which needs no extra memory in the record."""

    def __init__(
        self, native: Callable[..., Tensor], grouped: Callable[..., Tensor], takes: Callable[..., str]
    ) -> None:
        self._native, self._grouped, self._takes = native, grouped, takes

    def __call__(self, hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, *others: Any) -> Tensor:
        """Implement `moe`, `clamped_moe` or `relu2_moe`, whichever both functions implement: hidden
        [T, H], weights and ids [T, K], expert weights -> [T, H]. `others` are the entry's further
        arguments."""
        is_large = ids.numel() >= MANY_ROWS * w13.shape[0] and recorder.get() is None
        is_large = is_large and not self._takes(hidden, weights, ids, w13, *others)
        return (self._grouped if is_large else self._native)(hidden, weights, ids, w13, *others)


ACTIVATION_BITS = 8
"""Bits of the activations that are multiplied with integer codes, with a scale for each token and
group: the sums within a group are exact integers."""


def native_table(engine: Engine) -> KernelTable:
    """Make the kernel table: every entry that the native kernels implement runs on `engine`; the
    others are torch's. All share the engine, so one thread at a time may call them."""
    operations, latent, experts = Operations(engine), Latent(engine), Experts(engine)
    linear, draw = NativeLinear(engine, operations, latent), NativeDraw(engine)
    small = (operations, Proposals(engine), Trees(engine), Recurrent(engine))
    return (
        torch_kernels()
        .replace(
            **entries(linear, latent, experts, SparseAttention(engine), *small),
            **_mixtures(experts, engine.instruction_set in TILED),
            draw=draw,
            greedy=draw.greedy,
        )
        .rounding(ACTIVATION_BITS)
    )


def _mixtures(experts: Experts, has_tiles: bool) -> Mapping[str, Limited]:
    """Return the entries `moe`, `clamped_moe` and `relu2_moe` by name. With `has_tiles` (the
    instruction set has matrix tiles) each is a `NativeExperts`, which runs torch's grouped products
    for many tokens; else the native kernel alone."""
    moe, clamped_moe, relu2_moe = experts.moe, experts.clamped_moe, experts.relu2_moe
    if has_tiles:
        moe = NativeExperts(moe, torch_moe, takes_grouped)
        clamped_moe = NativeExperts(clamped_moe, torch_clamped_moe, takes_grouped)
        relu2_moe = NativeExperts(relu2_moe, torch_relu2_moe, takes_plain_grouped)
    return {
        "moe": Limited(moe, takes),
        "clamped_moe": Limited(clamped_moe, takes),
        "relu2_moe": Limited(relu2_moe, takes),
    }


def is_native(kernels: KernelTable) -> bool:
    """Return whether `native_table` made the table."""
    return _owner(kernels) is not None


def engine_of(kernels: KernelTable) -> Engine:
    """Return the engine of a native table. Raises Unavailable for another table."""
    owner = _owner(kernels)
    if owner is None:
        raise Unavailable("it needs the native kernels, which do not serve here; the row `kernels` says why")
    return owner.engine


def _owner(kernels: KernelTable) -> NativeLinear | None:
    owner = kernels.linear.__self__ if isinstance(kernels.linear, MethodType) else None
    return owner if isinstance(owner, NativeLinear) else None
