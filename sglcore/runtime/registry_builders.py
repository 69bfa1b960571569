"""Builds the decode and the prefill registry from the declarations of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext, InputBuffer, PostFill
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.reference_kernels import cache_locations as reference_locations
from sglcore.runtime.memory.pools import ReqToTokenPool, WindowTable
from sglcore.runtime.token_table import TokenTable
from sglcore.step.batch_field import When, leaves, spec_of, zero

Compute = Callable[[Tensor, Tensor, Tensor, int, Tensor], None]
"""The type of the kernel table's `cache_locations`."""


def build_decode_registry(
    facts: Facts,
    req_to_token_pool: ReqToTokenPool | None,
    *,
    max_bs: int,
    cells: Compute = reference_locations,
    window_table: WindowTable | None = None,
    extra_buffers: Iterable[InputBuffer] = (),
    batch_type: type[ForwardBatch] = ForwardBatch,
) -> BufferRegistry:
    """Build and allocate the buffers of steps with one token per row, for `max_bs` rows at first.

    `cells` is the kernel table's `cache_locations`, by which the KV slots in `req_to_token_pool`
    are computed (None: there is no such buffer, and the batch keeps its own). `window_table`: page
    table of the sliding-window pages of a worker that has such pages. `extra_buffers` are added
    last.
    """
    computed = _computed(facts, batch_type, req_to_token_pool, window_table, cells)
    staged = [buffer for buffer in _staged(batch_type, window_table) if buffer.spec.is_for_decode]
    return _build(facts, batch_type, max_bs, max_bs, [*staged, *computed, *extra_buffers])


def build_prefill_registry(
    facts: Facts,
    req_to_token_pool: ReqToTokenPool | None,
    *,
    max_bs: int,
    cells: Compute = reference_locations,
    window_table: WindowTable | None = None,
    max_num_tokens: int,
    register_input_embeds: bool = False,
    hidden_size: int = 0,
    dtype: torch.dtype = torch.float32,
    extra_buffers: Iterable[InputBuffer] = (),
    batch_type: type[ForwardBatch] = ForwardBatch,
) -> BufferRegistry:
    """Build and allocate the buffers of steps with any number of tokens per request, for `max_bs`
    requests and `max_num_tokens` tokens at first.

    `cells`, by which the KV slots in `req_to_token_pool` are computed, and `window_table` are as in
    `build_decode_registry`. With `register_input_embeds` there is a buffer [max_num_tokens,
    hidden_size] of `dtype` for embeddings; without it the padded view keeps the batch's own
    embeddings.
    """
    computed = _computed(facts, batch_type, req_to_token_pool, window_table, cells)
    buffers = [*_staged(batch_type, window_table), *computed]
    if register_input_embeds:
        name = str(dtype).removeprefix("torch.")
        spec = replace(spec_of(batch_type, "input_embeds"), dtype=name, padding=zero())
        buffers.append(InputBuffer(spec, trail=(hidden_size,)))
    return _build(facts, batch_type, max_bs, max_num_tokens, [*buffers, *extra_buffers])


def feature_buffer(size: int, dtype: torch.dtype) -> InputBuffer:
    """Return the buffer of `ForwardInputs.features`, `size` elements of `dtype` per token.

    For a draft model, which reads features at every step.
    """
    name = str(dtype).removeprefix("torch.")
    spec = replace(spec_of(ForwardBatch, "features"), dtype=name)

    def given(batch: ForwardBatch, ctx: FillContext) -> Tensor | None:
        return None if batch.features is None else batch.features[: ctx.raw_num_tokens]

    return InputBuffer(spec, trail=(size,), source_fn=given)


def previous_buffer(table: TokenTable, count: int) -> InputBuffer:
    """Return the buffer of `NgramEmbeddingInfo.previous_ids`, `count` ids for each token, for a
    model with embeddings of n-grams. The ids come from `input_ids` as far as the step has them, and
    from the history of the request slot otherwise."""
    name = "ngram_embedding_info.previous_ids"
    spec = next(spec for spec in leaves(ForwardBatch) if spec.name == name)
    return InputBuffer(spec, trail=(count,), post_fill=PreviousIds(table.history))


