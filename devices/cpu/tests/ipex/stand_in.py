"""A stand-in for Intel's extension: its operators in plain torch under their recorded schemas. They
refuse the calls that the real ones refuse, and those that the real ones silently compute wrongly.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from devices.cpu.tests.ipex.record import STORED

MODULE = "intel_extension_for_pytorch"
RECORDED = json.loads(STORED.read_text())
SCHEMAS = {schema.partition("(")[0]: schema for schema in RECORDED["schemas"]}
SIDE = 16
"""Rows of a block."""


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows of any stride and number; the product with the weight is in float32."""
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight.float()).to(x.dtype)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_back: bool) -> Tensor:
    """Return the norm of the sum; with `add_back`, write the sum to the residual."""
    if add_back and not residual.is_contiguous():
        raise RuntimeError("add_rmsnorm writes a residual as if its rows lay together")
    total = residual + x
    if add_back:
        residual.copy_(total)
    return rmsnorm(total, weight, eps)


def rotary_position_embedding(
    x: Tensor, table: Tensor, first: Tensor, heads: int, head_dim: int, offset: int, rotary_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate token t of x [1, T, heads, D] by row `first` + t of the table; a row holds sines, then
    cosines."""
    if not x.shape[1]:
        raise RuntimeError("rotary_position_embedding takes a row at least")
    if table.dtype is not torch.float32 or first.dtype is not torch.int64 or first.dim():
        raise RuntimeError("rotary_position_embedding wants a table of float32 and, here, one int64 number")
    if x.shape[0] != 1 or x.shape[2:] != (heads, head_dim) or offset * 2 != rotary_dim or rotary_dim != head_dim:
        raise RuntimeError("rotary_position_embedding is known here for one sequence of whole heads in halves")
    rows = table[int(first) : int(first) + x.shape[1]]
    sin, cos = rows.view(1, x.shape[1], 1, rotary_dim).chunk(2, dim=-1)
    one, other = x.float().chunk(2, dim=-1)
    found = torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1).to(x.dtype)
    return found, torch.empty(0), torch.empty(0)


class Context:
    """A packed weight. The owner of its handle must keep the context alive: the handle is an
    address."""

    alive: ClassVar[WeakValueDictionary[int, Context]] = WeakValueDictionary()

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16) or weight.dim() != 2:
            raise RuntimeError("could not create a primitive descriptor for the inner product")
        self.weight, self.bias = weight.clone(), bias
        self.alive[id(self)] = self

    def get_weight(self) -> Tensor:
        """Return the weight in blocks of `SIDE` rows."""
        return F.pad(self.weight, (0, 0, 0, -self.weight.shape[0] % SIDE)).unflatten(0, (-1, SIDE))

    def get_data_handle(self) -> Tensor:
        """Return the handle: the context's id."""
        return torch.tensor([id(self)])


def linear_prepack(weight: Tensor, bias: Tensor | None, batch_size: int | None) -> Context:
    """Pack a weight; a `batch_size` of None means any number of rows."""
    return Context(weight, bias)


def ipex_linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, out_features: int | None) -> Tensor:
    """Multiply with the weight and bias that the handle points to; `weight` and `bias` are
    ignored."""
    context = Context.alive.get(int(handle))
    if context is None:
        raise RuntimeError("the handle points to a packed weight that nobody kept")
    if x.dtype is not context.weight.dtype:
        raise RuntimeError("could not create a primitive descriptor for the inner product")
    return F.linear(x, context.weight, context.bias)


@cache
def library() -> torch.library.Library:
    """Register the operators, for the life of the process."""
    made = torch.library.Library("torch_ipex", "FRAGMENT")
    for kernel in (rmsnorm, add_rmsnorm, rotary_position_embedding, ipex_linear):
        made.define(SCHEMAS[f"torch_ipex::{kernel.__name__}"].partition("::")[2])
        made.impl(kernel.__name__, kernel, "CPU")
    return made


def install(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch, source: str | None = None) -> None:
    """Install a fake distribution of this version in `folder`, which is put on sys.path, and its
    module: the stand-in, or a file with the text `source`."""
    planted = folder / f"{MODULE}-{version}.dist-info"
    planted.mkdir(parents=True)
    (planted / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    if source is not None:
        (folder / f"{MODULE}.py").write_text(source)
        return
    library()
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    # The real operator returns a C++ class, so no operator of this schema can be registered from
    # Python.
    monkeypatch.setattr(torch.ops.ipex_prepack, "linear_prepack", linear_prepack, raising=False)
