"""Linear weights of 8 and 4 bits for the native kernels: packed from a checkpoint's codes, or
quantised on load.

A weight is scale * (code - zero), with one scale, and optionally one zero, for each group of
columns of a row. The kernels quantise activations to int8, with a scale for each token and group;
the sums within a group are exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore_cpu.arena import huge_empty
from sglcore_cpu.kernels.packed import PackedWeight
from sglcore_cpu.native import TYPES, BoundKernel, Engine

PANEL = 16
COLUMNS = 64
GROUPS = (128, 64, 32)
DEFAULT_GROUP: Mapping[int, int] = MappingProxyType({8: 64, 4: 32})
"""Default group size by number of bits. Activations use the same groups. At 8 bits, groups of 64:
one large activation reduces the precision of only 64 values, and groups of 128 would save only
1.5 % of the bytes. At 4 bits the weight's own error decides: 8.1 % with groups of 32, 9.0 % with
64."""
MOST_ZERO = 65504.0
"""The largest float16."""


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """Memory layout of a weight [rows, columns] in one block: codes of `bits` (8 or 4), float16
    scales, one for each `group` columns of a row, and float16 zeros if `has_zeros`. Each part is in
    panels of 16 rows and starts at a multiple of 64 bytes."""

    rows: int
    columns: int
    bits: int
    group: int
    has_zeros: bool

    @property
    def padded(self) -> int:
        """Columns in memory, padded to a multiple of 64 and of the group size."""
        unit = max(COLUMNS, self.group)
        return -(-self.columns // unit) * unit

    @property
    def groups(self) -> int:
        """Number of scales of a row in memory, padding included."""
        return self.padded // self.group

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes, with rows and columns padded."""
        return self._panels * PANEL * self.padded * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales, or of all zeros, padded to a multiple of 64."""
        return -(-self._panels * PANEL * self.groups * 2 // 64) * 64

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole weight: codes, scales and zeros."""
        return self.code_bytes + self.scale_bytes * (2 if self.has_zeros else 1)

    @property
    def _panels(self) -> int:
        return -(-self.rows // PANEL)

    def arguments(self, address: int, multiplier: float) -> dict[str, float]:
        """Return the kernel arguments that describe the weight at `address`, by name. `multiplier`:
        the factor of all scales. The argument `zeros` is 0 without zeros."""
        scales = address + self.code_bytes
        return {
            "codes": address,
            "scales": scales,
            "zeros": scales + self.scale_bytes if self.has_zeros else 0,
            "multiplier": multiplier,
            "bits": self.bits,
            "group": self.group,
            "rows": self.rows,
            "columns": self.columns,
        }


class QuantizedForm:
    """A quantised weight in memory, with the kernels that read it; implements `packed.Form`.
    `memory`: the block that `layout` describes; `multiplier`: a power of two that all scales are
    relative to."""

    __slots__ = ("_engine", "_gated", "_linear", "_rows", "_weight", "layout", "memory", "multiplier")

    def __init__(self, engine: Engine, layout: QuantizedLayout, memory: Tensor, multiplier: float) -> None:
        self.layout = layout
        self.memory = memory
        self.multiplier = multiplier
        self._engine = engine
        self._weight = layout.arguments(memory.data_ptr(), multiplier)
        self._linear = engine.kernel("linear_quantized").bind()
        self._gated = engine.kernel("linear_quantized_gated").bind()
        self._rows = engine.kernel("quantized_rows").bind()

    @property
    def num_bytes(self) -> int:
        """Bytes of `memory`."""
        return self.memory.numel()

    @property
    def name(self) -> str:
        """Its name in the ledger, such as "int4 panels of groups of 32 with zeros"."""
        zeros = " with zeros" if self.layout.has_zeros else ""
        return f"int{self.layout.bits} panels of groups of {self.layout.group}{zeros}"

    def multiply(self, x: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
        """Return x [T, in], float32 or bfloat16, times the weight's transpose, plus bias [out]
        (None: none): [T, out] in x's dtype, or the same values as float32 if `wide` (for bfloat16 x
        they are rounded to bfloat16 first). x is quantised to int8 inside. Raises ValueError for
        other dtypes, shapes and rows with gaps."""
        out = self._engine.empty(x.shape[0], self.layout.rows, dtype=torch.float32 if wide else x.dtype)
        self._multiply(self._linear, x, bias, out, wide and x.dtype == torch.bfloat16)
        return out

    def multiply_gated(self, x: Tensor) -> Tensor | None:
        """Return silu(x @ gate.T) * (x @ up.T) [T, out / 2] in x's dtype, for a weight with gate's
        rows before up's; None if gate and up do not fill whole panels, that is if `out` is no
        multiple of 32. Raises ValueError for an x that `multiply` refuses."""
        if self.layout.rows % (2 * PANEL):
            return None
        out = self._engine.empty(x.shape[0], self.layout.rows // 2, dtype=x.dtype)
        self._multiply(self._gated, x, None, out, False)
        return out

    def _multiply(self, kernel: BoundKernel, x: Tensor, bias: Tensor | None, out: Tensor, rounded: bool) -> None:
        self._check(x, bias)
        kernel(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_type=TYPES[x.dtype],
            tokens=x.shape[0],
            **self._weight,
            bias=0 if bias is None else bias.data_ptr(),
            bias_type=0 if bias is None else TYPES[bias.dtype],
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_type=TYPES[out.dtype],
            rounded=int(rounded),
        )

    def _check(self, x: Tensor, bias: Tensor | None) -> None:
        if x.dtype not in TYPES or x.dim() != 2 or x.shape[1] != self.layout.columns or x.stride(1) != 1:
            raise ValueError(
                f"found activations {list(x.shape)} of {x.dtype} with strides {x.stride()}; wanted "
                f"[tokens, {self.layout.columns}] of float32 or bfloat16 with rows in one piece; "
                "cast or copy them first"
            )
        if bias is not None and (bias.dtype not in TYPES or bias.shape != (self.layout.rows,) or bias.stride(0) != 1):
            raise ValueError(
                f"found a bias {list(bias.shape)} of {bias.dtype}; wanted [{self.layout.rows}] of float32 or bfloat16, "
                "contiguous; cast or copy it first"
            )

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight's rows `ids`, contiguous int32 or int64 [T], as [T, in] of `dtype`,
        float32 or bfloat16; an id out of range gives a row of NaN. Raises ValueError for other
        dtypes and shapes of the arguments."""
        if (
            ids.dtype not in (torch.int32, torch.int64)
            or ids.dim() != 1
            or not ids.is_contiguous()
            or dtype not in TYPES
        ):
            raise ValueError(
                f"found rows {list(ids.shape)} of {ids.dtype} requested as {dtype}; wanted int32 or int64 [T], "
                "contiguous, as float32 or bfloat16; cast or copy them first"
            )
        out = self._engine.empty(ids.shape[0], self.layout.columns, dtype=dtype)
        self._rows(
            ids=ids.data_ptr(),
            id_bytes=ids.element_size(),
            count=ids.shape[0],
            **self._weight,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_type=TYPES[dtype],
        )
        return out

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight [out, in] as a new plain tensor of `dtype`, float32 or bfloat16,
        rounded once. Raises KeyError for another dtype."""
        out = torch.empty(self.layout.rows, self.layout.columns, dtype=dtype)
        kernel = self._engine.kernel("dequantize").bind()
        kernel(**self._weight, out=out.data_ptr(), out_stride=out.stride(0), out_type=TYPES[dtype])
        return out


def pack_quantized(
    engine: Engine,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedWeight:
    """Pack a weight from a checkpoint's codes uint8 [N, K] (one code a byte), scales [N, groups],
    and zeros [N, groups] in units of codes (None: 128 for 8 bits, 8 for 4 bits).

    `group`: columns of one scale. A multiple of 32 is split into groups of 128, 64 or 32 that share
    the scale; a scale for the whole row is repeated. `dtype`: the dtype that the packed weight
    reports. Scales and zeros are stored as float16, scales relative to a power of two. Waits.
    Raises ValueError.
    """
    _check_codes(codes, bits)
    unit, repeats = _split(codes.shape[1], group)
    groups = -(-codes.shape[1] // unit)
    scales = _per_group(scales, "scales", codes.shape[0], groups, repeats)
    zeros = None if zeros is None else _per_group(zeros, "zeros", codes.shape[0], groups, repeats)
    multiplier = _multiplier(float(scales.abs().max()))
    layout = QuantizedLayout(codes.shape[0], codes.shape[1], bits, unit, zeros is not None)
    memory = _memory(layout)
    engine.kernel("pack_codes").bind()(
        source=codes.data_ptr(),
        source_stride=codes.stride(0),
        source_scales=scales.data_ptr(),
        source_zeros=0 if zeros is None else zeros.data_ptr(),
        **layout.arguments(memory.data_ptr(), multiplier),
    )
    return PackedWeight(QuantizedForm(engine, layout, memory, multiplier), codes.shape, dtype)


def quantize(
    engine: Engine, weight: Tensor, bits: int, group: int | None = None, has_zeros: bool = False
) -> PackedWeight:
    """Quantise a weight [N, K] of float32 or bfloat16 to `bits` (8 or 4) with the nearest codes;
    return the packed weight, and wait. `group`: columns of one scale, 32, 64 or 128 (None: 64 at 8
    bits, 32 at 4). At 4 bits each scale (and zero, with `has_zeros`) is searched for the least
    squared error.

    Raises ValueError for other bits, groups, dtypes, an empty weight, and values that are not
    finite.
    """
    group = DEFAULT_GROUP.get(bits, 0) if group is None else group
    if bits not in DEFAULT_GROUP or group not in GROUPS:
        raise ValueError(f"found {bits} bits in groups of {group}; wanted 8 or 4 bits in groups of 32, 64 or 128")
    if weight.dtype not in TYPES or weight.dim() != 2 or weight.stride(1) != 1 or 0 in weight.shape:
        raise ValueError(
            f"found a weight {list(weight.shape)} of {weight.dtype}; wanted [out, in] of float32 or bfloat16 with rows "
            "in one piece; cast or copy it first"
        )
    layout = QuantizedLayout(weight.shape[0], weight.shape[1], bits, group, has_zeros)
    memory = _memory(layout)
    chosen = torch.empty(1, dtype=torch.float64)
    engine.kernel("quantize_rows").bind()(
        source=weight.data_ptr(),
        source_stride=weight.stride(0),
        source_type=TYPES[weight.dtype],
        chosen=chosen.data_ptr(),
        **layout.arguments(memory.data_ptr(), 0.0),
    )
    if math.isnan(chosen.item()):
        raise ValueError(
            "found a weight with values that are not finite; it cannot be quantised: repair the checkpoint"
        )
    return PackedWeight(QuantizedForm(engine, layout, memory, chosen.item()), weight.shape, weight.dtype)


def _memory(layout: QuantizedLayout) -> Tensor:
    return huge_empty(layout.num_bytes)


def _check_codes(codes: Tensor, bits: int) -> None:
    if bits not in DEFAULT_GROUP:
        raise ValueError(f"found codes of {bits} bits; wanted 8 or 4: widen the codes")
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.stride(1) != 1 or 0 in codes.shape:
        raise ValueError(
            f"found codes {list(codes.shape)} of {codes.dtype}; wanted uint8 [out, in], one a byte, rows in one piece"
        )
    if bits == 4 and int(codes.max()) > 15:
        raise ValueError(f"found a code of {int(codes.max())} in a weight of 4 bits; wanted 0 to 15: unpack the codes")


def _split(columns: int, group: int) -> tuple[int, int]:
    """Return (the group size that the kernels use: 128, 64 or 32; the number of these groups that
    share a scale), for a checkpoint's groups of `group` columns. Raises ValueError unless `group`
    is a multiple of 32 or covers all columns."""
    if group >= columns and group not in GROUPS:
        return GROUPS[0], -(-columns // GROUPS[0])
    for unit in GROUPS:
        if group > 0 and group % unit == 0:
            return unit, group // unit
    raise ValueError(f"found groups of {group} columns; wanted a multiple of 32, or whole rows: quantise again")


def _per_group(values: Tensor, what: str, rows: int, groups: int, repeats: int) -> Tensor:
    """Return scales or zeros [rows, groups / repeats, rounded up] of any float dtype as contiguous
    float32 [rows, groups], each repeated for the groups that share it. `what`: "scales" or "zeros",
    for the message. Raises ValueError for another shape, values that are not finite, and zeros
    beyond float16."""
    wanted = (rows, -(-groups // repeats))
    if values.shape != wanted or not values.is_floating_point():
        raise ValueError(f"found {what} {list(values.shape)} of {values.dtype}; wanted {list(wanted)} of floats")
    wide = values.float()
    if not bool(wide.isfinite().all()):
        raise ValueError(f"found {what} that are not finite; repair the checkpoint")
    if what == "zeros" and float(wide.abs().max()) > MOST_ZERO:
        raise ValueError(
            f"found a zero of {float(wide.abs().max()):g}; wanted at most {MOST_ZERO:g}, as float16 holds: quantise "
            "the weight again"
        )
    return wide.repeat_interleave(repeats, dim=1)[:, :groups].contiguous()


def _multiplier(largest: float) -> float:
    """Return a power of two, the factor of all scales: `largest`, the largest scale, divided by it
    is below 2**15, within float16's range, and at least 2**14 (less for a scale below 2**-101). 1.0
    if `largest` is 0."""
    return math.ldexp(1.0, max(math.frexp(largest)[1], -100) - 15) if largest else 1.0
