"""FlashInfer over the paged KV cache: its plan/run wrappers for decode and prefill, and its graph-
mode wrappers for capture.

A wrapper is planned for one geometry (kv_heads, head_dim, window, softcap). Its plan needs lengths
on the host and copies them through its own pinned memory. The device may still read that memory
while the next step is planned, so plans alternate between two wrappers.

Pages are listed by the lengths on the device and planned by those on the host, so both must be
equal for every row: it does not serve speculation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.paged import (
    PageLists,
    as_pages,
    offsets,
    page_lists,
    pinned,
    window_left,
    with_padding,
)
from sglcore.runtime.forward_batch import ForwardBatch

try:
    import flashinfer  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: pip install 'sglcore-cuda[flashinfer]'") from error

FLOAT_WORKSPACE = 256 << 20
"""Bytes for partial results of split sequences; a plan that needs more raises an error with the
needed size."""
INT_WORKSPACE = 8 << 20
"""Bytes of one plan, equal to the wrappers' own allocation."""
TENSOR_CORE_GROUP = 4
"""With at least this number of query heads per KV head, decode uses the prefill kernels, because it
fills their tiles."""

Geometry = tuple[int, int, int | None, float | None]
"""(kv_heads, head_dim, sliding window, softcap)."""
Wrapper = Any
"""A FlashInfer wrapper; the library has no types."""


@dataclass(slots=True)
class FlashInferPlan(AttentionPlan):
    """The planned wrappers of one step, by geometry; empty for a batch without requests.
    `num_tokens`: the number of real tokens, without padding. `twins`: in a captured plan, two sets
    of wrappers over the same device memory, which `refresh` plans in turn; `turn` counts its
    refreshes."""

    wrappers: Mapping[Geometry, Wrapper] = field(default_factory=dict)
    num_tokens: int = 0
    twins: tuple[Mapping[Geometry, Wrapper], ...] = ()
    turn: int = 0


@dataclass(slots=True)
class GraphMemory:
    """Device memory that the captured wrappers of all buckets share, because each bucket is
    refreshed just before its replay, on the same stream. `starts` int32 [B + 1]: where each
    request's page list begins in `pages`; `last_lengths` int32 [B]: tokens on its last page;
    `plans`: bytes of one plan for each geometry."""

    starts: Tensor
    last_lengths: Tensor
    pages: Tensor
    plans: Mapping[Geometry, Tensor]


