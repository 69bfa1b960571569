"""Rows of tokens to verify: where each goes, and how far the proposals of a request are what was
drawn.

The state between steps is in tables by slot: how many cells of it are valid, its last token, and
what is proposed after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

NONE = -1
"""In place of a proposal: there is none here, nor after it."""


@dataclass(slots=True)
class Drafts:
    """Tables by slot, lazy arrays that one step hands to the next: `lengths` int32[slots + 1],
    cells that are valid, and `proposals` int32[slots + 1, k], what is proposed after its last
    token, NONE from where nothing is."""

    lengths: mx.array
    proposals: mx.array


def make_drafts(max_requests: int, tokens: int) -> Drafts:
    """Nothing is proposed."""
    slots = max_requests + 1
    return Drafts(mx.zeros((slots,), mx.int32), mx.full((slots, tokens), NONE, mx.int32))


@dataclass(frozen=True, slots=True)
class Placed:
    """N tokens of each of B requests, int32[B, N] each: `ids`, their `positions`, and the `owners`,
    their slots; a token that has no cell, or lacks a mask that it needs, is the first of slot 0."""

    ids: mx.array
    positions: mx.array
    owners: mx.array

    @property
    def lengths(self) -> mx.array:
        """int32[B * N]: what each sees, itself counted."""
        return self.positions.reshape(-1) + 1

    def first(self, count: int) -> Placed:
        """Those of the first `count` requests."""
        return Placed(self.ids[:count], self.positions[:count], self.owners[:count])

    @property
    def is_usable(self) -> mx.array:
        """bool[B, N]."""
        return self.owners != 0

    def cells(self, page_table: mx.array, page_size: int) -> mx.array:
        """int32[B * N]: where keys and values go, by page_table int32[B, n] of the requests."""
        pages = mx.take_along_axis(page_table, self.positions // page_size, axis=1)
        cells = pages * page_size + self.positions % page_size
        return mx.where(self.is_usable, cells, 0).reshape(-1)


def place(
    last: mx.array, drafts: Drafts, slots: mx.array, limits: mx.array, nodes: mx.array | None, width: int
) -> Placed:
    """The last token of slots int32[B] and `width` - 1 proposals after it. limits int32[B]: cells
    that are in the request's pages; nodes int32[B]: of its tokens those that may be verified (None:
    all). Where nothing is proposed stands the last token again. Queues only."""
    steps = mx.arange(width, dtype=mx.int32)[None]
    places = drafts.lengths[slots][:, None] + steps
    usable = places < limits[:, None]
    if nodes is not None:
        usable = usable & (steps < nodes[:, None])
    roots, proposed = last[slots][:, None], drafts.proposals[slots][:, : width - 1]
    # Attention over shared cells weighs with zero what a token does not see, so what stands there
    # must be numbers.
    ids = mx.concatenate([roots, mx.where(proposed < 0, roots, proposed)], axis=1)
    return Placed(ids, mx.where(usable, places, 0), mx.where(usable, slots[:, None], 0))


@dataclass(frozen=True, slots=True)
class Runs:
    """int32[B] each: how many proposals are right, how many there were, the token after the right
    ones, and the cells that are valid then."""

    accepted: mx.array
    proposed: mx.array
    roots: mx.array
    lengths: mx.array


def accept(drawn: mx.array, placed: Placed, drafts: Drafts, slots: mx.array, limits: mx.array) -> Runs:
    """How far the proposals of slots int32[B] are what was drawn, int32[B, N], in their places.
    Queues only."""
    width, usable = drawn.shape[1], placed.is_usable[:, 1:]
    proposed, before = drafts.proposals[slots][:, : width - 1], drafts.lengths[slots]
    right = ((drawn[:, :-1] == proposed) & usable).astype(mx.int32)
    accepted = mx.cumprod(right, axis=1).sum(axis=1) if width > 1 else mx.zeros_like(before)
    roots = mx.take_along_axis(drawn, accepted[:, None], axis=1)[:, 0]
    lengths = mx.minimum(before + accepted + 1, mx.maximum(limits, before))
    counted = ((proposed >= 0) & usable).astype(mx.int32).sum(axis=1)
    return Runs(accepted.astype(mx.int32), counted.astype(mx.int32), roots, lengths)
