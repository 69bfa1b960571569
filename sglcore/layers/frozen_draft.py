"""Layers of a draft that stores no keys and values.

Attention over another model's KV slots, a multiplication by one number, and an output layer that
skips groups of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglcore.checkpoint.frozen_draft_config import FrozenCells
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.layers.norm import RMSNorm
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable


class FrozenAttention:
    """Attention over the keys and values that a layer of another model has stored; queries have a
    norm for each head and are rotated.

    `layer` is the part that attention backends see.
    """

    __slots__ = ("_cos_sin", "_rotary", "layer", "q_norm")

    def __init__(self, build: Scope, cells: FrozenCells, rotary: Tensor, scaling: float) -> None:
        """`cells` names the other model's layer and gives its KV heads, head size and window;
        `rotary` is the result of `cos_sin_cache` for heads of this size; `scaling` is the factor of
        scores.
        """
        heads, size = build.config.num_attention_heads, cells.head_dim
        self.layer = BackendAttention(
            cells.layer_id, heads, cells.num_kv_heads, size, scaling, sliding_window=cells.window, is_frozen=True
        )
        self.q_norm = RMSNorm(build.at("q_norm"), size, build.config.rms_norm_eps, heads, offset=0.0)
        self._cos_sin = rotary
        turned = build.rows(heads * size), build.rows(size), build.indices(), rotary, size
        self._rotary = build.kernel(KernelTable.rotary, *turned)

    def __call__(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Return attention [T, heads * head_dim] of queries `q` of the same shape. Stores nothing.

        `q` is not yet normed and rotated.
        """
        size = self.layer.head_dim
        q = self.q_norm(q.unflatten(1, (-1, size))).flatten(1)
        # The kernel rotates queries and keys; there are no keys here.
        q, _ = self._rotary(q, q.new_zeros(len(q), size), batch.positions, self._cos_sin, size)
        return self.layer(q, None, None)


class Scale:
    """x * w with a weight [1]."""

    __slots__ = ("weight",)

    def __init__(self, build: Scope, name: str) -> None:
        self.weight = build.parameter(name, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return x * self.weight


class ChosenHead:
    """The output layer with -inf for tokens outside the best groups.

    Each group has a centroid that scores it. All rows of `head` are computed.
    """

    __slots__ = ("_centroids", "_groups", "_head", "_most", "_order")

    def __init__(self, build: Scope, groups: int, most: int, head: Callable[[Tensor], Tensor]) -> None:
        """`groups`: the number of groups, each of vocabulary / `groups` tokens. `most`: how many of
        them a row keeps. `head`: hidden states to logits float32 [N, vocab]. `centroids` and
        `token_ordering` (the tokens, group by group) are parameters of this scope.
        """
        tokens, device = build.config.vocab_size, build.weights.device
        self._centroids = Linear(build, (("centroids", groups),), build.config.hidden_size, may_round=False)
        self._order = build.parameter("token_ordering", tokens, dtype=torch.int32)
        self._groups = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._head, self._most = head, most
        build.weights.bounds.append((f"{build.prefix}token_ordering", self._order, tokens))
        build.weights.derived.append(self._invert)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab]."""
        scores = self._centroids(hidden)
        chosen = scores >= scores.topk(self._most, dim=-1)[0][:, -1:]
        return self._head(hidden).masked_fill(~chosen.index_select(1, self._groups), -torch.inf)

    def _invert(self) -> None:
        """Compute the group of each token, after loading; waits for the device. `_order` lists
        group 0 first; groups have equal size.
        """
        order = self._order.cpu().long()
        size = len(order) // self._centroids.weight.shape[0]
        groups = torch.empty(len(order), dtype=torch.int32)
        groups[order] = torch.arange(len(order), dtype=torch.int32) // size
        self._groups.copy_(groups)
