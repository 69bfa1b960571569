"""Which slots the decode and the prefill registries hold, built from the declarations of `ForwardBatch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext, Slot
from sglcore.runtime.fields import Axis, spec_of, specs, zero
from sglcore.runtime.forward_batch import ForwardBatch, NgramEmbeddingInfo
from sglcore.runtime.kernels.reference import cache_locations as reference_locations
from sglcore.runtime.memory.pools import ReqToTokenPool

Compute = Callable[[Tensor, Tensor, Tensor, int, Tensor], None]
"""The kernel table's `cache_locations`."""

_EXTEND_FIELDS = ("extend_prefix_lens", "extend_seq_lens", "extend_start_loc")


def build_decode_registry(
    facts: Facts,
    req_to_token_pool: ReqToTokenPool | None,
    *,
    max_bs: int,
    cells: Compute = reference_locations,
    tokens_per_request: int = 1,
    register_global_num_tokens: bool = False,
    num_ranks: int = 1,
    extra_slots: Iterable[Slot] = (),
) -> BufferRegistry:
    """Slots for steps in which every request brings `tokens_per_request` tokens."""
    max_num_tokens = max_bs * tokens_per_request
    slots = _common_slots(facts, req_to_token_pool, cells, register_global_num_tokens, num_ranks)
    return _build(facts, max_bs, max_num_tokens, [*slots, *extra_slots])


def build_prefill_registry(
    facts: Facts,
    req_to_token_pool: ReqToTokenPool | None,
    *,
    max_bs: int,
    cells: Compute = reference_locations,
    max_num_tokens: int,
    register_global_num_tokens: bool = False,
    register_input_embeds: bool = False,
    hidden_size: int = 0,
    dtype: torch.dtype = torch.float32,
    num_ranks: int = 1,
    extra_slots: Iterable[Slot] = (),
) -> BufferRegistry:
    """Slots for steps in which requests bring any number of tokens.

    `register_input_embeds=False` and `register_global_num_tokens=False` carry the batch's own values.
    """
    slots = _common_slots(facts, req_to_token_pool, cells, register_global_num_tokens, num_ranks)
    slots += [Slot(spec_of(ForwardBatch, name)) for name in _EXTEND_FIELDS]
    if register_input_embeds:
        spec = replace(spec_of(ForwardBatch, "input_embeds"), dtype=dtype, padding=zero())
        slots.append(Slot(spec, trail=(hidden_size,)))
    return _build(facts, max_bs, max_num_tokens, [*slots, *extra_slots])


def _build(facts: Facts, max_bs: int, max_num_tokens: int, slots: Iterable[Slot]) -> BufferRegistry:
    registry = BufferRegistry(
        facts.tensor_device,
        max_bs,
        max_num_tokens,
        shares_host_memory=facts.shares_host_memory,
        pinned=facts.has_pinned_memory,
    )
    for slot in slots:
        registry.register_slot(slot)
    registry.make_buffers()
    return registry


def _common_slots(
    facts: Facts, pool: ReqToTokenPool | None, compute: Compute, register_global_num_tokens: bool, num_ranks: int
) -> list[Slot]:
    slots = [
        Slot(spec)
        for spec in specs(ForwardBatch)
        if spec.is_slot and spec.axis is not Axis.NONE and spec.name not in (*_EXTEND_FIELDS, "out_cache_loc")
    ]
    if pool is not None:
        dtype = torch.int32 if facts.cache_loc_dtype == "int32" else torch.int64
        location = replace(spec_of(ForwardBatch, "out_cache_loc"), dtype=dtype)
        slots.append(Slot(location, post_fill=cache_locations(pool, compute)))
    slots.append(Slot(spec_of(ForwardBatch, "num_token_non_padded"), post_fill=RealTokens()))
    if register_global_num_tokens:
        spec = spec_of(ForwardBatch, "global_num_tokens")
        slots.append(Slot(spec, width=num_ranks, post_fill=count_global_tokens))
    slots += [Slot(replace(spec, name=f"ngram_embedding_info.{spec.name}")) for spec in specs(NgramEmbeddingInfo)]
    return slots


def cache_locations(pool: ReqToTokenPool, compute: Compute) -> Callable[[Tensor, ForwardBatch, FillContext], None]:
    """Computes the cell of each token from its request's page table; padding tokens stay at cell 0."""

    def post_fill(view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        slots, positions = batch.req_pool_indices, batch.positions
        assert slots is not None and positions is not None
        if batch.num_tokens != ctx.raw_num_tokens:
            slots, positions, view = slots[: ctx.raw_bs], positions[: ctx.raw_num_tokens], view[: ctx.raw_num_tokens]
        elif ctx.raw_num_tokens != ctx.padded_num_tokens:
            view = view[: ctx.raw_num_tokens]
        if batch.extend_seq_lens is not None:
            lengths = batch.extend_seq_lens[: ctx.raw_bs]
            slots = torch.repeat_interleave(slots, lengths, output_size=ctx.raw_num_tokens)
        compute(pool.page_table, slots, positions, pool.page_size, view)

    return post_fill


class RealTokens:
    """Writes how many leading tokens are real; a kernel that routes tokens ignores the others. Unchanged is not rewritten."""

    __slots__ = ("_count", "_view")

    def __init__(self) -> None:
        self._view: Tensor | None = None
        self._count = -1

    def __call__(self, view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        """As a slot's `post_fill`."""
        if view is not self._view or ctx.raw_num_tokens != self._count:
            view.fill_(ctx.raw_num_tokens)
            self._view, self._count = view, ctx.raw_num_tokens


def count_global_tokens(view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
    """Every rank pads to the same count, that of this one."""
    view.fill_(ctx.padded_num_tokens)
