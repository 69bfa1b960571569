"""Linear layers over plain and quantised weights, and the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from sglcore_mlx.layers.quantization import Form

MIN_SPLIT = 128
"""A linear layer with fewer outputs is not split over streams."""


@dataclass(frozen=True, slots=True)
class LinearParts:
    """The fastest ways to compute products and rotations on this device.

    `streams`: with two or more, a plain linear layer computes an equal share of its outputs on
    each; otherwise it is one product on the default stream. `fused_rotary`: `mx.fast.rope` is one
    kernel, not composed of small operations. `narrow_experts`: `mx.gather_mm` supports 16-bit
    elements, not only float32. `chunk`: how many tokens a recurrence computes at once, a power of
    two.
    """

    streams: tuple[mx.Stream, ...] = ()
    fused_rotary: bool = True
    narrow_experts: bool = True
    chunk: int = 64

    @classmethod
    def of_processor(cls, streams: tuple[mx.Stream, ...] = ()) -> LinearParts:
        """Return the values for MLX on the CPU, with these streams."""
        return cls(streams, fused_rotary=False, narrow_experts=False, chunk=16)


class Identified(Protocol):
    """A batch with token ids, as `Embedding.embed` takes it."""

    @property
    def input_ids(self) -> mx.array:
        """The token ids, int32 [T]."""
        ...


class Linear(Protocol):
    """A linear layer, callable: y = x W^T + b."""

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, out] in x's dtype. Lazy."""
        ...


class PlainLinear:
    """A `Linear` with a plain weight [out, in], one product; `bias` is [out] (None: none)."""

    __slots__ = ("_bias", "_turned")

    def __init__(self, turned: mx.array, bias: mx.array | None) -> None:
        """`turned`: the weight as a transposed view [in, out]."""
        self._turned = turned
        self._bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, out] in x's dtype."""
        if self._bias is None:
            return x @ self._turned
        return mx.addmm(self._bias, x, self._turned)


class SplitLinear:
    """A `Linear` that computes equal shares of its outputs on several streams. For one row it is
    the one product `whole`, because splitting does not pay."""

    __slots__ = ("_shares", "_streams", "_whole")

    def __init__(self, whole: PlainLinear, shares: Sequence[PlainLinear], streams: Sequence[mx.Stream]) -> None:
        self._whole = whole
        self._shares = tuple(shares)
        self._streams = tuple(streams)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, out] in x's dtype."""
        if x.shape[0] == 1:
            return self._whole(x)
        outputs: list[mx.array] = []
        for share, stream in zip(self._shares, self._streams, strict=True):
            with mx.stream(stream):
                outputs.append(share(x))
        return mx.concatenate(outputs, axis=-1)


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantised weight: `weight` uint32 [..., out, in * bits / 32], scales and, for affine modes
    only, biases [..., out, in / group]; `form` tells bits, group size and mode."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    form: Form

    def product(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, out] in x's dtype: x times the transposed weight."""
        form = self.form
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, group_size=form.group_size, bits=form.bits, mode=form.mode
        )

    def rows(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the weight's rows `ids` int [T], dequantised, as [T, in] of `dtype`."""
        form, biases = self.form, None if self.biases is None else self.biases[ids]
        rows = mx.dequantize(
            self.weight[ids], self.scales[ids], biases, group_size=form.group_size, bits=form.bits, mode=form.mode
        )
        return rows.astype(dtype)


class QuantisedLinear:
    """A `Linear` with a packed weight, one product; `bias` is [out] (None: none)."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, packed: Packed, bias: mx.array | None) -> None:
        self._packed = packed
        self._bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, out] in x's dtype."""
        y = self._packed.product(x)
        return y if self._bias is None else y + self._bias


class SideBySide:
    """A `Linear` of several with one input, whose weights can not be one array because they are
    packed differently."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [T, in] to [T, sum of out], the concatenated results."""
        return mx.concatenate([part(x) for part in self._parts], axis=-1)


class Ordered:
    """A `Linear` with reordered outputs, for weights that can not be reordered themselves: output i
    is output order[i] of the linear layer given."""

    __slots__ = ("_linear", "_order")

    def __init__(self, linear: Linear, order: mx.array) -> None:
        self._linear = linear
        self._order = order

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [T, in] to [T, len(order)]."""
        return self._linear(x)[:, self._order]


class Embedding:
    """Looks up rows of a plain or packed weight [rows, size], times an optional scale, in the
    model's dtype."""

    __slots__ = ("_dtype", "_scale", "weight")

    def __init__(self, weight: mx.array | Packed, dtype: mx.Dtype, scale: float | None = None) -> None:
        self.weight = weight
        self._dtype = dtype
        self._scale = None if scale is None else mx.array(scale, dtype)

    def __call__(self, ids: mx.array) -> mx.array:
        """Return the rows [T, size] of ids int [T]."""
        rows = self.weight.rows(ids, self._dtype) if isinstance(self.weight, Packed) else self.weight[ids]
        return rows if self._scale is None else rows * self._scale

    def embed(self, batch: Identified) -> mx.array:
        """Return the rows [T, size] of the batch's ids."""
        return self(batch.input_ids)

    def row(self, index: int) -> mx.array:
        """Return the row of the single id `index`, [1, size]."""
        return self(mx.array([index]))


class Head:
    """The output layer (LM head): hidden states to float32 logits."""

    __slots__ = ("_linear",)

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map [N, H] to logits float32 [N, V]."""
        return self._linear(hidden).astype(mx.float32)


class MappedHead:
    """The output layer of a part of the vocabulary: float32 logits of the whole vocabulary, -inf
    for tokens without a row."""

    __slots__ = ("_head", "_rows")

    def __init__(self, head: Head, rows: mx.array) -> None:
        """`rows` int32 [V]: the head's row of each token; its number of rows for a token without
        one."""
        self._head = head
        self._rows = rows

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map [N, H] to logits float32 [N, V]."""
        own = self._head(hidden)
        return mx.concatenate([own, mx.full((own.shape[0], 1), -mx.inf)], axis=-1)[:, self._rows]
