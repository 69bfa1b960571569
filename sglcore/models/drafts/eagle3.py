"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

The draft predicts a token from the target's hidden states of the token before in some layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.decoder import AnyLayer, LayerState, SelfAttention
from sglcore.models.drafts.draft_checkpoint import LIBRARY_KIND, SHARED, DraftCheckpoint, Shapes, lacking, same, unfit
from sglcore.models.drafts.eagle import Drafts
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build, Layer

AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""Names of the norms before `fc` in older files."""


class Eagle3Layer:
    """The first layer: attention over token and features concatenated, added to the features."""

    __slots__ = (
        "concat",
        "hidden_norm",
        "input_layernorm",
        "is_normed",
        "mlp",
        "post_attention_layernorm",
        "self_attn",
    )

    def __init__(self, build: Build, self_attn: SelfAttention, mlp: Layer) -> None:
        """`self_attn` takes [T, 2 * H]. `words["norm_before_residual"]`: its result is added to the
        normed features; False or absent: to the features as they are.
        """
        size = build.config.hidden_size
        self.input_layernorm = build.norm("input_layernorm", size)
        self.hidden_norm = build.norm("hidden_norm", size)
        self.concat = build.concat()
        self.self_attn = self_attn
        self.post_attention_layernorm = build.norm("post_attention_layernorm", size)
        self.mlp = mlp
        self.is_normed = build.config.words.get("norm_before_residual", False)

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch) -> tuple[Array, Array]:
        """Map the embedded tokens `hidden` [T, H] and the batch's features to the feed-forward's
        output [T, H], and the residual sum [T, H] without that output.

        Does not read `residual` and does not change the batch's features.
        """
        normed = self.hidden_norm(batch.features)
        mixed = self.self_attn(self.concat(self.input_layernorm(hidden), normed), batch)
        summed = mixed + (normed if self.is_normed else batch.features)
        return self.mlp(self.post_attention_layernorm(summed)), summed


class Eagle3ForCausalLM(Drafts, LlamaForCausalLM):
    """An EAGLE-3 draft. `words` of the configuration describe the checkpoint:

    - `aux_layers`: the target's layers before which the draft takes the residual sum as features,
      `target_hidden_size` wide for each.
    - `has_input_norm`: one norm over all these features before `fc`.
    - `has_fc_norm`: one norm for the features of each layer before `fc`.
    - `draft_vocab_size`, `has_d2t`: the draft's own vocabulary and its map to the target's.
    - `norm_output`: the draft's own features are normed. It and `norm_before_residual` (see
      `Eagle3Layer`) are the checkpoint's own words; `eagle3_words` makes the others.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        words, inner = build.config.words, build.at("model")
        self.aux_layers = words["aux_layers"]
        self.norm_output = words.get("norm_output", False)
        count, self.width = len(self.aux_layers), words["target_hidden_size"]
        self.fc = inner.linear("fc", count * self.width, build.config.hidden_size) if count else None
        self.input_norm = inner.norm("input_norm", count * self.width) if words["has_input_norm"] else None
        norms = range(count if words["has_fc_norm"] else 0)
        self.fc_norms = tuple(inner.norm(f"fc_norm.{each}", self.width) for each in norms)
        self.concat = build.concat()

    @classmethod
    def own_name(cls, name: str) -> str:
        """Rename older names of norms and layers; move `t2d`, which repeats `d2t`, to `target.*`,
        which is not read.
        """
        for place, norm in enumerate(AUX_NORMS):
            name = name.replace(f"{norm}.", f"fc_norm.{place}.")
        return "target.t2d" if name == "t2d" else super().own_name(name.replace("midlayer.", "layers.0."))

    def make_head(self, build: Build) -> Layer:
        """Return the output layer, over the draft's own vocabulary if it has one."""
        config, rows = build.config, build.config.words["draft_vocab_size"]
        if not config.words["has_d2t"]:
            return build.head("lm_head", config.vocab_size, config.hidden_size)
        return build.mapped_head("lm_head", "model.d2t", rows, config.hidden_size, config.vocab_size)

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        if layer_id:
            return super().make_layer(build, layer_id)
        config, bias = build.config, build.config.attention_bias
        inputs = 2 * config.hidden_size
        attention = SelfAttention(build.at("self_attn"), 0, self.rotary, qkv_bias=bias, output_bias=bias, inputs=inputs)
        return Eagle3Layer(build, attention, build.mlp("mlp", config.intermediate_size, config.mlp_bias))

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: the embedded tokens."""
        return LayerState(self.embed_tokens(batch.input_ids), None, batch)

    def finish(self, state: LayerState) -> Array:
        """Return the residual sum [T, H], normed if `norm_output`."""
        summed = state.hidden + state.residual
        return self.norm(summed) if self.norm_output else summed

    def logits(self, hidden: Array) -> Array:
        """Return float32 [N, vocab] of [N, H]; -inf for tokens outside the draft's vocabulary."""
        return super().logits(hidden if self.norm_output else self.norm(hidden))

    def project(self, features: Array) -> Array:
        """Return the features [T, H] of a batch, from the target's [T, layers *
        target_hidden_size]; without `aux_layers`, the target's [T, H] unchanged.
        """
        if self.fc is None:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms:
            width = self.width
            parts = [norm(features[:, i * width : (i + 1) * width]) for i, norm in enumerate(self.fc_norms)]
            features = self.concat(*parts)
        return self.fc(features)


AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an EAGLE-3 draft."""
    return any(name.endswith(".hidden_norm.weight") for name in names)


def shared(shapes: Shapes) -> Mapping[str, str]:
    """Return the target's parts that the draft uses because its files do not have them: the draft's
    module name of each, and EMBEDDING or HEAD."""
    return {name: part for name, part in SHARED.items() if f"{name.removeprefix('model.')}.weight" not in shapes}


def eagle3_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return further entries for the configuration's `words`, which `Eagle3ForCausalLM` reads:
    `aux_layers`, `target_hidden_size`, `has_input_norm`, `has_fc_norm`, `draft_vocab_size` and
    `has_d2t`.

    Raises ConfigError for a draft that does not fit the target.
    """
    width = config.words.get("target_hidden_size", config.hidden_size)
    same(config.path, "target_hidden_size", width, target.feature_size)
    rows = config.words.get("draft_vocab_size", config.vocab_size)
    has_head = "lm_head.weight" in shapes
    if rows > config.vocab_size:
        unfit(config.path, "draft_vocab_size", rows, f"{config.vocab_size} at most")
    missing = [name for name in ("lm_head.weight", "d2t") if name not in shapes]
    if rows != config.vocab_size and missing:
        lacking(config.path, "draft_vocab_size", rows, missing[0], f"{config.vocab_size}")
    has_norm = "input_norm.weight" in shapes
    if not has_norm and config.words.get("eagle_config", config.words).get("norm_before_fc", False):
        lacking(config.path, "norm_before_fc", True, "input_norm.weight", "false")
    return {
        "aux_layers": aux_layers_of(config, shapes, target.config.num_hidden_layers, width),
        "target_hidden_size": width,
        "has_input_norm": has_norm,
        "has_fc_norm": any(name.startswith(("fc_norm.", "aux_norm_")) for name in shapes),
        "draft_vocab_size": rows,
        "has_d2t": has_head and "d2t" in shapes,
    }


def aux_layers_of(config: ModelConfig, shapes: Shapes, layers: int, width: int) -> tuple[int, ...]:
    """Return the target's layers, from 0, before which the draft takes the residual sum, ascending.
    Without ids in the configuration they are 2, `layers` / 2 and `layers` - 3; empty if the draft
    takes the last hidden states. `width`: elements of the target's features.

    The ids in a configuration name the layer before the sum. In configurations by the library
    speculators they name the layer after it. Raises ConfigError for ids that do not fit `layers` or
    the columns of `fc.weight`.
    """
    eagle = config.words.get("eagle_config", {})
    if not eagle.get("use_aux_hidden_state", True):
        return ()
    ids, offset = eagle.get(AUX_IDS, config.words.get(AUX_IDS)), 0 if LIBRARY_KIND in config.words else 1
    found = [2, layers // 2, layers - 3] if ids is None else [each + offset for each in ids]
    if not found or found != sorted(found) or found[0] < 0 or found[-1] > layers:
        unfit(config.path, AUX_IDS, ids, f"ascending numbers of the model's {layers} layers")
    inputs = shapes.get("fc.weight", (0, 0))[1]
    if inputs != len(found) * width:
        unfit(config.path, AUX_IDS, ids, f"{inputs // width} layers, because fc.weight has {inputs} columns")
    return tuple(found)


CHECKPOINT = DraftCheckpoint("sglcore.models.drafts.eagle3:Eagle3ForCausalLM", is_eagle3, eagle3_words, shared)
