"""Layers of transformers' classes on the engine's kernels. Before `place`, which declares a layer's
weights and chooses its kernels, the layer returns tensors with undefined content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglcore.layers.linear import Embedding, Linear
from sglcore.layers.norm import RMSNorm
from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.deferred_sums import Addend, Sum, added
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.table import KernelTable


class Product:
    """Linear layers (name, layer) with a common input, computed as one product. Before `place`,
    results have undefined content.
    """

    def __init__(self, linears: Sequence[tuple[str, nn.Linear]]) -> None:
        first = linears[0][1]
        self.parts = [(name, each.out_features) for name, each in linears]
        self.inputs, self.outputs = first.in_features, sum(size for _, size in self.parts)
        self.has_bias = first.bias is not None
        self.linear: Linear | None = None
        self._x: Tensor | None = None
        self._split: Sequence[Tensor] = ()

    def place(self, build: Build) -> Linear:
        """Declare the weights, and choose the kernel; return the layer that computes."""
        self.linear = made = Linear(build, self.parts, self.inputs, self.has_bias)
        return made

    def rows(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return empty_as(x, x.shape[0], self.outputs) if self.linear is None else self.linear(x)

    def whole(self, x: Tensor, is_addend: bool = False) -> Tensor:
        """[..., in] to [..., out]. With `is_addend`, [1, T, in] to an `Addend` [1, T, out]: the
        result, which the next norm adds to the residual; a plain tensor under a compiler.
        """
        shape = *x.shape[:-1], self.outputs
        if self.linear is None and not is_addend:
            return empty_as(x, *shape)
        return handed(self.rows(as_rows(x)), shape, is_addend)

    def part(self, place: int, x: Tensor) -> Tensor:
        """[..., in] to the output of layer `place`. Computes the whole product at the first call
        with an `x` and drops it at the last layer's; a call out of order only costs time."""
        if x is not self._x:
            self._x, self._split = x, self.whole(x).split([size for _, size in self.parts], dim=-1)
        part = self._split[place]
        if place == len(self.parts) - 1:
            self._x, self._split = None, ()
        return part


class PackedLinear(nn.Module):
    """y = x W^T + b over any leading dimensions, alone or as a part of a `Product`. Before `place`,
    results have undefined content.
    """

    part = 0
    is_addend = False
    is_read = False

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self.name = name
        self._own = (linear,)  # in a tuple, so that it is not registered as a submodule
        self.product = Product([(name, linear)])

    @property
    def weight(self) -> Tensor:
        """The original weight, on the meta device. A read sets `is_read`: the class then computes
        with the weight itself."""
        self.is_read = True
        return self.own.weight

    @property
    def bias(self) -> Tensor | None:
        """The original bias, on the meta device. A read sets `is_read`."""
        self.is_read = True
        return self.own.bias

    @property
    def own(self) -> nn.Linear:
        """The original layer."""
        return self._own[0]

    def place(self, build: Build) -> None:
        """Declare the weights and choose the kernel, once for all parts of a product."""
        if self.part == 0:
            self.product.place(build)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; with `is_addend`, [1, T, in] to an `Addend`, which the next norm
        adds to the residual.
        """
        if len(self.product.parts) == 1:
            return self.product.whole(x, self.is_addend)
        found = self.product.part(self.part, x)
        return Addend.of(found, found[0]) if self.is_addend else found


Activation = Entry[Callable[[Tensor], Tensor]]
"""A kernel table entry that takes gate and up in one tensor [T, 2 * I] and returns [T, I]."""


class GatedBlock(nn.Module):
    """down(activation(gate(x)) * up(x)); `gate_up` is the product of gate and up. Before `place`,
    results have undefined content.
    """

    is_addend = False

    def __init__(self, gate_up: Product, down: Product, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._activation = activation
        self._inner: Callable[[Tensor], Tensor] | None = None

    def place(self, build: Build) -> None:
        """Declare the weights, and choose the kernels."""
        linear, gated = self.gate_up.place(build), None
        self.down.place(build)
        if self._activation is KernelTable.silu_and_mul and not self.gate_up.has_bias:
            gated = build.kernel(KernelTable.gated_linear, build.rows(self.gate_up.inputs), linear.weight)
        activate = build.kernel(self._activation, build.rows(self.gate_up.outputs))
        self._inner = (lambda x: activate(linear(x))) if gated is None else (lambda x: gated(x, linear.weight))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]; with `is_addend`, [1, T, H] to an `Addend`, which the next norm
        adds to the residual.
        """
        if self._inner is None:
            return handed(empty_as(x, x.shape[:-1].numel(), x.shape[-1]), x.shape, self.is_addend)
        return handed(self.down.rows(self._inner(as_rows(x))), x.shape, self.is_addend)


