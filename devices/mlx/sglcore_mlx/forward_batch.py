"""One forward's inputs as arrays. Each field is declared once (see sglcore/step/forward_inputs.py),
and staging follows the declarations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from sglcore.step.batch_field import Axis, Split, batch_field, batch_record
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import HostReader, Values
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


@batch_record(ScheduleBatch)
class ForwardBatch(ForwardInputs[mx.array]):
    """The inputs of one forward as arrays, with functions for attention and recurrent states
    (`attend`, `recur`). `rotations`: one rotation for each rotary embedding, made at its first use.
    In a compiled step, host values are only the sizes and the forward mode."""

    attend: Attend = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    store: Store = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    recur: Recur = batch_field(axis=Axis.NONE, split=Split.COPY, owner="layers")
    rotations: dict[Rotary, Rotate] | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="layers")

    def rotation(self, rotary: Rotary) -> Rotate:
        """Return the rotation of heads at these tokens' positions; made at the first call for each
        rotary embedding, the same object afterwards."""
        if self.rotations is None:
            self.rotations = {}
        if rotary not in self.rotations:
            self.rotations[rotary] = rotary.at(self.positions)
        return self.rotations[rotary]


def arrays_of(reader: HostReader, values: Values) -> dict[str, mx.array]:
    """Return the staged host values as arrays of their declared dtypes, by field name; fields
    without a value are left out."""
    found = ((spec, values.get(spec.name)) for spec in reader.staged)
    return {spec.name: mx.array(np.asarray(value, spec.dtype)) for spec, value in found if value is not None}
