"""One forward's inputs as arrays. Each field is declared once (see sglcore/step/forward_inputs.py),
and staging follows the declarations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from sglcore.step.batch_field import Axis, FieldSpec, Split, batch_field, batch_record, leaves
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import HostReader, Values, make_batch
from sglcore.step.repeated_fields import value_of
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.layers.rotary import Rotary, Rotate

States: TypeAlias = list[mx.array]
"""The states of N requests in one layer: arrays [N, *shape], in the layer's declared order."""

Attend: TypeAlias = Callable[..., mx.array]
"""`attend(layer_id, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D], index=None)` returns
[T, heads, D]; the rotary embedding is already applied to q and k. `v` None: the values are a part
of the keys, and the result has their size (`LayerShape.value_dim`). `index`: the queries of the
layer's indexer, an `IndexQueries`; its keys follow those in `k`."""


class IndexQueries(NamedTuple):
    """The queries of an indexer: `queries` [T, H, D], and float32 `weights` [T, H] of the heads."""

    queries: mx.array
    weights: mx.array

    def of(self, tokens: slice) -> IndexQueries:
        """Return those of some tokens."""
        return IndexQueries(self.queries[tokens], self.weights[tokens])


Store: TypeAlias = Callable[[int, mx.array, mx.array | None], None]
"""`store(layer_id, k, v)` writes keys and values as `attend` does, without a query."""


Advance: TypeAlias = Callable[..., tuple[mx.array, States]]
"""`advance(states, *inputs, lens=None)`: from states [N, *shape] and inputs [N, L, ...] of N
requests with L tokens each, returns results [N, L, ...], and the states after all tokens, or after
the first `lens` int32[N]."""

Recur: TypeAlias = Callable[..., mx.array]
"""`recur(layer_id, advance, *inputs)` returns the results [T, ...] of inputs [T, ...]; each request
continues from its own states."""


Finish: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""`finish(blocks float32 [N, size], positions int32 [N])` norms and rotates the rows of blocks;
`positions`: those of the first token of each block."""


class Blocks(Protocol):
    """The compressed blocks of a forward (DeepSeek-V4). A layer first stores its window's keys by
    `store`, then calls `compress`, and `choose` if it has an indexer, then `attend`."""

    def compress(self, layer_id: int, number: int, x: mx.array, ape: mx.array, finish: Finish) -> None:
        """Store the blocks that these tokens complete. x [T, 2 * series * size]: values and gates;
        ape float32 [ratio, series * size] is added to the gates. `number`: 0 for the layer's
        blocks, 1 for its indexer's keys. Queues only."""
        ...

    def choose(self, layer_id: int, index: IndexQueries) -> Any:
        """Choose blocks for each token; returns what `attend` takes. Queues only."""
        ...

    def attend(self, layer_id: int, q: mx.array, chosen: Any = ()) -> mx.array:
        """Attend with q [T, heads, D] to the sliding window and to complete blocks: to all, or to
        those that `choose` returned. Returns q's shape. Queues only."""
        ...


@batch_record(ScheduleBatch)
class ForwardBatch(ForwardInputs[mx.array]):
    """The inputs of one forward as arrays, which attention reads too, with functions for attention,
    recurrent states and compressed blocks (`attend`, `recur`, `blocks`). `page_table` int32 [R, n]:
    the pages of R requests with the same number of rows each (`width`, or one); None: a forward
    with prompts, or without a KV cache. `rotations`: one rotation for each rotary embedding, made
    at its first use. In a compiled step, host values are only the sizes and the forward mode."""

    page_table: mx.array | None = batch_field(axis=Axis.NONE, split=Split.REFUSE, owner="pool")
    attend: Attend = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    store: Store = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    recur: Recur = batch_field(axis=Axis.NONE, split=Split.COPY, owner="layers")
    blocks: Blocks | None = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    rotations: dict[Rotary, Rotate] | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="layers")

    @property
    def pages_of_requests(self) -> mx.array:
        """`page_table`; raises AssertionError if there is none."""
        assert self.page_table is not None
        return self.page_table

    @property
    def pages_of_rows(self) -> mx.array:
        """The page table row of each of the T rows, int32 [T, n]: the table itself if `width` is
        None."""
        table = self.pages_of_requests
        return table if self.width is None else mx.repeat(table, self.width, axis=0)

    def rotation(self, rotary: Rotary) -> Rotate:
        """Return the rotation of heads at these tokens' positions; made at the first call for each
        rotary embedding, the same object afterwards."""
        if self.rotations is None:
            self.rotations = {}
        if rotary not in self.rotations:
            self.rotations[rotary] = rotary.at(self.positions)
        return self.rotations[rotary]


def part_of(batch: ForwardBatch, requests: slice, tokens: slice, page_table: mx.array | None = None) -> ForwardBatch:
    """Return the inputs of some whole requests and their tokens, as views of those of the batch,
    with their own `page_table`; without the functions. Each field follows its declared axis."""
    made: dict[str, Any] = {}
    for spec in leaves(type(batch)):
        value = value_of(batch, spec.name)
        if value is not None and spec.split not in (Split.FRESH, Split.DROP):
            made[spec.name] = _part_of(spec, value, requests, tokens)
    sizes = {"batch_size": requests.stop - requests.start, "num_tokens": tokens.stop - tokens.start}
    if batch.extend_start_loc is not None:
        made["extend_start_loc"] = made["extend_start_loc"] - tokens.start
    return make_batch(type(batch), {**made, **sizes, "page_table": page_table})


def _part_of(spec: FieldSpec, value: Any, requests: slice, tokens: slice) -> Any:
    if spec.axis is Axis.NONE:
        return value
    return value[(slice(None),) * spec.dim + (tokens if spec.axis is Axis.TOKENS else requests,)]


def arrays_of(reader: HostReader, values: Values) -> dict[str, mx.array]:
    """Return the staged host values as arrays of their declared dtypes, by field name; fields
    without a value are left out."""
    found = ((spec, values.get(spec.name)) for spec in reader.staged)
    return {spec.name: mx.array(np.asarray(value, spec.dtype)) for spec, value in found if value is not None}
