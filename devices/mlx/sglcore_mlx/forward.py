"""One forward as a lazy graph, from tokens to hidden states or logits, with the updated KV
cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.step.host_values import host_reader, make_batch
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore_mlx.attention.blocks import has_blocks
from sglcore_mlx.attention.compressed import BlockStep, extend_parts, one_part
from sglcore_mlx.attention.contract import AttentionPlan, DecodeAttention
from sglcore_mlx.attention.encoder import EncoderRows
from sglcore_mlx.attention.indexed import ChoosingPlan
from sglcore_mlx.attention.prompt import PromptPlan, PromptRow
from sglcore_mlx.forward_batch import Advance, ForwardBatch, IndexQueries, States, arrays_of, part_of
from sglcore_mlx.inputs import SingleRows, extend_values, parts_of
from sglcore_mlx.models.contract import LayerShape, Model
from sglcore_mlx.pool import DeviceState, PageTable, Writes


@dataclass(frozen=True, slots=True)
class DecodeForward:
    """The decode forward: the last token of each request slot. A pure function of arrays, so that
    it can be compiled."""

    model: Model
    attention: DecodeAttention
    batch_type: type[ForwardBatch] = ForwardBatch
    num_hidden: int = 0
    """Arrays of hidden states that follow the logits: 0, 1 (those after the last norm), or 2 (also
    those before it)."""
    keeps_entries: bool = False
    """`rows_to_verify` returns the KV entries of its tokens."""

    def __call__(
        self,
        fields: dict[str, mx.array],
        page_table: mx.array,
        last: mx.array,
        cells: list[mx.array],
        states: list[States],
    ) -> tuple[list[mx.array], list[mx.array], list[States]]:
        """Return logits float32 [B, V] followed by `num_hidden` arrays [B, H], the KV cache with
        the new keys and values, and the states after the tokens. `fields` and `page_table` as in
        `DecodeInputs`, B requests; `last` and `cells` as in `DeviceState`; `states` of the B
        requests, by layer."""
        return self.rows({**fields, "input_ids": last[fields["req_pool_indices"]]}, page_table, cells, states)

    def rows(
        self, fields: dict[str, mx.array], page_table: mx.array, cells: list[mx.array], states: list[States]
    ) -> tuple[list[mx.array], list[mx.array], list[States]]:
        """Like `__call__`, with `input_ids` in the fields. The number of tokens may be a multiple
        of the page table's rows: then consecutive tokens share a row."""
        batch, step = self._batch(fields, page_table, cells, states)
        return self._outputs(batch)[: 1 + self.num_hidden], step.cells, step.states

    def rows_to_verify(
        self,
        fields: dict[str, mx.array],
        page_table: mx.array,
        cells: list[mx.array],
        states: list[States],
        moved: list[mx.array],
    ) -> tuple[list[mx.array], list[mx.array], list[list[mx.array]], list[mx.array]]:
        """Like `rows`, with N tokens of each request; return logits followed by at least one array
        of hidden states [B * N, H], the KV cache, the inputs of each layer's recurrence,
        [B, N, ...], and with `keeps_entries` the KV entries of the tokens by layer. `advanced`
        makes the states, when the accepted tokens are known. `moved` as in `Writes`."""
        batch, step = self._batch(fields, page_table, cells, states, moved)
        outputs = self._outputs(batch)
        entries = [step.writes.entries[layer] for layer in range(len(cells))] if self.keeps_entries else []
        return outputs, step.cells, step.inputs, entries

    def _outputs(self, batch: ForwardBatch) -> list[mx.array]:
        """Return logits, hidden states, and with `num_hidden` 2 those before the last norm."""
        hidden = self.model.with_norm_inputs(batch) if self.num_hidden > 1 else (self.model(batch),)
        return [self.model.logits(hidden[0]), *hidden]

    def advanced(self, states: list[States], inputs: list[list[mx.array]], lens: mx.array) -> list[States]:
        """Return the states, by layer, after the first `lens` int32[B] tokens of each request;
        `states` before them, and `inputs` as `rows_to_verify` returned them."""
        given = zip(self.model.advances, states, inputs, strict=True)
        return [advance(before, *each, lens=lens)[1] for advance, before, each in given]

    def hidden(
        self, fields: dict[str, mx.array], page_table: mx.array, cells: list[mx.array], states: list[States]
    ) -> tuple[mx.array, list[mx.array], list[States]]:
        """Like `rows`, with hidden states [B, H] in place of logits."""
        batch, step = self._batch(fields, page_table, cells, states)
        return self.model(batch), step.cells, step.states

    def _batch(
        self,
        fields: dict[str, mx.array],
        page_table: mx.array,
        cells: list[mx.array],
        states: list[States],
        moved: Sequence[mx.array] = (),
    ) -> tuple[ForwardBatch, _Decoding]:
        """Return the inputs of the model, and what its layers read and replace."""
        rows, requests = fields["seq_lens"].shape[0], page_table.shape[0]
        own = {"forward_mode": ForwardMode.DECODE, "batch_size": rows, "num_tokens": rows, "page_table": page_table}
        width = None if rows == requests else rows // requests
        batch = make_batch(self.batch_type, {**fields, **own, "width": width})
        given = Writes(fields["out_cache_loc"], moved), self.model.layers, list(cells), list(states)
        step = _Decoding(self.attention.plan(batch), requests, *given)
        batch.attend, batch.store, batch.recur = step.attend, step.store, step.recur
        batch.blocks = BlockStep(step, step.layers, fields["out_cache_loc"], one_part(step.plan), step.inputs)
        return batch, step


