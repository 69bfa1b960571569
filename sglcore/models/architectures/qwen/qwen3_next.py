"""Qwen3-Next: the gated delta rule, gated attention in every fourth layer, a shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from sglcore.checkpoint.recurrent_config import FULL, DeltaNetConfig, delta_net_config, layer_kinds
from sglcore.models.architectures.qwen.qwen2_moe import Qwen2MoeForCausalLM
from sglcore.models.decoder import DecoderLayer, Recurrent
from sglcore.models.layer_kinds import Array, Batch, Build, Layer


class GatedAttention:
    """Attention with an output gate: the sigmoid of a part of the query projection, by element."""

    __slots__ = ("attention", "o_proj", "qkv_proj", "sigmoid", "width")
    state = None

    def __init__(self, build: Build, layer_id: int, rotary: Any) -> None:
        config = build.config
        size, heads, bias = config.head_dim, config.num_attention_heads, config.attention_bias
        queries, keys = heads * size, config.num_key_value_heads * size
        parts = (("q_proj", 2 * queries), ("k_proj", keys), ("v_proj", keys))
        self.qkv_proj = build.ordered(parts, config.hidden_size, [*_halves_apart(heads, size, keys)], bias)
        self.attention = build.attention(layer_id, rotary, qk_norm=True, norm_offset=1.0)
        layer = self.attention.layer
        self.width = (layer.num_heads + 2 * layer.num_kv_heads) * size
        self.sigmoid = build.activation("sigmoid")
        self.o_proj = build.linear("o_proj", queries, config.hidden_size, bias)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        qkv = self.qkv_proj(hidden)
        return self.o_proj(self.attention(qkv[:, : self.width], batch) * self.sigmoid(qkv[:, self.width :]))


def _halves_apart(heads: int, size: int, keys: int) -> Iterator[int]:
    """Yield, for each output in the order queries, keys, values, gates, its index in the
    checkpoint's order (`q_proj`, `k_proj`, `v_proj`).

    In the checkpoint's query projection, each head's query comes before its gate. `size`: elements
    of a head; `keys`: outputs of `k_proj`, and as many of `v_proj`.
    """
    for offset in (0, size):
        for head in range(heads):
            yield from range(2 * head * size + offset, 2 * head * size + offset + size)
        if not offset:
            yield from range(2 * heads * size, 2 * heads * size + 2 * keys)


def _parts_apart(net: DeltaNetConfig) -> Iterator[int]:
    """Yield, for each output in the order queries, keys, values, gates, b, a, its index in the
    checkpoint's order (`in_proj_qkvz`, then `in_proj_ba`).

    The outputs of each projection in the checkpoint are grouped by key head.
    """
    each = net.value_heads // net.key_heads
    sizes = (net.key_dim, net.key_dim, each * net.value_dim, each * net.value_dim)
    for first, parts in ((0, sizes), (net.key_heads * sum(sizes), (each, each))):
        for place, size in enumerate(parts):
            for head in range(net.key_heads):
                start = first + head * sum(parts) + sum(parts[:place])
                yield from range(start, start + size)


class Qwen3NextForCausalLM(Qwen2MoeForCausalLM):
    """A layer has the gated delta rule or gated attention, as the configuration's layer types say.
    The checkpoint's MTP layers are not read."""

    calls_library = True
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    ignored = (r"model\.mtp\..*",)
    norm_offset: ClassVar[float | None] = 1.0

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        kinds = layer_kinds(build.config)
        of_its_kind = kinds[:layer_id].count(kinds[layer_id])
        if kinds[layer_id] == FULL:
            mixer = GatedAttention(build.at("self_attn"), of_its_kind, self.rotary)
        else:
            mixer = self._make_delta_net(build.at("linear_attn"), of_its_kind)
        return DecoderLayer(build, mixer, self.make_mlp(build, layer_id), self.norm_offset)

    def _make_delta_net(self, build: Build, state_id: int) -> Recurrent:
        net, size = delta_net_config(build.config), build.config.hidden_size
        projection, output = self.make_projection(build, net), build.linear("out_proj", net.values, size)
        return Recurrent(build.gated_delta_net(state_id, net, projection, output))

    def make_projection(self, build: Build, net: DeltaNetConfig) -> Layer:
        """Return the projection of a gated delta rule layer: queries, keys and values, the gate, b
        and a."""
        parts = (("in_proj_qkvz", 2 * net.keys + 2 * net.values), ("in_proj_ba", 2 * net.value_heads))
        return build.ordered(parts, build.config.hidden_size, [*_parts_apart(net)])

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        """Return the feed-forward block; dense in all layers if the configuration has no
        experts."""
        if build.config.moe is None:
            return build.mlp("mlp", build.config.intermediate_size)
        return super().make_mlp(build, layer_id)
