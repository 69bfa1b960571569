"""Attention in Triton: any page size, head size, window, softcap and sink, on any device that Triton compiles for.

`attend` takes every length and page from the device, so a captured plan stays right for any batch of its size. A device
package subclasses `TritonAttention` to give `make_tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

# Stands before what imports Triton itself, so that a missing library is named with the command that installs it.
import sglcore.runtime.kernels.triton as kernels
from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.attention.triton_decode import attend_singles, splits_for
from sglcore.runtime.attention.triton_extend import attend_rows

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(slots=True)
class TritonPlan(AttentionPlan):
    """What launches need of the host. `singles` leading rows bring one token each (None: every row of q does); the
    `rows` after them bring up to `longest`, `tokens` of all rows together. `splits` is fixed when the plan is made."""

    splits: int = 1
    singles: int | None = None
    rows: int = 0
    longest: int = 0
    tokens: int = 0


class TritonAttention(AttentionBackend[TritonPlan]):
    """Paged attention over a table of pages: split decode, and extend with a prefix."""

    facts = AttentionFacts(
        dtypes=("float32", "float16", "bfloat16"),
        features=frozenset({"sliding_window", "softcap", "sinks", "mixed", "capture", "tree_mask"}),
        takes_stored=True,
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.tuning = self.make_tuning()

    def make_tuning(self) -> kernels.Tuning:
        """How its kernels are launched; asked once, when it is made, so that this may read the device's properties."""
        return kernels.Tuning()

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Sizes only: nothing is copied to the device and nothing allocated."""
        plan = self.capture_plan(Bucket(batch.batch_size, batch.num_tokens))
        self.refresh(plan, batch)
        return plan

    def capture_plan(self, bucket: Bucket) -> TritonPlan:
        """A plan for one token a row until `refresh` says otherwise. It holds no address."""
        kv_heads = max(heads for heads, _ in self.shape.layers)
        pool = self.req_to_token_pool
        splits = splits_for(self.tuning, bucket.batch_size, kv_heads, pool.max_pages * pool.page_size)
        return TritonPlan(self, self.token_to_kv_pool.generation, splits)

    def refresh(self, plan: TritonPlan, batch: ForwardBatch) -> None:
        """Decode needs nothing: its kernels read the lengths. For longer rows the sizes of the launches change."""
        lengths = batch.extend_seq_lens_cpu
        if lengths is None:
            plan.singles, plan.rows = None, 0
            return
        longer = np.flatnonzero(lengths != 1)
        plan.singles = int(longer[0]) if len(longer) else len(lengths)
        plan.rows = len(lengths) - plan.singles
        plan.longest = int(lengths.max(initial=0))
        plan.tokens = int(lengths.sum())

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: TritonPlan) -> Tensor:
        """Lines of an extend batch beyond the real ones come out as zero."""
        is_covered = plan.singles is None or plan.tokens == q.shape[0]
        out = (torch.empty if is_covered else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        singles = q.shape[0] if plan.singles is None else plan.singles
        self._singles(q[:singles], out[:singles], layer, batch, plan)
        if plan.rows:
            self._rows(q, out, layer, batch, plan, slice(singles, singles + plan.rows))
        return out

    def _singles(self, q: Tensor, out: Tensor, layer: Attention, batch: ForwardBatch, plan: TritonPlan) -> None:
        pool = self.req_to_token_pool
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        attend_singles(
            q,
            k_cache,
            v_cache,
            pool.page_table,
            pool.page_size,
            batch.req_pool_indices,
            batch.seq_lens,
            out,
            plan.splits,
            layer,
            self.tuning,
            batch.visible,
        )

    def _rows(
        self, q: Tensor, out: Tensor, layer: Attention, batch: ForwardBatch, plan: TritonPlan, rows: slice
    ) -> None:
        assert batch.extend_seq_lens is not None and batch.extend_start_loc is not None
        pool = self.req_to_token_pool
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        attend_rows(
            q,
            k_cache,
            v_cache,
            pool.page_table,
            pool.page_size,
            batch.req_pool_indices[rows],
            batch.seq_lens[rows],
            batch.extend_seq_lens[rows],
            batch.extend_start_loc[rows],
            plan.longest,
            out,
            layer,
            self.tuning,
        )
