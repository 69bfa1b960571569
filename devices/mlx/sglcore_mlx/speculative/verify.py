"""Verification of draft tokens: computes their positions and KV slots, and how many are accepted.

The state between steps is in tables by request slot: the number of valid KV slots, the last token,
and the draft tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

NONE = -1
"""Stands for a draft token: there is none here, nor after it."""


@dataclass(slots=True)
class Drafts:
    """Tables by request slot, lazy arrays that one step hands to the next. `lengths` int32[slots +
    1]: number of valid KV slots; `proposals` int32[slots + 1, k]: draft tokens after the last
    token, NONE after the last draft token; `trees` int32[slots + 1, 4, k + 1]: the table of each
    draft tree, as `trees.tables_of` (None: draft tokens are chains). `draft_probs`: the
    distributions of draft tokens, if an acceptance rule reads them; `kept`: what a drafter keeps by
    request slot."""

    lengths: mx.array
    proposals: mx.array
    trees: mx.array | None = None
    draft_probs: list[mx.array] = field(default_factory=list)
    kept: list[mx.array] = field(default_factory=list)

    def arrays(self) -> list[mx.array]:
        """Return all tables."""
        return [
            self.lengths,
            self.proposals,
            *self.draft_probs,
            *self.kept,
            *(() if self.trees is None else (self.trees,)),
        ]


def make_drafts(max_requests: int, tokens: int) -> Drafts:
    """Make tables without draft tokens: lengths 0, and NONE for the `tokens` draft tokens of each
    slot."""
    slots = max_requests + 1
    return Drafts(mx.zeros((slots,), mx.int32), mx.full((slots, tokens), NONE, mx.int32))


@dataclass(frozen=True, slots=True)
class Placed:
    """N tokens of each of B requests, int32 [B, N] each: `ids`, `positions` in their text, request
    slots `owners`, and `places`, the index of each token's KV slot in its request (None: its
    position). A token that is not verified (without a KV slot, or without a mask that it needs) has
    position 0, place 0 and owner 0."""

    ids: mx.array
    positions: mx.array
    owners: mx.array
    places: mx.array | None = None

    @property
    def slot_places(self) -> mx.array:
        """`places`, or positions if these are the same."""
        return self.positions if self.places is None else self.places

    @property
    def lengths(self) -> mx.array:
        """The number of KV slots up to that of each token, included: int32 [B * N]."""
        return self.slot_places.reshape(-1) + 1

    @property
    def ends(self) -> mx.array:
        """The position in its text of the token after each token: int32 [B * N]."""
        return self.positions.reshape(-1) + 1

    def first(self, count: int) -> Placed:
        """Return the tokens of the first `count` requests, without padding."""
        places = None if self.places is None else self.places[:count]
        return Placed(self.ids[:count], self.positions[:count], self.owners[:count], places)

    @property
    def is_usable(self) -> mx.array:
        """Whether each token can be verified: bool [B, N]."""
        return self.owners != 0

    def cells(self, page_table: mx.array, page_size: int) -> mx.array:
        """Return int32 [B * N]: the KV slots of the tokens, by page_table int32 [B, n]; 0 for
        tokens that can not be verified."""
        places = self.slot_places
        pages = mx.take_along_axis(page_table, places // page_size, axis=1)
        cells = pages * page_size + places % page_size
        return mx.where(self.is_usable, cells, 0).reshape(-1)

    def fields(self, page_table: mx.array, page_size: int) -> dict[str, mx.array]:
        """Return the fields of a decode batch in which each token is a row, by name."""
        return {
            "req_pool_indices": self.owners.reshape(-1),
            "seq_lens": self.lengths,
            "positions": self.positions.reshape(-1),
            "input_ids": self.ids.reshape(-1),
            "out_cache_loc": self.cells(page_table, page_size),
        }


def place(
    last: mx.array, drafts: Drafts, slots: mx.array, limits: mx.array, nodes: mx.array | None, width: int
) -> Placed:
    """Return the last token of each request slot, slots int32 [B], and `width` - 1 draft tokens
    after it, with their positions. limits int32 [B]: number of KV slots in the request's pages;
    nodes int32 [B]: how many of its tokens, the last one included, may be verified (None: all).
    Missing draft tokens are replaced with the last token. Lazy."""
    steps = mx.arange(width, dtype=mx.int32)[None]
    places = drafts.lengths[slots][:, None] + steps
    usable = places < limits[:, None]
    if nodes is not None:
        usable = usable & (steps < nodes[:, None])
    roots, proposed = last[slots][:, None], drafts.proposals[slots][:, : width - 1]
    # Attention multiplies unseen keys and values by zero, so these KV slots must not hold NaN.
    ids = mx.concatenate([roots, mx.where(proposed < 0, roots, proposed)], axis=1)
    return Placed(ids, mx.where(usable, places, 0), mx.where(usable, slots[:, None], 0))


@dataclass(frozen=True, slots=True)
class Runs:
    """int32[B] each: numbers of accepted and of verified draft tokens (`accepted`, `proposed`), the
    token after the accepted ones (`roots`), and the number of valid KV slots after the step
    (`lengths`)."""

    accepted: mx.array
    proposed: mx.array
    roots: mx.array
    lengths: mx.array


def accept(drawn: mx.array, placed: Placed, drafts: Drafts, slots: mx.array, limits: mx.array) -> Runs:
    """Return how many draft tokens of the request slots, slots int32 [B], are accepted: those
    before the first that differs from the token drawn at its place, of drawn int32 [B, N]. `limits`
    as in `place`. Writes no table. Lazy."""
    width, usable = drawn.shape[1], placed.is_usable[:, 1:]
    proposed, before = drafts.proposals[slots][:, : width - 1], drafts.lengths[slots]
    right = ((drawn[:, :-1] == proposed) & usable).astype(mx.int32)
    accepted = mx.cumprod(right, axis=1).sum(axis=1) if width > 1 else mx.zeros_like(before)
    roots = mx.take_along_axis(drawn, accepted[:, None], axis=1)[:, 0]
    lengths = mx.minimum(before + accepted + 1, mx.maximum(limits, before))
    counted = ((proposed >= 0) & usable).astype(mx.int32).sum(axis=1)
    return Runs(accepted.astype(mx.int32), counted.astype(mx.int32), roots, lengths)


def padded(values: mx.array, rows: int) -> mx.array:
    """Pad [B, ...] with zeros to `rows` rows."""
    missing = rows - values.shape[0]
    return mx.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)) if missing else values
