"""Latent attention (MLA) in its absorbed form: queries are multiplied by the matrix that makes keys
from a cache entry, and the result by the matrix that makes values (DeepSeek-V2, section 2.1.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from sglcore.checkpoint.latent_config import FULL, INNER_EPS, LatentConfig
from sglcore_mlx.forward_batch import ForwardBatch, IndexQueries
from sglcore_mlx.layers.linear import Linear, Packed
from sglcore_mlx.layers.norm import LayerNorm
from sglcore_mlx.layers.rotary import Rotary
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.models.contract import LayerShape

ByHead: TypeAlias = Callable[[mx.array], mx.array]
"""A matrix of each head: [heads, T, in] to [heads, T, out]."""
Projections: TypeAlias = Callable[[mx.array], tuple[mx.array, mx.array, mx.array | None]]
"""As `Projections` in `models/layer_kinds.py`."""


class LatentAttention:
    """A callable layer: attention over one cache entry for each token, which all heads share. An
    entry is the normed latent, which is the value too, and the rotated part of the key."""

    __slots__ = (
        "_indexer",
        "_keys",
        "_latent",
        "_layer_id",
        "_norm",
        "_output",
        "_projections",
        "_rotary",
        "_values",
        "layer",
    )

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        rotary: Rotary,
        latent: LatentConfig,
        projections: Projections,
        output: Linear,
    ) -> None:
        """Arguments as in `Build.latent_attention`."""
        heads = build.config.num_attention_heads
        has_indexer = latent.top_k > 0 and latent.indexers[layer_id] == FULL
        self.layer = LayerShape(
            heads,
            1,
            latent.width,
            None,
            latent.scaling,
            value_dim=latent.kv_rank,
            top_k=latent.top_k,
            index_dim=latent.index_dim if has_indexer else 0,
        )
        self._indexer = Indexer(build.at("indexer"), rotary, latent) if has_indexer else None
        self._projections, self._output, self._rotary = projections, output, rotary
        self._norm = build.at("kv_a_layernorm").parameter("weight", latent.kv_rank)
        self._keys, self._values = _matrices(build, heads, latent)
        self._layer_id, self._latent = layer_id, latent

    def __call__(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Map [T, H] to [T, H]."""
        latent, tokens = self._latent, hidden.shape[0]
        queries, entry, low = self._projections(hidden)
        queries = queries.reshape(tokens, self.layer.num_heads, latent.query_dim)
        inner = mx.fast.rms_norm(entry[:, : latent.kv_rank], self._norm, INNER_EPS)
        shared = mx.concatenate([queries[..., latent.nope_dim :], entry[:, None, latent.kv_rank :]], axis=1)
        turned = batch.rotation(self._rotary)(pairs_apart(shared), shared.shape[1])
        keyed = self._keys(queries[..., : latent.nope_dim].swapaxes(0, 1)).swapaxes(0, 1)
        q = mx.concatenate([keyed, turned[:, :-1]], axis=-1)
        k = mx.concatenate([inner[:, None], turned[:, -1:]], axis=-1)
        index = None
        if self._indexer is not None and low is not None:
            index = self._indexer.queries(hidden, low, batch)
            k = mx.concatenate([k, self._indexer.keys(hidden, batch)], axis=-1)
        mixed = batch.attend(self._layer_id, q, k, None, index)
        values = self._values(mixed.swapaxes(0, 1)).swapaxes(0, 1)
        return self._output(values.reshape(tokens, self.layer.num_heads * latent.value_dim))


class Indexer:
    """The queries and keys with a few small heads that select the tokens to attend to (DeepSeek-
    V3.2, section 2.1)."""

    __slots__ = ("_is_paired", "_norm", "_rope_dim", "_rotary", "_shape", "_weigh", "_wk", "_wq")

    def __init__(self, build: Scope, rotary: Rotary, latent: LatentConfig) -> None:
        heads, size, hidden = latent.index_heads, latent.index_dim, build.config.hidden_size
        self._shape, self._rope_dim, self._is_paired = (heads, size), latent.rope_dim, latent.is_paired
        self._wq, self._wk = build.linear("wq_b", latent.q_rank, heads * size), build.linear("wk", hidden, size)
        self._norm = LayerNorm(build.at("k_norm"), size, INNER_EPS)
        self._weigh, self._rotary = build.wide("weights_proj", heads), rotary

    def queries(self, hidden: mx.array, low: mx.array, batch: ForwardBatch) -> IndexQueries:
        """Return the queries of low-rank queries [T, q_rank], and weights of hidden states [T,
        H]."""
        queries = self._wq(low).reshape(low.shape[0], *self._shape)
        return IndexQueries(self._turned(queries, batch), self._weigh(hidden))

    def keys(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Return the keys [T, 1, D] of hidden states [T, H]."""
        return self._turned(self._norm(self._wk(hidden))[:, None], batch)

    def _turned(self, heads: mx.array, batch: ForwardBatch) -> mx.array:
        first = heads[..., : self._rope_dim]
        turned = batch.rotation(self._rotary)(pairs_apart(first) if self._is_paired else first, heads.shape[1])
        return mx.concatenate([turned, heads[..., self._rope_dim :]], axis=-1)


def pairs_apart(heads: mx.array) -> mx.array:
    """Reorder the last dimension of [..., D]: pairs of neighbours become pairs that are D / 2
    apart, as `Rotary` rotates them. Products of queries and keys stay the same."""
    size = heads.shape[-1]
    return heads.reshape(*heads.shape[:-1], size // 2, 2).swapaxes(-1, -2).reshape(heads.shape)


def _matrices(build: Scope, heads: int, latent: LatentConfig) -> tuple[ByHead, ByHead]:
    """Return the matrices from queries [nope_dim] to the latent [kv_rank], and from it to values.
    The checkpoint has `kv_b_proj`, or `embed_q` and `unembed_out` as mlx_lm writes them."""
    nope, rank, value = latent.nope_dim, latent.kv_rank, latent.value_dim
    if build.weights.has(f"{build.prefix}embed_q.weight"):
        return _by_head(build, "embed_q", heads, nope, rank), _by_head(build, "unembed_out", heads, rank, value)
    both = _plain(build, "kv_b_proj", heads * (nope + value), rank).reshape(heads, nope + value, rank)
    keys = build.weights.keep(both[:, :nope])
    values = build.weights.keep(both[:, nope:].swapaxes(1, 2))
    return lambda x: x @ keys, lambda x: x @ values


def _plain(build: Scope, name: str, outputs: int, inputs: int) -> mx.array:
    """Return a weight [outputs, inputs], dequantised if it is packed."""
    form = build.form_of(name)
    if form is None:
        return build.weights.take(f"{build.prefix}{name}.weight", outputs, inputs)
    return build.unpacked(name, outputs, inputs, form)


def _by_head(build: Scope, name: str, heads: int, inputs: int, outputs: int) -> ByHead:
    """Return the matrices of a module with one tensor [heads, out, in], plain or packed."""
    form = build.form_of(name)
    if form is not None:
        packed: Packed = build.packed([(name, (heads, outputs))], inputs, form)
        return packed.product
    weight = build.weights.keep(build.weights.take(f"{build.prefix}{name}.weight", heads, outputs, inputs))
    turned = build.weights.view(weight.swapaxes(1, 2))
    return lambda x: x @ turned