class FlashInferAttention(AttentionBackend[FlashInferPlan]):
    """Decoder attention with or without sliding windows and softcaps, in half precision. The
    wrappers do not support sinks. Importing this module raises Unavailable without the library."""

    facts = AttentionFacts(
        head_dims=(64, 128, 256),
        dtypes=("float16", "bfloat16"),
        features=frozenset({"sliding_window", "softcap", "mixed", "capture"}),
        takes_stored=True,
        library="flashinfer",
        needs_host_lengths=True,
        takes_bounds=False,
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        device = self.req_to_token_pool.page_table.device
        self._workspace = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        kinds = dict.fromkeys(self.shape.layers)
        self._geometries: tuple[Geometry, ...] = tuple(
            (*kind, *bounds) for kind in kinds for bounds in product(self.shape.windows, self.shape.softcaps)
        )
        self._dtype = self.token_to_kv_pool.kv(0)[0].dtype
        self._prefill = tuple(self._wrappers(self._prefill_wrapper) for _ in range(2))
        self._decode = tuple(self._wrappers(self._decode_wrapper) for _ in range(2))
        self._turn = 0
        self._graph_memory: GraphMemory | None = None

    def plan(self, batch: ForwardBatch) -> FlashInferPlan:
        """Plan the wrapper of every geometry for this batch. Copies lengths to the device; does not
        wait. The plan is valid until the second next call of `plan`, because calls alternate
        between two sets of wrappers."""
        assert batch.seq_lens_cpu is not None
        count = len(batch.seq_lens_cpu)
        plan = FlashInferPlan(self, self.token_to_kv_pool.generation)
        if not count:
            return plan
        self._turn += 1
        lists = page_lists(self.req_to_token_pool, batch, count)
        if batch.extend_seq_lens_cpu is None:
            plan.wrappers, plan.num_tokens = self._decode[self._turn % 2], count
            self._plan_decode(plan.wrappers, lists)
        else:
            starts = pinned(offsets(batch.extend_seq_lens_cpu), lists.pages)
            plan.wrappers, plan.num_tokens = self._prefill[self._turn % 2], int(starts[-1])
            self._plan_prefill(plan.wrappers, starts, lists)
        return plan

    def capture_plan(self, bucket: Bucket) -> FlashInferPlan:
        """Make two graph-mode wrappers for each geometry, over buffers that all buckets share,
        planned for `bucket.batch_size` requests of one token. Waits for the device."""
        size = bucket.batch_size
        memory = self._shared(size)
        pair = tuple({g: self._graph_wrapper(g, memory, size) for g in self._geometries} for _ in range(2))
        plan = FlashInferPlan(self, self.token_to_kv_pool.generation, pair[0], size, pair)
        # A replay's plan reuses the kernels of a first plan, so both wrappers need a first plan.
        ones, pages = np.ones(size, np.int32), memory.pages.new_zeros(size)
        lists = PageLists(offsets(ones), torch.from_numpy(ones), memory.starts, memory.last_lengths, pages)
        for wrappers in pair:
            self._plan_decode(wrappers, lists)
        torch.accelerator.current_stream().synchronize()
        return plan

    def refresh(self, plan: FlashInferPlan, batch: ForwardBatch) -> None:
        """Write page lists and lengths of the batch to the captured buffers on the device, then
        plan the set of wrappers in `plan.twins` that the previous refresh did not plan; the
        captured kernels read the new plan. Returns None: the graph itself needs no update."""
        assert self._graph_memory is not None
        size, memory, page_size = plan.num_tokens, self._graph_memory, self.token_to_kv_pool.page_size
        plan.turn += 1
        lists = page_lists(self.req_to_token_pool, batch, size)
        memory.starts[: size + 1].copy_(lists.starts)
        memory.last_lengths[:size].copy_(lists.last_lengths)
        memory.pages[: len(lists.pages)].copy_(lists.pages)
        for (kv_heads, head_dim, window, softcap), wrapper in plan.twins[plan.turn % 2].items():
            flashinfer.fast_decode_plan(
                wrapper,
                memory.starts[: size + 1],
                lists.pages,
                lists.host_last_lengths,
                self.shape.num_heads,
                kv_heads,
                head_dim,
                page_size,
                window_left=window_left(window),
                logits_soft_cap=softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                global_override_indptr_cpu=lists.host_starts,
            )

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: FlashInferPlan) -> Tensor:
        """Implements `AttentionBackend.attend` with the planned wrapper of the layer's geometry: q
        [T, heads * D] -> [T, heads * D]; padding rows become zero. Does not wait."""
        if not plan.wrappers:
            return torch.zeros_like(q)
        wrapper = plan.wrappers[layer.num_kv_heads, layer.head_dim, layer.sliding_window, layer.softcap]
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        page_size = self.token_to_kv_pool.page_size
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        # The wrappers scale by 1 / sqrt(head_dim); a factor gives other scales without separate
        # plans per layer.
        factor = layer.scaling * math.sqrt(layer.head_dim)
        out = wrapper.run(
            queries[: plan.num_tokens],
            (as_pages(k_cache, page_size), as_pages(v_cache, page_size)),
            q_scale=None if math.isclose(factor, 1.0) else factor,
        )
        return with_padding(out, q)

    def _plan_decode(self, wrappers: Mapping[Geometry, Wrapper], lists: PageLists) -> None:
        for (kv_heads, head_dim, window, softcap), wrapper in wrappers.items():
            wrapper.plan(
                lists.host_starts,
                lists.pages,
                lists.host_last_lengths,
                self.shape.num_heads,
                kv_heads,
                head_dim,
                self.token_to_kv_pool.page_size,
                window_left=window_left(window),
                logits_soft_cap=softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    def _plan_prefill(self, wrappers: Mapping[Geometry, Wrapper], starts: Tensor, lists: PageLists) -> None:
        for (kv_heads, head_dim, window, softcap), wrapper in wrappers.items():
            wrapper.plan(
                starts,
                lists.host_starts,
                lists.pages,
                lists.host_last_lengths,
                self.shape.num_heads,
                kv_heads,
                head_dim,
                self.token_to_kv_pool.page_size,
                causal=True,
                window_left=window_left(window),
                logits_soft_cap=softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    def _wrappers(self, make: Any) -> Mapping[Geometry, Wrapper]:
        return {geometry: make(geometry) for geometry in self._geometries}

    def _prefill_wrapper(self, geometry: Geometry) -> Wrapper:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")

    def _decode_wrapper(self, geometry: Geometry, **graph: Any) -> Wrapper:
        fills = self.shape.num_heads // geometry[0] >= TENSOR_CORE_GROUP
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=fills, **graph)

    def _graph_wrapper(self, geometry: Geometry, memory: GraphMemory, size: int) -> Wrapper:
        wrapper = self._decode_wrapper(
            geometry,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=memory.starts[: size + 1],
            paged_kv_indices_buffer=memory.pages,
            paged_kv_last_page_len_buffer=memory.last_lengths[:size],
        )
        wrapper.reset_workspace_buffer(self._workspace, memory.plans[geometry])
        return wrapper

    def _shared(self, size: int) -> GraphMemory:
        """Return the memory that captured wrappers share, for at least `size` requests. The largest
        bucket must be captured first: a later, larger one gets new memory, and earlier captures
        keep theirs, which is no longer refreshed."""
        memory, pool = self._graph_memory, self.req_to_token_pool
        if memory is None or len(memory.last_lengths) < size:
            like = pool.page_table
            plans = {g: like.new_zeros(INT_WORKSPACE, dtype=torch.uint8) for g in self._geometries}
            pages = like.new_zeros(size * pool.max_pages)
            memory = self._graph_memory = GraphMemory(like.new_zeros(size + 1), like.new_zeros(size), pages, plans)
        return memory