@dataclass(frozen=True, slots=True)
class NormForm:
    """The variant of root mean square norm. `offset` is added to the weight, and the product with
    it is in float32 and then cast; None: the row is cast before the product with the weight."""

    eps: float
    offset: float | None


class Norm(nn.Module):
    """Root mean square norm over the last dimension, fused with the addition before it if its input
    is a `Sum`. `heads`: the heads of its inputs [1, T, heads, size], or [1, heads, T, size] if
    `is_transposed`; None for inputs [1, T, size]."""

    heads: int | None = None
    is_transposed = False
    waits = False
    """Whether attention norms the heads, together with the rotary embedding. Does not hold under a
    compiler."""
    is_addend = False

    def __init__(self, name: str, own: Tensor, form: NormForm) -> None:
        """`own` is the original weight, on the meta device."""
        super().__init__()
        self._name, self._form = name, form
        self._own = (own,)  # in a tuple, so that it is not registered as a parameter
        self._norm: RMSNorm | None = None

    @property
    def weight(self) -> Tensor:
        """The original weight, on the meta device, for classes that read its dtype. The class must
        not compute with it."""
        return self._own[0]

    def place(self, build: Build) -> None:
        """Declare the weight, and choose the kernels."""
        scope = build.at(*self._name.split("."))
        self._norm = RMSNorm(scope, self._own[0].shape[0], self._form.eps, self.heads, self._form.offset)

    @property
    def placed(self) -> RMSNorm:
        """The layer that computes. Only after `place`."""
        assert self._norm is not None
        return self._norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]; the input itself if attention norms the heads (`waits`).
        Before `place`, the result has undefined content.
        """
        if self._norm is None:
            if type(x) is Sum:
                x.total = x.residual
            x = added(x)
            return empty_as(x, *x.shape)
        if self.waits and not torch.compiler.is_compiling():
            return x
        if type(x) is Sum and x.total is None:
            normed, x.total = self._norm.add(x.addend, x.residual)
            return handed(normed, (1, *normed.shape), self.is_addend)
        x = added(x)
        if x.dim() == 2 or x.shape[0] != 1:
            return self._norm(x)
        if self.is_transposed:
            # Kernels take [T, heads, size]; some are compiled for each number in the middle.
            return self._norm(x[0].transpose(0, 1)).transpose(0, 1)[None]
        return handed(self._norm(x[0]), x.shape, self.is_addend)


class Rows(nn.Module):
    """An embedding: a row of the weight `name` for each id, times a scale."""

    def __init__(self, embedding: nn.Embedding, name: str, scale: float) -> None:
        super().__init__()
        self.name = name
        self.is_read = False
        self._scale = None if scale == 1.0 else scale
        self._own = (embedding,)  # in a tuple, so that it is not registered as a submodule
        self._embedding: Embedding | None = None

    @property
    def weight(self) -> Tensor:
        """The original weight, on the meta device. A read sets `is_read`: the class then computes
        with the weight itself."""
        self.is_read = True
        return self.own.weight

    @property
    def own(self) -> nn.Embedding:
        """The original module."""
        return self._own[0]

    def place(self, build: Build) -> Embedding:
        """Return the embedding that computes; the first call declares the weight and chooses the
        kernel.
        """
        if self._embedding is None:
            rows, size = self.own.weight.shape
            self._embedding = Embedding(build.at(*self.name.split(".")), rows, size, self._scale)
        return self._embedding

    def forward(self, ids: Tensor) -> Tensor:
        """int [...] to [..., size]."""
        if self._embedding is None:
            return self.own(ids)
        return self._embedding(ids.reshape(-1)).view(*ids.shape, self.own.weight.shape[1])


def empty_as(x: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor with the dtype and device of `x`, outside any torch function mode. On
    the meta device `new_empty` takes four times as long."""
    with torch._C.DisableTorchFunction():
        return torch.empty(shape, dtype=x.dtype, device=x.device)


def as_rows(x: Tensor) -> Tensor:
    """Return [..., size] as [T, size] with contiguous rows, if possible a view, as kernels take
    them: classes also pass columns, for example after a convolution."""
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


Replacement = PackedLinear | GatedBlock | Norm


class NoDropout(nn.Dropout):
    """Dropout that returns its input, because models only infer here. Torch's would record a copy
    in a graph."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


def handed(rows: Tensor, shape: Sequence[int], is_addend: bool) -> Tensor:
    """Return a view of `rows` [T, H] in another shape. With `is_addend` it is an `Addend`, which
    the next norm adds to the residual; under a compiler always a plain tensor.
    """
    x = rows.view(shape)
    return Addend.of(x, rows) if is_addend and not torch.compiler.is_compiling() else x
