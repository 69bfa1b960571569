"""The vendor's fused attention over the paged KV cache: one operator for decode and prefill.

It reads the page table from the device and lengths from the host, so a captured call is rewritten
before each replay (`tasks`). Decode uses the layout BSND with one query per request; prefill the
packed layout TND with the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.paged import padded_lengths, page_rows
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore_npu.tasks import HostLengths, Task, npu, record

OPERATOR = "npu_fused_infer_attention_score"
PAGE_SIZES = (128,)
HEAD_DIMS = (64, 128)
"""Page and head sizes that packed layout (TND) supports, with and without grouped KV heads; BSND
supports more."""
MASK = 2048
"""Side length of the operator's compressed mask, which it shifts over the whole matrix."""
ANY_MASK = 0
"""The sparse mode in which the mask names each key of each request: bool [B, 1, keys], as wide as
the pages of the table. Others measured it on the vendor's card (2026): with upper bounds as
lengths, results and times are those of exact lengths."""
RIGHT_DOWN_CAUSAL = 3
"""The sparse mode "causal" in which the last query sees the last key."""

if not hasattr(torch.ops.npu, OPERATOR):  # foreign: operators are attributes that exist once they are registered
    raise Unavailable(f"torch_npu is not imported or lacks {OPERATOR}: pip install torch_npu of the version of torch")


@dataclass(slots=True)
class FusedPlan(AttentionPlan):
    """`pages`: page table rows int32[B, pages]; on the host `lengths`: number of keys of each
    request, and `ends`: cumulative number of queries (None: one query per request).

    A captured plan also keeps the `tasks` of its graph, and the operator's workspace for each
    (kv_heads, head_dim).
    `mask`, in a decode of which `lengths` are upper bounds: bool[B, 1, pages * page_size], true for
    the keys past a request's length on the device. None: `lengths` are exact.
    """

    pages: Tensor
    lengths: list[int]
    ends: list[int] | None = None
    mask: Tensor | None = None
    tasks: list[Task] = field(default_factory=list)
    workspaces: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def query_ends(batch: ForwardBatch) -> list[int] | None:
    """Return the cumulative number of queries of each request of the batch; None for a decode step,
    where each has one query."""
    return None if batch.extend_seq_lens_cpu is None else np.cumsum(batch.extend_seq_lens_cpu).tolist()


