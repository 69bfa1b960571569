"""Draft tokens by several MTP layers, one each (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

KV entry i of layer j (from 0) has token i + 1 + j and the output of layer j - 1 for entry i; layer
0 has the target's features of token i. The last j entries of a text therefore depend on draft
tokens. With k layers, every forward begins k - 1 entries before those of the target and rewrites
them from the accepted text; their inputs are kept by slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.step.batch_field import Axis, leaves
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.forward import DecodeForward, extend_inputs
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.speculative.drafter import (
    Begun,
    Cells,
    DraftParts,
    Draw,
    Fields,
    ModelDrafter,
    Pages,
    PromptRows,
    Roots,
    VerifiedRows,
    fields_of_prompts,
    fields_of_verified,
)
from sglcore_mlx.speculative.verify import Placed

Run = Callable[[int, mx.array, mx.array], mx.array]
"""`run(depth, beyond int32[R, k - 1], features)`: run layer number `depth` over all its tokens, and
return its output; `features`: the output of the layer before. Tokens after the known text are taken
from `beyond`."""


@dataclass(frozen=True, slots=True)
class HeadsBegun(Begun):
    """The tokens that every layer runs."""

    run: Run
    features: mx.array
    """The input of layer 0."""
    last: mx.array
    """int32[P]: the token of each request that drafts after which it does."""
    beyond: mx.array
    """int32[R, k - 1]: of each request of the forward, the last known token, repeated."""
    drafting: mx.array
    """int32[P]: the requests that draft, among the R."""


class _Head:
    """One MTP layer as a model."""

    def __init__(self, predictor: Any, layers: tuple[LayerShape, ...]) -> None:
        self._predictor, self.layers = predictor, layers

    def __call__(self, batch: ForwardBatch) -> mx.array:
        return self._predictor(batch)


class HeadDrafter(ModelDrafter):
    """Runs each layer once over the same KV entries; each drafts the next token. All layers run at
    every step, even if fewer tokens are wanted, so that every entry is written."""

    always_runs = True

    def __init__(self, parts: DraftParts) -> None:
        """As `ModelDrafter`."""
        super().__init__(parts)
        predictors, layers = self.model.architecture.heads, self.model.layers
        self._heads = tuple(_Head(each, layers) for each in predictors)
        self.lookahead = len(self._heads)
        self._back = len(self._heads) - 1
        self._starts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._runs = [partial(self._run_head, depth) for depth in range(len(self._heads))]
        if parts.compiles:
            self._runs = [mx.compile(each) for each in self._runs]

    def kept(self, slots: int) -> list[mx.array]:
        """Return the inputs of the last k - 1 entries of each slot: int32[slots, k - 1], the tokens
        after them, and [slots, k - 1, H], the target's features."""
        self._starts = np.zeros(slots, np.int32)
        size = self.model.config.hidden_size
        return [mx.zeros((slots, self._back), mx.int32), mx.zeros((slots, self._back, size), self.model.dtype)]

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> HeadsBegun:
        """Implements `ModelDrafter.take_in_verified`: prepare the rows before the verification, and
        its own."""
        size, width = rows.drawn.shape
        back, shape = self._back, (size, width)
        owners, places = (rows.fields[name].reshape(shape) for name in ("req_pool_indices", "positions"))
        slots = owners[:, 0]
        front = places[:, :1] + mx.arange(-back, 0, dtype=mx.int32)[None]
        usable = (front >= mx.array(self._starts)[slots][:, None]) & (slots[:, None] != 0)
        owners = mx.concatenate([mx.where(usable, slots[:, None], 0), owners], axis=1)
        places = mx.concatenate([mx.where(usable, front, 0), places], axis=1)
        ids = mx.concatenate([rows.kept[0][slots], rows.drawn], axis=1)
        own = self.project(rows.hidden).reshape(size, width, -1)
        features = mx.concatenate([rows.kept[1][slots].astype(own.dtype), own], axis=1)
        last = rows.accepted + back
        self._keep(rows.kept, slots, ids, features, last)
        placed = Placed(ids, places, owners)
        carried = fields_of_verified(self._parts.batch_type, rows)
        fields = {name: mx.repeat(each, back + width, axis=-1) for name, each in carried.items()}
        fields |= placed.fields(rows.page_table, self._parts.page_size)

        def run(depth: int, beyond: mx.array, features: mx.array) -> mx.array:
            given = {**fields, "input_ids": _ahead(ids, last + 1, beyond, depth).reshape(-1)}
            out, cells[depth] = self._runs[depth](given, rows.page_table, cells[depth], features)
            return out

        known = mx.take_along_axis(ids, last[:, None], axis=1)
        places_of_last = mx.arange(size, dtype=mx.int32) * (back + width) + last
        every = mx.arange(size, dtype=mx.int32)
        flat = features.reshape(size * (back + width), -1)
        return HeadsBegun(None, rows.lengths, carried, run, flat, places_of_last, mx.repeat(known, back, axis=1), every)

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> HeadsBegun:
        """Implements `ModelDrafter.take_in_prompts`: prepare the tokens of the chunks, and those
        before them."""
        batch, back = rows.batch, self._back
        starts = np.where(batch.page_counts == 0, batch.prefix_lens, self._starts[batch.slots])
        self._starts[batch.slots] = starts
        lengths = np.diff(batch.token_offsets)
        fronts = np.minimum(np.int32(back), batch.prefix_lens - starts)
        wide = _Widened.of(lengths, fronts)
        slots = mx.array(batch.slots)
        own = self.project(rows.hidden)
        kept_ids, kept_features = rows.kept[0][slots], rows.kept[1][slots].astype(own.dtype)
        ids = wide.joined(kept_ids, rows.following)
        features = wide.joined(kept_features, own)
        self._keep_of_chunks(rows, kept_ids, kept_features, own, lengths)
        given = self._parts.attention, self.model.layers, wide.batch(batch, self._parts.batch_type), rows.table, cells
        forward = extend_inputs(*given, [], self._parts.batch_type, (), input_ids=ids, features=features).forward

        def run(depth: int, beyond: mx.array, features: mx.array) -> mx.array:
            shifted = wide.ahead(ids, beyond, depth)
            return self._heads[depth](replace(forward, input_ids=shifted, features=features))

        last = mx.array(wide.ends)
        known = mx.repeat(ids[last][:, None], back, axis=1)
        carried = fields_of_prompts(forward, replace(rows, ends=last[rows.requests]))
        return HeadsBegun(None, rows.lengths, carried, run, features, last[rows.requests], known, rows.requests)

    def propose(self, pages: Pages, begun: Begun, root: Roots, wanted: int, draw: Draw) -> mx.array:
        """Implements `ModelDrafter.propose`; runs all layers."""
        assert isinstance(begun, HeadsBegun)
        hidden, beyond, count, found = begun.features, begun.beyond, root.ids.shape[0], list[mx.array]()
        for depth, head in enumerate(self.model.architecture.heads):
            hidden = begun.run(depth, beyond, hidden)
            if depth >= wanted or not count:
                continue
            logits = head.logits(hidden[begun.last[:count]])
            found.append(draw(logits, root.lengths[:count] + (depth + 1)))
            if depth < self._back:
                beyond[begun.drafting[:count], depth] = found[-1]
        return mx.stack(found, axis=1) if found else mx.zeros((count, 0), mx.int32)

    def _run_head(
        self,
        depth: int,
        fields: Fields,
        page_table: mx.array,
        cells: mx.array,
        features: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Run one layer over decode rows; return its output [T, H] and its `cells`."""
        head: Any = self._heads[depth]
        forward, every = DecodeForward(head, self._parts.attention, self._parts.batch_type), [cells] * len(self._heads)
        out, after, _ = forward.hidden({**fields, "features": features}, page_table, every, [])
        return out, after[depth]

    def _keep(self, kept: list[mx.array], slots: mx.array, ids: mx.array, features: mx.array, last: mx.array) -> None:
        """Keep the inputs of the k - 1 rows up to `last` int32[P], of ids int32[P, C] and features
        [P, C, H]."""
        columns = last[:, None] + mx.arange(1 - self._back, 1, dtype=mx.int32)[None]
        rows = mx.arange(len(slots), dtype=mx.int32)[:, None]
        kept[0][slots] = ids[rows, columns]
        kept[1][slots] = features[rows, columns].astype(kept[1].dtype)

    def _keep_of_chunks(
        self,
        rows: PromptRows,
        kept_ids: mx.array,
        kept_features: mx.array,
        features: mx.array,
        lengths: NDArray[np.int32],
    ) -> None:
        """As `_keep`, for chunks with `lengths` tokens; a short chunk keeps part of what was
        kept."""
        whole = _Widened.of(lengths, np.full_like(lengths, self._back))
        places = mx.array(whole.ends[:, None] + np.arange(1 - self._back, 1, dtype=np.int32))
        slots = mx.array(rows.batch.slots)
        rows.kept[0][slots] = whole.joined(kept_ids, rows.following)[places]
        rows.kept[1][slots] = whole.joined(kept_features, features)[places].astype(rows.kept[1].dtype)

    def close(self) -> None:
        """Release compiled functions."""
        super().close()
        del self._runs


@dataclass(frozen=True, slots=True)
class _Widened:
    """Chunks of B requests, each with some tokens before it: `fronts` and `lengths` int32[B]."""

    lengths: NDArray[np.int32]
    fronts: NDArray[np.int32]
    offsets: NDArray[np.int32]
    """int32[B + 1]: where each request's tokens begin, and the end of the last."""
    requests: NDArray[np.int32]
    """int32[T']: the request of each token."""

    @classmethod
    def of(cls, lengths: NDArray[np.int32], fronts: NDArray[np.int32]) -> _Widened:
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths + fronts, out=offsets[1:])
        return cls(lengths, fronts, offsets, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths + fronts))

    @property
    def ends(self) -> NDArray[np.int32]:
        """int32[B]: the last token of each request."""
        return self.offsets[1:] - np.int32(1)

    @property
    def columns(self) -> NDArray[np.int32]:
        """int32[T']: the index of each token among its request's."""
        return np.arange(len(self.requests), dtype=np.int32) - self.offsets[self.requests]

    @property
    def sources(self) -> NDArray[np.int32]:
        """int32[T']: each token's index in the chunks; of a token before a chunk, its first."""
        firsts = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        return firsts[self.requests] + np.maximum(self.columns - self.fronts[self.requests], 0)

    def joined(self, kept: mx.array, own: mx.array) -> mx.array:
        """Return [T', ...]: the last `fronts` of kept [B, k - 1, ...], then the request's of own
        [T, ...]."""
        back = kept.shape[1]
        before = np.clip(self.columns - self.fronts[self.requests] + back, 0, max(back - 1, 0))
        is_own = mx.array((self.columns >= self.fronts[self.requests]).astype(np.int8)).astype(mx.bool_)
        old = kept[mx.array(self.requests), mx.array(before)]
        return mx.where(is_own.reshape(-1, *(1,) * (own.ndim - 1)), own[mx.array(self.sources)], old)

    def ahead(self, ids: mx.array, beyond: mx.array, depth: int) -> mx.array:
        """Return int32[T']: the token `depth` places after ids int32[T'] of each token; after the
        end of its request's, those of beyond int32[B, k - 1]."""
        columns, sizes = self.columns + np.int32(depth), (self.lengths + self.fronts)[self.requests]
        within = mx.array(self.offsets[self.requests] + np.minimum(columns, sizes - 1))
        is_known = mx.array((columns < sizes).astype(np.int8)).astype(mx.bool_)
        after = mx.array(np.clip(columns - sizes, 0, beyond.shape[1] - 1))
        return mx.where(is_known, ids[within], beyond[mx.array(self.requests), after])

    def batch(self, batch: ScheduleBatch, batch_type: type[ForwardBatch]) -> ScheduleBatch:
        """Return the host batch with these tokens; a token before a chunk has the values of the
        chunk's first."""
        sources, made = self.sources, dict[str, Any]()
        for spec in leaves(batch_type):
            if spec.axis is Axis.TOKENS and isinstance(spec.read, str):
                value = getattr(batch, spec.read)
                made[spec.read] = None if value is None else np.take(value, sources, axis=spec.dim)
        return replace(batch, token_offsets=self.offsets, prefix_lens=batch.prefix_lens - self.fronts, **made)


def _ahead(ids: mx.array, known: mx.array, beyond: mx.array, depth: int) -> mx.array:
    """Return int32[P, C]: the token `depth` places after each of ids int32[P, C]; from `known`
    int32[P] on, those of beyond int32[P, k - 1]."""
    size = ids.shape[1]
    columns = mx.arange(depth, depth + size, dtype=mx.int32)[None]
    after = columns - known[:, None]
    later = mx.take_along_axis(beyond, mx.clip(after, 0, beyond.shape[1] - 1), axis=1)
    return mx.where(after < 0, ids[:, mx.minimum(columns[0], size - 1)], later)
