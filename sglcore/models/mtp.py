"""The layer behind a model's last, which predicts one token more (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2): two norms, a
projection of both sides, a layer as the model's own, and a norm. Checkpoints differ in their names for these alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from sglcore.checkpoint.config import ModelConfig
from sglcore.models.build import Architecture, Array, Batch, Build
from sglcore.models.decoder import CausalLM, LayerState
from sglcore.models.registry import model_class


class Names(NamedTuple):
    """What a checkpoint calls the parts, below `prefix`, in which {} is the number of the model's layers. What is no such part
    and begins with `layer` is of the layer; `shared` are the model's own once more. `hidden_first`: the projection takes what was made
    of the token before first. `has_blank`: the token at position 0 counts as zeros."""

    prefix: str
    token_norm: str
    hidden_norm: str
    proj: str
    norm: str
    layer: str = ""
    shared: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")
    hidden_first: bool = False
    has_blank: bool = False

    @property
    def parts(self) -> Mapping[str, str]:
        """What stands around the layer, and what it is called here."""
        ours = {self.token_norm: "enorm", self.hidden_norm: "hnorm", self.proj: "eh_proj", self.norm: "norm"}
        return {theirs: f"model.{name}." for theirs, name in ours.items()}


LAYOUTS = (
    Names("model.layers.{}.", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm."),
    Names("mtp.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0."),
    Names(
        "model.mtp_layers.0.",
        "token_layernorm.",
        "hidden_layernorm.",
        "input_proj.",
        "final_layernorm.",
        hidden_first=True,
        has_blank=True,
    ),
)
"""DeepSeek's, which GLM's are as well, Qwen's and MiMo's."""


def layout_of(names: Collection[str], layers: int) -> Names | None:
    """That of a checkpoint with tensors of these names and so many layers, with its prefix; None for one without such a layer."""
    for each in LAYOUTS:
        prefix = each.prefix.format(layers)
        if f"{prefix}{each.proj}weight" in names:
            return each._replace(prefix=prefix)
    return None


def next_token_config(config: ModelConfig, names: Names) -> ModelConfig:
    """That of the layer behind the last one of a model with this configuration."""
    moe = None if config.moe is None else replace(config.moe, layers=(True,))
    kinds = {"layer_types": ["full_attention"], "indexer_types": ["full"], "num_nextn_predict_layers": 0}
    return replace(
        config,
        num_hidden_layers=1,
        sliding_windows=config.sliding_windows[-1:],
        moe=moe,
        words={**config.words, **kinds, "next_token_names": names, "target_architecture": config.architecture},
    )


class NextToken(Architecture):
    """The model's own architecture with one layer, and what joins a token with what was made of the one before. Embedding and output
    layer are the model's."""

    ignored = (r"target\..*",)
    aux_layers: tuple[int, ...] = ()

    def __init__(self, build: Build) -> None:
        """`build.config` is that of `next_token_config`."""
        super().__init__(build)
        words, size, inner = build.config.words, build.config.hidden_size, build.at("model")
        kind = model_class(words["target_architecture"])
        assert issubclass(kind, CausalLM)
        self.names: Names = words["next_token_names"]
        self.model = kind(build)
        self.enorm, self.hnorm = (inner.norm(name, size, kind.norm_offset) for name in ("enorm", "hnorm"))
        self.eh_proj = inner.linear("eh_proj", 2 * size, size)
        self.concat = build.concat()
        self.attention_layers = self.model.attention_layers

    def named(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """Those of the layer as a model's own; the rest of the checkpoint's below `target`."""
        return {name: self._own_name(name) for name in shapes}

    def _own_name(self, name: str) -> str:
        names, rest = self.names, name.removeprefix(self.names.prefix)
        if rest == name or rest.startswith(names.shared):
            return f"target.{name}"
        for theirs, ours in names.parts.items():
            if rest.startswith(theirs):
                return ours + rest.removeprefix(theirs)
        return f"model.layers.0.{rest.removeprefix(names.layer)}"

    def __call__(self, batch: Batch) -> Array:
        """Tokens, and `features` [T, H] of those before them, to hidden states [T, H] after the norm."""
        tokens = self.model.embed_tokens(batch.input_ids)
        if self.names.has_blank:
            tokens = tokens * (batch.positions > 0)[:, None]
        sides = self.enorm(tokens), self.hnorm(batch.features)
        joined = self.eh_proj(self.concat(*(sides[::-1] if self.names.hidden_first else sides)))
        return self.model.finish(self.model.run_layers(LayerState(joined, None, batch), 0, 1))

    def logits(self, hidden: Array) -> Array:
        """[N, H] to float32 [N, vocab], as the model's."""
        assert self.model.lm_head is not None
        return self.model.lm_head(hidden)

    def project(self, features: Array) -> Array:
        """The model's hidden states, as they are."""
        return features
