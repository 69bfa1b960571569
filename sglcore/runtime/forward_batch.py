"""One forward's inputs on the device. Per-batch data only: no pools, no backend, no coordinator.

Every field is declared once (see fields.py); the registry's slots, padded views, children, retention and poison follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from sglcore.runtime.fields import Axis, Source, Split, batch_field, fill_once, sentinel, zero

if TYPE_CHECKING:
    from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan
    from sglcore.runtime.buffer_registry import BufferRegistry

REQUESTS, TOKENS, NONE = Axis.REQUESTS, Axis.TOKENS, Axis.NONE
I32 = torch.int32


class StalePlanError(RuntimeError):
    """A batch was planned for another backend, shape or pool than the one it is about to run on."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What was true when attention was planned: by whom, for which sizes, over which pool generation."""

    plan: AttentionPlan
    planner: AttentionBackend
    batch_size: int
    num_tokens: int
    generation: int
    replan_equivalent: bool


@dataclass(slots=True)
class NgramEmbeddingInfo:
    """Inputs of n-gram embeddings: where in its row of the token history each request's tokens of this step start, and
    how many there are. int32[B] each."""

    column_starts: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.ADVANCE, dtype=I32, padding=zero(), source=Source.HOST
    )
    req_lens: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype=I32, padding=zero(), source=Source.HOST
    )


