"""Draft tokens from a draft model: one after another, or a block at once.

A draft has KV entries of its own, in the pages of its target. After each forward of the target it
runs the same tokens, which writes them. Draft tokens write none: their keys and values are in
arrays of the step (`attention/tail.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx

from sglcore.models.drafts.draft_config import STANDALONE
from sglcore.step.host_values import make_batch
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.attention.tail import Gathered, TailAttention, gather
from sglcore_mlx.forward import DecodeForward, extend_inputs
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.load import LoadedModel
from sglcore_mlx.pool import PageTable
from sglcore_mlx.speculative.drafts import Draft
from sglcore_mlx.speculative.verify import Placed, padded

Draw: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""`draw(logits float32[B, V], positions int32[B]) -> int32[B]`: draw the tokens at these positions
of their texts with the requests' own sampling."""
Cells: TypeAlias = list[mx.array]


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The parts of which a drafter is made; `attention` is over the draft's own KV cache."""

    draft: Draft
    attention: DecodeAttention
    page_size: int
    compiles: bool
    batch_type: type[ForwardBatch] = ForwardBatch


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """A decode forward of the target with N tokens for each of P requests, and what was drawn."""

    fields: dict[str, mx.array]
    """Its inputs by field, [P * N] each."""
    page_table: mx.array
    """int32[P, n]: the pages of each request."""
    hidden: mx.array
    """[P * N, H + F]: its output."""
    drawn: mx.array
    """int32[P, N]: the token drawn after each token."""
    accepted: mx.array
    """int32[P]: the number of accepted draft tokens."""
    roots: mx.array
    """int32[P]: the token drawn after these."""
    lengths: mx.array
    """int32[P]: the number of valid KV slots of the target."""
    limits: mx.array
    """int32[P]: KV slots in the pages of each request."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A forward of the target over T tokens of prompts, after which P requests drew a token."""

    batch: ScheduleBatch
    """The host batch."""
    table: PageTable
    """The pages of all request slots."""
    ids: mx.array
    """int32[T]: its tokens."""
    following: mx.array
    """int32[T]: the token after each token."""
    hidden: mx.array
    """[T, H + F]: its output."""
    ends: mx.array
    """int32[P]: the last token of each request that drew one."""
    roots: mx.array
    """int32[B]: the tokens drawn, without padding."""
    lengths: mx.array
    """int32[P]: the number of valid KV slots of the target."""
    page_table: mx.array
    """int32[P, n]: the pages of each request that drew one."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Where P requests begin to draft. `hidden` [P, H]: the draft's output after each root, the
    last token that was drawn; None: the root was not run yet. `lens` int32[P]: the number of valid
    KV entries of the draft."""

    hidden: mx.array | None
    lens: mx.array


@dataclass(frozen=True, slots=True)
class Pages:
    """The draft's KV cache, and the pages int32[P, n] of the requests that draft."""

    cells: Cells
    page_table: mx.array
    page_size: int

    def gathered(self, lens: mx.array) -> Gathered:
        """Return the first `lens` int32[P] entries of each request."""
        return gather(self.cells, self.page_table, self.page_size, lens)


@dataclass(frozen=True, slots=True)
class Roots:
    """The last tokens that were drawn: `ids` int32[B]; `lengths` int32[P], their positions in the
    text, padded to P requests."""

    ids: mx.array
    lengths: mx.array


