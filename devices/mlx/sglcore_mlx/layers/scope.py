"""The scope in which a layer is built: configuration, weights, and the layer's name in the
checkpoint.

A layer takes each weight once, by the checkpoint's name; `Scope` finds out whether it is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import mlx.core as mx
import numpy as np

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.rope_config import halves_first, rotary_dim
from sglcore.core.errors import CheckpointError
from sglcore_mlx.layers.linear import (
    MIN_SPLIT,
    Embedding,
    Head,
    Linear,
    LinearParts,
    MappedHead,
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
    """The scope in which a layer is built. `prefix`: its name in the checkpoint, with a trailing
    dot unless empty. `max_positions`: positions are below this number. `given`: layers of another
    model that replace embeddings and output layers, by name."""

    config: ModelConfig
    weights: Weights
    kernels: LinearParts
    max_positions: int
    prefix: str = field(default="")
    given: Mapping[str, Any] = field(default_factory=dict)

    def at(self, *names: str | int) -> Self:
        """Implements `layer_kinds.Build.at`: return the scope of a part of this layer; `names` are
        joined with dots, so at("experts", 3) adds "experts.3." to the prefix."""
        return replace(self, prefix=self.prefix + "".join(f"{name}." for name in names))

    def parameter(self, name: str, *shape: int, offset: float | None = None) -> mx.array:
        """Take the weight named prefix + `name`, of this shape, and keep it: in the model's dtype,
        or with an `offset` in float32, and then the offset is added unless the checkpoint's weights
        include it."""
        taken = self.weights.take(self.prefix + name, *shape, dtype=None if offset is None else mx.float32)
        return self.weights.keep(taken + offset if offset and not self.weights.has_offsets else taken)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the model's computation."""
        return self.weights.dtype

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """Implements `layer_kinds.Build.linear`: return the linear layer `name` of this scope, from
        `inputs` to `outputs` elements."""
        return self.fused([(name, outputs)], inputs, bias)

    def wide(self, name: str, outputs: int) -> Linear:
        """Make a linear layer of hidden states without a bias that computes in float32."""
        if self.form_of(name) is not None:
            packed = self.linear(name, self.config.hidden_size, outputs)
            return lambda x: packed(x).astype(mx.float32)
        turned = self.at(name).parameter("weight", outputs, self.config.hidden_size, offset=0.0).T
        return lambda x: x.astype(mx.float32) @ turned

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Implements `layer_kinds.Build.fused`: return one linear layer of several with the same
        input; `parts`: (name, outputs) of each, and the results are concatenated in this order. It
        is one product if their weights have the same format. `interleaved`: names of parts with
        rotary pairs in adjacent rows, which are reordered to halves."""
        if len({self.form_of(name) for name, _ in parts}) > 1:
            return SideBySide([self.fused([part], inputs, bias, interleaved) for part in parts])
        return self._product(parts, inputs, bias, self._order(parts, interleaved) if interleaved else None)

    def ordered(
        self, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool = False
    ) -> Linear:
        """Implements `layer_kinds.Build.ordered`: like `fused`, but output i of the result is
        output order[i] of the concatenated parts."""
        indices = mx.array(np.asarray(order, np.int32))
        if len({self.form_of(name) for name, _ in parts}) > 1:
            return Ordered(self.fused(parts, inputs, bias), indices)
        return self._product(parts, inputs, bias, indices)

    def _product(self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, order: mx.array | None) -> Linear:
        """Return one linear layer of weights in the same format, concatenated by rows, then
        reordered (`order` None: not)."""
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
        """Return a linear layer with `weight` [out, in], which must be kept already, and bias [out]
        or None; it is split over the streams if there are several and at least 128 outputs."""
        whole = self._turned(weight, bias, 0, out_features)
        streams = self.kernels.streams
        if len(streams) < 2 or out_features < MIN_SPLIT:
            return whole
        edges = [out_features * share // len(streams) for share in range(len(streams) + 1)]
        shares = [self._turned(weight, bias, *edges[i : i + 2]) for i in range(len(streams))]
        return SplitLinear(whole, shares, streams)

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Embedding:
        """Implements `layer_kinds.Build.embedding`: return an embedding with a weight [rows, size],
        plain or packed, one row for each id, or the one in `given`; `scale`: a factor of the
        rows."""
        if self.prefix + name in self.given:
            return self.given[self.prefix + name]
        form = self.form_of(name)
        if form is not None:
            return Embedding(self.packed([(name, (rows,))], size, form), self.dtype, scale)
        weight = self.weights.keep(self.weights.take(f"{self.prefix}{name}.weight", rows, size))
        return Embedding(weight, self.dtype, scale)

    def head(self, name: str, rows: int, size: int, tied: Embedding | None = None) -> Head:
        """Implements `layer_kinds.Build.head`: return the output layer from `size` to `rows`
        (vocabulary) elements, or the one in `given`. With `tied` it uses that embedding's weight,
        without additional memory, and `name` is not read."""
        if self.prefix + name in self.given:
            return self.given[self.prefix + name]
        if tied is None:
            return Head(self.linear(name, size, rows))
        weight = tied.weight
        return Head(QuantisedLinear(weight, None) if isinstance(weight, Packed) else self.plain(weight, None, rows))

    def mapped_head(self, name: str, ids: str, rows: int, size: int, outputs: int) -> MappedHead:
        """Implements `layer_kinds.Build.mapped_head`: make an output layer for a part of the
        vocabulary. Raises `CheckpointError` for ids beyond the vocabulary."""
        offsets = self.weights.take_raw(self.prefix + ids, "I64", rows)
        found = np.array(offsets).astype(np.int64) + np.arange(rows)
        if found.min(initial=0) < 0 or found.max(initial=0) >= outputs:
            raise CheckpointError(
                f"{ids} maps to token {found.max()} and {found.min()}",
                wanted=f"tokens of the model's {outputs}",
                remedy="use a draft that was made for this model",
            )
        row_of = np.full(outputs, rows, np.int32)
        row_of[found] = np.arange(rows, dtype=np.int32)
        return MappedHead(Head(self.linear(name, size, rows)), self.weights.keep(mx.array(row_of)))

    def concat(self) -> Callable[..., mx.array]:
        """Implements `layer_kinds.Build.concat`: return the function that concatenates the last
        dimension."""
        return lambda *parts: mx.concatenate(list(parts), axis=-1)

    def form_of(self, name: str) -> Form | None:
        """Return the packed format of the weight of module `name` in this scope; None: it is plain.
        The module's weights must not have been taken yet."""
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
        """Take the packed weights of modules in one format, concatenate them by rows, reorder the
        rows (`order` None: not), and keep and return the result. `names`: (module, its dimensions
        before the last) of each."""
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

    def unpacked(self, name: str, outputs: int, inputs: int, form: Form) -> mx.array:
        """Take a packed weight [outputs, inputs]; return it dequantised, in the model's dtype."""
        width, groups, module = inputs * form.bits // WORD_BITS, inputs // form.group_size, self.prefix + name
        words = self.weights.take_raw(f"{module}.weight", "U32", outputs, width)
        biases = None
        if form.is_affine:
            scales, biases = (self.weights.take(f"{module}.{part}", outputs, groups) for part in ("scales", "biases"))
        else:
            scales = self.weights.take_raw(f"{module}.scales", "U8", outputs, groups)
        return mx.dequantize(words, scales, biases, group_size=form.group_size, bits=form.bits, mode=form.mode).astype(
            self.dtype
        )

    def _rows(self, arrays: list[mx.array], order: mx.array | None) -> mx.array:
        """Concatenate arrays [..., rows, width] by rows, reorder the rows (`order` None: not), keep
        and return the result."""
        joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=-2)
        return self.weights.keep(joined if order is None else joined[..., order, :])

    def _joined(self, arrays: list[mx.array], order: mx.array | None) -> mx.array | None:
        """Concatenate arrays along the first dimension, reorder it (`order` None: not), keep and
        return the result; None if there are no arrays."""
        if not arrays:
            return None
        joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        return self.weights.keep(joined if order is None else joined[order])

    def _order(self, parts: Sequence[tuple[str, int]], interleaved: Sequence[str]) -> mx.array:
        """Return int32 [outputs]: the checkpoint row of each row of the joined parts."""
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
