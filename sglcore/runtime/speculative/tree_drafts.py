"""Draft trees from a draft model: beams of several tokens each.

The likeliest candidates become the tree. Each beam sees its own branch. Row b of the forward for
tokens of depth s has KV slot w * (s - 1) + b after those of the text, and a word that says which of
the KV slots before it belong to its ancestors. All beams of a frozen draft see the same KV slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.chain_drafts import (
    AutoregressiveDrafter,
    FeatureDrafter,
    StandaloneDrafter,
)
from sglcore.runtime.speculative.draft_batches import decode_batch, placed
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from sglcore.runtime.speculative.target_features import features_of
from sglcore.runtime.speculative.tree import Beams, CellBits, DraftTree, TreeRecords, chained, depths_of_records
from sglcore.step.tree_shapes import TreeShape


class Beam(Protocol):
    """A function that runs the draft's forward for the beams of one depth."""

    def __call__(self, beams: Beams, depth: int, hidden: Tensor) -> Tensor:
        """Run the tokens of beams [R, w].

        Return hidden states [R * w, H] for the candidates of `depth`. `hidden` is the output of the
        forward before, [R, H] for depth 2, [R * w, H] after that.
        """
        ...


def grown(
    rows: DraftRows, shape: TreeShape, depths: Tensor, hidden: Tensor, runner: ModelRunner, go: Beam
) -> DraftTree:
    """Return a tree for each root. Does not wait.

    `hidden` [R, H] yields the candidates of depth 1 through the logits of `runner`; `go` runs the
    beams for each further depth. `depths` is the result of `depths_of_records`.
    """
    assert rows.rank is not None
    found, beams = TreeRecords(len(rows.most_lens), shape, depths, runner.attn_backend.kernels), None
    for depth in range(1, shape.depth + 1):
        if beams is not None:
            hidden = go(beams, depth, hidden)
        beams = found.expand(*rows.rank(runner.logits(hidden, None), depth, shape.width))
    return found.build()


def parents_of(hidden: Tensor, beams: Beams, depth: int) -> Tensor:
    """Return the rows of `hidden` (see `Beam`) from which beams [R, w] grew: [R * w, H]."""
    count, width = beams.tokens.shape
    if depth == 2:
        return hidden.repeat_interleave(width, 0)
    sources = beams.origins + torch.arange(0, count * width, width, device=hidden.device)[:, None]
    return hidden.index_select(0, sources.flatten())


