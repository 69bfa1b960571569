"""DeepSeek-V2: latent attention, group-limited softmax routing, and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sglcore.checkpoint.latent_config import INNER_EPS, LatentConfig, latent_config
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.core.errors import ConfigError
from sglcore.models.decoder import CausalLM, DecoderLayer, SharedExpert
from sglcore.models.layer_kinds import Array, Attention, Batch, Build, Layer


class LatentProjections:
    """The `layer_kinds.Projections` of a layer, to queries and cache entries. Low-rank queries
    share their first product with the cache entries."""

    __slots__ = ("first", "norm", "queries", "rank")

    def __init__(self, build: Build, latent: LatentConfig) -> None:
        config, self.rank = build.config, latent.q_rank
        size, outputs = config.hidden_size, config.num_attention_heads * latent.query_dim
        kept = "kv_a_proj_with_mqa", latent.width
        if not self.rank:
            self.first = build.linear(*kept[:1], size, latent.width, config.attention_bias)
            self.queries = build.linear("q_proj", size, outputs)
            return
        self.first = build.fused((("q_a_proj", self.rank), kept), size, config.attention_bias)
        self.norm = build.norm("q_a_layernorm", self.rank, eps=INNER_EPS)
        self.queries = build.linear("q_b_proj", self.rank, outputs)

    def __call__(self, hidden: Array) -> tuple[Array, Array, Array | None]:
        """Return queries [T, heads * query_dim], cache entries [T, width], and the normed query
        latents [T, q_rank] (None for plain queries) of hidden states [T, H]."""
        first = self.first(hidden)
        if not self.rank:
            return self.queries(hidden), first, None
        inner = self.norm(first[:, : self.rank])
        return self.queries(inner), first[:, self.rank :], inner


class LatentSelfAttention:
    """Latent attention: all heads share one cache entry for each token."""

    __slots__ = ("attention",)
    attention: Attention
    state = None

    def __init__(self, build: Build, layer_id: int, rotary: Any, latent: LatentConfig) -> None:
        config = build.config
        values = config.num_attention_heads * latent.value_dim
        output = build.linear("o_proj", values, config.hidden_size, config.attention_bias)
        projections = LatentProjections(build, latent)
        self.attention = build.latent_attention(layer_id, rotary, latent, projections, output)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.attention(hidden, batch)


class DeepseekV2ForCausalLM(CausalLM):
    """Layers have a dense block or, where `moe.layers` is true, routed experts plus a shared one.

    `wanted`: values that keys of the configuration must have if they are present.
    """

    knows: ClassVar[frozenset[str]] = frozenset({"n_group", "n_shared_experts", "routed_scaling_factor"})
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    behind: ClassVar[int] = 1
    wanted: ClassVar[Mapping[str, Any]] = MappingProxyType({"scoring_func": "softmax", "norm_topk_prob": False})

    def __init__(self, build: Build) -> None:
        self.latent = self.make_latent(build)
        super().__init__(build)

    def make_latent(self, build: Build) -> LatentConfig:
        """Return the configuration of latent attention, the same in all layers. Raises
        `ConfigError` for values that do not fit.
        """
        return latent_config(build.config, self.wanted)

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = LatentSelfAttention(build.at("self_attn"), layer_id, self.rotary, self.latent)
        if not self.moe.layers[layer_id]:
            return DecoderLayer(build, attention, build.mlp("mlp", build.config.intermediate_size))
        block, experts = build.at("mlp"), self.make_experts(build)
        return DecoderLayer(
            build, attention, SharedExpert(block, experts, block.mlp("shared_experts", self.moe.shared_size))
        )

    def make_experts(self, build: Build) -> Layer:
        """Return the routed experts alone, without the shared one. Raises `ConfigError` for a
        `topk_method` that is neither greedy nor group-limited greedy."""
        method = build.config.words.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(
                f"{build.config.file} has topk_method = {method!r}",
                wanted="'greedy' or 'group_limited_greedy'",
            )
        return build.experts("mlp", self.moe, routing=RoutingSpec("group_limited"))