class FusedAttention(AttentionBackend[FusedPlan]):
    """Decoder attention without sliding windows, softcaps and sinks, in half precision."""

    facts = AttentionFacts(
        page_sizes=PAGE_SIZES,
        head_dims=HEAD_DIMS,
        dtypes=("float16", "bfloat16"),
        features=frozenset({"mixed", "capture"}),
        takes_stored=True,
        library="torch_npu",
        needs_host_lengths=True,
        masks_bounds=True,
    )

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        ones = self.req_to_token_pool.page_table.new_ones(MASK, MASK, dtype=torch.bool)
        self._mask = ones.triu_(1)
        pool = self.req_to_token_pool
        self._places = torch.arange(pool.max_pages * pool.page_size, dtype=torch.int32, device=pool.page_table.device)
        self._masks = self._mask[:0, :0]

    def plan(self, batch: ForwardBatch) -> FusedPlan:
        """Gather page table rows on the device, and read lengths from the host; does not wait. The
        plan is for eager calls."""
        assert batch.seq_lens_cpu is not None
        rows = len(batch.seq_lens_cpu)
        pages = page_rows(self.req_to_token_pool, batch.req_pool_indices[:rows])
        plan = FusedPlan(self, self.token_to_kv_pool.generation, pages, batch.seq_lens_cpu.tolist(), query_ends(batch))
        if self.shape.has_bounds and plan.ends is None:
            # The mask is as wide as the pages that the operator gets: those of the longest request.
            size = self.req_to_token_pool.page_size
            plan.pages = pages[:, : -(-max(plan.lengths, default=1) // size)].contiguous()
            places = self._places[: plan.pages.shape[1] * size]
            plan.mask = (places >= batch.seq_lens[:rows, None]).unsqueeze(1)
        return plan

    def capture_plan(self, bucket: Bucket) -> FusedPlan:
        """Make a decode plan for `bucket.batch_size` requests with fixed page table rows, which
        `refresh` writes; lengths are 1 until then."""
        pool, size = self.req_to_token_pool, bucket.batch_size
        pages = pool.page_table.new_zeros(size, pool.max_pages)
        mask = self._shared_mask(size) if self.shape.has_bounds else None
        return FusedPlan(self, self.token_to_kv_pool.generation, pages, [1] * size, mask=mask)

    def _shared_mask(self, rows: int) -> Tensor:
        """Return bool[rows, 1, cells] for a captured plan. All plans have views of one tensor,
        because replays do not overlap; a plan of more rows than any before gets a new one."""
        if len(self._masks) < rows:
            self._masks = self._places.new_zeros(rows, len(self._places), dtype=torch.bool)
        return self._masks[:rows, None]

    def refresh(self, plan: FusedPlan, batch: ForwardBatch) -> HostLengths:
        """Overwrite the plan's page table rows on the device and its lengths on the host; return
        the new lengths for the graph's tasks, which `NpuSegment.replay` takes. Does not wait."""
        assert batch.seq_lens_cpu is not None
        page_rows(self.req_to_token_pool, batch.req_pool_indices, out=plan.pages)
        plan.ends = query_ends(batch)
        rows = len(plan.pages) if plan.ends is None else len(plan.ends)
        plan.lengths = padded_lengths(batch, rows).tolist()
        if plan.mask is not None:
            torch.ge(self._places, batch.seq_lens[:rows, None, None], out=plan.mask)
        return HostLengths(plan.tasks, plan.lengths)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: FusedPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * D] -> [T, heads * D]. An eager call,
        or while a decode step is captured, a task with lengths that can be rewritten. After
        prompts, padding rows are zero."""
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        if plan.ends is not None:
            return self._extend(queries, plan, plan.ends, layer).view(q.shape)
        masked = {} if plan.mask is None else {"atten_mask": plan.mask, "sparse_mode": ANY_MASK}
        call = self._call(queries[:, None], plan, layer, input_layout="BSND", **masked)
        if npu().is_current_stream_capturing():
            return self._captured(call, plan, layer).view(q.shape)
        if not len(queries):
            return torch.zeros_like(q)
        return torch.ops.npu.npu_fused_infer_attention_score(**call, actual_seq_lengths_kv=plan.lengths)[0].view(
            q.shape
        )

    def _extend(self, queries: Tensor, plan: FusedPlan, ends: list[int], layer: Attention) -> Tensor:
        tokens = ends[-1] if ends else 0
        if not tokens:
            return torch.zeros_like(queries)
        causal = {"input_layout": "TND", "atten_mask": self._mask, "sparse_mode": RIGHT_DOWN_CAUSAL}
        call = self._call(queries[:tokens], plan, layer, **causal, actual_seq_lengths=ends)
        out = torch.ops.npu.npu_fused_infer_attention_score(**call, actual_seq_lengths_kv=plan.lengths)[0]
        if tokens < len(queries):
            out = torch.cat((out, out.new_zeros(len(queries) - tokens, *out.shape[1:])))
        return out

    def _captured(self, call: dict[str, Any], plan: FusedPlan, layer: Attention) -> Tensor:
        geometry = (layer.num_kv_heads, layer.head_dim)
        if geometry not in plan.workspaces:
            plan.workspaces[geometry] = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(
                **call, actual_seq_lengths_kv=plan.lengths
            )
        out = torch.empty_like(call["query"])
        results = [out, out.new_empty(1, dtype=torch.float32)]
        plan.tasks.append(record({**call, "workspace": plan.workspaces[geometry], "out": results}, plan.lengths))
        return out

    def _call(self, query: Tensor, plan: FusedPlan, layer: Attention, **layout: Any) -> dict[str, Any]:
        """Return the arguments that all variants of the operator take; the KV cache [KV slots,
        heads, dim] is viewed as pages [pages, size, heads * dim]. `layout`: further arguments."""
        size = self.token_to_kv_pool.page_size
        keys, values = self.token_to_kv_pool.kv(layer.layer_id)
        return {
            "query": query.contiguous(),
            "key": keys.view(-1, size, layer.num_kv_heads * layer.head_dim),
            "value": values.view(-1, size, layer.num_kv_heads * layer.head_dim),
            "block_table": plan.pages[: len(plan.lengths)],
            "block_size": size,
            "num_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "scale": layer.scaling,
            **layout,
        }
