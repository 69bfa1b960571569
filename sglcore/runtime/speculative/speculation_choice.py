"""Decides whether this start speculates, and how: by configuration, checkpoint and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglcore.config.draft_kinds import DRAFT_KINDS, DRAFT_TOKENS, IN_TREES, MODELS, NO_PREFIX_CACHE, RANKS
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.package import Ref, resolve
from sglcore.runtime.speculative.draft_steps import DraftSizes, KindSteps, StepShape
from sglcore.runtime.speculative.refused_combinations import (
    ALL,
    DRAFT_RINGS,
    DRAFT_STATE,
    EMBEDS,
    HISTORY,
    OTHER_RULES,
    OTHER_STATE,
    ROWS,
    STATE,
    TREES,
    WINDOWS,
    first_reason,
    reason_against,
    reason_in_shards,
)
from sglcore.step.draft_length import lengths_of
from sglcore.step.tree_shapes import TREE_TOKENS, TreeShape, tree_shape

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel

COUPLED, REJECTION, BLOCK = "coupled", "rejection", "block"
"""The choices of `speculative_verify`.

`coupled` accepts a draft token if it equals the token that the target draws; the others keep the
distribution only (`rejection.py`).
"""
DRAFT_LOADER: Ref = "sglcore.models.drafts.draft_loader:load_draft"
DRAFT_KIND: Ref = "sglcore.models.drafts.draft_config:kind_of"
OFFERED: Ref = "sglcore.models.drafts.draft_config:offered_head"
FOLDER: Ref = "sglcore.models.drafts.draft_config:draft_folder"
GIVEN_FOLDER: Ref = "sglcore.models.drafts.draft_config:given_folder"
"""Functions that load a draft, return its kind, and find the draft of a checkpoint, its folder, and
a configured folder.

References, because models import the runtime.
"""

TREE_MASK = "tree_mask"
"""The feature of attention backends that can mask single KV slots for a row."""

LoadDraft = Callable[[Path, str], Any]
"""`load(folder, kind)` returns the draft, with its `model`, `aux_layers` and `heads`."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a start has decided about speculation. `choose_speculation` makes it."""

    kind: str
    """Kind of drafter, a name in DRAFT_KINDS."""
    lengths: tuple[int, ...]
    """Possible numbers of draft tokens in a step, ascending."""
    draft: LoadedModel | None = None
    """The draft model. None: the kind needs none."""
    aux_layers: tuple[int, ...] | None = None
    """The target's layers that the drafter reads, as in `StepShape`. None: it reads only tokens of
    the target."""
    rule: str = COUPLED
    """The rule by which draft tokens are accepted."""
    is_tried: bool = False
    """Speculation is kept only if a trial shows that it is faster."""
    tree: TreeShape | None = None
    """Shape of draft trees. None: drafts are chains."""
    heads: int = 1
    """Layers of the draft model that propose one token each. 1: one layer proposes all tokens."""

    @property
    def summary(self) -> str:
        """A text for the ledger: the kind, the numbers of draft tokens, and a tree's beams."""
        if self.tree is not None:
            return f"{self.kind}, trees of {self.tokens} tokens a step, {self.tree.width} beams {self.tree.depth} deep"
        fewer = f"{', '.join(map(str, self.lengths[:-1]))} or " if self.lengths[1:] else ""
        return f"{self.kind}, {fewer}{self.tokens} tokens a step"

    @property
    def tokens(self) -> int:
        """Maximum draft tokens per step."""
        return self.lengths[-1]

    def draft_probs_shape(self, requests: int, vocab_size: int) -> tuple[int, ...]:
        """Return the shape [slots, k, V] of the draft distributions, float32.

        Empty under the rule COUPLED, which reads none, and without a draft model.
        """
        return () if self.rule == COUPLED or self.draft is None else (requests + 1, self.tokens, vocab_size)

    def shape_of(self, model: LoadedModel) -> StepShape:
        """Return the shape of the draft's decode steps if `model` is the draft, otherwise of the
        target's.
        """
        sizes = DraftSizes(self.lengths, self.tree, self.heads)
        if model is not self.draft:
            return StepShape(sizes.widths, aux_layers=self.aux_layers or ())
        return model_steps(self.kind).shape(sizes, model)


def verified_rows(model: LoadedModel, speculation: Speculation | None) -> int:
    """Return the maximum rows of a request in a verification; 0 without speculation."""
    return 0 if speculation is None else speculation.shape_of(model).most


def model_steps(kind: str) -> KindSteps:
    """Return the `KindSteps` of a kind of drafts with a model, a name in DRAFT_KINDS."""
    return resolve(DRAFT_KINDS[kind].steps)


