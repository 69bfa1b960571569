"""Nemotron-H: each layer is one norm and one mixer: Mamba 2, attention without positions, or a
feed-forward block, dense or with experts."""

from __future__ import annotations

from typing import Any, ClassVar

from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.recurrent_config import FULL, LINEAR, MLP, MOE, layer_kinds
from sglcore.models.decoder import CausalLM, Mixer, SelfAttention, SharedExpert, make_mamba2
from sglcore.models.layer_kinds import Array, Batch, Build, Layer


class Relu2Mlp:
    """down(max(up(x), 0)^2)."""

    __slots__ = ("activation", "down_proj", "up_proj")

    def __init__(self, build: Build, inner: int) -> None:
        size, bias = build.config.hidden_size, build.config.mlp_bias
        self.up_proj = build.linear("up_proj", size, inner, bias)
        self.activation = build.activation(build.config.hidden_act)
        self.down_proj = build.linear("down_proj", inner, size, bias)

    def __call__(self, hidden: Array) -> Array:
        """[T, H] to [T, H]."""
        return self.down_proj(self.activation(self.up_proj(hidden)))


class FeedForward:
    """The `Mixer` of a layer with a feed-forward block, `block`, in place of attention."""

    __slots__ = ("block",)
    attention = None
    state = None

    def __init__(self, block: Layer) -> None:
        self.block = block

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.block(hidden)


class NemotronHLayer:
    """A norm and a mixer. The next layer's norm adds the mixer's output to the residual sum."""

    __slots__ = ("norm", "self_attn")

    def __init__(self, build: Build, mixer: Mixer, offset: float | None) -> None:
        """`offset` is added to the norm's weight (`Build.norm`)."""
        self.norm = build.norm("norm", build.config.hidden_size, offset)
        self.self_attn = mixer

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch) -> tuple[Array, Array]:
        """Return the mixer's output [T, H] and the residual sum [T, H] without it, from `hidden`
        and `residual` before this layer (`residual` None before the first). Both arguments may be
        overwritten.
        """
        hidden, residual = self.norm.add(hidden, residual)
        return self.self_attn(hidden, batch), residual


class NemotronHForCausalLM(CausalLM):
    """Norms multiply in float32. The MTP layers are not read."""

    calls_library = True
    ignored = (r"model\.mtp\..*",)
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    knows: ClassVar[frozenset[str]] = frozenset(
        {"n_group", "n_shared_experts", "routed_scaling_factor", "shared_expert_intermediate_size"}
    )
    norm_offset: ClassVar[float | None] = 0.0

    @classmethod
    def own_name(cls, name: str) -> str:
        """Map a tensor's name to that in other decoders: `backbone` (the decoder in older files) to
        `model`, `embeddings` to `embed_tokens`, `norm_f` to `norm`.
        """
        name = name.replace("backbone.", "model.", 1)
        return super().own_name(name.replace("model.embeddings.", "model.embed_tokens.").replace(".norm_f.", ".norm."))

    def make_rotary(self, build: Build) -> Any:
        """Return None: the model has no positions."""

    def make_layer(self, build: Build, layer_id: int) -> NemotronHLayer:
        config, mixer = build.config, build.at("mixer")
        kinds = layer_kinds(config, (LINEAR, FULL, MLP, MOE))
        of_its_kind = kinds[:layer_id].count(kinds[layer_id])
        made: Mixer
        if kinds[layer_id] == FULL:
            made = SelfAttention(mixer, of_its_kind, None)
        elif kinds[layer_id] == LINEAR:
            made = make_mamba2(mixer, of_its_kind)
        else:
            dense = kinds[layer_id] == MLP
            made = FeedForward(Relu2Mlp(mixer, config.intermediate_size) if dense else self._make_experts(build))
        return NemotronHLayer(build, made, self.norm_offset)

    def _make_experts(self, build: Build) -> Layer:
        spec = ExpertSpec("relu2", latent=build.config.words.get("moe_latent_size", 0))
        experts = build.experts("mixer", self.moe, spec, RoutingSpec("sigmoid"))
        return SharedExpert(build, experts, Relu2Mlp(build.at("mixer", "shared_experts"), self.moe.shared_size))
