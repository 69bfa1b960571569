"""The reference backend: torch's scaled dot-product attention over gathered KV slots of any pool.

Slow and simple; it defines correct results. Rows with one token are attended together, longer rows
one by one. Only KV slots of the row itself are read: columns after a row's length repeat its last
KV slot and are masked, so garbage elsewhere in the pool cannot change the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch

Window = int | None


@dataclass(slots=True)
class SingleRows:
    """The first R rows of the batch, with one token each.

    `count` is R. `slots` (request slots) and `seq_lens` int32[R] on the device, at most `longest`
    tokens each; `visible` int32[R] as in the batch. `gathers` by window: KV slots int32[R * L] and
    mask bool[R, 1, 1, L] (True: seen), made by the first layer that needs them; L is `longest`, or
    the window if shorter.
    """

    count: int
    slots: Tensor
    seq_lens: Tensor
    longest: int
    visible: Tensor | None = None
    gathers: dict[Window, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LongRow:
    """One request with the tokens [start, end) of the batch, n of them.

    `cells` int32[S] are the KV slots of the whole request, empty in an encoder. `masks` by window:
    bool[n, S], True where seen (None: causal without prefix).
    """

    start: int
    end: int
    cells: Tensor
    masks: dict[Window, Tensor | None]


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The part of a `ReferencePlan` for a captured step: sizes, and constant indices; slots and
    lengths are read from the batch.

    `offsets` int32[n] are 0 to n - 1, for the n tokens of each of `batch_size` requests. `places`
    int32[context] are the indices of all tokens that a request may have.
    """

    batch_size: int
    offsets: Tensor
    places: Tensor


@dataclass(slots=True)
class ReferencePlan(AttentionPlan):
    """The plan of `ReferenceAttention`: the leading requests of one token (`singles`; None: there
    are none) and the `rows` after them. `captured` has the sizes of a captured step instead, and is
    set by `GatheredAttention` only.
    """

    singles: SingleRows | None = None
    rows: list[LongRow] = field(default_factory=list)
    captured: CapturedRows | None = None


