"""Weights in float32 and bf16, packed in panels of 16 rows, and the kernels that multiply with
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore_cpu.arena import huge_empty
from sglcore_cpu.kernels.packed import PackedWeight
from sglcore_cpu.native import TYPES, Engine

ROWS = 16
"""Rows of a panel."""
ALIGNMENT = 64
"""Bytes of a cache line; panels are aligned to it."""


def pack(engine: Engine, weight: Tensor) -> PackedWeight:
    """Return a packed copy of `weight` [out, in] float32 or bf16, made on the engine's threads;
    waits. The weight may have any address (a mapped file too) and any row stride, and is not used
    afterwards. Raises ValueError for another dtype, an empty weight or rows with gaps, and
    MemoryError."""
    if weight.dtype not in TYPES or weight.dim() != 2 or not weight.numel() or not _has_plain_rows(weight):
        raise ValueError(
            f"found a weight {list(weight.shape)} of {weight.dtype} with strides {weight.stride()}; wanted [out, in] "
            "of float32 or bfloat16, not empty, with contiguous rows; convert it, or keep it unpacked"
        )
    form = PanelForm(engine, weight.shape[0], weight.shape[1], weight.dtype)
    form.fill(weight, 0)
    return PackedWeight(form, weight.shape, weight.dtype)


def pack_parts(engine: Engine, parts: Sequence[Tensor], done: Callable[[int], None]) -> PackedWeight | None:
    """Return parts [rows, in] packed as one weight, concatenated by rows; waits. Returns None,
    before reading anything, if the parts differ in dtype or width, if `pack` does not take one, or
    if any but the last has a number of rows that is no multiple of 16. Calls `done(index)` on the
    calling thread once part `index` is packed and no longer needed. Raises MemoryError."""
    first = parts[0]
    alike = all(part.dtype is first.dtype and part.shape[1:] == first.shape[1:] for part in parts)
    whole = all(part.shape[0] % ROWS == 0 for part in parts[:-1])
    plain = all(part.dim() == 2 and part.numel() and _has_plain_rows(part) for part in parts)
    if first.dtype not in TYPES or not plain or not alike or not whole:
        return None
    shape = torch.Size((sum(part.shape[0] for part in parts), first.shape[1]))
    form, row = PanelForm(engine, shape[0], shape[1], first.dtype), 0
    for place, part in enumerate(parts):
        form.fill(part, row)
        row += part.shape[0]
        done(place)
    return PackedWeight(form, shape, first.dtype)


class PanelForm:
    """A weight [out_features, in_features] in panels of 16 rows: a `packed.Form`. Rows are padded
    to a multiple of 16, the columns of bf16 weights to a multiple of 32. Its memory is zeros until
    `fill`."""

    def __init__(self, engine: Engine, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.engine = engine
        self.out_features, self.in_features, self.dtype = out_features, in_features, dtype
        self.type = TYPES[dtype]
        depth = in_features if dtype is torch.float32 else -(-in_features // 32) * 32
        self.num_bytes = -(-out_features // ROWS) * ROWS * depth * dtype.itemsize
        self._memory = _aligned(self.num_bytes)
        self.address = self._memory.data_ptr()
        self._linear = engine.kernel("linear").bind()
        self._linear_gated = engine.kernel("linear_gated").bind()
        self._panel_rows = engine.kernel("panel_rows").bind()

    def fill(self, weight: Tensor, row: int) -> None:
        """Pack the rows of `weight` [rows, in_features], which has this form's dtype, as the rows
        from `row` on; `row` is a multiple of 16. Checks nothing; waits."""
        panel_bytes = self.num_bytes // -(-self.out_features // ROWS)
        self.engine.kernel("pack_panels").bind()(
            source=weight.data_ptr(),
            source_stride=weight.stride(0),
            source_type=self.type,
            panels=self.address + row // ROWS * panel_bytes,
            type=self.type,
            out_features=weight.shape[0],
            in_features=self.in_features,
        )

    @property
    def name(self) -> str:
        """Its name in the ledger: "float32 panels" or "bf16 panels"."""
        return "float32 panels" if self.dtype is torch.float32 else "bf16 panels"

    def multiply(self, x: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
        """Return x [T, in] times the weight's transpose, plus bias [out] (None: none): [T, out] in
        x's dtype, from float32 sums that are rounded once, or these sums as float32 if `wide`. x
        (with any row stride) and bias must have the weight's dtype; raises ValueError otherwise,
        and for other shapes."""
        self._check(x)
        out = self.engine.empty(x.shape[0], self.out_features, dtype=torch.float32 if wide else x.dtype)
        self._linear(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            panels=self.address,
            type=self.type,
            bias=0 if bias is None else self._checked_bias(bias),
            out=out.data_ptr(),
            out_stride=self.out_features,
            out_type=TYPES[out.dtype],
            tokens=x.shape[0],
            in_features=self.in_features,
            out_features=self.out_features,
        )
        return out

    def multiply_gated(self, x: Tensor) -> Tensor | None:
        """Return silu(x @ gate.T) * (x @ up.T) [T, out / 2] for a weight with gate's rows before
        up's, with the reference's casts; None if `out` is no multiple of 32. Raises ValueError for
        an x that `multiply` refuses."""
        if self.out_features % (2 * ROWS):
            return None
        self._check(x)
        out = self.engine.empty(x.shape[0], self.out_features // 2, dtype=x.dtype)
        self._linear_gated(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            panels=self.address,
            type=self.type,
            out=out.data_ptr(),
            out_stride=self.out_features // 2,
            tokens=x.shape[0],
            in_features=self.in_features,
            out_features=self.out_features,
        )
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight's rows `ids`, contiguous int32 or int64 [T], as [T, in] of `dtype`,
        float32 or bf16. The ids are not checked on the host: a row that the weight lacks is NaN.
        Raises ValueError for other dtypes and shapes of the arguments."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
            raise ValueError(f"found ids {list(ids.shape)} of {ids.dtype}; wanted contiguous int32 or int64 [T]")
        if dtype not in TYPES:
            raise ValueError(f"found rows requested as {dtype}; wanted float32 or bfloat16")
        out = self.engine.empty(ids.shape[0], self.in_features, dtype=dtype)
        self._panel_rows(
            ids=ids.data_ptr(),
            id_bytes=ids.dtype.itemsize,
            panels=self.address,
            type=self.type,
            out=out.data_ptr(),
            out_stride=self.in_features,
            out_type=TYPES[dtype],
            tokens=ids.shape[0],
            in_features=self.in_features,
            out_features=self.out_features,
        )
        return out

    def _check(self, x: Tensor) -> None:
        if x.dtype is not self.dtype or x.dim() != 2 or x.shape[1] != self.in_features or not _has_plain_rows(x):
            raise ValueError(
                f"found x {list(x.shape)} of {x.dtype} with strides {x.stride()}; wanted [T, {self.in_features}] of "
                f"{self.dtype} with contiguous rows; convert it, or make it contiguous"
            )

    def _checked_bias(self, bias: Tensor) -> int:
        if bias.dtype is not self.dtype or bias.shape != (self.out_features,) or not bias.is_contiguous():
            raise ValueError(
                f"found a bias {list(bias.shape)} of {bias.dtype}; wanted contiguous [{self.out_features}] "
                f"of {self.dtype}"
            )
        return bias.data_ptr()


def _has_plain_rows(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1 or tensor.shape[1] == 1


def _aligned(num_bytes: int) -> Tensor:
    whole = huge_empty(num_bytes + ALIGNMENT)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + num_bytes]
