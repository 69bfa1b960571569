"""Loads the draft model of a target, with the target's embedding and output layer where it has none
of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.drafts.draft_checkpoint import EMBEDDING, HEAD
from sglcore.models.drafts.draft_config import (
    LAYERS,
    STANDALONE,
    check_vocabulary,
    draft_classes,
    draft_config,
    shared_parts,
    tensor_shapes,
)
from sglcore.models.drafts.mtp import PREFIXES
from sglcore.models.layer_kinds import Architecture
from sglcore.step.sizing import size_text
from sglcore.step.tree_shapes import TreeShape
from sglcore_mlx.layers.linear import LinearParts
from sglcore_mlx.load import LoadedModel, load_model
from sglcore_mlx.models.contract import Model
from sglcore_mlx.models.features import FeatureModel
from sglcore_mlx.speculative.choice import check_trees


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model, and the target as it runs with it: with the features that the draft
    reads."""

    kind: str
    model: LoadedModel
    target: Model
    heads: int = 1
    """Layers that draft one token each. 1: one layer, or one model, drafts all tokens."""

    def features(self, hidden: mx.array) -> mx.array:
        """Return the features [T, F] for the draft in the target's output [T, H + F]."""
        return self.target.features(hidden) if isinstance(self.target, FeatureModel) else hidden


def load_draft(
    config: EngineConfig,
    folder: Path,
    kind: str,
    target: LoadedModel,
    *,
    parts: LinearParts,
    ledger: DecisionLedger,
    progress: Callable[[int, int], None],
    tree: TreeShape | None = None,
) -> Draft:
    """Load the draft of a kind from its folder, in the target's dtype and for its positions, and
    record it in the ledger. Waits.

    `tree`: the shape of draft trees. Raises ConfigError, before it reads weights, for a draft of
    another kind, one that does not fit the target, one with recurrent states, or one that can not
    draft trees; and the errors of `load_model`.
    """
    own = _configured(config, folder, kind, target)
    names = {} if kind == STANDALONE else shared_parts(kind, tensor_shapes(folder))
    of_target = {EMBEDDING: target.architecture.embed_ids, HEAD: target.logits}
    model = load_model(
        folder,
        own,
        dtype=target.dtype,
        max_positions=config.max_model_len or target.config.context_length,
        parts=parts,
        progress=progress,
        architectures=draft_classes(),
        check=partial(_check, tree),
        given={name: of_target[part] for name, part in names.items()},
    )
    shared = " and ".join(names.values()) or "nothing"
    told = f"{size_text(model.num_bytes)} of weights in {folder}; shared with the model: {shared}"
    heads, layers = len(own.words.get(PREFIXES, ())), own.words.get(LAYERS, 1)
    if heads == 1 < layers:
        told += f"; the first of its {layers} layers drafts all tokens"
    elif heads > 1:
        told += f"; each of {heads} layers drafts one token"
    ledger.record(Row("draft model", kind, kind, told, "--draft-model"))
    aux_layers: tuple[int, ...] = () if kind == STANDALONE else model.architecture.aux_layers
    return Draft(kind, model, FeatureModel(target, aux_layers) if aux_layers else target, max(heads, 1))


def _configured(config: EngineConfig, folder: Path, kind: str, target: LoadedModel) -> ModelConfig:
    """Return the configuration from which the draft is built."""
    if kind == STANDALONE:
        return check_vocabulary(folder, target.config)
    return draft_config(folder, kind, target.architecture, config)


def _check(tree: TreeShape | None, model: Architecture) -> None:
    if model.state_layers:
        kept = "a state of each request, which cannot undo its draft tokens"
        raise ConfigError(f"the draft keeps {kept}", remedy="use another draft")
    if any(layer.top_k for layer in model.attention_layers):
        raise ConfigError("the draft has an indexer, which this device does not run yet", remedy="--speculative ngram")
    if tree is not None:
        check_trees(tree, "the draft", model)