class ReferenceAttention(AttentionBackend[ReferencePlan]):
    """Serves every shape, page size, window, softcap and sink, and encoder attention."""

    facts = AttentionFacts(
        features=frozenset({"sliding_window", "softcap", "sinks", "encoder", "mixed", "tree_mask"}),
        takes_stored=True,
        layouts=None,
    )

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Implements `AttentionBackend.plan`: compute gather indices for every row of the batch."""
        plan = ReferencePlan(self, self.token_to_kv_pool.generation)
        self._fill(plan, batch)
        return plan

    def capture_plan(self, bucket: Bucket) -> ReferencePlan:
        """Implements `AttentionBackend.capture_plan` by an empty plan: attention is opaque in a
        capture and reads it at run time.
        """
        return ReferencePlan(self, self.token_to_kv_pool.generation)

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`: plan the batch again, in the same plan object."""
        plan.singles, plan.rows = None, []
        self._fill(plan, batch)

    def _fill(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        seq_lens = batch.seq_lens_cpu
        assert seq_lens is not None
        if not len(seq_lens):
            return
        if batch.extend_seq_lens_cpu is None:
            plan.singles = self._single_rows(batch, len(seq_lens))
            return
        lengths = batch.extend_seq_lens_cpu
        leading = int(np.argmax(lengths != 1)) if (lengths != 1).any() else len(lengths)
        if leading and not self.shape.is_encoder:
            plan.singles = self._single_rows(batch, leading)
        else:
            leading = 0
        start = leading
        for row in range(leading, len(lengths)):
            end = start + int(lengths[row])
            plan.rows.append(self._long_row(batch, row, start, end, int(seq_lens[row])))
            start = end

    def _single_rows(self, batch: ForwardBatch, count: int) -> SingleRows:
        slots, seq_lens, lens = batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu
        assert lens is not None
        if count != len(slots):
            slots, seq_lens, lens = slots[:count], seq_lens[:count], lens[:count]
        visible = None if batch.visible is None else batch.visible[:count]
        return SingleRows(count, slots, seq_lens, int(lens.max()), visible)

    def _gather(self, part: SingleRows, window: Window) -> tuple[Tensor, Tensor]:
        found = part.gathers.get(window)
        if found is None:
            found = part.gathers[window] = self._make_gather(part, window)
        return found

    def _make_gather(self, part: SingleRows, window: Window) -> tuple[Tensor, Tensor]:
        longest, counts, starts = part.longest, part.seq_lens[:, None], None
        if window is not None and window < longest:
            longest, starts = window, (counts - window).clamp_(min=0)
            counts = counts - starts
        columns = torch.arange(longest, dtype=torch.int32, device=part.slots.device)[None]
        mask = columns < counts
        if part.visible is not None:
            mask &= is_seen(
                part.visible[:, None], part.seq_lens[:, None] - 1 - columns - (0 if starts is None else starts)
            )
        # Unseen KV slots may hold NaN, and NaN times a weight of 0 is NaN: read the row's own KV
        # slot instead.
        positions = torch.where(mask, columns, counts - 1)
        if starts is not None:
            positions = positions + starts
        return self._cells(part.slots, positions).view(-1), mask[:, None, None, :]

    def _long_row(self, batch: ForwardBatch, row: int, start: int, end: int, seq_len: int) -> LongRow:
        slots = batch.req_pool_indices[row : row + 1]
        if self.shape.is_encoder:
            return LongRow(start, end, slots.new_empty(0), {})
        positions = torch.arange(seq_len, dtype=torch.int32, device=slots.device)
        prefix = seq_len - (end - start)
        masks: dict[Window, Tensor | None] = {}
        for window in self.shape.windows:
            masks[window] = None
            if prefix or (window is not None and window < seq_len):
                queries = positions[prefix:, None]
                mask = positions <= queries
                masks[window] = mask if window is None else mask & (positions > queries - window)
        return LongRow(start, end, self._cells(slots, positions[None]).view(-1), masks)

    def _cells(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the KV slots int32[R, L] of positions int32[R, L] in request slots int32[R]."""
        pool = self.req_to_token_pool
        pages = pool.page_table[slots[:, None], positions // pool.page_size]
        return pages * pool.page_size + positions % pool.page_size

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: ReferencePlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * head_dim] to the same shape. Padding
        rows are zero.
        """
        grouped = _grouped(q, layer)
        singles = plan.singles
        if singles is not None and singles.count == q.shape[0]:
            return self._attend_singles(grouped, singles, layer).reshape(q.shape)
        out = torch.zeros_like(grouped)
        if singles is not None:
            rows = slice(0, singles.count)
            out[rows] = self._attend_singles(grouped[rows], singles, layer)
        for row in plan.rows:
            keys, values = self.token_to_kv_pool.read_cells(layer.layer_id, row.cells)
            mask = row.masks[layer.sliding_window]
            out[row.start : row.end] = self._attend_row(
                grouped[row.start : row.end], keys, values, mask, layer, mask is None
            )
        return out.view(q.shape)

    def encode(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, plan: ReferencePlan) -> Tensor:
        """Implements `AttentionBackend.encode`, one request at a time: q [T, heads * head_dim], k
        and v [T, kv_heads * head_dim] to q's shape. Padding rows are zero.
        """
        queries = _grouped(q, layer)
        keys, values = (x.view(-1, layer.num_kv_heads, layer.head_dim) for x in (k, v))
        out = torch.zeros_like(queries)
        for row in plan.rows:
            rows = slice(row.start, row.end)
            mask = _encoder_mask(row, layer, q.device)
            causal = layer.causal and mask is None
            out[rows] = self._attend_row(queries[rows], keys[rows], values[rows], mask, layer, causal)
        return out.view(q.shape)

    def _attend_singles(self, q: Tensor, part: SingleRows, layer: Attention) -> Tensor:
        """Attend q [R, kv_heads, group, dim], one token of each row of `part`; return q's shape.
        The heads of a group share their keys.
        """
        cells, mask = self._gather(part, layer.sliding_window)
        shape = (part.count, cells.shape[0] // part.count, layer.num_kv_heads, layer.head_dim)
        keys, values = self.token_to_kv_pool.read_cells(layer.layer_id, cells)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        if _is_plain(layer):
            return sdpa(q, keys, values, attn_mask=mask, scale=layer.scaling)
        parts = q[:, :, :, None], keys[:, :, None], values[:, :, None]
        return self._attend_scores(*parts, mask[:, None], layer)[:, :, :, 0]

    def _attend_row(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: Attention, causal: bool
    ) -> Tensor:
        """Attend one request: q [n, kv_heads, group, dim], k and v [s, kv_heads, dim].

        `mask` bool [n, s] is True where seen. None: all is seen, or with `causal` the tokens up to
        the query's own (n = s). Return q's shape.
        """
        if not _is_plain(layer):
            if mask is None and causal:
                mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril_()
            found = self._attend_scores(
                q.permute(1, 2, 0, 3), k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None], mask, layer
            )
            return found.permute(2, 0, 1, 3)
        queries = q.flatten(1, 2).transpose(0, 1)[None]
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        grouped = layer.num_heads != layer.num_kv_heads
        out = sdpa(queries, keys, values, attn_mask=mask, is_causal=causal, scale=layer.scaling, enable_gqa=grouped)
        return out[0].transpose(0, 1).reshape(q.shape)

    def _attend_scores(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: Attention) -> Tensor:
        """Attend with explicit scores, for softcaps and sinks; return q's shape.

        q [..., kv_heads, group, n, dim], k and v [..., kv_heads, 1, s, dim]; `mask` bool broadcasts
        to [..., kv_heads, group, n, s], True where seen (None: all). The softmax is in float32, as
        in transformers.
        """
        scores = self.scores(q, k, layer)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(layer.num_kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
        return (weights @ v.float()).to(q.dtype)

    def scores(self, q: Tensor, k: Tensor, layer: Attention) -> Tensor:
        """Return float32 scores [..., n, s] of q [..., n, dim] and k [..., s, dim].

        They are scaled and softcapped.
        """
        scores = (q.float() @ k.float().transpose(-1, -2)) * layer.scaling
        return scores if layer.softcap is None else layer.softcap * torch.tanh(scores / layer.softcap)


def _encoder_mask(row: LongRow, layer: Attention, device: torch.device) -> Tensor | None:
    """Return the mask bool [n, n] of a row without KV slots, True where seen; kept in `row.masks`
    by window.

    None: the layer's window, if any, covers the row; the caller still masks later tokens if the
    layer is causal.
    """
    window, count = layer.sliding_window, row.end - row.start
    if window is None or window >= count:
        return None
    if window not in row.masks:
        places = torch.arange(count, dtype=torch.int32, device=device)
        back = places[:, None] - places
        row.masks[window] = (back < window) & (back >= (0 if layer.causal else 1 - window))
    return row.masks[window]


def is_seen(visible: Tensor, back: Tensor) -> Tensor:
    """Return bool: whether rows with the words `visible` (`ForwardInputs.visible`) see the KV slots
    `back` places before their own: bit 31 - back of the word; more than 31 places back, True.

    Both are int32 and broadcast. Negative `back` is not masked here: it counts as 0.
    """
    return (visible >> (31 - back).clamp_(min=0, max=31)).bitwise_and_(1).bool() | (back > 31)


def _grouped(q: Tensor, layer: Attention) -> Tensor:
    """View q [T, heads * dim] as [T, kv_heads, group, dim]."""
    return q.view(q.shape[0], layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim)


def _is_plain(layer: Attention) -> bool:
    """Return whether torch's own function serves this layer (no softcap, no sinks)."""
    return layer.softcap is None and layer.sinks is None
