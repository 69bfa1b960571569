"""Attention over pages, row by row in float32: the arithmetic under every vendor's paged attention call."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def plant_module(name: str, **names: Any) -> ModuleType:
    """A module of a library that is not installed, importable by name."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def attend(
    out: Tensor,
    q: Tensor,
    rows: Iterable[tuple[int, int, Tensor]],
    k_cells: Tensor,
    v_cells: Tensor,
    scale: float,
    causal: bool,
    left: int,
) -> None:
    """Write into out [T, heads, dim] what q attends to. Each row is (first query, end, cells of its sequence); its queries
    are the last of the sequence. `left` tokens before a query are seen (-1: all)."""
    for start, end, cells in rows:
        out[start:end] = _row(q[start:end], k_cells[cells], v_cells[cells], scale, causal, left).to(out.dtype)


def _row(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (x.to(torch.float32).transpose(0, 1) for x in (q, k, v))
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = queries @ keys.transpose(1, 2) * scale
    positions = torch.arange(k.shape[0])
    own = positions[k.shape[0] - q.shape[0] :, None]
    if causal:
        scores = scores.masked_fill(positions > own, float("-inf"))
    if left >= 0:
        scores = scores.masked_fill(positions < own - left, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def cells_of(pages: Tensor, length: int, page_size: int) -> Tensor:
    """The cells of the first `length` tokens of a sequence with these pages."""
    cells = pages.to(torch.int64)[:, None] * page_size + torch.arange(page_size)
    return cells.reshape(-1)[:length]


def flat(pages: Tensor) -> Tensor:
    """Pages [pages, page_size, heads, dim] as cells."""
    return pages.reshape(-1, *pages.shape[2:])
