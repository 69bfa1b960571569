"""OLMo 2: norms after attention and feed-forward instead of before them.

Queries and keys are normed too, over all heads of a token at once.
"""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.decoder import CausalLM, SelfAttention
from sglcore.models.layer_kinds import Array, Batch, Build, Layer


class NormAfterLayer:
    """A decoder layer that norms the results of attention and feed-forward; both read the residual
    sum without a norm."""

    __slots__ = ("mlp", "post_attention_layernorm", "post_feedforward_layernorm", "self_attn")

    def __init__(self, build: Build, self_attn: SelfAttention, mlp: Layer, offset: float | None) -> None:
        """`self_attn` maps hidden states and a batch to hidden states; `offset` is added to the
        norms' weights (`Build.norm`).
        """
        size = build.config.hidden_size
        self.self_attn = self_attn
        self.post_attention_layernorm = build.norm("post_attention_layernorm", size, offset)
        self.mlp = mlp
        self.post_feedforward_layernorm = build.norm("post_feedforward_layernorm", size, offset)

    def __call__(self, hidden: Array, residual: None, batch: Batch) -> tuple[Array, None]:
        """Return the residual sum [T, H] after this layer; `hidden` is the whole sum before it.
        There is no separate residual: the second result is None.
        """
        hidden = hidden + self.post_attention_layernorm(self.self_attn(hidden, batch))
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden)), None


class Olmo2ForCausalLM(CausalLM):
    """Layers are `NormAfterLayer`s. Norms multiply by their weights in float32."""

    calls_library = True
    norm_offset: ClassVar[float | None] = 0.0

    def make_layer(self, build: Build, layer_id: int) -> NormAfterLayer:
        bias = build.config.attention_bias
        attention = SelfAttention(
            build.at("self_attn"),
            layer_id,
            self.rotary_of(layer_id),
            qkv_bias=bias,
            output_bias=bias,
            whole_norm=True,
            norm_offset=self.norm_offset,
        )
        return NormAfterLayer(build, attention, build.mlp("mlp", build.config.intermediate_size), self.norm_offset)