class ModelDrafter(ABC):
    """Runs a draft model. Holds constants and compiled functions only. No method waits."""

    lookahead: ClassVar[int] = 0
    """Distance from the position of a KV entry to the position of the token in it."""
    more_rows: ClassVar[int] = 0
    """Tokens of a request that the draft's forward has in addition to those of the target's."""

    def __init__(self, parts: DraftParts) -> None:
        self._parts, self.model = parts, parts.draft.model
        self._forward = DecodeForward(self.taking_in(), parts.attention, parts.batch_type)
        self._take_in: Callable[..., tuple[mx.array, Cells]] = self.take_in
        self._step: Callable[..., tuple[mx.array, mx.array, list[mx.array]]] = self.step
        if parts.compiles:
            self._take_in, self._step = mx.compile(self.take_in), mx.compile(self.step)

    def taking_in(self) -> Any:
        """Return the model that takes in tokens: the draft, or what only stores its KV entries."""
        return self.model

    @abstractmethod
    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Write KV entries for the tokens of prompts to `cells`, in place of its arrays."""

    @abstractmethod
    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Write KV entries for verified tokens to `cells`, in place of its arrays."""

    @abstractmethod
    def propose(self, pages: Pages, begun: Begun, root: Roots, wanted: int, draw: Draw) -> mx.array:
        """Return int32[B, wanted]: draft tokens after each root."""

    def take_in(
        self, fields: dict[str, mx.array], page_table: mx.array, cells: Cells, hidden: list[mx.array]
    ) -> tuple[mx.array, Cells]:
        """Run decode rows with the fields of a decode forward; return hidden states [T, H] and the
        KV cache. `hidden` [T, H + F]: the target's output, in a list that is empty for a draft that
        reads none."""
        given = {"features": self.project(hidden[0])} if hidden else {}
        out, cells, _ = self._forward.hidden({**fields, **given}, page_table, cells, [])
        return out, cells

    def take_in_chunks(self, rows: PromptRows, cells: Cells, **given: mx.array) -> mx.array:
        """Run the tokens of prompts, with `given` values of fields, `input_ids` among them; return
        hidden states [T, H]."""
        own = self._parts.attention, self.model.layers, rows.batch, rows.table, cells, []
        return self._forward.model(extend_inputs(*own, self._parts.batch_type, **given).forward)

    def step(
        self, ids: mx.array, features: list[mx.array], lens: mx.array, cells: Cells, tails: list[mx.array]
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Run W tokens of each request, ids int32[P, W], after its `lens` KV entries in `cells` and
        its earlier draft tokens in `tails`, as in `TailAttention`.

        `features`: of the tokens before, [P * W, H], in a list that is empty for a draft that reads
        none. Return logits float32 [P * W, V], hidden states and the new tails."""
        attention = TailAttention(self.model.layers, Gathered(cells, lens), tails)
        first = tails[0].shape[1] if tails else 0
        places = mx.arange(first, first + ids.shape[1], dtype=mx.int32)[None]
        hidden = self.model(self._batch(attention, ids.reshape(-1), (lens[:, None] + places).reshape(-1), features))
        return self.model.logits(hidden), hidden, attention.tails

    def _batch(
        self, attention: TailAttention, ids: mx.array, positions: mx.array, features: list[mx.array]
    ) -> ForwardBatch:
        """Return the inputs of a forward over ids int32[T] at these positions, which writes nothing
        to the KV cache."""
        rows, nothing = ids.shape[0], mx.zeros_like(ids)
        own: dict[str, Any] = {"forward_mode": ForwardMode.DECODE, "batch_size": rows, "num_tokens": rows}
        own |= {"req_pool_indices": nothing, "out_cache_loc": nothing, "seq_lens": positions + 1}
        own |= {"input_ids": ids, "positions": positions, "features": features[0] if features else None}
        return make_batch(self._parts.batch_type, {**own, "attend": attention.attend})

    def project(self, hidden: mx.array) -> mx.array:
        """Return the draft's features [T, H'] of the target's output [T, H + F]."""
        return self.model.architecture.project(self._parts.draft.features(hidden))

    def close(self) -> None:
        """Release compiled functions."""
        del self._take_in, self._step


class ChainDrafter(ModelDrafter):
    """Drafts one token after another, with a forward for each."""

    def propose(self, pages: Pages, begun: Begun, root: Roots, wanted: int, draw: Draw) -> mx.array:
        """Implements `ModelDrafter.propose`."""
        gathered = pages.gathered(begun.lens)
        hidden, ids, count, found = begun.hidden, root.ids, root.ids.shape[0], list[mx.array]()
        tails, logits = list[mx.array](), None if hidden is None else self.model.logits(hidden)
        for depth in range(1, wanted + 1):
            if found or logits is None:
                fed = [] if hidden is None or not self.lookahead else [hidden]
                given = padded(ids, root.lengths.shape[0])[:, None], fed, gathered.lens, gathered.cells, tails
                logits, hidden, tails = self._step(*given)
            ids = draw(logits[:count], root.lengths[:count] + depth)
            found.append(ids)
        return mx.stack(found, axis=1)


