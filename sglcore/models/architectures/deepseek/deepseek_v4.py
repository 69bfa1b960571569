"""DeepSeek-V4: hyper-connections around every block, attention over a sliding window and compressed
blocks, and experts with clamped factors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression, compressed_config
from sglcore.checkpoint.model_config import ModelConfig, MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.models.decoder import CausalLM, LayerState
from sglcore.models.layer_kinds import Array, Attention, Batch, Build, CompressedProjections, IndexProjections, Layer

NAMES: Sequence[tuple[str, str]] = (
    (r"^model\.", ""),
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.(compressor\.)?", ".self_attn.compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
    (r"\.w(kv|gate)\.", r".\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"(_proj)\.scale$", r"\1.weight_scale_inv"),
)
"""Renaming rules for published tensor names, applied in order.

Files that transformers writes have some of the same names after transformers' own prefixes.
"""

OFFSET = 0.0
"""The offset of norms: 0.0 makes them multiply in float32."""


class Chain:
    """Runs layers one after another."""

    __slots__ = ("layers",)

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def __call__(self, x: Array) -> Array:
        """[T, inputs of the first layer] to [T, outputs of the last]."""
        for layer in self.layers:
            x = layer(x)
        return x


class CompressedAttention:
    """Attention with low-rank queries, one row as key and value of all heads, and an output
    projection by groups of heads."""

    __slots__ = ("attention",)
    state = None

    def __init__(
        self, build: Build, layer_id: int, net: CompressedConfig, compression: Compression | None, rotary: Any
    ) -> None:
        self.attention: Attention = build.compressed_attention(
            layer_id, net, compression, rotary, _projections(build, net, compression)
        )

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.attention(hidden, batch)


def _projections(build: Build, net: CompressedConfig, compression: Compression | None) -> CompressedProjections:
    size, queries, latent = build.config.hidden_size, net.heads * net.head_dim, net.q_lora_rank
    into_groups = build.grouped("o_a_proj", net.groups, queries // net.groups, net.o_lora_rank)
    blocks = None if compression is None else _blocks(build.at("compressor"), compression, net.head_dim)
    index = None
    if compression is not None and compression.is_sparse:
        index = _index(build.at("compressor", "indexer"), net, compression)
    return CompressedProjections(
        latent=Chain(build.linear("q_a_proj", size, latent), build.norm("q_a_norm", latent, OFFSET)),
        queries=build.linear("q_b_proj", latent, queries),
        keys=build.linear("kv_proj", size, net.head_dim),
        output=Chain(into_groups, build.linear("o_b_proj", net.groups * net.o_lora_rank, size)),
        blocks=blocks,
        index=index,
    )


def _blocks(build: Build, compression: Compression, size: int) -> Layer:
    """Return a layer: [T, H] to [T, 2 * series * size], each token's part in compressed rows of
    `size` elements: values, then gates.
    """
    channels = compression.series * size
    return build.fused((("kv_proj", channels), ("gate_proj", channels)), build.config.hidden_size)


def _index(build: Build, net: CompressedConfig, compression: Compression) -> IndexProjections:
    return IndexProjections(
        queries=build.linear("q_b_proj", net.q_lora_rank, net.index_heads * net.index_dim),
        weights=build.at("scorer").linear("weights_proj", build.config.hidden_size, net.index_heads),
        blocks=_blocks(build, compression, net.index_dim),
    )


class LimitedExperts:
    """Routed experts plus a shared expert, with clamped factors. `is_hashed`: a table by token id
    chooses the experts; False: the gate's scores choose them.
    """

    __slots__ = ("experts", "shared")

    def __init__(self, build: Build, net: CompressedConfig, moe: MoeConfig, is_hashed: bool) -> None:
        routing = RoutingSpec("table" if is_hashed else "sqrtsoftplus")
        self.experts = build.experts("mlp", moe, ExpertSpec("limited", limit=net.limit), routing)
        self.shared = build.at("mlp").limited_mlp("shared_experts", moe.intermediate_size, net.limit)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]; the batch gives the token ids for the table."""
        return self.experts(hidden, batch.input_ids) + self.shared(hidden)


class DeepseekV4Layer:
    """Attention and experts. Before each, a hyper-connection combines the n streams [T, n, H] into
    one; after it, distributes the result over the streams."""

    __slots__ = ("attn_hc", "ffn_hc", "input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(
        self, build: Build, net: CompressedConfig, self_attn: CompressedAttention, mlp: LimitedExperts
    ) -> None:
        size, numbers = build.config.hidden_size, (net.streams, net.sinkhorn_iters, net.hc_eps)
        self.attn_hc = build.hyper_connection("attn_hc", *numbers)
        self.input_layernorm = build.norm("input_layernorm", size, OFFSET)
        self.self_attn = self_attn
        self.ffn_hc = build.hyper_connection("ffn_hc", *numbers)
        self.post_attention_layernorm = build.norm("post_attention_layernorm", size, OFFSET)
        self.mlp = mlp

    def __call__(self, hidden: Array, residual: None, batch: Batch) -> tuple[Array, None]:
        """Return the streams [T, n, H] after this layer, from the streams `hidden` before it; there
        is no residual sum.
        """
        x, mix = self.attn_hc.narrow(hidden)
        hidden = self.attn_hc.widen(self.self_attn(self.input_layernorm(x), batch), hidden, mix)
        x, mix = self.ffn_hc.narrow(hidden)
        return self.ffn_hc.widen(self.mlp(self.post_attention_layernorm(x), batch), hidden, mix), None


class DeepseekV4ForCausalLM(CausalLM):
    """Layers pass all streams [T, n, H] to the next. The MTP layers are not read."""

    ignored = (r"mtp\..*",)
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    knows: ClassVar[frozenset[str]] = frozenset(
        {"n_group", "n_shared_experts", "routed_scaling_factor", "shared_expert_intermediate_size", "swiglu_limit"}
    )
    norm_offset: ClassVar[float | None] = OFFSET
    net: CompressedConfig

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.hc_head = build.at("model").hyper_head("hc_head", self.net.streams, self.net.hc_eps)
        self.feature_size *= self.net.streams

    def _check(self, config: ModelConfig) -> None:
        super()._check(config)
        self.net = compressed_config(config)

    @classmethod
    def own_name(cls, name: str) -> str:
        """Map a published name to the name in this model, mostly transformers' name; a name that
        transformers wrote keeps its modules. Names of MTP layers begin with `mtp.`.
        """
        for published, own in NAMES:
            name = re.sub(published, own, name)
        return name if name.startswith(("lm_head.", "mtp.")) else f"model.{name}"

    def make_rotary(self, build: Build) -> tuple[Any, Any]:
        """Return two rotary embeddings: for layers with only a sliding window, and for layers with
        blocks."""
        return build.rotary(self.net.main_rope), build.rotary(self.net.block_rope)

    def make_layer(self, build: Build, layer_id: int) -> DeepseekV4Layer:
        compression = self.net.compressions[layer_id]
        rotary = self.rotary[compression is not None]
        attention = CompressedAttention(build.at("self_attn"), layer_id, self.net, compression, rotary)
        experts = LimitedExperts(build, self.net, self.moe, self.net.is_hashed[layer_id])
        return DeepseekV4Layer(build, self.net, attention, experts)

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: every stream starts with the embedded tokens."""
        return LayerState(self.hc_head.begin(self.embed_tokens.embed(batch)), None, batch)

    def finish_both(self, state: LayerState) -> tuple[Array, Array]:
        """Combine the streams and apply the last norm; also return its input."""
        combined = self.hc_head.end(state.hidden)
        return self.norm(combined), combined
