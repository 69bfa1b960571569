"""Paged attention, row by row in float32, for the references of every vendor's call, and the check
of a call's preconditions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FLASH_ATTENTION = "flash_attn_with_kvcache"


def plant_module(name: str, **names: Any) -> ModuleType:
    """Make a module with these names for a library that is not installed, importable as `name` in
    this process, and return it. It replaces a module of that name that was imported before."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def require(call: str, wanted: Mapping[str, object], error: type[Exception] = RuntimeError) -> None:
    """Raise `error`, with the call's name and the text of the first precondition in `wanted` (text:
    whether it holds) that does not hold. If all hold, do nothing."""
    for what, holds in wanted.items():
        if not holds:
            raise error(f"{call} wants {what}")


def ints(part: Tensor, *shape: int) -> bool:
    """Return whether `part` is a contiguous int32 tensor of this shape."""
    return part.dtype == torch.int32 and tuple(part.shape) == shape and part.is_contiguous()


def together(*parts: Tensor) -> bool:
    """Return whether all tensors are on one device that is not the host's CPU."""
    return len({part.device for part in parts}) == 1 and not parts[0].is_cpu


def adjacent(*parts: Tensor) -> bool:
    """Return whether the last dimension of every tensor has stride 1."""
    return all(part.stride(-1) == 1 for part in parts)


def flash_attention(
    sim: Any, parts: tuple[Tensor, ...], longest: int, scale: float | None, causal: bool, left: int, softcap: float
) -> Tensor:
    """Run FlashAttention 3 over pages in one launch and return the result, a new tensor of the
    queries' shape. `parts`: queries [tokens, heads, dim], both caches [pages, size, heads, dim],
    page table and lengths (of each row, query tokens included), query offsets [rows + 1]. Queries
    of a row beyond `longest` are not computed. `scale` None: dim ** -0.5. `left`, `softcap`: as in
    `attend`.

    Raises RuntimeError where `mha_fwd` in hopper/flash_api.cpp (Dao-AILab/flash-attention) does.
    """
    q, k, v, table, lens, starts = parts
    rows, dim = len(starts) - 1, q.shape[-1]
    wanted = {
        "one half precision for all": {q.dtype, k.dtype, v.dtype} in ({torch.float16}, {torch.bfloat16}),
        "everything on one device": together(*parts),
        "tensors whose last dimension is contiguous": adjacent(q, k, v, table),
        "queries [tokens, heads, dim] and pages [pages, size, heads, dim]": q.dim() == 3 and k.dim() == 4,
        "values of the shape of keys": v.shape == k.shape and k.shape[-1] == dim,
        "heads of whole 8ths up to 256": dim % 8 == 0 and dim <= 256,
        "as many query heads for each head of keys": q.shape[1] % k.shape[-2] == 0,
        "page_table int32[rows, pages]": table.dtype == torch.int32 and table.dim() == 2 and len(table) == rows,
        "cache_seqlens int32[rows], contiguous": ints(lens, rows),
        "cu_seqlens_q int32[rows + 1], contiguous": ints(starts, rows + 1),
    }
    require(FLASH_ATTENTION, wanted)
    out, page_size = torch.empty_like(q), k.shape[1]
    factor = dim**-0.5 if scale is None else scale

    def kernel() -> None:
        begin, pages = sim.host_view(starts).tolist(), sim.host_view(table)
        # The launch has tiles for `longest` queries per row; further queries are not computed.
        spans = [(start, min(end, start + longest)) for start, end in pairwise(begin)]
        rows = [
            (start, end, cells_of(pages[row], length, page_size))
            for row, ((start, end), length) in enumerate(zip(spans, sim.host_view(lens).tolist(), strict=True))
            if end > start
        ]
        caches = flat(sim.host_view(k)), flat(sim.host_view(v))
        attend(sim.host_view(out), sim.host_view(q), rows, *caches, factor, causal, left, softcap)

    sim.launch(FLASH_ATTENTION, kernel, reads=list(parts), writes=[out])
    return out


def attend(
    out: Tensor,
    q: Tensor,
    rows: Iterable[tuple[int, int, Tensor]],
    k_cells: Tensor,
    v_cells: Tensor,
    scale: float,
    causal: bool,
    left: int,
    softcap: float = 0.0,
    hidden: Tensor | None = None,
) -> None:
    """Write the attention of q [T, heads, dim] to `out`, of the same shape; returns nothing. Each
    row is (first query, end, KV slots of its sequence), with slots as indices of k_cells and
    v_cells [slots, key heads, dim]; its queries are the last tokens of the sequence. If `causal`, a
    query does not see later tokens. It sees `left` earlier tokens (-1: all). A score times `scale`,
    s, becomes softcap * tanh(s / softcap), unless `softcap` is 0. `hidden` bool [rows, keys]: no
    query of row i sees the keys where hidden[i] is true; their values are multiplied by 0, so that
    NaN stays NaN. CPU tensors."""
    for row, (start, end, cells) in enumerate(rows):
        unseen = None if hidden is None else hidden[row, : len(cells)]
        parts = q[start:end], k_cells[cells], v_cells[cells]
        out[start:end] = _row(*parts, scale, causal, left, softcap, unseen).to(out.dtype)


def _row(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, softcap: float, hidden: Tensor | None
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (x.to(torch.float32).transpose(0, 1) for x in (q, k, v))
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = queries @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(k.shape[0])
    own = positions[k.shape[0] - q.shape[0] :, None]
    if causal:
        scores = scores.masked_fill(positions > own, float("-inf"))
    if left >= 0:
        scores = scores.masked_fill(positions < own - left, float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def cells_of(pages: Tensor, length: int, page_size: int) -> Tensor:
    """Return the KV slots of the first `length` tokens of a sequence, int64 [length]; `pages` [P]
    are its page numbers. Fewer if the pages hold fewer tokens."""
    cells = pages.to(torch.int64)[:, None] * page_size + torch.arange(page_size)
    return cells.reshape(-1)[:length]


def flat(pages: Tensor) -> Tensor:
    """Return pages [pages, page_size, heads, dim] as KV slots [slots, heads, dim]: a view if the
    strides allow it, else a copy."""
    return pages.reshape(-1, *pages.shape[2:])