@dataclass(slots=True)
class _Decoding:
    """What the layers of a decode forward read and replace."""

    plan: AttentionPlan
    """The attention of its queries."""
    requests: int
    """B; each has the same number of tokens."""
    writes: Writes
    """What is written to the KV cache."""
    layers: Sequence[LayerShape]
    """The model's attention layers."""
    cells: list[mx.array]
    """The KV cache, by layer."""
    states: list[States]
    """The recurrent states, by state id."""
    chosen: mx.array | None = None
    """What the last indexer selected."""
    inputs: list[list[mx.array]] = field(default_factory=list)
    """The inputs of each layer's recurrence, by state id."""

    def attend(
        self, layer_id: int, q: mx.array, k: mx.array, v: mx.array | None, index: IndexQueries | None = None
    ) -> mx.array:
        self.store(layer_id, k, v)
        kv, layer = self.cells[layer_id], self.layers[layer_id]
        if index is not None:
            self.chosen = _choosing(self.plan).choose(index, kv, layer)
        if self.chosen is None:
            return self.plan.forward(q, kv, layer)
        return _choosing(self.plan).forward_chosen(q, kv, layer, self.chosen)

    def store(self, layer_id: int, k: mx.array, v: mx.array | None) -> None:
        self.cells[layer_id] = self.writes.store(layer_id, self.cells[layer_id], k, v)

    def recur(self, layer_id: int, advance: Advance, *inputs: mx.array) -> mx.array:
        assert layer_id == len(self.inputs), "layers with states run in the order of their ids"
        self.inputs.append([each.reshape(self.requests, -1, *each.shape[1:]) for each in inputs])
        out, self.states[layer_id] = advance(self.states[layer_id], *self.inputs[-1])
        return out.reshape(-1, *out.shape[2:])


@dataclass(slots=True)
class Extend:
    """A step with prompts or several tokens per request: the host batch, and its inputs on the
    device. The model is called with `forward`; `step` keeps what its layers read and replace."""

    host: ScheduleBatch
    forward: ForwardBatch
    step: _Extending

    def continue_on(self, state: DeviceState) -> None:
        """Take over the KV cache arrays of `state`, for a step that runs in slices: steps that ran
        in between have replaced the arrays."""
        self.step.cells = state.cells

    def leave(self, state: DeviceState) -> None:
        """Store the requests' recurrent states in `state`, after all layers have run. The KV cache
        needs no such call."""
        state.states.leave(self.host, self.step.states)


