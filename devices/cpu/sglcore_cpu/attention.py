"""Attention over the paged pool by the native kernels. Slots, lengths and pages are read when a
kernel runs, so a recorded decode step serves whatever its buffers hold."""

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
from sglcore_cpu.kv_pool import INT8
from sglcore_cpu.native import TYPES, BoundKernel, Engine
from sglcore_cpu.table import engine_of

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import ReqToTokenPool, TokenToKVPool

CELL_TYPES: Mapping[torch.dtype, int] = MappingProxyType({**TYPES, torch.uint8: 2})
"""Element types as the kernels count them; cells of bytes hold codes of 8 bits, each head's with
its scale behind."""


@dataclass(slots=True)
class PagedPlan(AttentionPlan):
    """The first `singles` rows bring one token each (None: every row that the batch shows, padding
    too); `starts` int32[N + 1] are the first tokens of the rows after them and the end of the last,
    None if there are none."""

    singles: int | None = None
    starts: Tensor | None = None


class PagedAttention(AttentionBackend[PagedPlan]):
    """Serves every page size, head size, window, softcap and sink in float32 and bfloat16, over
    cells of either or of 8 bits."""

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
        """`engine`: None for that of the kernel table; raises Unavailable if it has none."""
        super().__init__(shape, req_to_token_pool, token_to_kv_pool, kernels, hisparse)
        self._engine = engine or engine_of(kernels)
        self._decode = self._engine.kernel("paged_decode").bind()
        self._prefill = self._engine.kernel("paged_prefill").bind()

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Which rows bring one token, and where the others start. Waits for nothing."""
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
        """Every row brings one token; what is in the buffers says the rest. Raises ValueError for
        another bucket."""
        if bucket.num_tokens != bucket.batch_size:
            raise ValueError(f"found {bucket.num_tokens} tokens of {bucket.batch_size} requests; wanted one of each")
        return PagedPlan(self, self.token_to_kv_pool.generation)

    def refresh(self, plan: PagedPlan, batch: ForwardBatch) -> None:
        """Nothing: the kernel reads the buffers."""

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: PagedPlan) -> Tensor:
        """Rows of padding come out as zero. Raises TypeError or ValueError for what no kernel
        serves."""
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
    """One layer's attention, checked: q [T, heads * D] to out, `slots` and `seq_lens` int32 of the
    rows."""

    backend: PagedAttention
    layer: Attention
    q: Tensor
    out: Tensor
    slots: Tensor
    seq_lens: Tensor

    def run(self, kernel: BoundKernel, first: int, rows: int, tokens: int, **more: int) -> None:
        """The rows [first, first + rows); tokens of out up to `tokens` that belong to none become
        zero."""
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
