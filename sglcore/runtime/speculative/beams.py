"""Proposals by a draft that reads features, as a tree: beams of several tokens each, of which the likeliest are kept.

Each beam sees its own branch: row b of the forward for tokens of depth s has cell w * (s - 1) + b behind the known ones, and a word
that says which of those before it are its ancestors'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.autoregressive import FeatureDrafter, decode_batch, placed
from sglcore.runtime.speculative.drafter import NONE, DraftRows
from sglcore.runtime.speculative.tree import (
    Beams,
    CellBits,
    DraftTree,
    Records,
    TreeShape,
    recorded,
    tree_build,
    tree_expand,
)


class TreeDrafter(FeatureDrafter):
    """One forward over the target's own rows, and one of `shape.width` rows a request for each depth but the last."""

    def __init__(self, runner: ModelRunner, shape: TreeShape, project: Callable[[Tensor], Tensor]) -> None:
        """`runner` and `project` as of `FeatureDrafter`."""
        super().__init__(runner, shape.nodes - 1, project)
        device = runner.token_table.last.device
        self.shape = shape
        self._bits = CellBits(shape.cells, device)
        self._depths = shape.depths_of_records(device)

    def advance(self, rows: DraftRows) -> Tensor:
        """As `Drafter.advance`: the tokens of a tree."""
        return self.grow(rows).tokens

    def grow(self, rows: DraftRows) -> DraftTree:
        """Take in what the target computed, and propose a tree for each root: a chain where the rows ask for one. Waits for nothing."""
        hidden, count = self.take_in(rows), len(rows.most_lens)
        if rows.is_chain or not count:
            return chained(self.follow(rows, hidden, self.shape.depth), self.tokens)
        assert rows.rank is not None
        width, kept, seen, beams = self.shape.width, list[Records](), None, None
        logits = self.runner.logits(hidden, None)
        for depth in range(1, self.shape.depth + 1):
            if kept:
                beams = tree_expand(kept[-1], width, sum(self.shape.records[: depth - 2]))
                batch, seen = self.batch(rows, beams, depth, hidden, seen)
                hidden = self.run(batch)
                logits = self.runner.logits(hidden, None)
            tokens, scores = (part.view(count, -1, width) for part in rows.rank(logits, depth, width))
            kept.append(recorded(tokens, scores, beams))
        return tree_build(kept, self._depths, self.shape.nodes)

    def batch(
        self, rows: DraftRows, beams: Beams, depth: int, hidden: Tensor, seen: Tensor | None
    ) -> tuple[ForwardBatch, Tensor]:
        """A decode of the beams' tokens, whose leaders are of `depth`; and the cells that each beam sees of those behind the known
        ones, int32[R, w], by those of the depth before, `seen`."""
        count, width = beams.tokens.shape
        own = slice((depth - 2) * width, (depth - 1) * width)
        bits = self._bits
        if seen is None:
            seen, features = bits.own[own].expand(count, width), hidden.repeat_interleave(width, 0)
        else:
            seen = seen.gather(1, beams.origins).bitwise_or_(bits.own[own])
            sources = beams.origins + torch.arange(0, count * width, width, device=hidden.device)[:, None]
            features = hidden.index_select(0, sources.flatten())
        slots, cells = placed(rows.slots[:, None], rows.lengths[:, None] + bits.places[own], rows.limits[:, None])
        positions = (rows.lengths + (depth - 2))[:, None] * (slots > 0)
        places = rows.most_lens[:, None] + np.arange(own.start + 1, own.stop + 1, dtype=np.int32)
        most = np.minimum(places, np.maximum(rows.host_limits, 1)[:, None]).reshape(-1)
        batch = decode_batch(rows.batch, slots.flatten(), positions.flatten(), beams.tokens.flatten(), most, features)
        return replace(batch, seq_lens=(cells + 1).flatten(), visible=bits.words(seen, own).flatten()), seen


def chained(tokens: Tensor, most: int) -> DraftTree:
    """The tree int32[R, most] whose nodes follow one another, of tokens int32[R, k]."""
    whole = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=NONE)
    parents = torch.arange(most, dtype=torch.int32, device=tokens.device).expand_as(whole)
    return DraftTree(whole, parents, parents + 1)
