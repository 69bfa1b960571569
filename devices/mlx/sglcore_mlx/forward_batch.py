"""One forward's inputs as arrays. Each field is declared once (see sglcore/step/forward_inputs.py);
staging follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from sglcore.device.batch import ScheduleBatch
from sglcore.step.fields import Axis, Split, batch_field, batch_record
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import HostReader, Values
from sglcore_mlx.layers.rotary import Rotary, Rotate

States: TypeAlias = list[mx.array]
"""What one layer keeps of N requests: arrays [N, *shape], in the order in which it declares
them."""

Attend: TypeAlias = Callable[[int, mx.array, mx.array, mx.array], mx.array]
"""`attend(layer_id, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D])` gives [T, heads, D];
q and k come rotated."""


Advance: TypeAlias = Callable[..., tuple[mx.array, States]]
"""`advance(states, *inputs)`: from states [N, *shape] and inputs [N, L, ...] of N rows with L
tokens each to results [N, L, ...] and the states after them."""

Recur: TypeAlias = Callable[..., mx.array]
"""`recur(layer_id, advance, *inputs)` gives the results [T, ...] of inputs [T, ...]: each row goes
on from its own states."""


@batch_record(ScheduleBatch)
class ForwardBatch(ForwardInputs[mx.array]):
    """The inputs as arrays, attention over their tokens, and the states of their requests. Each
    rotary embedding is opened for their positions once. What is compiled has no values of the host
    but the sizes and the kind of step."""

    attend: Attend = batch_field(axis=Axis.NONE, split=Split.COPY, owner="attention")
    recur: Recur = batch_field(axis=Axis.NONE, split=Split.COPY, owner="layers")
    rotations: dict[Rotary, Rotate] | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="layers")

    def rotation(self, rotary: Rotary) -> Rotate:
        """The rotation of these tokens' heads."""
        if self.rotations is None:
            self.rotations = {}
        if rotary not in self.rotations:
            self.rotations[rotary] = rotary.at(self.positions)
        return self.rotations[rotary]


def arrays_of(reader: HostReader, values: Values) -> dict[str, mx.array]:
    """What was read and has a type, as arrays of that type."""
    found = ((spec, values.get(spec.name)) for spec in reader.staged)
    return {spec.name: mx.array(np.asarray(value, spec.dtype)) for spec, value in found if value is not None}
