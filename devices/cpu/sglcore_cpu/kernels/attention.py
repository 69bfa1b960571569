"""Paged attention by the native kernels. They read request slots, lengths and page tables when they
run, so a recorded decode step can be replayed on new buffer contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, AttentionShape, Bucket
from sglcore.runtime.memory.pools import CELL_MAJOR
from sglcore_cpu.kernels.kv_pool import INT8
from sglcore_cpu.kernels.table import engine_of
from sglcore_cpu.native import TYPES, BoundKernel, Engine

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import ReqToTokenPool, TokenToKVPool

CELL_TYPES: Mapping[torch.dtype, int] = MappingProxyType({**TYPES, torch.uint8: 2})
"""The kernels' numbers for the element types of KV slots; uint8 means 8-bit codes, with one scale
after the codes of each head."""


@dataclass(slots=True)
class PagedPlan(AttentionPlan):
    """Where the requests of a batch are. `singles`: the number of leading requests with one token
    each (None: every row of the batch, padding included). `starts` int32[N + 1]: index of the first
    token of each of the N requests after them, and the end of the last one; None if N is 0."""

    singles: int | None = None
    starts: Tensor | None = None


class PagedAttention(AttentionBackend[PagedPlan]):
    """Attention over KV pages in float32 and bfloat16, over KV slots of float32, bfloat16 or 8-bit
    codes. Serves every page size, head size, sliding window, softcap and sink, prefill and decode
    in one batch, and draft trees."""

    facts = AttentionFacts(
        dtypes=("bfloat16", "float32"),
        features=frozenset({"sliding_window", "softcap", "sinks", "mixed", "capture", "tree_mask"}),
        takes_stored=True,
        layouts=(CELL_MAJOR, INT8),
    )

    def __init__(
        self,
        shape: AttentionShape,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        kernels: KernelTable,
        hisparse: object | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: the native kernels to call; None takes the kernel table's engine, and raises
        Unavailable if the table is not native. Raises ConfigError as `AttentionBackend` does."""
        super().__init__(shape, req_to_token_pool, token_to_kv_pool, kernels, hisparse)
        self._engine = engine or engine_of(kernels)
        self._decode = self._engine.kernel("paged_decode").bind()
        self._prefill = self._engine.kernel("paged_prefill").bind()

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Implements `AttentionBackend.plan`: find the leading requests with one token, and where
        the others start. Does not wait."""
        plan = PagedPlan(self, self.token_to_kv_pool.generation)
        assert batch.seq_lens_cpu is not None
        lengths = batch.extend_seq_lens_cpu
        if lengths is None:
            plan.singles = len(batch.seq_lens_cpu)
            return plan
        longer = np.flatnonzero(lengths != 1)
        plan.singles = int(longer[0]) if len(longer) else len(lengths)
        if plan.singles < len(lengths):
            starts = np.cumsum([plan.singles, *lengths[plan.singles :]], dtype=np.int32)
            plan.starts = torch.from_numpy(starts)
        return plan

    def capture_plan(self, bucket: Bucket) -> PagedPlan:
        """Implements `AttentionBackend.capture_plan` for a decode step: one token for each row. The
        plan is empty, because the kernel reads request slots and lengths from the buffers. Raises
        ValueError if the bucket's token count is not its batch size."""
        if bucket.num_tokens != bucket.batch_size:
            raise ValueError(f"found {bucket.num_tokens} tokens of {bucket.batch_size} requests; wanted one of each")
        return PagedPlan(self, self.token_to_kv_pool.generation)

    def refresh(self, plan: PagedPlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`; does nothing, because the kernel reads the buffers
        at each replay. Returns None."""

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: PagedPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * D] -> [T, heads * D], a new tensor of
        q's dtype; padding rows are zero. Raises TypeError for a dtype that no kernel serves,
        ValueError for a scaling that is not positive."""
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = self._engine.empty(*q.shape, dtype=q.dtype)
        singles = min(len(batch.req_pool_indices), q.shape[0]) if plan.singles is None else plan.singles
        call = Call(self, layer, q, out, batch.req_pool_indices, batch.seq_lens)
        tokens = q.shape[0] if plan.starts is None else singles
        if tokens:
            visible = 0 if batch.visible is None else batch.visible.data_ptr()
            call.run(self._decode, 0, singles, tokens, visible=visible)
        if plan.starts is not None:
            call.run(self._prefill, singles, len(plan.starts) - 1, q.shape[0], starts=plan.starts.data_ptr())
        return out


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of `PagedAttention.attend` for the kernels: q [T, heads * D], the
    output `out` of the same shape, `slots` and `seq_lens` int32, the request slot and the length of
    each request of the batch. `run` runs one kernel on some requests."""

    backend: PagedAttention
    layer: Attention
    q: Tensor
    out: Tensor
    slots: Tensor
    seq_lens: Tensor

    def run(self, kernel: BoundKernel, first: int, rows: int, tokens: int, **more: int) -> None:
        """Check the dtypes and run `kernel` on the requests [first, first + rows); their part of
        `out` is written. Tokens of `out` below `tokens` that belong to no request become zero.
        `more`: kernel arguments besides. Raises TypeError and ValueError as `attend` does."""
        layer, pool = self.layer, self.backend.req_to_token_pool
        keys, values = self.backend.token_to_kv_pool.kv(layer.layer_id)
        sinks = layer.sinks
        self._check(keys)
        kernel(
            q=self.q.data_ptr(),
            q_stride=self.q.stride(0),
            q_type=TYPES[self.q.dtype],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_type=CELL_TYPES[keys.dtype],
            page_table=pool.page_table.data_ptr(),
            table_stride=pool.page_table.stride(0),
            slots=self.slots.data_ptr() + 4 * first,
            seq_lens=self.seq_lens.data_ptr() + 4 * first,
            out=self.out.data_ptr(),
            rows=rows,
            tokens=tokens,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            dim=layer.head_dim,
            page_size=pool.page_size,
            window=layer.sliding_window or 0,
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            sinks_type=0 if sinks is None else TYPES[sinks.dtype],
            **more,
        )

    def _check(self, keys: Tensor) -> None:
        if self.q.dtype not in TYPES or keys.dtype not in CELL_TYPES:
            raise TypeError(
                f"attention of {self.q.dtype} over cells of {keys.dtype}; wanted float32 or bfloat16; choose another "
                "--attention-backend or --dtype"
            )
        if self.layer.scaling <= 0:
            raise ValueError(f"layer {self.layer.layer_id} scales scores by {self.layer.scaling}; wanted more than 0")