class CellBeams(AutoregressiveDrafter):
    """The base of drafters of trees with KV slots of their own: one forward over the target's rows,
    then one per further depth.

    The later forwards have `shape.width` rows per request; the last depth needs none.
    """

    shape: TreeShape

    def shaped(self, shape: TreeShape) -> Self:
        """Set the shape of the trees; return self."""
        device = self.runner.token_table.last.device
        self.shape = shape
        self._bits = CellBits(shape.cells, device)
        self._depths = depths_of_records(shape, device)
        return self

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance`: returns the tokens of a tree, int32[R, `tokens`]."""
        return self.grow(rows).tokens

    def grow(self, rows: DraftRows) -> DraftTree:
        """Take in the target's outputs and return a tree for each root.

        A chain if `rows.is_chain`. Does not wait.
        """
        hidden = self.take_in(rows)
        if rows.is_chain or not len(rows.most_lens):
            return chained(self.follow(rows, hidden, self.shape.depth), self.tokens)
        seen: Tensor | None = None

        def go(beams: Beams, depth: int, hidden: Tensor) -> Tensor:
            nonlocal seen
            batch, seen = self.batch(rows, beams, depth, hidden, seen)
            return self.run(batch)

        return grown(rows, self.shape, self._depths, hidden, self.runner, go)

    def batch(
        self, rows: DraftRows, beams: Beams, depth: int, hidden: Tensor, seen: Tensor | None
    ) -> tuple[ForwardBatch, Tensor]:
        """Return the decode batch of the beams' tokens, and the visibility bits of each beam.

        The batch yields candidates of `depth`. The bits int32[R, w] mark the KV slots after those
        of the text that a beam sees; `seen` has the bits of the depth before (None: the beams are
        the first).
        """
        count, width = beams.tokens.shape
        own, bits = slice((depth - 2) * width, (depth - 1) * width), self._bits
        before = bits.own.new_zeros(1).expand(count, width) if seen is None else seen.gather(1, beams.origins.long())
        seen = before.bitwise_or(bits.own[own])
        # A draft without features also has a KV slot of the root.
        known = 1 - self.lookahead
        slots, cells = placed(
            rows.slots[:, None], rows.lengths[:, None] + (bits.places[own] + known), rows.limits[:, None]
        )
        positions = (rows.lengths + (depth - 2 + known))[:, None] * (slots > 0)
        places = rows.most_lens[:, None] + np.arange(own.start + 1, own.stop + 1, dtype=np.int32) + np.int32(known)
        most = np.minimum(places, np.maximum(rows.host_limits, 1)[:, None]).reshape(-1)
        features = parents_of(hidden, beams, depth) if self.lookahead else None
        placed_rows = slots.flatten(), positions.flatten(), beams.tokens.flatten(), most, features
        batch = decode_batch(rows.batch, lambda axis: rows.sources(axis).repeat_interleave(width), *placed_rows)
        return replace(batch, seq_lens=(cells + 1).flatten(), visible=bits.words(seen, own).flatten()), seen


class TreeDrafter(CellBeams, FeatureDrafter):
    """The drafter of trees with a model that reads features."""


class StandaloneTreeDrafter(CellBeams, StandaloneDrafter):
    """The drafter of trees with any model with the target's vocabulary."""


class FrozenTreeDrafter(FrozenDrafter):
    """The drafter of trees with a model without KV slots of its own.

    All beams of a request have the same position and KV slots; each has the features of its own
    branch.
    """

    def __init__(self, runner: ModelRunner, shape: TreeShape, feature_size: int) -> None:
        """For `runner` and `feature_size` see `FrozenDrafter`."""
        super().__init__(runner, shape.nodes - 1, feature_size)
        self.shape = shape
        self._depths = depths_of_records(shape, runner.token_table.last.device)

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance`: returns the tokens of a tree, int32[R, `tokens`]."""
        return self.grow(rows).tokens

    def grow(self, rows: DraftRows) -> DraftTree:
        """Return a tree for each root, from the target's outputs; a chain if `rows.is_chain`. Does
        not wait.
        """
        count = len(rows.most_lens)
        if rows.is_chain or not count:
            return chained(self.follow(rows, self.shape.depth if count else 0), self.tokens)
        first = self.planned(self.first(rows), 1)
        batch = self.widened(first)

        def go(beams: Beams, depth: int, hidden: Tensor) -> Tensor:
            nonlocal batch
            batch = self.batch(batch, beams, depth, hidden)
            return self.runner.forward(batch)[0]

        return grown(rows, self.shape, self._depths, self.runner.forward(first)[0], self.runner, go)

    def widened(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a decode batch with each row of `batch` repeated `shape.width` times, once for
        each beam, and with its turn; without features and a plan.
        """
        width = self.shape.width
        slots, positions, ids = (
            part.repeat_interleave(width) for part in (batch.req_pool_indices, batch.positions, batch.input_ids)
        )
        assert batch.seq_lens_cpu is not None and batch.turn is not None
        most, firsts = np.repeat(batch.seq_lens_cpu, width), torch.arange(batch.num_tokens, device=slots.device)
        wide = decode_batch(batch, lambda axis: firsts.repeat_interleave(width), slots, positions, ids, most)
        return replace(wide, turn=batch.turn)

    def batch(self, before: ForwardBatch, beams: Beams, depth: int, hidden: Tensor) -> ForwardBatch:
        """Return the batch of the beams' tokens; the first one is planned for all later ones too.

        `before` is the batch of the depth before, or the result of `widened`.
        """
        features = features_of(parents_of(hidden, beams, depth), self._feature_size)
        batch = replace(before, input_ids=beams.tokens.flatten(), features=features)
        if depth == 2:
            return self.planned(batch, self.shape.depth - 1)
        return replace(batch, turn=self.later(before))