def most_drafts(config: EngineConfig) -> int:
    """Return the maximum tokens per request in a decode step: a root and its draft tokens; 1 if the
    configuration rules speculation out.

    Derived from the configuration alone.
    """
    is_off = config.speculative == "off" or (config.speculative is None and config.draft_model is None)
    return 1 if is_off else 1 + _lengths(config)[-1]


def most_rows(config: EngineConfig) -> int:
    """Return the maximum rows per request in one forward of a decode step; 1 if the configuration
    rules speculation out.

    In addition to the tokens to verify, a draft may run a new root, or KV slots that its further
    layers rewrite. If the checkpoint decides the kind, the maximum over all kinds.
    """
    drafts = most_drafts(config)
    if drafts == 1:
        return drafts
    named = (config.speculative,) if config.speculative in DRAFT_KINDS else MODELS
    return drafts + max((model_steps(name).more_rows(drafts) for name in named if name in MODELS), default=0)


def _lengths(config: EngineConfig, is_divided: bool = False) -> tuple[int, ...]:
    if config.draft_width > 1:
        return (config.draft_tokens or TREE_TOKENS,)
    # The number of draft tokens is fixed under a rule that is only exact in distribution, because
    # another number would change the text, and with several ranks, because each would choose its
    # own. Data-parallel shards get the number with each step.
    fixed = None if config.speculative_verify == COUPLED and not is_divided else DRAFT_TOKENS
    return lengths_of(config.draft_tokens or fixed, DRAFT_TOKENS)


def choose_speculation(
    config: EngineConfig,
    model: LoadedModel,
    folder: Path,
    ledger: DecisionLedger,
    load: LoadDraft,
    is_divided: bool = False,
    no_trees: str = "",
    in_shards: bool = False,
) -> Speculation | None:
    """Return the configured speculation; None: off. Records it in the ledger.

    `is_divided`: on several ranks, which must verify the same number of tokens in each step.
    `in_shards`: these ranks are data-parallel shards with separate requests. `no_trees`: why trees
    become chains. Raises ConfigError for a kind that this model, these ranks or another setting
    refuse (`refused_combinations.py`), for an impossible tree, and the exceptions of loading the
    draft.
    """
    asked, rule = config.speculative or "not asked", config.speculative_verify
    kind, why, is_tried = _kind(config, model, folder)
    if config.draft_model is not None and kind not in MODELS:
        remedy = "leave one of --draft-model and --speculative out"
        raise ConfigError(f"a draft model is given, and speculative is {asked!r}, which uses none", remedy=remedy)
    if kind == "off":
        if config.draft_width > 1 and config.speculative != "auto":
            found = f"draft_width is {config.draft_width}, and speculative is {asked!r}, which drafts no tokens"
            raise ConfigError(found, remedy=f"--speculative {', '.join(IN_TREES)}, or leave --draft-width out")
        ledger.record(Row("speculative", asked, "off", why, "--speculative ngram, for texts that repeat themselves"))
        return None
    reason = _reason_against(model, kind)
    if reason:
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy="--speculative off")
    if not config.prefix_cache and (reason := reason_against(NO_PREFIX_CACHE, kind)):
        remedy = "--speculative ngram, or leave the prefix cache on"
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy=remedy)
    if is_divided and (reason := reason_against(RANKS, kind)):
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy="--tp 1, or another draft")
    if in_shards and (reason := reason_in_shards(kind, config.draft_width > 1)):
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy="--dp 1, or another draft")
    config, tree = _tree_of(config, kind, model, ledger, no_trees)
    made = Speculation(kind, _lengths(config, is_divided and not in_shards), rule=rule, is_tried=is_tried, tree=tree)
    if kind in MODELS:
        made = _with_draft(config, made, load(resolve(FOLDER)(config, folder, kind), kind), ledger)
    if not is_tried:
        ledger.record(Row("speculative", asked, made.summary, f"{why}; {promise(rule)}", "--speculative off"))
    return made


def _tree_of(
    config: EngineConfig, kind: str, model: LoadedModel, ledger: DecisionLedger, no_trees: str
) -> tuple[EngineConfig, TreeShape | None]:
    """Return the configuration and the configured tree (None: chains).

    With `no_trees`, the reason why the device cannot mask single KV slots, a configured tree
    becomes a chain, with a ledger row and the returned configuration changed to it. Raises
    ConfigError if the model or the configuration does not allow the tree.
    """
    tree = _tree(config, kind)
    if tree is None:
        return config, None
    of_model = {STATE: model.state_layers, HISTORY: model.reads_history}
    if reason := _reason_against_trees(model.attention_layers) or first_reason(of_model, TREES):
        raise ConfigError(f"draft_width is {tree.width}, and this model keeps {reason}", remedy="--draft-width 1")
    if not no_trees:
        return config, tree
    remedy = "another --attention-backend"
    ledger.record(Row("draft width", str(tree.width), "1", no_trees, remedy, downgrade=True))
    return replace(config, draft_width=1, draft_depth=None), None


