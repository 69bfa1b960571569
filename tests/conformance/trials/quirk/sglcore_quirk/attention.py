"""Attention of quirk: one call per row over page-major keys and values; sizes come from the
host."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglcore.runtime.attention.contract import AttentionFacts
from sglcore.runtime.attention.page_rows import PageRowsAttention, RowsPlan
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import PAGE_MAJOR


@dataclass(slots=True)
class HostPlan(RowsPlan):
    """`sizes`: (number of queries, length) of each row."""

    sizes: tuple[tuple[int, int], ...]


class QuirkAttention(PageRowsAttention):
    """Decoder attention without sliding windows, in bfloat16."""

    facts = AttentionFacts(index_dtype="int32", page_sizes=(32,), dtypes=("bfloat16",), layouts=(PAGE_MAJOR,))

    def plan(self, batch: ForwardBatch) -> HostPlan:
        """Plan the page rows of the batch, and add its sizes from the host."""
        made, queries = PageRowsAttention.plan(self, batch), batch.extend_seq_lens_cpu
        assert batch.seq_lens_cpu is not None
        lengths = batch.seq_lens_cpu.tolist()
        sizes = zip([1] * len(lengths) if queries is None else queries.tolist(), lengths, strict=True)
        return HostPlan(*(getattr(made, field.name) for field in fields(made)), tuple(sizes))  # pyright: ignore[reportCallIssue]

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: Any, layer: Any) -> Tensor:
        """Attend one row after the other."""
        outs: list[Tensor] = []
        for row, (count, length) in enumerate(plan.sizes):
            queries, q = q[:count].transpose(0, 1), q[count:]
            pages = plan.pages[row, : -(-length // k_pages.shape[2])]
            keys, values = (part[pages].transpose(0, 1).flatten(1, 2)[:, :length] for part in (k_pages, v_pages))
            mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
            scale = layer.scaling
            out = scaled_dot_product_attention(
                queries[None], keys[None], values[None], mask, scale=scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)
