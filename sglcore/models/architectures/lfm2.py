"""LFM2: layers with a short convolution between two gates; some layers have attention instead."""

from __future__ import annotations

from sglcore.checkpoint.recurrent_config import FULL, layer_kinds
from sglcore.models.decoder import CausalLM, DecoderLayer, Mixer, Recurrent, SelfAttention
from sglcore.models.layer_kinds import Build, Layer

NAMES = (
    ("model.embedding_norm.", "model.norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
"""Names of parts in the checkpoint, and in other decoders."""


class Lfm2ForCausalLM(CausalLM):
    """A norm for each query and key head; only convolutions may have biases."""

    calls_library = True

    @classmethod
    def own_name(cls, name: str) -> str:
        """Return the name that other decoders have for the tensor `name` of LFM2's checkpoint."""
        name = super().own_name(name)
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        return name

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        kinds = layer_kinds(build.config)
        of_its_kind = kinds[:layer_id].count(kinds[layer_id])
        mixer: Mixer
        if kinds[layer_id] == FULL:
            mixer = SelfAttention(build.at("self_attn"), of_its_kind, self.rotary, qk_norm=True)
        else:
            mixer = self._make_conv(build.at("conv"), of_its_kind)
        return DecoderLayer(build, mixer, self.make_mlp(build, layer_id))

    def _make_conv(self, build: Build, state_id: int) -> Recurrent:
        size, words = build.config.hidden_size, build.config.words
        bias = words.get("conv_bias", False)
        projection, output = build.linear("in_proj", size, 3 * size, bias), build.linear("out_proj", size, size, bias)
        return Recurrent(build.short_conv(state_id, words.get("conv_L_cache", 3), projection, output, bias))

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        """Return the feed-forward block of one layer."""
        return build.mlp("mlp", build.config.intermediate_size)
