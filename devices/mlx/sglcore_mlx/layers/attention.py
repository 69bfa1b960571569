"""The attention layer: from concatenated queries, keys and values to the attention output."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.layers.norm import HeadNorm, WholeNorm
from sglcore_mlx.layers.rotary import Rotary
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.models.contract import LayerShape


class AttentionLayer:
    """A callable layer: norms of query and key heads (if the model has them), rotary embedding
    (unless None), attention; it has no linear layers. `layer`: its shape for the backends."""

    __slots__ = ("_layer_id", "_norm", "_rotary", "layer")

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        rotary: Rotary | None,
        *,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        is_encoder: bool = False,
        make_norm: Callable[..., HeadNorm | WholeNorm] | None = None,
    ) -> None:
        """Options as in `Build.attention`. `make_norm` makes the norm, from the scope and the
        offset; None: the one that the options name."""
        config, size = build.config, build.config.head_dim
        heads, kv_heads, window = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.sliding_windows[layer_id],
        )
        self.layer = LayerShape(
            heads,
            kv_heads,
            size,
            window,
            config.attention_scaling,
            causal=not is_encoder,
            softcap=config.options.get("attn_logit_softcapping"),
            sinks=build.parameter("sinks", heads) if sinks else None,
        )
        norm = make_norm or (WholeNorm if whole_norm else HeadNorm)
        self._norm = norm(build, norm_offset) if qk_norm or whole_norm else None
        self._rotary = rotary
        self._layer_id = layer_id

    def __call__(self, qkv: mx.array, batch: ForwardBatch) -> mx.array:
        """Map concatenated queries, keys and values [T, (heads + 2 kv_heads) * head_dim] to [T,
        heads * head_dim]. Keys and values are written to the KV cache by `batch.attend`."""
        shape, tokens = self.layer, qkv.shape[0]
        heads, turned = shape.num_heads, shape.num_heads + shape.num_kv_heads
        qkv = qkv.reshape(tokens, turned + shape.num_kv_heads, shape.head_dim)
        qk = qkv if self._norm is None else self._norm(qkv[:, :turned])
        if self._rotary is not None:
            qk = batch.rotation(self._rotary)(qk, turned)
        attended = batch.attend(self._layer_id, qk[:, :heads], qk[:, heads:turned], qkv[:, turned:])
        return attended.reshape(tokens, heads * shape.head_dim)

    def store(self, kv: mx.array, batch: ForwardBatch) -> None:
        """Store keys and values [T, 2 * kv_heads * head_dim], before norm and rotary embedding, in
        the KV slots of the batch's tokens."""
        count, size = self.layer.num_kv_heads, self.layer.head_dim
        both = kv.reshape(kv.shape[0], 2 * count, size)
        k = both[:, :count] if self._norm is None else self._norm.keys(both[:, :count])
        if self._rotary is not None:
            k = batch.rotation(self._rotary)(k, count)
        batch.store(self._layer_id, k, both[:, count:])