class PreviousIds:
    """A `post_fill` that writes the tokens before each token, the nearest first; -1 before the
    start of a text.

    Those of decode rows come from `history` int32[slots + 1, context + 1]. It has all tokens before
    the step; if a request has several rows, also theirs.
    """

    __slots__ = ("_history",)

    def __init__(self, history: Tensor) -> None:
        self._history = history

    def __call__(self, view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        """Fill the buffer; the signature is that of `post_fill`."""
        tokens, view = ctx.raw_num_tokens, view[: ctx.raw_num_tokens]
        slots, positions = batch.req_pool_indices[: ctx.raw_bs], batch.positions[:tokens]
        if batch.extend_seq_lens is None or batch.extend_start_loc is None:
            view.copy_(self._before(slots, positions, view.shape[1]))
            return
        lengths, starts = batch.extend_seq_lens[: ctx.raw_bs], batch.extend_start_loc[: ctx.raw_bs]
        slots, starts = (torch.repeat_interleave(each, lengths, output_size=tokens) for each in (slots, starts))
        places = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
        view.copy_(self._before(slots, positions, view.shape[1]))
        for back in range(1, view.shape[1] + 1):
            own = batch.input_ids[:tokens].roll(back)
            torch.where(places - starts >= back, own, view[:, back - 1], out=view[:, back - 1])

    def _before(self, slots: Tensor, positions: Tensor, count: int) -> Tensor:
        """Return int32[T, count]: the tokens of the history before these positions int32[T]."""
        columns = positions.unsqueeze(1) - torch.arange(1, count + 1, dtype=positions.dtype, device=positions.device)
        found = self._history[slots.unsqueeze(1), columns.clamp(min=0)]
        return torch.where(columns < 0, -1, found)


def visible_buffer() -> InputBuffer:
    """Return the buffer of `ForwardInputs.visible`, for steps with draft trees.

    In a batch without the field every row sees all KV slots.
    """
    spec, seen = spec_of(ForwardBatch, "visible"), dict[torch.device, Tensor]()

    def given(batch: ForwardBatch, ctx: FillContext) -> Tensor | None:
        if batch.visible is not None:
            return batch.visible[: ctx.raw_bs]
        device = batch.seq_lens.device
        every = seen.setdefault(device, torch.tensor([-1], dtype=torch.int32, device=device))
        return every.expand(ctx.raw_bs)

    return InputBuffer(spec, source_fn=given)


def run_buffers() -> list[InputBuffer]:
    """Return the buffers of `ForwardInputs.run_*`.

    In a batch without these fields every row is a run of one token, and nothing of it is kept.
    """
    ones = dict[torch.device, Tensor]()

    def own(batch: ForwardBatch) -> Tensor:
        return batch.req_pool_indices

    def one(batch: ForwardBatch) -> Tensor:
        device = batch.seq_lens.device
        return ones.setdefault(device, torch.ones(1, dtype=torch.int32, device=device)).expand(batch.batch_size)

    def none(batch: ForwardBatch) -> Tensor:
        return batch.req_pool_indices * 0

    def buffer(name: str, otherwise: Callable[[ForwardBatch], Tensor]) -> InputBuffer:
        read = attrgetter(name)

        def given(batch: ForwardBatch, ctx: FillContext) -> Tensor:
            found = read(batch)
            return (otherwise(batch) if found is None else found)[: ctx.raw_bs]

        return InputBuffer(spec_of(ForwardBatch, name), source_fn=given)

    sources = {"run_slots": own, "run_targets": own, "run_lens": one, "run_rows": none}
    return [buffer(name, otherwise) for name, otherwise in sources.items()]


def _build(
    facts: Facts, batch_type: type[ForwardBatch], max_bs: int, max_num_tokens: int, buffers: Iterable[InputBuffer]
) -> BufferRegistry:
    registry = BufferRegistry(
        batch_type,
        facts.tensor_device,
        max_bs,
        max_num_tokens,
        shares_host_memory=facts.shares_host_memory,
        pinned=facts.has_pinned_memory,
    )
    for buffer in buffers:
        registry.register(buffer)
    registry.make_buffers()
    return registry


def _staged(batch_type: type[ForwardBatch], window_table: WindowTable | None) -> list[InputBuffer]:
    """Return the buffers of the fields that the host fills.

    Sliding-window fields are staged at every step if there is a window table, and never otherwise.
    """
    found = [spec for spec in leaves(batch_type) if spec.is_staged]
    if window_table is not None:
        found = [replace(spec, when=When.ALWAYS) if spec.when is When.WINDOWS else spec for spec in found]
    return [InputBuffer(spec) for spec in found]


def _computed(
    facts: Facts,
    batch_type: type[ForwardBatch],
    pool: ReqToTokenPool | None,
    window_table: WindowTable | None,
    compute: Compute,
) -> Iterator[InputBuffer]:
    tables = {"out_cache_loc": (pool, "positions"), "window_cache_loc": (window_table, "window_positions")}
    for name, (table, positions) in tables.items():
        if table is not None:
            location = replace(spec_of(batch_type, name), dtype=facts.index_dtype)
            yield InputBuffer(location, post_fill=cache_locations(table, compute, positions))
    yield InputBuffer(spec_of(batch_type, "num_token_non_padded"), post_fill=RealTokens())


def cache_locations(pool: ReqToTokenPool, compute: Compute, field: str = "positions") -> PostFill:
    """Return a `post_fill` that computes the KV slot of each token from the page table.

    The position of a token is the batch's `field`; in a batch with trees it is the row's `seq_lens
    - 1`. Padding tokens keep KV slot 0.
    """
    read = attrgetter("req_pool_indices", field)

    def post_fill(view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        slots, positions = read(batch)
        if batch.visible is not None:
            positions = batch.seq_lens - 1
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
    """A `post_fill` that writes the number of real tokens, so that MoE routing can ignore padding.

    Writes only if the number changes.
    """

    __slots__ = ("_count", "_view")

    def __init__(self) -> None:
        self._view: Tensor | None = None
        self._count = -1

    def __call__(self, view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        """Fill the buffer; the signature is that of `post_fill`."""
        if view is not self._view or ctx.raw_num_tokens != self._count:
            view.fill_(ctx.raw_num_tokens)
            self._view, self._count = view, ctx.raw_num_tokens
