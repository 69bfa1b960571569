"""Attention over the rows that DeepSeek-V3.2's indexer chose, as the vendor's operator for it. It
takes lengths from the device, so a captured call is replayed as it is.

Limits are those of the vendor's page on npu_sparse_flash_attention (docs/context of
Ascend/op-plugin) and of what it rests on (aclnnSparseFlashAttention in cann/ops-transformer), on an
A2 or A3: what all versions take.
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
"""Elements of a row that are key and value, and of those that hold its place."""
MOST_HEADS = 128
GATHERED = 1 << 26
"""Elements of chosen rows that exist at a time, in either of two arrangements."""
ABSORBED = 2
"""The attention mode in which a row is the key and the value of all heads: the only one that there
is."""


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
    """One operator over the chosen rows of some tokens at a time. It reads keys and what holds
    their place apart, both without gaps, and a row has them side by side: so the chosen ones are
    gathered first."""
    out = q.new_empty(*q.shape[:2], value_size)
    step = max(1, GATHERED // (chosen.shape[1] * rows.shape[1]))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        out[part] = _attend(q[part], rows, chosen[part], scale)
    return out


def _attend(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Attend with one call in which each token is a request and its chosen rows are the text.

    A token without chosen rows reads row 0, and its result is set to 0.
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
    """The published latent row in half precision, of one pool, for a power of two heads."""
    heads, size = q.shape[1:]
    if rows.dtype not in HALF or q.dtype != rows.dtype:
        asked, kept = (str(each.dtype).removeprefix("torch.") for each in (q, rows))
        return f"it reads rows of float16 and bfloat16 by queries of that type, not rows of {kept} by {asked}"
    if more_rows is not None or sinks is not None:
        return "rows of two pools, or sinks; it takes one pool without sinks"
    if (size, value_size) != (LATENT + ROTATED, LATENT):
        return f"rows of {size}, values of {value_size}; it takes {LATENT + ROTATED}, the first {LATENT} of which are values"
    if heads & (heads - 1) or heads > MOST_HEADS:
        return f"{heads} heads; it takes a power of two up to {MOST_HEADS}"
    return ""


OPERATORS: Mapping[str, Limited] = MappingProxyType(
    {"npu_sparse_flash_attention": Limited(sparse_mqa, takes_sparse_mqa)}
)
"""As in `kernels`."""