def _with_draft(config: EngineConfig, made: Speculation, draft: Any, ledger: DecisionLedger) -> Speculation:
    """Return `made` with a loaded draft (its model, `aux_layers`, `heads`), and its numbers of
    draft tokens cut to what the draft can make.

    Raises ConfigError if it cannot draft after verified tokens, or not in trees, or if more tokens
    were configured than it can make.
    """
    if reason := _reason_against_draft(draft.model, made.kind):
        raise ConfigError(f"the draft keeps {reason}", remedy="use another draft")
    if made.tree is not None and (reason := _reason_against_trees(draft.model.attention_layers)):
        raise ConfigError(
            f"draft_width is {config.draft_width}, and the draft keeps {reason}", remedy="--draft-width 1"
        )
    if (fit := model_steps(made.kind).fit_lengths) is not None:
        made = replace(made, lengths=fit(config, made.lengths, draft.model))
    if draft.heads > 1:
        made = _by_heads(config, made, draft.heads, ledger)
    return replace(made, draft=draft.model, aux_layers=draft.aux_layers)


def _by_heads(config: EngineConfig, made: Speculation, heads: int, ledger: DecisionLedger) -> Speculation:
    """Return `made` for a draft with `heads` layers that propose one token each: at most `heads`
    draft tokens per step. Records this in the ledger.
    """
    lengths = tuple(sorted({min(each, heads) for each in made.lengths}))
    told, why = ", ".join(map(str, lengths)), f"each of the draft's {heads} layers drafts one token per step"
    asked = "auto" if config.draft_tokens is None else str(config.draft_tokens)
    ledger.record(Row("draft tokens", asked, told, why, "--draft-tokens 1, for the first layer alone"))
    return replace(made, lengths=lengths, heads=heads)


def _tree(config: EngineConfig, kind: str) -> TreeShape | None:
    """Return the configured tree; None: chains. Raises ConfigError for an impossible shape."""
    against_rule = "" if config.speculative_verify == COUPLED else reason_against(OTHER_RULES, TREES)
    return tree_shape(config, kind, against_rule, writes_cells=kind not in MODELS or model_steps(kind).writes_cells)


def promise(rule: str) -> str:
    """Describe how the text relates to the text without speculation under a rule of
    `speculative_verify`.
    """
    if rule == COUPLED:
        return "the text is the same as without speculation"
    return (
        f"with {rule}, the distribution of texts is exact, not each token; a draft token takes one number per token "
        "of the vocabulary"
    )


def _kind(config: EngineConfig, model: LoadedModel, folder: Path) -> tuple[str, str, bool]:
    """Return the kind ("off": no speculation), the reason, and whether a trial must show that it is
    faster.
    """
    if config.speculative not in (None, "auto"):
        return config.speculative, "requested", False
    if config.draft_model is not None:
        return resolve(DRAFT_KIND)(resolve(GIVEN_FOLDER)(config.draft_model, folder)), "a draft model was given", False
    if model.config.is_encoder:
        return "off", reason_against(EMBEDS, ALL), False
    offered = resolve(OFFERED)(folder)
    if offered is None:
        return "off", "this checkpoint has no draft model", False
    if reason := _reason_against(model, offered):
        return "off", reason, False
    if config.speculative is None:
        return (
            "off",
            f"this checkpoint has a draft ({offered}): --speculative auto uses it if it is faster",
            False,
        )
    return offered, "this checkpoint has it", True


def _reason_against(model: LoadedModel, kind: str) -> str:
    """Return why draft tokens of a kind cannot be verified on this model; empty if they can."""
    has = {
        EMBEDS: model.config.is_encoder,
        OTHER_STATE: any(layer.taken_in is None for layer in model.state_layers),
    }
    return first_reason(has, kind)


def _reason_against_draft(draft: LoadedModel, kind: str) -> str:
    """Return which state of the draft would be spoiled by unverified tokens; empty if none."""
    rings = any(kept.ring for layer in draft.attention_layers for kept in layer.rows.values())
    has = {DRAFT_STATE: draft.state_layers, DRAFT_RINGS: rings}
    return first_reason(has, kind)


def _reason_against_trees(layers: Sequence[Any]) -> str:
    """Return which entries of a model cannot be masked one by one; empty if all can."""
    has = {
        ROWS: any(layer.rows for layer in layers),
        WINDOWS: any(layer.sliding_window is not None for layer in layers),
    }
    return first_reason(has, TREES)
