"""Multi-token prediction (MTP): layers after a model's last layer, each predicts one more token.

Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2. Each has two norms, a projection of the
embedding and the hidden state, a decoder layer as the model's own, and a last norm. Checkpoints
differ only in the names of these parts.

MTP layer 0 takes the target's hidden state of token t, layer j the output of layer j - 1 for the
same t. Each also takes the embedding of token t + j + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.models.architecture_registry import model_class
from sglcore.models.decoder import CausalLM, LayerState
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build


class Names(NamedTuple):
    """How a checkpoint names its multi-token prediction layers. `LAYOUTS` has the known ones.

    Names are below `prefix` and end with a dot.
    """

    prefix: str
    """The prefix of all names of a layer; {} is the layer's number."""
    token_norm: str
    """The norm of the token's embedding."""
    hidden_norm: str
    """The norm of the hidden state."""
    proj: str
    """The projection of both."""
    norm: str
    """The last norm."""
    layer: str = ""
    """The prefix of the decoder layer's names, after `prefix`."""
    shared: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")
    """The model's own parts, which the checkpoint repeats here."""
    hidden_first: bool = False
    """The projection takes the hidden state first. False: the embedding first."""
    has_blank: bool = False
    """The embedding of the token at position 0 counts as zeros."""
    first: int | None = None
    """The number of the first layer. None: the number of the model's layers."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The parts around the decoder layer: the checkpoint's name of each, with its last dot, and
        the name that this package uses, without one.
        """
        return {self.token_norm: "enorm", self.hidden_norm: "hnorm", self.proj: "eh_proj", self.norm: "norm"}

    def prefixes(self, names: Collection[str], layers: int) -> tuple[str, ...]:
        """Return the prefix of each MTP layer of a checkpoint, in order; empty if it has none under
        these names.

        `names` are the checkpoint's tensors, `layers` is the number of the model's own layers.
        """
        found, first = list[str](), layers if self.first is None else self.first
        while f"{(prefix := self.prefix.format(first + len(found)))}{self.proj}weight" in names:
            found.append(prefix)
            if "{}" not in self.prefix:
                break
        return tuple(found)


