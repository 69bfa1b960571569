"""EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): what a target model would make of a token, by what it made of
the one before. They differ in what is proposed, not in the model."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.build import Array, Batch, Build, Norm
from sglcore.models.decoder import AnyLayer, CausalLM, DecoderLayer, LayerState, SelfAttention
from sglcore.models.llama import LlamaForCausalLM


class Drafts(CausalLM):
    """A decoder that proposes tokens. Called with a batch whose tokens are those that followed the tokens of which `features` [T, F]
    were made, it gives [T, F], which are the features of what it proposes itself.

    `aux_layers` are the layers of the target before which it wants the target's sum; none: it wants the hidden states after
    the last norm.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu",)
    ignored = (r"target\..*",)
    aux_layers: tuple[int, ...] = ()

    def project(self, features: Array) -> Array:
        """What the target made of some tokens to the features [T, F] of a batch."""
        return features


class NoNorm:
    """In the place of a norm: the sum as it is."""

    def __call__(self, x: Array) -> Array:
        """[T, H], the same."""
        return x

    def add(self, x: Array, residual: Array | None) -> tuple[Array, Array]:
        """As `Norm.add`."""
        summed = x if residual is None else x + residual
        return summed, summed


class EagleForCausalLM(Drafts, LlamaForCausalLM):
    """Llama's layers, without the norm before the first and that behind the last. `fc_bias` of the configuration's words says
    whether `fc` has one."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        size = build.config.hidden_size
        self.concat = build.concat()
        self.fc = build.at("model").linear("fc", 2 * size, size, build.config.words["fc_bias"])

    @classmethod
    def own_name(cls, name: str) -> str:
        """Embedding and output layer are the target's, whatever copies the file has."""
        return f"target.{name}" if "embed_tokens" in name or "lm_head" in name else super().own_name(name)

    def make_norm(self, build: Build) -> Norm:
        return NoNorm()

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        config, bias = build.config, build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias)
        mlp = build.mlp("mlp", config.intermediate_size, config.mlp_bias)
        return DecoderLayer(build, attention, mlp, first=None if layer_id else NoNorm())

    def embed(self, batch: Batch) -> LayerState:
        """Of a token and of the features before it."""
        return LayerState(self.fc(self.concat(self.embed_tokens(batch.input_ids), batch.features)), None, batch)
