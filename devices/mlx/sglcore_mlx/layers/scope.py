"""What a layer receives when it is built: the configuration, and where its weights come from.

A layer asks for each weight once, by the checkpoint's own name; whether it is quantised is found
out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import mlx.core as mx
import numpy as np

from sglcore.checkpoint.config import ModelConfig
from sglcore.checkpoint.rotary import halves_first, rotary_dim
from sglcore_mlx.layers.linear import (
    MIN_SPLIT,
    Embedding,
    Head,
    Linear,
    LinearParts,
    Ordered,
    Packed,
    PlainLinear,
    QuantisedLinear,
    SideBySide,
    SplitLinear,
)
from sglcore_mlx.layers.quantization import Form
from sglcore_mlx.layers.weights import Weights

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope in which a layer is built; `prefix` is its name in the checkpoint, with a trailing
    dot unless empty.

    `max_positions` bounds the positions that will occur.
    """

    config: ModelConfig
    weights: Weights
    kernels: LinearParts
    max_positions: int
    prefix: str = field(default="")

    def at(self, *names: str | int) -> Self:
        """The scope of a part of this layer."""
        return replace(self, prefix=self.prefix + "".join(f"{name}." for name in names))

    def parameter(self, name: str, *shape: int, offset: float | None = None) -> mx.array:
        """One weight, `prefix.name` in the checkpoint. With an `offset`, which is added unless it
        is in it, it is float32."""
        taken = self.weights.take(self.prefix + name, *shape, dtype=None if offset is None else mx.float32)
        return self.weights.keep(taken + offset if offset and not self.weights.has_offsets else taken)

    @property
    def dtype(self) -> mx.Dtype:
        """What the model is computed in."""
        return self.weights.dtype

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A linear layer of this scope."""
        return self.fused([(name, outputs)], inputs, bias)

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Several linear layers with one input, as one; `parts` are (name, outputs). One product if
        their weights are packed alike."""
        if len({self.form_of(name) for name, _ in parts}) > 1:
            return SideBySide([self.fused([part], inputs, bias, interleaved) for part in parts])
        return self._product(parts, inputs, bias, self._order(parts, interleaved) if interleaved else None)

    def ordered(
        self, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool = False
    ) -> Linear:
        """`fused`, whose output i is output order[i] of the parts."""
        indices = mx.array(np.asarray(order, np.int32))
        if len({self.form_of(name) for name, _ in parts}) > 1:
            return Ordered(self.fused(parts, inputs, bias), indices)
        return self._product(parts, inputs, bias, indices)

    def _product(self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, order: mx.array | None) -> Linear:
        """Weights that are packed alike, rows below rows, then in an order."""
        total, form = sum(size for _, size in parts), self.form_of(parts[0][0])
        biases = [self.weights.take(f"{self.prefix}{name}.bias", size) for name, size in parts] if bias else []
        offset = self._joined(biases, order)
        if form is not None:
            return QuantisedLinear(self.packed([(name, (size,)) for name, size in parts], inputs, form, order), offset)
        weights = [self.weights.take(f"{self.prefix}{name}.weight", size, inputs) for name, size in parts]
        weight = self._joined(weights, order)
        assert weight is not None
        return self.plain(weight, offset, total)

    def plain(self, weight: mx.array, bias: mx.array | None, out_features: int) -> Linear:
        """A linear layer over a kept weight [out, in], split over the streams there are."""
        whole = self._turned(weight, bias, 0, out_features)
        streams = self.kernels.streams
        if len(streams) < 2 or out_features < MIN_SPLIT:
            return whole
        edges = [out_features * share // len(streams) for share in range(len(streams) + 1)]
        shares = [self._turned(weight, bias, *edges[i : i + 2]) for i in range(len(streams))]
        return SplitLinear(whole, shares, streams)

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Embedding:
        """A row for each id."""
        form = self.form_of(name)
        if form is not None:
            return Embedding(self.packed([(name, (rows,))], size, form), self.dtype, scale)
        weight = self.weights.keep(self.weights.take(f"{self.prefix}{name}.weight", rows, size))
        return Embedding(weight, self.dtype, scale)

    def head(self, name: str, rows: int, size: int, tied: Embedding | None = None) -> Head:
        """The output layer; one that is tied takes no memory of its own."""
        if tied is None:
            return Head(self.linear(name, size, rows))
        weight = tied.weight
        return Head(QuantisedLinear(weight, None) if isinstance(weight, Packed) else self.plain(weight, None, rows))

    def form_of(self, name: str) -> Form | None:
        """How the weight of a module of this scope is packed; None: it is plain."""
        module, quantization = self.prefix + name, self.weights.quantization
        if quantization is None or not self.weights.has(f"{module}.scales"):
            return None
        return quantization.form_of(module)

    def packed(
        self,
        names: Sequence[tuple[str, tuple[int, ...]]],
        in_features: int,
        form: Form,
        order: mx.array | None = None,
    ) -> Packed:
        """The packed weights of modules of one form, rows below rows, then in an order; `names` are
        (name, leading dimensions)."""
        weights, width, groups = self.weights, in_features * form.bits // WORD_BITS, in_features // form.group_size
        weights.note_form(str(form))
        modules = [(self.prefix + name, shape) for name, shape in names]
        words = [weights.take_raw(f"{module}.weight", "U32", *shape, width) for module, shape in modules]
        if not form.is_affine:
            scales = [weights.take_raw(f"{module}.scales", "U8", *shape, groups) for module, shape in modules]
            return Packed(self._rows(words, order), self._rows(scales, order), None, form)
        scales = [weights.take(f"{module}.scales", *shape, groups) for module, shape in modules]
        biases = [weights.take(f"{module}.biases", *shape, groups) for module, shape in modules]
        return Packed(self._rows(words, order), self._rows(scales, order), self._rows(biases, order), form)

    def _rows(self, arrays: list[mx.array], order: mx.array | None) -> mx.array:
        """Arrays [..., rows, width] below one another, kept."""
        joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=-2)
        return self.weights.keep(joined if order is None else joined[..., order, :])

    def _joined(self, arrays: list[mx.array], order: mx.array | None) -> mx.array | None:
        """Arrays one after the other along the first dimension, kept; none of none."""
        if not arrays:
            return None
        joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        return self.weights.keep(joined if order is None else joined[order])

    def _order(self, parts: Sequence[tuple[str, int]], interleaved: Sequence[str]) -> mx.array:
        """int32 [outputs]: where each row of the joined parts is among those of the checkpoint."""
        rows, first, head = [], 0, self.config.head_dim
        for name, size in parts:
            is_paired = name in interleaved
            own = halves_first(size // head, head, rotary_dim(self.config)) if is_paired else np.arange(size)
            rows.append(own + first)
            first += size
        return mx.array(np.concatenate(rows).astype(np.int32))

    def _turned(self, weight: mx.array, bias: mx.array | None, first: int, last: int) -> PlainLinear:
        is_whole = last - first == weight.shape[0]
        part = self.weights.view((weight if is_whole else weight[first:last]).T)
        return PlainLinear(part, bias if bias is None or is_whole else self.weights.view(bias[first:last]))
