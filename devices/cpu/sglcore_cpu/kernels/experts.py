"""Expert routing, and mixtures of experts with unpacked weights, by the native kernels.

Models use them in float32 and bfloat16 (`operands.takes`). Tensors with a dtype or a memory layout
that the kernels do not read go to the reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_kernels
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.kernels.operands import INDEX_BYTES, same_dtype, takes
from sglcore_cpu.native import TYPES, Engine

SUM_EPS = 1e-20
"""Added to the sum that weights are divided by, because all scores may be 0."""
SIGMOID, ROOT_OF_SOFTPLUS = 0, 1
GATED, CLAMPED, SQUARED = 0, 1, 2


class Experts:
    """Implements the kernel table's entries for experts by methods of the same names, on one
    engine. Each call waits for its result."""

    def __init__(self, engine: Engine) -> None:
        self._empty = engine.empty
        self._top_k, self._scored, self._hashed, self._moe = (
            engine.kernel(name).bind() for name in ("top_k_routing", "scored_routing", "hash_routing", "moe")
        )

    @implements(takes)
    def top_k_routing(self, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.top_k_routing`: logits [T, E] -> (weights [T, K] of logits' dtype,
        ids int64 [T, K]), the K largest softmax probabilities, largest first; among equal logits
        the lower expert index comes first. `normalize`: divide the weights by their sum."""
        if not _is_plain(logits):
            return reference_kernels.top_k_routing(logits, k, normalize)
        weights, ids = self._choices(logits, k)
        self._top_k(**_routing(logits, weights, ids, normalize))
        return weights, ids

    @implements(takes)
    def sigmoid_routing(
        self, logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int, normalize: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.sigmoid_routing`: logits [T, E], bias float32 [E] -> (weights [T,
        K] of logits' dtype, ids int64 [T, K]), the K largest of sigmoid(logits) + bias within the
        best `top_groups` of `groups`, largest first; among equal scores the lower group and expert
        index come first. Weights are without the bias, divided by their sum if `normalize`, times
        `scale`."""
        if not (_is_plain(logits) and _is_wide(bias)):
            return reference_kernels.sigmoid_routing(logits, bias, k, groups, top_groups, normalize, scale)
        return self._scored_by(SIGMOID, logits, bias, k, (groups, top_groups), normalize, scale)

    @implements(takes)
    def sqrtsoftplus_routing(self, logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.sqrtsoftplus_routing`: logits [T, E], bias float32 [E] -> (weights
        [T, K] of logits' dtype, ids int64 [T, K]), the K largest of sqrt(softplus(logits)) + bias,
        largest first; among equal scores the lower expert index comes first. Weights are without
        the bias, divided by their sum, times `scale`."""
        if not (_is_plain(logits) and _is_wide(bias)):
            return reference_kernels.sqrtsoftplus_routing(logits, bias, k, scale)
        return self._scored_by(ROOT_OF_SOFTPLUS, logits, bias, k, (1, 1), True, scale)

    @implements(takes)
    def hash_routing(self, logits: Tensor, input_ids: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.hash_routing`: logits [T, E], input_ids int [T], table int32
        [vocab, K] -> (weights [T, K] of logits' dtype, ids int64 [T, K]): the K experts that the
        table has for each token, with weights as in `sqrtsoftplus_routing`. Computes the scores of
        these experts only."""
        ids_bytes = INDEX_BYTES.get(input_ids.dtype)
        is_chosen = table.dtype is torch.int32 and table.is_contiguous() and input_ids.is_contiguous()
        if ids_bytes is None or not (_is_plain(logits) and is_chosen):
            return reference_kernels.hash_routing(logits, input_ids, table, scale)
        weights, ids = self._choices(logits, table.shape[1])
        self._hashed(
            **_routing(logits, weights, ids, True),
            input_ids=input_ids.data_ptr(),
            input_bytes=ids_bytes,
            chosen=table.data_ptr(),
            eps=SUM_EPS,
            scale=scale,
        )
        return weights, ids

    def moe(self, hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """Implement `KernelTable.moe`: hidden [T, H], weights and ids [T, K], w13 [E, 2 * I, H], w2
        [E, H, I] -> [T, H]. Only chosen experts are computed, and each one's w13 and w2 are read
        once."""
        found = self._mixed(GATED, hidden, weights, ids, w13, w2)
        return reference_kernels.moe(hidden, weights, ids, w13, w2) if found is None else found

    @implements(takes)
    def limited_moe(
        self, hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, limit: float
    ) -> Tensor:
        """Implement `KernelTable.limited_moe` with the kernel of `moe`; shapes as there. `limit`
        clamps gate and up before the activation."""
        found = self._mixed(GATED, hidden, weights, ids, w13, w2, limit=limit)
        return reference_kernels.limited_moe(hidden, weights, ids, w13, w2, limit) if found is None else found

    def clamped_moe(
        self,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor,
        w13: Tensor,
        b13: Tensor,
        w2: Tensor,
        b2: Tensor,
        alpha: float,
        limit: float,
    ) -> Tensor:
        """Implement `KernelTable.clamped_moe` with the kernel of `moe`: shapes as there, with
        biases b13 [E, 2 * I] and b2 [E, H], and interleaved gate and up rows in w13."""
        found = self._mixed(CLAMPED, hidden, weights, ids, w13, w2, (b13, b2), alpha, limit)
        if found is None:
            return reference_kernels.clamped_moe(hidden, weights, ids, w13, b13, w2, b2, alpha, limit)
        return found

    def relu2_moe(self, hidden: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Implement `KernelTable.relu2_moe` with the kernel of `moe`: shapes as there, with w1 [E,
        I, H], no gate, and the activation max(x, 0)^2."""
        found = self._mixed(SQUARED, hidden, weights, ids, w1, w2)
        return reference_kernels.relu2_moe(hidden, weights, ids, w1, w2) if found is None else found

    def _choices(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tokens = logits.shape[0]
        return self._empty(tokens, k, dtype=logits.dtype), self._empty(tokens, k, dtype=torch.int64)

    def _scored_by(
        self,
        kind: int,
        logits: Tensor,
        bias: Tensor,
        k: int,
        groups: tuple[int, int],
        normalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        weights, ids = self._choices(logits, k)
        self._scored(
            **_routing(logits, weights, ids, normalize),
            bias=bias.data_ptr(),
            kind=kind,
            groups=groups[0],
            top_groups=groups[1],
            eps=SUM_EPS,
            scale=scale,
        )
        return weights, ids

    def _mixed(
        self,
        form: int,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor,
        w13: Tensor,
        w2: Tensor,
        biases: tuple[Tensor, ...] = (),
        alpha: float = 0.0,
        limit: float = math.inf,
    ) -> Tensor | None:
        """Run the kernel `moe` and return [T, H]; None, before anything runs, for dtypes or strides
        that it does not read. `form`: the activation (GATED, CLAMPED or SQUARED). `biases`: empty,
        or (b13, b2)."""
        element, ids_bytes = TYPES.get(hidden.dtype), INDEX_BYTES.get(ids.dtype)
        is_plain = hidden.stride()[1] == 1 and all(part.is_contiguous() for part in (weights, ids, w13, w2, *biases))
        if element is None or ids_bytes is None or not is_plain:
            return None
        if not same_dtype(hidden, weights, w13, w2, *biases):
            return None
        tokens, hidden_size = hidden.shape
        out = self._empty(tokens, hidden_size, dtype=hidden.dtype)
        b13, b2 = (bias.data_ptr() for bias in biases) if biases else (0, 0)
        self._moe(
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride()[0],
            weights=weights.data_ptr(),
            ids=ids.data_ptr(),
            ids_bytes=ids_bytes,
            w13=w13.data_ptr(),
            b13=b13,
            w2=w2.data_ptr(),
            b2=b2,
            out=out.data_ptr(),
            tokens=tokens,
            choices=ids.shape[1],
            experts=w13.shape[0],
            hidden_size=hidden_size,
            inner=w2.shape[2],
            type=element,
            form=form,
            alpha=alpha,
            limit=limit,
        )
        return out


def _is_plain(logits: Tensor) -> bool:
    return logits.dtype in TYPES and logits.stride()[1] == 1


def _is_wide(bias: Tensor) -> bool:
    return bias.dtype is torch.float32 and bias.is_contiguous()


def _routing(logits: Tensor, weights: Tensor, ids: Tensor, normalize: bool) -> dict[str, int]:
    tokens, experts = logits.shape
    return {
        "logits": logits.data_ptr(),
        "stride": logits.stride()[0],
        "weights": weights.data_ptr(),
        "ids": ids.data_ptr(),
        "tokens": tokens,
        "experts": experts,
        "k": weights.shape[1],
        "normalize": int(normalize),
        "type": TYPES[logits.dtype],
    }
