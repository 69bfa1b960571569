"""A kernel for the elementwise torch operations that a model runs between the kernels of a recorded
step: sums and products of rows, the sigmoid of a gate. A torch call takes several times longer, and
splits the list of kernel calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore_cpu.native import TYPES, Engine

ADD, MULTIPLY, SIGMOID = 0, 1, 2
OPERATIONS: Mapping[Any, int] = MappingProxyType(
    {
        torch.ops.aten.add.Tensor: ADD,
        torch.ops.aten.add_.Tensor: ADD,
        torch.ops.aten.mul.Tensor: MULTIPLY,
        torch.ops.aten.mul_.Tensor: MULTIPLY,
        torch.ops.aten.sigmoid.default: SIGMOID,
    }
)
IN_PLACE = frozenset((torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor))


def elementwise(engine: Engine, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Run the torch operation `func` with a native kernel if it is one of `OPERATIONS` on rows [T,
    N] of float32 or bfloat16: with a number, with rows of the same dtype that broadcast to them, or
    alone (sigmoid). Return its result: a new tensor, or the first argument for an operation in
    place.

    Returns None, and computes nothing, for any other call, and for one with named arguments
    (`named`).
    """
    operation = OPERATIONS.get(func)
    if operation is None or named:
        return None
    x, y = args if len(args) == 2 else (*args, 0.0)
    is_in_place = func in IN_PLACE
    if isinstance(y, Tensor) and not is_in_place and isinstance(x, Tensor) and y.numel() > x.numel():
        x, y = y, x
    if not _is_rows(x) or not (isinstance(y, int | float) or _fits(x, y)) or (is_in_place and not x.is_contiguous()):
        return None
    rows, width = x.shape
    out = x if is_in_place else engine.empty(rows, width, dtype=x.dtype)
    is_number = isinstance(y, int | float)
    engine.kernel("elementwise").bind()(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        y=0 if is_number else y.data_ptr(),
        y_stride=0 if is_number or y.shape[0] == 1 else y.stride(0),
        y_width=1 if is_number else y.shape[1],
        scalar=float(y) if is_number else 0.0,
        out=out.data_ptr(),
        rows=rows,
        width=width,
        operation=operation,
        type=TYPES[x.dtype],
    )
    return out


def _is_rows(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in TYPES and x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


def _fits(x: Tensor, y: object) -> bool:
    if not isinstance(y, Tensor) or not _is_rows(y) or y.dtype is not x.dtype:
        return False
    return y.shape[0] in (1, x.shape[0]) and y.shape[1] in (1, x.shape[1])
