"""EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858).

The draft predicts the target's features of a token from its features of the token before. The two
versions have the same model and differ in how they select draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.decoder import AnyLayer, CausalLM, DecoderLayer, LayerState, SelfAttention
from sglcore.models.drafts.draft_checkpoint import DraftCheckpoint, Shapes
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build, Norm


class Drafts(CausalLM):
    """A decoder that drafts tokens.

    A forward takes token t + 1 and the target's `features` [T, F] of token t. It returns the
    draft's own features [T, F], from which drafting continues.

    `aux_layers`: the draft takes the target's residual sum before each of these layers. Empty: it
    takes the target's hidden states after the last norm.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu",)
    ignored = (r"target\..*",)
    aux_layers: tuple[int, ...] = ()

    def project(self, features: Array) -> Array:
        """Return the features [T, F] of a batch, from the target's output for its tokens: here
        that output, unchanged."""
        return features


class NoNorm:
    """Replaces a norm: returns the sum unchanged."""

    def __call__(self, x: Array) -> Array:
        """Return `x` [T, H] unchanged."""
        return x

    def add(self, x: Array, residual: Array | None) -> tuple[Array, Array]:
        """Return residual + x twice, without a norm; `residual` None counts as 0."""
        summed = x if residual is None else x + residual
        return summed, summed


class EagleForCausalLM(Drafts, LlamaForCausalLM):
    """Llama's layers without the norm before the first layer and without the last norm.

    `fc` maps each token's embedding and the features of the token before, [T, 2 * H], to [T, H].
    `words["fc_bias"]` of the configuration: whether it has a bias.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        size = build.config.hidden_size
        self.concat = build.concat()
        self.fc = build.at("model").linear("fc", 2 * size, size, build.config.words["fc_bias"])

    @classmethod
    def own_name(cls, name: str) -> str:
        """Rename copies of the embedding and the head to `target.*`: the target's own are used."""
        return f"target.{name}" if "embed_tokens" in name or "lm_head" in name else super().own_name(name)

    def make_norm(self, build: Build) -> Norm:
        return NoNorm()

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        config, bias = build.config, build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias)
        mlp = build.mlp("mlp", config.intermediate_size, config.mlp_bias)
        return DecoderLayer(build, attention, mlp, first=None if layer_id else NoNorm())

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: `fc` of each token and the features of the one before."""
        return LayerState(self.fc(self.concat(self.embed_tokens(batch.input_ids), batch.features)), None, batch)


def is_eagle(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an EAGLE-1 or EAGLE-2 draft."""
    return "fc.weight" in names and not any(name.endswith("hidden_norm.weight") for name in names)


def eagle_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return a further entry for the configuration's `words`, which `EagleForCausalLM` reads:
    `fc_bias`.
    """
    return {"fc_bias": "fc.bias" in shapes}


CHECKPOINT = DraftCheckpoint("sglcore.models.drafts.eagle:EagleForCausalLM", is_eagle, eagle_words)
