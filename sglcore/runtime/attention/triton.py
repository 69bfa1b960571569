"""Attention in Triton, on any device with a Triton compiler.

Any page size, head size, window, softcap and sink. `attend` reads every length and page on the
device, so a captured plan is valid for any batch of its size. A device package subclasses
`TritonAttention` to override `make_tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

# Imported before any module that imports Triton: the error for a missing Triton names the command
# that installs it.
import sglcore.runtime.kernels.triton as kernels
from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.attention.triton_decode import Chunks, attend_singles, chunks_for
from sglcore.runtime.attention.triton_extend import attend_rows

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(slots=True)
class TritonPlan(AttentionPlan):
    """The plan of `TritonAttention`: the host values that launches need.

    `singles` leading rows have one token each (None: every row of q). The `rows` after them have up
    to `longest` tokens; `tokens` counts the tokens of all rows. `chunks` is fixed when the plan is
    made.
    """

    chunks: Chunks = Chunks(1, 1)
    singles: int | None = None
    rows: int = 0
    longest: int = 0
    tokens: int = 0


class TritonAttention(AttentionBackend[TritonPlan]):
    """The attention backend in Triton: decode in chunks, and extend with a prefix."""

    facts = AttentionFacts(
        dtypes=("float32", "float16", "bfloat16"),
        features=frozenset({"sliding_window", "softcap", "sinks", "mixed", "capture", "tree_mask"}),
        takes_stored=True,
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.tuning = self.make_tuning()

    def make_tuning(self) -> kernels.Tuning:
        """Return the launch parameters.

        Called once, by the constructor, so it may read device properties.
        """
        return kernels.Tuning()

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Implements `AttentionBackend.plan` by sizes only: nothing is copied to the device and
        nothing is allocated.
        """
        plan = self.capture_plan(Bucket(batch.batch_size, batch.num_tokens))
        self.refresh(plan, batch)
        return plan

    def capture_plan(self, bucket: Bucket) -> TritonPlan:
        """Implements `AttentionBackend.capture_plan`: a plan for one token per row until `refresh`
        changes it. It holds no address.
        """
        kv_heads = max(heads for heads, _ in self.shape.layers)
        pool = self.req_to_token_pool
        chunks = chunks_for(self.tuning, bucket.batch_size, kv_heads, pool.max_pages * pool.page_size)
        return TritonPlan(self, self.token_to_kv_pool.generation, chunks)

    def refresh(self, plan: TritonPlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`: update the sizes of extend launches.

        Decode needs no update: its kernels read the lengths.
        """
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
        """Implements `AttentionBackend.attend`: q [T, heads * head_dim] to a new tensor of the same
        shape. Padding rows of an extend batch are zero.
        """
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
            plan.chunks,
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
