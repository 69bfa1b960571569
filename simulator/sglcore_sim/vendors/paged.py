"""Attention over pages, row by row in float32: the arithmetic under every vendor's paged attention
call, and the refusal of a call whose preconditions do not hold."""

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
    """A module of a library that is not installed, importable by name."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def require(call: str, wanted: Mapping[str, object], error: type[Exception] = RuntimeError) -> None:
    """Raise `error`, naming the first of the preconditions `wanted` (a text, and whether it holds)
    that does not hold."""
    for what, holds in wanted.items():
        if not holds:
            raise error(f"{call} wants {what}")


def ints(part: Tensor, *shape: int) -> bool:
    """Contiguous int32 of this shape."""
    return part.dtype == torch.int32 and tuple(part.shape) == shape and part.is_contiguous()


def together(*parts: Tensor) -> bool:
    """All on one device, which is not the host."""
    return len({part.device for part in parts}) == 1 and not parts[0].is_cpu


def adjacent(*parts: Tensor) -> bool:
    """The elements of every last dimension lie side by side."""
    return all(part.stride(-1) == 1 for part in parts)


def flash_attention(
    sim: Any, parts: tuple[Tensor, ...], longest: int, scale: float | None, causal: bool, left: int, softcap: float
) -> Tensor:
    """FlashAttention 3 over pages, in one launch, refusing what `mha_fwd` of hopper/flash_api.cpp
    (Dao-AILab/flash-attention) checks. `parts` are queries, both caches, the page table, the
    lengths and the queries' offsets."""
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
        # The launch has tiles for `longest` queries of a row; more are never computed.
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
) -> None:
    """Write into out [T, heads, dim] what q attends to. Each row is (first query, end, cells of its
    sequence); its queries are the last of the sequence. `left` tokens before a query are seen (-1:
    all); a scaled score s becomes softcap * tanh(s / softcap), unless that is 0."""
    for start, end, cells in rows:
        out[start:end] = _row(q[start:end], k_cells[cells], v_cells[cells], scale, causal, left, softcap).to(out.dtype)


def _row(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, softcap: float) -> Tensor:
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
    return (scores.softmax(-1) @ values).transpose(0, 1)


def cells_of(pages: Tensor, length: int, page_size: int) -> Tensor:
    """The cells of the first `length` tokens of a sequence with these pages."""
    cells = pages.to(torch.int64)[:, None] * page_size + torch.arange(page_size)
    return cells.reshape(-1)[:length]


def flat(pages: Tensor) -> Tensor:
    """Pages [pages, page_size, heads, dim] as cells."""
    return pages.reshape(-1, *pages.shape[2:])
