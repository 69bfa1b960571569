"""Draft tokens from a draft model: one after another, or a block at once.

A draft has KV entries of its own, in the pages of its target. After each forward of the target it
runs the same tokens, which writes them. Draft tokens write none: their keys and values are in
arrays of the step (`attention/tail.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx

from sglcore.step.batch_field import Axis, FieldSpec
from sglcore.step.host_values import make_batch
from sglcore.step.repeated_fields import continued, repeated
from sglcore.step.tree_shapes import TreeShape
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.attention.tail import Gathered, TailAttention, gather
from sglcore_mlx.forward import DecodeForward, extend_inputs
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.load import LoadedModel
from sglcore_mlx.pool import PageTable
from sglcore_mlx.speculative.drafts import Draft
from sglcore_mlx.speculative.trees import Beams, DraftTree, TreeRecords, parents_of, words_of
from sglcore_mlx.speculative.verify import Placed, padded

Draw: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""`draw(logits float32[B, V], positions int32[B]) -> int32[B]`: draw the tokens at these positions
of their texts with the requests' own sampling."""
Rank: TypeAlias = Callable[[mx.array, mx.array, int], tuple[mx.array, mx.array]]
"""`rank(logits float32[B * b, V], positions int32[B], count)`: return the leading candidates of
such a draw for each of b rows of each request, int32[B * b, count], and the logarithms of their
estimated acceptance probabilities, float32."""
Cells: TypeAlias = list[mx.array]
Fields: TypeAlias = dict[str, mx.array]
"""Values of declared fields by (dotted) name."""


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
    kept: list[mx.array]
    """What the drafter keeps by request slot, replaced in place."""


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
    requests: mx.array
    """int32[P]: the requests of the batch that drew one."""
    kept: list[mx.array]
    """What the drafter keeps by request slot, replaced in place."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Where P requests begin to draft. `hidden` [P, H]: the draft's output after each root, the
    last token that was drawn; None: the root was not run yet. `lens` int32[P]: the number of valid
    KV entries of the draft. `fields`: by name, the declared fields that draft tokens have from
    their request, one entry for each."""

    hidden: mx.array | None
    lens: mx.array
    fields: Fields


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

    lookahead: int = 0
    """Distance from the position of a KV entry to the position of the token in it; with several
    layers, of the last one's."""
    always_runs: ClassVar[bool] = False
    """`propose` also runs if no draft tokens are wanted, or for no request."""
    more_rows: ClassVar[int] = 0
    """Tokens of a request that the draft's forward has in addition to those of the target's."""

    def __init__(self, parts: DraftParts) -> None:
        self._parts, self.model = parts, parts.draft.model
        self._forward = DecodeForward(self.taking_in(), parts.attention, parts.batch_type)
        self._take_in: Callable[..., tuple[mx.array, Cells]] = self.take_in
        self._step: Callable[..., tuple[mx.array, mx.array, list[mx.array]]] = self.step
        self._beams: Callable[..., tuple[mx.array, mx.array, list[mx.array]]] = self.beams
        if parts.compiles:
            self._take_in, self._step = mx.compile(self.take_in), mx.compile(self.step)
            self._beams = mx.compile(self.beams)

    def kept(self, slots: int) -> list[mx.array]:
        """Return what the drafter keeps by request slot, for `slots` slots. Waits for nothing."""
        return []

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

    def take_in_chunks(self, rows: PromptRows, cells: Cells, **given: mx.array) -> tuple[mx.array, Fields]:
        """Run the tokens of prompts, with `given` values of fields, `input_ids` among them; return
        hidden states [T, H], and the fields of `Begun`."""
        own = self._parts.attention, self.model.layers, rows.batch, rows.table, cells, []
        batch = extend_inputs(*own, self._parts.batch_type, (), **given).forward
        return self._forward.model(batch), fields_of_prompts(batch, rows)

    def step(
        self,
        ids: mx.array,
        features: list[mx.array],
        lens: mx.array,
        cells: Cells,
        tails: list[mx.array],
        fields: Fields,
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Run W tokens of each request, ids int32[P, W], after its `lens` KV entries in `cells` and
        its earlier draft tokens in `tails`, as in `TailAttention`; each has its request's `fields`.

        `features`: of the tokens before, [P * W, H], in a list that is empty for a draft that reads
        none. Return logits float32 [P * W, V], hidden states and the new tails."""
        positions = self._places(lens, tails, ids.shape[1])
        return self._run(ids, {"positions": positions}, features, Gathered(cells, lens), tails, fields)

    def beams(
        self,
        ids: mx.array,
        features: list[mx.array],
        lens: mx.array,
        cells: Cells,
        tails: list[mx.array],
        fields: Fields,
        positions: mx.array,
        visible: mx.array,
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """As `step`, for W beams of each request at the same `positions` int32[P]; visible int32[P,
        W] as in `ForwardInputs`, where `tails` count as KV slots after those in `cells`."""
        seq_lens = self._places(lens, tails, ids.shape[1]) + 1
        own = {"positions": mx.repeat(positions, ids.shape[1]), "seq_lens": seq_lens, "visible": visible.reshape(-1)}
        return self._run(ids, own, features, Gathered(cells, lens), tails, fields)

    def _places(self, lens: mx.array, tails: list[mx.array], width: int) -> mx.array:
        """Return int32[P * width]: the next places after each request's entries and `tails`."""
        first = tails[0].shape[1] if tails else 0
        return (lens[:, None] + mx.arange(first, first + width, dtype=mx.int32)[None]).reshape(-1)

    def _run(
        self,
        ids: mx.array,
        placed: Fields,
        features: list[mx.array],
        gathered: Gathered,
        tails: list[mx.array],
        fields: Fields,
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Run ids int32[P, W] with the fields `placed` of each token, and the `fields` of each
        request. Writes nothing to the KV cache. Return what `step` does."""
        width, ids = ids.shape[1], ids.reshape(-1)
        own: dict[str, Any] = {"forward_mode": ForwardMode.DECODE, "batch_size": len(ids), "num_tokens": len(ids)}
        own |= {name: each if width == 1 else mx.repeat(each, width, axis=-1) for name, each in fields.items()}
        own |= {"input_ids": ids, "out_cache_loc": mx.zeros_like(ids), "features": features[0] if features else None}
        batch = make_batch(self._parts.batch_type, {**own, "seq_lens": placed["positions"] + 1, **placed})
        attention = TailAttention(batch, self.model.layers, gathered, tails)
        batch.attend = attention.attend
        hidden = self.model(batch)
        return self.model.logits(hidden), hidden, attention.tails

    def project(self, hidden: mx.array) -> mx.array:
        """Return the draft's features [T, H'] of the target's output [T, H + F]."""
        return self.model.architecture.project(self._parts.draft.features(hidden))

    def close(self) -> None:
        """Release compiled functions."""
        del self._take_in, self._step, self._beams


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
                logits, hidden, tails = self._step(*given, begun.fields)
            ids = draw(logits[:count], root.lengths[:count] + depth)
            found.append(ids)
        return mx.stack(found, axis=1)

    def grow(self, pages: Pages, begun: Begun, root: Roots, shape: TreeShape, rank: Rank) -> DraftTree:
        """Return a draft tree for each root: beams see their own branch of the tails."""
        gathered, count, size = pages.gathered(begun.lens), root.ids.shape[0], root.lengths.shape[0]
        hidden, tails, records, beams = begun.hidden, list[mx.array](), TreeRecords(shape), None
        places, width, seen = begun.lens, shape.width, mx.zeros((size, shape.width), mx.uint32)
        if hidden is None:
            ids = padded(root.ids, size)[:, None]
            logits, hidden, tails = self._step(ids, [], gathered.lens, gathered.cells, tails, begun.fields)
            places = places + 1
        else:
            logits = self.model.logits(hidden)
        for depth in range(1, shape.depth + 1):
            if beams is not None:
                first = (depth - 2) * width
                own = mx.array(1, mx.uint32) << mx.arange(first, first + width, dtype=mx.uint32)
                seen = mx.take_along_axis(seen, beams.origins, axis=1) | own
                fed = [parents_of(hidden, beams, depth)] if self.lookahead else []
                given = beams.tokens, fed, gathered.lens, gathered.cells, tails, begun.fields
                logits, hidden, tails = self._beams(*given, places + (depth - 2), words_of(seen, first))
            each = 1 if beams is None else width
            found = records.expand(*rank(logits[: count * each], root.lengths[:count] + depth, width))
            beams = Beams(*(padded(part, size) for part in found))
        return records.build()


class FeatureDrafter(ChainDrafter):
    """The drafter with a model that reads features of the target (EAGLE, EAGLE-3, MTP): KV entry i
    holds token i + 1 and the features of token i."""

    lookahead = 1

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        given = {"input_ids": rows.following, "features": self.project(rows.hidden)}
        hidden, fields = self.take_in_chunks(rows, cells, **given)
        return Begun(hidden[rows.ends], rows.lengths, fields)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        fields, width = {**rows.fields, "input_ids": rows.drawn.reshape(-1)}, rows.drawn.shape[1]
        hidden, cells[:] = self._take_in(fields, rows.page_table, cells, [rows.hidden])
        select = mx.arange(rows.drawn.shape[0], dtype=mx.int32) * width + rows.accepted
        return Begun(hidden[select], rows.lengths, fields_of_verified(self._parts.batch_type, rows))


class StandaloneDrafter(ChainDrafter):
    """The drafter with any model that has the target's vocabulary: KV entry i holds token i. Its
    forward after a verification also has the root of each request."""

    more_rows = 1

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        _, fields = self.take_in_chunks(rows, cells, input_ids=rows.ids)
        return Begun(None, rows.lengths, fields)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        own, width = fields_of_verified(self._parts.batch_type, rows), rows.drawn.shape[1] + 1
        fields = {name: mx.repeat(each, width, axis=-1) for name, each in own.items()} | self._with_roots(rows)
        hidden, cells[:] = self._take_in(fields, rows.page_table, cells, [])
        return Begun(hidden[width - 1 :: width], rows.lengths + 1, own)

    def _with_roots(self, rows: VerifiedRows) -> Fields:
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
        return placed.fields(rows.page_table, self._parts.page_size)


class BlockDrafter(ModelDrafter):
    """The drafter of DFlash: one forward over each root and mask tokens after it. KV entry i holds
    the features of token i; the tokens of a block see these and each other."""

    def taking_in(self) -> Any:
        """Return what stores keys and values of features."""
        return Injection(self.model)

    def take_in_prompts(self, rows: PromptRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_prompts`."""
        _, fields = self.take_in_chunks(rows, cells, input_ids=rows.ids, features=self.project(rows.hidden))
        return Begun(None, rows.lengths, fields)

    def take_in_verified(self, rows: VerifiedRows, cells: Cells) -> Begun:
        """Implements `ModelDrafter.take_in_verified`."""
        _, cells[:] = self._take_in(rows.fields, rows.page_table, cells, [rows.hidden])
        return Begun(None, rows.lengths, fields_of_verified(self._parts.batch_type, rows))

    def propose(self, pages: Pages, begun: Begun, root: Roots, wanted: int, draw: Draw) -> mx.array:
        """Implements `ModelDrafter.propose`."""
        gathered, count, model = pages.gathered(begun.lens), root.ids.shape[0], self.model.architecture
        rows = root.lengths.shape[0]
        masks = mx.full((rows, model.block_size - 1), model.mask_token_id, mx.int32)
        ids = mx.concatenate([padded(root.ids, rows)[:, None], masks], axis=1)
        logits, _, _ = self._step(ids, [], gathered.lens, gathered.cells, [], begun.fields)
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


def fields_of_prompts(batch: ForwardBatch, rows: PromptRows) -> Fields:
    """Return the fields of `Begun` after a forward over prompts: those of each request that drew a
    token, at its last token; padded as declared."""
    is_real = mx.arange(rows.requests.shape[0]) < rows.roots.shape[0]

    def take(spec: FieldSpec, value: mx.array) -> mx.array:
        places = rows.ends if spec.axis is Axis.TOKENS else rows.requests
        own = mx.take(value, places, axis=spec.dim)
        return mx.where(is_real, own, mx.array(spec.padding.value, own.dtype))

    slots = mx.where(is_real, batch.req_pool_indices[rows.requests], 0)
    return dict(continued(batch, take)) | {"req_pool_indices": slots}


def fields_of_verified(batch_type: type[ForwardBatch], rows: VerifiedRows) -> Fields:
    """Return the fields of `Begun` after a verification: those of the first token of each
    request."""
    names = [spec.name for spec in repeated(batch_type)]
    return {
        name: rows.fields[name][..., :: rows.drawn.shape[1]]
        for name in ("req_pool_indices", *names)
        if name in rows.fields
    }
