"""Linear layers of transformers' classes by the engine's kernels, in whatever form a device reads fastest."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor, nn
from transformers import PreTrainedModel

from sglcore.layers.build import Build
from sglcore.runtime.kernels.table import KernelTable

_CHOOSING = frozenset({"gate", "router", "wg"})
"""Layers that choose experts stay as they are: a rounding would choose others, and their classes read their weights."""


class PackedLinear(nn.Module):
    """y = x W^T + b over any leading dimensions. Its weight is a `Packable`'s, which the loader may keep in another form."""

    def __init__(self, linear: nn.Linear, name: str, build: Build) -> None:
        super().__init__()
        self.weights = _Weight(linear, name)
        self.bias = linear.bias
        self._sizes = linear.in_features, linear.out_features
        self._linear = build.kernel(KernelTable.linear, build.rows(linear.in_features), linear.weight, linear.bias)
        build.weights.linears.append(self.weights)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        inputs, outputs = self._sizes
        return self._linear(x.reshape(-1, inputs), self.weights.weight, self.bias).view(*x.shape[:-1], outputs)


class _Weight:
    """What the loader packs; no module, so that no class of torch's looks into it."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        self.names = (f"{name}.weight",)
        self.may_round = True
        self.weight: Tensor = linear.weight


def pack_linears(model: PreTrainedModel, build: Build, plain: Set[nn.Module] = frozenset()) -> None:
    """Replace every linear layer but those that choose experts, the output layer, whose weight may be the embedding's, and
    those of `plain`, whose weights others read."""
    head = model.get_output_embeddings()
    for name, parent in list(model.named_modules()):
        for own, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head and child not in plain and own not in _CHOOSING:
                setattr(parent, own, PackedLinear(child, f"{name}.{own}".removeprefix("."), build))