def begin_extend(
    attention: DecodeAttention,
    layers: Sequence[LayerShape],
    batch: ScheduleBatch,
    table: PageTable,
    state: DeviceState,
    batch_type: type[ForwardBatch] = ForwardBatch,
) -> Extend:
    """Return the inputs of any batch that writes to the KV cache, for one call of a model with
    these layers. During that call attention writes keys and values to the KV cache in `state`;
    recurrent states begin as those of the requests in `state`, and `Extend.leave` stores them after
    the layers. Builds the lazy graph only."""
    ids = resolve_ids(batch.input_ids, state.last)
    states = state.states.take(batch, batch.batch_size)
    given = attention, layers, batch, table, state.cells, states, batch_type, state.take_moved()
    return extend_inputs(*given, input_ids=ids)


def extend_inputs(
    attention: DecodeAttention,
    layers: Sequence[LayerShape],
    batch: ScheduleBatch,
    table: PageTable,
    cells: list[mx.array],
    states: list[States],
    batch_type: type[ForwardBatch] = ForwardBatch,
    moved: Sequence[mx.array] = (),
    **given: mx.array,
) -> Extend:
    """Return the inputs of any batch for one call of a model with these layers, which writes keys
    and values, and `moved` as in `Writes`, to `cells` and begins with `states`. `given`: values of
    fields, `input_ids` among them. Builds the lazy graph only."""
    reader = host_reader(batch_type, is_decode=False)
    values = extend_values(reader, batch, table)
    own = {**given, "out_cache_loc": mx.array(values["out_cache_loc"])}
    forward = make_batch(batch_type, {**values, **arrays_of(reader, values), **own})
    parts: list[_Singles | PromptPlan] = []
    rows: list[int] = []
    for part in parts_of(batch, table):
        is_prompt = isinstance(part, PromptRow)
        parts.append(part.plan(layers, forward) if is_prompt else _singles(part, attention, batch, table, forward))
        rows.append(1 if is_prompt else part.last - part.first)
    step = _Extending(parts, rows, Writes(own["out_cache_loc"], moved), layers, cells, list(states))
    forward.attend, forward.store, forward.recur = step.attend, step.store, step.recur
    if has_blocks(layers):
        forward.blocks = BlockStep(step, layers, own["out_cache_loc"], extend_parts(batch, table), [])
    return Extend(batch, forward, step)


def extend_forward(
    model: Model,
    attention: DecodeAttention,
    batch: ScheduleBatch,
    table: PageTable,
    state: DeviceState,
    batch_type: type[ForwardBatch] = ForwardBatch,
) -> tuple[mx.array, mx.array | None]:
    """Return hidden states [T, H] of any batch that writes to the KV cache, and those before the
    last norm if the batch requests them (else None); updates KV cache and recurrent states in
    `state`. Builds the lazy graph only."""
    extend = begin_extend(attention, model.layers, batch, table, state, batch_type)
    if extend.forward.return_hidden_states_before_norm:
        hidden, before = model.with_norm_inputs(extend.forward)
    else:
        hidden, before = model(extend.forward), None
    extend.leave(state)
    return hidden, before


def embed_forward(model: Model, batch: ScheduleBatch, batch_type: type[ForwardBatch] = ForwardBatch) -> mx.array:
    """Return hidden states [T, H] of whole sequences, the tokens of each attend to each other only,
    without a KV cache. Builds the lazy graph only."""
    reader = host_reader(batch_type, is_decode=False)
    values = reader.read(batch)
    forward = make_batch(batch_type, {**values, **arrays_of(reader, values)})
    forward.attend = EncoderRows(forward, batch.token_offsets, model.layers).attend
    return model(forward)


