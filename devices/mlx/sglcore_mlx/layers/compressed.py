"""Attention over a sliding window and compressed blocks (DeepSeek-V4): the layer between its
projections."""

from __future__ import annotations

import mlx.core as mx

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.models.layer_kinds import CompressedProjections
from sglcore_mlx.forward_batch import ForwardBatch, IndexQueries
from sglcore_mlx.layers.rotary import Rotary
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.models.contract import BlockShape, LayerShape


class CompressedAttention:
    """A callable layer: one row for each token, which is key and value of all heads, in a sliding
    window; and with compression the rows of complete blocks."""

    __slots__ = (
        "_blocks",
        "_eps",
        "_index",
        "_index_shape",
        "_kv_norm",
        "_layer_id",
        "_projections",
        "_rotary",
        "layer",
    )

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Rotary,
        projections: CompressedProjections,
    ) -> None:
        """Arguments as in `Build.compressed_attention`."""
        self.layer = LayerShape(
            net.heads,
            1,
            net.head_dim,
            net.window,
            net.head_dim**-0.5,
            sinks=build.parameter("sinks", net.heads),
            value_dim=net.head_dim,
            blocks=_block_shape(net, compression),
        )
        self._kv_norm = build.parameter("kv_norm.weight", net.head_dim, offset=0.0)
        self._layer_id, self._projections, self._rotary = layer_id, projections, rotary
        self._eps, self._index_shape = build.config.rms_norm_eps, (net.index_heads, net.index_dim)
        self._blocks = self._index = None
        if compression is not None:
            scope = build.at("compressor")
            self._blocks = BlockRows(scope, compression, net.head_dim, rotary)
            if compression.is_sparse:
                self._index = BlockRows(scope.at("indexer"), compression, net.index_dim, rotary)

    def __call__(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Map [T, H] to [T, H]; `batch` stores the tokens' rows and blocks."""
        given, layer, tokens = self._projections, self.layer, hidden.shape[0]
        angles, latent = self._rotary.angles(batch.positions), given.latent(hidden)
        k = mx.fast.rms_norm(given.keys(hidden), self._kv_norm, self._eps).astype(hidden.dtype)
        q = given.queries(latent).reshape(tokens, layer.num_heads, layer.head_dim)
        q = turned(mx.fast.rms_norm(q, None, self._eps), angles)
        k = turned(k[:, None], angles)
        if self._blocks is None:
            mixed = batch.attend(self._layer_id, q, k, None)
        else:
            mixed = self._attend(hidden, latent, q, k, angles, batch)
        mixed = turned(mixed, (angles[0], -angles[1]))
        return given.output(mixed.reshape(tokens, layer.num_heads * layer.head_dim))

    def _attend(
        self,
        hidden: mx.array,
        latent: mx.array,
        q: mx.array,
        k: mx.array,
        angles: tuple[mx.array, mx.array],
        batch: ForwardBatch,
    ) -> mx.array:
        given, blocks, layer_id = self._projections, batch.blocks, self._layer_id
        assert blocks is not None and given.blocks is not None and self._blocks is not None
        batch.store(layer_id, k, None)
        blocks.compress(layer_id, 0, given.blocks(hidden), self._blocks.ape, self._blocks.finish)
        if self._index is None or given.index is None:
            return blocks.attend(layer_id, q)
        heads, size = self._index_shape
        blocks.compress(layer_id, 1, given.index.blocks(hidden), self._index.ape, self._index.finish)
        queries = turned(given.index.queries(latent).reshape(-1, heads, size), angles)
        weights = given.index.weights(hidden).astype(mx.float32) * (heads * size) ** -0.5
        return blocks.attend(layer_id, q, blocks.choose(layer_id, IndexQueries(queries, weights)))


class BlockRows:
    """The norm and the rotation of block rows, and `ape` float32 [ratio, series * size], which is
    added to gates."""

    __slots__ = ("_eps", "_rotary", "_weight", "ape")

    def __init__(self, build: Scope, compression: Compression, size: int, rotary: Rotary) -> None:
        self.ape = build.parameter("position_bias", compression.ratio, compression.series * size, offset=0.0)
        self._weight = build.parameter("kv_norm.weight", size, offset=0.0)
        self._eps, self._rotary = build.config.rms_norm_eps, rotary

    def finish(self, blocks: mx.array, positions: mx.array) -> mx.array:
        """Implements `Finish`: returns float32 [N, size]. `positions`: those of the first token of
        each block."""
        normed = mx.fast.rms_norm(blocks, self._weight, self._eps)
        return turned(normed[:, None], self._rotary.angles(positions))[:, 0]


def turned(heads: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
    """Return heads [T, N, D] with the last elements rotated, pairs of neighbours each: cosines and
    sines float32 [T, R / 2] of R elements. In float32, then cast."""
    cos, sin = (each[:, None] for each in angles)
    size = 2 * cos.shape[-1]
    first, last = heads[..., : heads.shape[-1] - size], heads[..., heads.shape[-1] - size :]
    pairs = last.astype(mx.float32).reshape(*last.shape[:-1], size // 2, 2)
    one, two = pairs[..., 0], pairs[..., 1]
    both = mx.stack([one * cos - two * sin, two * cos + one * sin], axis=-1).reshape(last.shape)
    return mx.concatenate([first, both.astype(heads.dtype)], axis=-1)


def _block_shape(net: CompressedConfig, compression: Compression | None) -> BlockShape | None:
    if compression is None:
        return None
    is_sparse = compression.is_sparse
    sizes = (net.head_dim, net.index_dim) if is_sparse else (net.head_dim,)
    return BlockShape(compression.ratio, compression.series, sizes, net.index_topk if is_sparse else 0)
