"""Linear layers, the embedding and output layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable


class Linear:
    """y = x W^T + b with a weight [out, in]. Several layers of the checkpoint with one input become
    one product.

    `parts`: (name in the scope, out features) of each, in the order of the weight's rows.
    `may_round`: quantisation to fewer bits than in the checkpoint is allowed, if requested.
    """

    __slots__ = ("_linear", "bias", "may_round", "names", "weight")

    def __init__(
        self,
        build: Scope,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        bias: bool = False,
        *,
        may_round: bool = True,
    ) -> None:
        self.may_round = may_round
        self.names = tuple(f"{build.prefix}{name}.weight" for name, _ in parts)
        self.weight = build.stacked([(f"{name}.weight", size) for name, size in parts], in_features)
        self.bias = build.stacked([(f"{name}.bias", size) for name, size in parts]) if bias else None
        self._linear = build.kernel(KernelTable.linear, build.rows(in_features), self.weight, self.bias)
        build.weights.linears.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, sum of out], the parts' outputs concatenated."""
        return self._linear(x, self.weight, self.bias)


class GroupedLinear:
    """A linear layer without bias for each group of inputs, with one `weight` [groups, outputs,
    inputs]."""

    __slots__ = ("_linear", "weight")

    def __init__(self, build: Scope, groups: int, inputs: int, outputs: int) -> None:
        """Declare `weight` of this scope, which the checkpoint stores as [groups * outputs,
        inputs], the rows of group 0 first. `inputs` and `outputs` are those of one group.
        """
        self.weight = build.parameter("weight", groups * outputs, inputs).view(groups, outputs, inputs)
        self._linear = build.kernel(KernelTable.grouped_linear, build.rows(groups, inputs), self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, groups * inputs] to [T, groups * outputs]."""
        return self._linear(x.unflatten(1, self.weight.shape[::2]), self.weight).flatten(1)


class OrderedLinear:
    """A linear layer with its outputs in another order than the checkpoint's rows."""

    __slots__ = ("_linear", "order")

    def __init__(
        self, build: Scope, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool
    ) -> None:
        """Output i is output order[i] of the concatenated `parts`, which are (name, outputs) in the
        checkpoint.
        """
        self._linear = Linear(build, parts, inputs, bias)
        self.order = torch.tensor(order, device=build.weights.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, len(order)]."""
        return self._linear(x).index_select(1, self.order)


class Embedding:
    """A table with a row for each id; the rows are multiplied by `scale`, if given, which is first
    rounded to the model's dtype."""

    __slots__ = ("_embedding", "_scale", "may_round", "names", "weight")

    def __init__(self, build: Scope, rows: int, size: int, scale: float | None = None) -> None:
        self.may_round = True
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=build.dtype, device="cpu"))
        self.names = (f"{build.prefix}weight",)
        self.weight = build.parameter("weight", rows, size)
        self._embedding = build.kernel(KernelTable.embedding, build.indices(), self.weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """int [T] to [T, size]."""
        rows = self._embedding(ids, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the rows [T, size] of the batch's ids, or a copy of its `input_embeds` if it has
        them."""
        if batch.input_embeds is not None:
            return batch.input_embeds.clone()  # kernels may write into it, not into the batch's
        return self(batch.input_ids)

    def row(self, index: int) -> Tensor:
        """Return row `index` of the table, [size], without `scale`. It is a view."""
        return self.weight[index]


class Head:
    """The output layer: hidden states to logits, with its own weight or the embedding's.

    `tied` is the embedding with the weight (None: a weight of its own). If the embedding's weight
    is packed, the head reads it packed.
    """

    __slots__ = ("_head", "_linear", "_owner")

    def __init__(self, build: Scope, rows: int, size: int, tied: Embedding | None) -> None:
        self._owner = Embedding(build, rows, size) if tied is None else tied
        self._linear = build.kernel(KernelTable.linear, build.rows(size), self._owner.weight, None)
        self._head = build.kernel(KernelTable.head, build.rows(size), self._owner.weight)
        build.weights.head, build.weights.is_head_tied = self._owner, tied is not None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab]."""
        if self._head is not None:
            return self._head(hidden, self._owner.weight)
        return self._linear(hidden, self._owner.weight, None).float()


class MappedHead:
    """The output layer of a part of the vocabulary: float32 logits of the whole vocabulary, -inf
    for tokens without a row."""

    __slots__ = ("_head", "_ids", "_rows")

    def __init__(self, build: Scope, name: str, ids: str, rows: int, size: int, outputs: int) -> None:
        """`name` is the module in this scope with the weight [rows, size], `ids` the parameter
        int32 [rows] in this scope: row i gives the logit of token i + `ids`[i]. `outputs` is the
        size of the whole vocabulary.
        """
        self._head = Head(build.at(name), rows, size, None)
        self._ids = build.parameter(ids, rows, dtype=torch.int32)
        self._rows = torch.full((outputs,), rows, dtype=torch.int32, device=build.weights.device)
        build.weights.offsets.append((self._ids, torch.arange(rows, dtype=torch.int32, device=build.weights.device)))
        build.weights.bounds.append((build.prefix + ids, self._ids, outputs))
        build.weights.derived.append(self._invert)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, outputs]."""
        logits = torch.nn.functional.pad(self._head(hidden), (0, 1), value=-torch.inf)
        return logits.index_select(1, self._rows)

    def _invert(self) -> None:
        rows = torch.full(self._rows.shape, len(self._ids), dtype=torch.int32)
        rows[self._ids.cpu().long()] = torch.arange(len(self._ids), dtype=torch.int32)
        self._rows.copy_(rows)


class Softcap:
    """cap * tanh(x / cap)."""

    __slots__ = ("_cap", "_softcap")

    def __init__(self, build: Scope, cap: float) -> None:
        self._cap = cap
        self._softcap = build.kernel(KernelTable.softcap, build.rows(build.config.vocab_size).float(), cap)

    def __call__(self, x: Tensor) -> Tensor:
        """Return cap * tanh(x / cap) of float32 logits [N, vocab]."""
        return self._softcap(x, self._cap)