def resolve_ids(input_ids: NDArray[np.int32], last: mx.array) -> mx.array:
    """Return token ids int32 [T]: a negative id -s becomes the last token of request slot s, from
    `last` int32 [slots], which may still be a lazy array. Other ids stay."""
    ids = mx.array(input_ids)
    if not (input_ids < 0).any():
        return ids
    return mx.where(ids < 0, last[mx.array(np.maximum(-input_ids, 0))], ids)


def _choosing(plan: AttentionPlan) -> ChoosingPlan:
    assert isinstance(plan, ChoosingPlan), "only backends that take latent entries run layers with an indexer"
    return plan


@dataclass(frozen=True, slots=True)
class _Singles:
    """A part of an extend forward: the tokens [start, end) of consecutive requests with one token
    each."""

    start: int
    end: int
    plan: AttentionPlan

    def choose(self, index: IndexQueries, k: mx.array, kv: mx.array, layer: LayerShape) -> mx.array | None:
        return _choosing(self.plan).choose(index.of(slice(self.start, self.end)), kv, layer)

    def forward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array | None,
        kv: mx.array,
        layer: LayerShape,
        chosen: mx.array | None = None,
    ) -> mx.array:
        if chosen is None:
            return self.plan.forward(q[self.start : self.end], kv, layer)
        return _choosing(self.plan).forward_chosen(q[self.start : self.end], kv, layer, chosen)


def _singles(
    part: SingleRows, attention: DecodeAttention, batch: ScheduleBatch, table: PageTable, forward: ForwardBatch
) -> _Singles:
    rows = slice(part.first, part.last)
    pages = mx.array(table.rows[batch.slots[rows], : -(-int(batch.seq_lens[rows].max()) // table.page_size)])
    return _Singles(part.start, part.end, attention.plan(part_of(forward, rows, slice(part.start, part.end), pages)))


@dataclass(slots=True)
class _Extending:
    """What the layers of an extend forward read and replace: the KV cache (`cells`) and the
    recurrent states, by layer. `parts`: runs of requests with one token, and single prompts, in
    order; `rows`: the number of requests of each part."""

    parts: Sequence[_Singles | PromptPlan]
    rows: Sequence[int]
    writes: Writes
    layers: Sequence[LayerShape]
    cells: list[mx.array]
    states: list[States]
    chosen: Sequence[mx.array | None] = ()
    """What the last indexer selected, for each part."""

    def attend(
        self, layer_id: int, q: mx.array, k: mx.array, v: mx.array | None, index: IndexQueries | None = None
    ) -> mx.array:
        self.store(layer_id, k, v)
        kv, layer = self.cells[layer_id], self.layers[layer_id]
        if index is not None:
            self.chosen = [part.choose(index, k, kv, layer) for part in self.parts]
        chosen = self.chosen or [None] * len(self.parts)
        mixed = [part.forward(q, k, v, kv, layer, each) for part, each in zip(self.parts, chosen, strict=True)]
        return mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)

    def store(self, layer_id: int, k: mx.array, v: mx.array | None) -> None:
        self.cells[layer_id] = self.writes.store(layer_id, self.cells[layer_id], k, v)

    def recur(self, layer_id: int, advance: Advance, *inputs: mx.array) -> mx.array:
        before, first = self.states[layer_id], 0
        results: list[mx.array] = []
        after: list[States] = []
        for part, rows in zip(self.parts, self.rows, strict=True):
            length = (part.end - part.start) // rows
            given = [each[part.start : part.end].reshape(rows, length, each.shape[1]) for each in inputs]
            out, states = advance([state[first : first + rows] for state in before], *given)
            results.append(out.reshape(rows * length, out.shape[2]))
            after.append(states)
            first += rows
        self.states[layer_id] = (
            after[0] if len(after) == 1 else [mx.concatenate(list(each)) for each in zip(*after, strict=True)]
        )
        return results[0] if len(results) == 1 else mx.concatenate(results)
