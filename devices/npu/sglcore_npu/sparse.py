"""Attention over the KV entries that DeepSeek-V3.2's indexer selects, with the vendor's operator.
It reads lengths from the device, so a captured call can be replayed unchanged.

Limits are from the vendor's pages on npu_sparse_flash_attention (docs/context of Ascend/op-plugin)
and aclnnSparseFlashAttention (cann/ops-transformer), for A2 and A3: what all versions support.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.table import Limited

HALF = (torch.float16, torch.bfloat16)
LATENT, ROTATED = 512, 64
"""Elements of a KV entry: the latent part (key and value), and the rotary part of the key."""
MOST_HEADS = 128
GATHERED = 1 << 26
"""The most elements of gathered entries at a time; they exist in two layouts."""
ABSORBED = 2
"""The attention mode in which an entry is key and value of all heads; the operator's only mode."""


def sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
) -> Tensor:
    """Implements `KernelTable.sparse_mqa`: q [T, H, 576] over the rows that chosen int32 [T, W]
    lists -> [T, H, 512]; only calls that `takes_sparse_mqa` takes. Long lists are handled for some
    tokens at a time: the operator reads the latent and the rotary part from two contiguous tensors,
    but our entries hold them together, so the selected entries are gathered first."""
    out = q.new_empty(*q.shape[:2], value_size)
    step = max(1, GATHERED // (chosen.shape[1] * rows.shape[1]))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        out[part] = _attend(q[part], rows, chosen[part], scale)
    return out


def _attend(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Return [T, H, LATENT] of q [T, H, LATENT + ROTATED]: attend with one call in which each token
    is a request and its selected entries are the text.

    `chosen` int32 [T, W] indexes `rows`, padded with -1 at the end only. A token without selected
    entries reads entry 0, and its result is set to 0.
    """
    tokens, width = chosen.shape
    counts = (chosen >= 0).sum(1, dtype=torch.int32)
    lens = counts.clamp(min=1)
    gathered = rows.index_select(0, chosen.clamp(min=0).flatten()).view(tokens, width, 1, LATENT + ROTATED)
    keys, turned = (part.contiguous() for part in gathered.split((LATENT, ROTATED), dim=-1))
    queries, queries_turned = (part.contiguous() for part in q.unsqueeze(1).split((LATENT, ROTATED), dim=-1))
    places = torch.arange(width, dtype=torch.int32, device=q.device).expand(tokens, width)
    places = places.masked_fill(places >= lens.unsqueeze(1), -1)
    found, *_ = torch.ops.npu.npu_sparse_flash_attention(
        queries,
        keys,
        keys,
        places.view(tokens, 1, 1, width),
        scale,
        actual_seq_lengths_query=torch.ones_like(lens),
        actual_seq_lengths_kv=lens,
        query_rope=queries_turned,
        key_rope=turned,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=0,
        attention_mode=ABSORBED,
    )
    return found.squeeze(1).masked_fill((counts == 0).view(tokens, 1, 1), 0)


def takes_sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: object,
) -> str:
    """Return why `sparse_mqa` refuses a call; otherwise empty (see `Limited`). It takes entries of
    the published size in half precision, one pool without sinks, and a power of two heads."""
    heads, size = q.shape[1:]
    if rows.dtype not in HALF or q.dtype != rows.dtype:
        asked, kept = (str(each.dtype).removeprefix("torch.") for each in (q, rows))
        return f"it takes float16 or bfloat16 for both queries and rows, not rows of {kept} with queries of {asked}"
    if more_rows is not None or sinks is not None:
        return "rows of two pools, or sinks; it takes one pool without sinks"
    if (size, value_size) != (LATENT + ROTATED, LATENT):
        return f"rows of {size}, values of {value_size}; it takes {LATENT + ROTATED}, with values in the first {LATENT}"
    if heads & (heads - 1) or heads > MOST_HEADS:
        return f"{heads} heads; it takes a power of two up to {MOST_HEADS}"
    return ""


OPERATORS: Mapping[str, Limited] = MappingProxyType(
    {"npu_sparse_flash_attention": Limited(sparse_mqa, takes_sparse_mqa)}
)
"""The function for the kernel table by the vendor's operator, as in `kernels.OPERATORS`."""