LAYOUTS = (
    Names("model.layers.{}.", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm."),
    Names("mtp.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0."),
    Names(
        "model.mtp_layers.{}.",
        "token_layernorm.",
        "hidden_layernorm.",
        "input_proj.",
        "final_layernorm.",
        hidden_first=True,
        has_blank=True,
        first=0,
    ),
)
"""The names of DeepSeek (GLM has the same), of Qwen and of MiMo."""


NAMES, PREFIXES = "next_token_names", "next_token_prefixes"
"""Keys in `words` of a configuration made by `next_token_config`."""


def layout_of(names: Collection[str], layers: int) -> tuple[Names, tuple[str, ...]] | None:
    """Return the layout of a checkpoint and the prefix of each MTP layer; None if it has none.

    `names` are the checkpoint's tensors, `layers` is the number of the model's own layers.
    """
    for each in LAYOUTS:
        if prefixes := each.prefixes(names, layers):
            return each, prefixes
    return None


def next_token_config(config: ModelConfig, names: Names, prefixes: tuple[str, ...]) -> ModelConfig:
    """Return the configuration of a model's MTP layers, from that of the model: one layer for each
    of `prefixes`, each with the sliding window of the model's last layer and, if the model has
    experts, with experts. In `words` its layer and indexer types are full; `words` also have
    `names` (key NAMES), `prefixes` (key PREFIXES) and the model's architecture
    ("target_architecture").
    """
    count = len(prefixes)
    moe = None if config.moe is None else replace(config.moe, layers=(True,) * count)
    kinds = {"layer_types": ["full_attention"] * count, "indexer_types": ["full"] * count}
    own = {"num_nextn_predict_layers": 0, NAMES: names, PREFIXES: prefixes}
    return replace(
        config,
        num_hidden_layers=count,
        sliding_windows=config.sliding_windows[-1:] * count,
        moe=moe,
        words={**config.words, **kinds, **own, "target_architecture": config.architecture},
    )


class Predictor:
    """One MTP layer with its two norms and its projection: a model as runners take it."""

    def __init__(self, build: Build, model: CausalLM, names: Names, index: int) -> None:
        """`model` has the decoder layers of all predictors; `index`, from 0, is this one's layer.
        Predictor 0 uses the model's norm.
        """
        size, scope = build.config.hidden_size, build.at("model") if not index else build.at("model", "heads", index)
        self.model, self.names, self.index = model, names, index
        self.enorm, self.hnorm = (scope.norm(name, size, model.norm_offset) for name in ("enorm", "hnorm"))
        self.eh_proj = scope.linear("eh_proj", 2 * size, size)
        self.norm = model.make_norm(scope) if index else model.norm
        self.concat = build.concat()
        self.attention_layers = model.attention_layers

    def __call__(self, batch: Batch) -> Array:
        """Return hidden states [T, H] after the norm.

        The batch has the tokens, and in `features` [T, H] the hidden states of the tokens before.
        """
        tokens = self.model.embed_tokens(batch.input_ids)
        if self.names.has_blank:
            tokens = tokens * (batch.positions > 0)[:, None]
        sides = self.enorm(tokens), self.hnorm(batch.features)
        joined = self.eh_proj(self.concat(*(sides[::-1] if self.names.hidden_first else sides)))
        state = self.model.run_layers(LayerState(joined, None, batch), self.index, self.index + 1)
        return self.norm.add(state.hidden, state.residual)[0]

    def logits(self, hidden: Array) -> Array:
        """[N, H] to float32 [N, vocab], as the model's."""
        assert self.model.lm_head is not None
        return self.model.lm_head(hidden)

    def embed_ids(self, ids: Array) -> Array:
        """Token ids [T] to embeddings [T, H], as the model's."""
        return self.model.embed_ids(ids)


class NextToken(Architecture):
    """The model's own architecture with the MTP layers only, and the target's embedding and head.

    `heads` are all predictors. A forward runs the first.
    """

    ignored = (r"target\..*",)
    aux_layers: tuple[int, ...] = ()

    def __init__(self, build: Build) -> None:
        """`build.config` is the result of `next_token_config`."""
        super().__init__(build)
        words = build.config.words
        kind = model_class(words["target_architecture"])
        assert issubclass(kind, CausalLM)
        self.names: Names = words[NAMES]
        self.prefixes: tuple[str, ...] = words[PREFIXES]
        self.model = kind(build)
        self.heads = tuple(Predictor(build, self.model, self.names, each) for each in range(len(self.prefixes)))
        self.attention_layers = self.model.attention_layers

    @classmethod
    def naming(cls, config: ModelConfig) -> Callable[[str], str]:
        """Map the tensors of the MTP layers to this model's own names. All others, and the layers'
        own copies of embedding and head, become `target.*`, which is not read.
        """
        return partial(_own_name, config.words[NAMES], config.words[PREFIXES])

    def __call__(self, batch: Batch) -> Array:
        """Return the hidden states [T, H] of the first predictor."""
        return self.heads[0](batch)

    def logits(self, hidden: Array) -> Array:
        """Return float32 [N, vocab] of hidden states [N, H] after the norm, as a call of any
        predictor returns them; all predictors share the head.
        """
        return self.heads[0].logits(hidden)

    def project(self, features: Array) -> Array:
        """Return the target's hidden states unchanged."""
        return features


def _own_name(names: Names, prefixes: Sequence[str], name: str) -> str:
    for index, prefix in enumerate(prefixes):
        rest = name.removeprefix(prefix)
        if rest == name or rest.startswith(names.shared):
            continue
        for theirs, ours in names.parts.items():
            if rest.startswith(theirs):
                return f"model.{f'heads.{index}.' if index else ''}{ours}." + rest.removeprefix(theirs)
        return f"model.layers.{index}.{rest.removeprefix(names.layer)}"
    return f"target.{name}"