@dataclass(slots=True)
class ForwardBatch:
    """B requests and T tokens; a padded view has more rows than `num_token_non_padded` says are real.

    Cells are indices into the KV pool. `extend_*` are None when every row brings one token. `*_cpu` are host mirrors.
    `global_num_tokens` int32[ranks] counts tokens on every data-parallel rank.
    """

    forward_mode: ForwardMode = batch_field(axis=NONE, split=Split.COPY, default=ForwardMode.IDLE)
    batch_size: int = batch_field(axis=NONE, split=Split.CLIP, default=0)
    num_tokens: int = batch_field(axis=NONE, split=Split.CLIP, default=0)

    input_ids: Tensor | None = batch_field(axis=TOKENS, dtype=I32, padding=zero(), source=Source.HOST)
    positions: Tensor | None = batch_field(axis=TOKENS, dtype=I32, padding=zero(), source=Source.HOST)
    out_cache_loc: Tensor | None = batch_field(
        axis=TOKENS, dtype=torch.int64, padding=zero(), source=Source.COMPUTED, owner="pool"
    )
    req_pool_indices: Tensor | None = batch_field(axis=REQUESTS, dtype=I32, padding=zero(), source=Source.HOST)
    seq_lens: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype=I32, padding=sentinel(1), source=Source.HOST
    )
    extend_prefix_lens: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype=I32, padding=zero(), source=Source.HOST
    )
    extend_seq_lens: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype=I32, padding=sentinel(1), source=Source.HOST
    )
    extend_start_loc: Tensor | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype=I32, padding=zero(), source=Source.HOST
    )
    num_token_non_padded: Tensor | None = batch_field(
        axis=NONE, split=Split.COUNT, dtype=I32, padding=fill_once(0), source=Source.COMPUTED
    )
    global_num_tokens: Tensor | None = batch_field(
        axis=NONE, split=Split.DROP, dtype=I32, padding=fill_once(0), source=Source.COMPUTED, owner="parallel"
    )

    seq_lens_cpu: NDArray[np.int32] | None = batch_field(axis=REQUESTS, split=Split.CLIP)
    extend_prefix_lens_cpu: NDArray[np.int32] | None = batch_field(axis=REQUESTS, split=Split.CLIP)
    extend_seq_lens_cpu: NDArray[np.int32] | None = batch_field(axis=REQUESTS, split=Split.CLIP)

    mrope_positions: Tensor | None = batch_field(axis=TOKENS, dtype=I32, padding=zero(), source=Source.HOST, lead=(3,))
    input_embeds: Tensor | None = batch_field(axis=TOKENS)
    ngram_embedding_info: NgramEmbeddingInfo | None = batch_field(axis=NONE, split=Split.NESTED, owner="embedding")

    capture_hidden_mode: CaptureHiddenMode = batch_field(axis=NONE, split=Split.COPY, default=CaptureHiddenMode.NONE)
    return_hidden_states_before_norm: bool = batch_field(axis=NONE, split=Split.COPY, default=False)
    sampling: Any = batch_field(axis=NONE, split=Split.DROP, owner="sampler")
    spec_info: Any = batch_field(axis=NONE, split=Split.NESTED, owner="speculative")

    plan_record: PlanRecord | None = batch_field(axis=NONE, split=Split.FRESH, owner="attention")

    @classmethod
    def init_new(cls, batch: ScheduleBatch, registry: BufferRegistry) -> ForwardBatch:
        """Stage a host batch into the registry's slots and return the view of them, unpadded. Waits for nothing.

        One-shot values are taken from `batch`, so a second call does not see them. Negative input ids are left for
        `resolve_future`, cache locations for `fill_from`.
        """
        seq_lens_cpu = batch.seq_lens_cpu_cache.take()
        if seq_lens_cpu is None:
            seq_lens_cpu = batch.seq_lens
        registry.ensure(batch.batch_size, batch.num_tokens)
        stage = registry.stage
        stage("req_pool_indices", batch.slots)
        stage("seq_lens", seq_lens_cpu)
        if batch.forward_mode.is_decode:
            stage("positions", seq_lens_cpu - 1)
        else:
            _stage_extend(stage, batch)
        _stage_optional(stage, batch)
        registry.commit()
        view = registry.view(cls, batch.batch_size, batch.num_tokens, not batch.forward_mode.is_decode)
        view.forward_mode = batch.forward_mode
        view.seq_lens_cpu = seq_lens_cpu
        view.extend_prefix_lens_cpu = batch.prefix_lens
        view.extend_seq_lens_cpu = np.diff(batch.token_offsets) if not batch.forward_mode.is_decode else None
        if batch.mrope_positions is not None:
            view.mrope_positions = registry.slot("mrope_positions").head(batch.batch_size, batch.num_tokens)
        if batch.ngram_starts is not None or batch.ngram_lens is not None:
            given = NgramEmbeddingInfo(batch.ngram_starts, batch.ngram_lens)  # pyright: ignore[reportArgumentType]
            view.ngram_embedding_info = registry.nested_view("ngram_embedding_info", given, batch.batch_size)
        view.capture_hidden_mode = batch.capture_hidden_mode.take()
        view.return_hidden_states_before_norm = batch.return_hidden_states_before_norm.take()
        return view

    def mark_forward_metadata_ready(self, plan: AttentionPlan, replan_equivalent: bool = False) -> None:
        """Record that attention was planned for this batch as it is now.

        `replan_equivalent`: planning again on drifted sizes gives what the caller wants; otherwise drift is an error.
        """
        self.plan_record = PlanRecord(
            plan, plan.planner, self.batch_size, self.num_tokens, plan.generation, replan_equivalent
        )

    def needs_forward_metadata_init(self, backend: AttentionBackend) -> bool:
        """True if `backend` must plan before it runs; raises StalePlanError on a plan that is not for this forward."""
        record = self.plan_record
        if record is None:
            return True
        drift = self._plan_drift(record, backend)
        if not drift:
            return False
        if record.replan_equivalent:
            return True
        raise StalePlanError(f"{drift}; plan again before the forward, or mark the plan replan_equivalent")

    def _plan_drift(self, record: PlanRecord, backend: AttentionBackend) -> str:
        if record.planner is not backend:
            return f"planned by {record.planner!r}, about to run on {backend!r}"
        if (record.batch_size, record.num_tokens) != (self.batch_size, self.num_tokens):
            planned = f"{record.batch_size} requests and {record.num_tokens} tokens"
            return f"planned for {planned}, the batch now has {self.batch_size} and {self.num_tokens}"
        generation = backend.token_to_kv_pool.generation
        if record.generation != generation:
            return f"planned over generation {record.generation} of the KV pool, it is now {generation}"
        return ""


def _stage_extend(stage: Callable[[str, NDArray], None], batch: ScheduleBatch) -> None:
    lengths = np.diff(batch.token_offsets)
    starts = batch.token_offsets[:-1]
    stage("input_ids", batch.input_ids)
    offsets = np.repeat(batch.prefix_lens - starts, lengths)
    stage("positions", offsets + np.arange(batch.num_tokens, dtype=np.int32))
    stage("extend_prefix_lens", batch.prefix_lens)
    stage("extend_seq_lens", lengths)
    stage("extend_start_loc", starts)


def _stage_optional(stage: Callable[[str, NDArray], None], batch: ScheduleBatch) -> None:
    if batch.mrope_positions is not None:
        stage("mrope_positions", batch.mrope_positions)
    if batch.ngram_starts is not None:
        stage("ngram_embedding_info.column_starts", batch.ngram_starts)
    if batch.ngram_lens is not None:
        stage("ngram_embedding_info.req_lens", batch.ngram_lens)