class FeatureDrafter(ChainDrafter):
    """The drafter with a model that reads features of the target (EAGLE, EAGLE-3, MTP): KV entry i
    holds token i + 1 and the features of token i."""

    lookahead = 1

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        given = {"input_ids": rows.following, "features": self.project(rows.hidden)}
        return Begun(self.take_in_chunks(rows, cells, **given)[rows.ends], rows.lengths)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        fields, width = {**rows.fields, "input_ids": rows.drawn.reshape(-1)}, rows.drawn.shape[1]
        hidden, cells[:] = self._take_in(fields, rows.page_table, cells, [rows.hidden])
        select = mx.arange(rows.drawn.shape[0], dtype=mx.int32) * width + rows.accepted
        return Begun(hidden[select], rows.lengths)


class StandaloneDrafter(ChainDrafter):
    """The drafter with any model that has the target's vocabulary: KV entry i holds token i. Its
    forward after a verification also has the root of each request."""

    more_rows = 1

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        self.take_in_chunks(rows, cells, input_ids=rows.ids)
        return Begun(None, rows.lengths)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        fields = self._with_roots(rows)
        hidden, cells[:] = self._take_in(fields, rows.page_table, cells, [])
        width = rows.drawn.shape[1] + 1
        return Begun(hidden[width - 1 :: width], rows.lengths + 1)

    def _with_roots(self, rows: VerifiedRows) -> dict[str, mx.array]:
        """Return the fields of the accepted tokens of each request, followed by its root."""
        shape, ends = rows.drawn.shape, rows.lengths[:, None]
        ids, positions, owners = (
            rows.fields[name].reshape(shape) for name in ("input_ids", "positions", "req_pool_indices")
        )
        slots = mx.max(owners, axis=1, keepdims=True)
        positions, usable = mx.concatenate([positions, ends], axis=1), mx.concatenate(
            [(positions < ends) & (owners != 0), ends < rows.limits[:, None]], axis=1
        )  # fmt: skip
        ids = mx.concatenate([ids, rows.roots[:, None]], axis=1)
        placed = Placed(ids, mx.where(usable, positions, 0), mx.where(usable, slots, 0))
        return {
            "req_pool_indices": placed.owners.reshape(-1),
            "seq_lens": placed.lengths,
            "positions": placed.positions.reshape(-1),
            "input_ids": placed.ids.reshape(-1),
            "out_cache_loc": placed.cells(rows.page_table, self._parts.page_size),
        }


class BlockDrafter(ModelDrafter):
    """The drafter of DFlash: one forward over each root and mask tokens after it. KV entry i holds
    the features of token i; the tokens of a block see these and each other."""

    def taking_in(self) -> Any:
        """Return what stores keys and values of features."""
        return Injection(self.model)

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        self.take_in_chunks(rows, cells, input_ids=rows.ids, features=self.project(rows.hidden))
        return Begun(None, rows.lengths)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        _, cells[:] = self._take_in(rows.fields, rows.page_table, cells, [rows.hidden])
        return Begun(None, rows.lengths)

    def propose(self, pages: Pages, begun: Begun, root: Roots, wanted: int, draw: Draw) -> mx.array:
        """Implements `ModelDrafter.propose`."""
        gathered, count, model = pages.gathered(begun.lens), root.ids.shape[0], self.model.architecture
        rows = root.lengths.shape[0]
        masks = mx.full((rows, model.block_size - 1), model.mask_token_id, mx.int32)
        ids = mx.concatenate([padded(root.ids, rows)[:, None], masks], axis=1)
        logits, _, _ = self._step(ids, [], gathered.lens, gathered.cells, [])
        each = logits.reshape(rows, model.block_size, -1)[:count]
        drawn = [draw(each[:, depth], root.lengths[:count] + depth) for depth in range(1, wanted + 1)]
        return mx.stack(drawn, axis=1)


class Injection:
    """A model that only stores keys and values of the features of its tokens."""

    def __init__(self, model: LoadedModel) -> None:
        self.layers = model.layers
        self._inject = model.architecture.inject

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Store, and return the features [T, H]."""
        assert batch.features is not None
        self._inject(batch.features, batch)
        return batch.features


def drafter_type(draft: Draft) -> type[ModelDrafter]:
    """Return the drafter of a draft's kind."""
    kinds: Mapping[str, type[ModelDrafter]] = {STANDALONE: StandaloneDrafter, "dflash": BlockDrafter}
    return kinds.get(draft.kind, FeatureDrafter)
