"""Attention over given keys and values: with `mx.fast`, or with plain operations for a softcap,
which `mx.fast` does not support."""

from __future__ import annotations

import mlx.core as mx

from sglcore_mlx.models.contract import LayerShape


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str, layer: LayerShape) -> mx.array:
    """Attend with q [B, heads, L, D] over k [B, kv_heads, S, D] and v [B, kv_heads, S, E], with the
    layer's scale, softcap and sinks; returns [B, heads, L, E] in q's dtype. `mask`, True where a
    query sees a key: bool [L, S] or [B, 1, 1 or L, S], or "causal" (the last query sees the last
    key). Sums are in float32. Builds the lazy graph only."""
    if layer.softcap is None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=layer.scale, mask=mask, sinks=layer.sinks)
    grouped = q.reshape(q.shape[0], layer.num_kv_heads, -1, *q.shape[2:]).astype(mx.float32)
    keys, values = (x[:, :, None].astype(mx.float32) for x in (k, v))
    bent = layer.softcap * mx.tanh(grouped * (layer.scale / layer.softcap) @ keys.swapaxes(-1, -2))
    scores = mx.where(_seen(mask, *bent.shape[-2:]), bent, -mx.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.astype(mx.float32).reshape(layer.num_kv_heads, -1, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[2]]
    return (weights @ values).reshape(q.shape).astype(q.dtype)


def _seen(mask: mx.array | str, queries: int, keys: int) -> mx.array:
    """Return `mask` of `attend` as one that broadcasts to [B, kv_heads, heads per KV head, L, S];
    "causal" becomes bool [L, S] for L queries and S keys."""
    if isinstance(mask, str):
        return mx.arange(keys)[None] <= mx.arange(keys - queries, keys)[:, None]
    return mask if mask.ndim == 2 else mask[:, :, None]
