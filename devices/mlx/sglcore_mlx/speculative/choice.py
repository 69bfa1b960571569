"""Chooses the drafter by the configuration, and checks what this device and the model support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.config.draft_kinds import DRAFT_TOKENS, IN_TREES, MTP
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.drafts.draft_config import draft_folder, given_folder, kind_of, next_token_heads, offered_head
from sglcore.step.draft_length import lengths_of
from sglcore.step.tree_shapes import TreeShape, tree_shape
from sglcore.worker.model_worker import Limits

DFLASH = "dflash"
"""The drafter that fills in a block at once."""
NGRAM, SUFFIX = "ngram", "suffix"
"""The drafters without a model: `ngram` drafts from the request's own text, `suffix` first from
texts of the prefix cache."""
SERVED = (NGRAM, SUFFIX, "eagle", "eagle3", "mtp", "standalone", DFLASH)
"""The supported drafters."""
WITH_MODEL = SERVED[2:]
"""The supported drafters with a draft model."""
_OTHER = "this device has no drafter of this kind yet"
GAPS: Mapping[str, str] = MappingProxyType({"frozen-mtp": _OTHER})
"""Drafters of the core that this device does not support, and why."""
BLOCK_SIZE = "block_size"
"""Key in the configuration of a draft that fills in blocks: tokens of a block, its root included.
"""
COUPLED, REJECTION, BLOCK = "coupled", "rejection", "block"
"""The acceptance rules. `coupled`: a draft token is accepted if it is the token that the model
draws; the others keep the distribution only (`rejection.py`)."""
RULES = (COUPLED, REJECTION, BLOCK)
"""The supported acceptance rules."""
ONLY_CHAINS = "these accept only chains"
"""Why other rules than `coupled` take no draft trees."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a start has chosen: `kind`, the drafter's name; `lengths`, ascending, the possible
    numbers of draft tokens per request and step; the `folder` of the draft model (None: the kind
    has none); and `is_tried`: it is kept only if a trial shows that it is faster."""

    kind: str
    lengths: tuple[int, ...]
    folder: Path | None = None
    is_tried: bool = False
    tree: TreeShape | None = None
    """Shape of draft trees. None: drafts are chains."""
    rule: str = COUPLED
    """The rule by which draft tokens are accepted."""

    @property
    def tokens(self) -> int:
        """The most draft tokens of a request per step: the last of `lengths`."""
        return self.lengths[-1]

    @property
    def summary(self) -> str:
        """The drafter and the numbers of draft tokens as text, for the ledger; and a tree's
        beams."""
        if self.tree is not None:
            return f"{self.kind}, trees of {self.tokens} tokens a step, {self.tree.width} beams {self.tree.depth} deep"
        fewer = f"{', '.join(map(str, self.lengths[:-1]))} or " if self.lengths[1:] else ""
        return f"{self.kind}, {fewer}{self.tokens} tokens a step"

    @property
    def from_host(self) -> bool:
        """Whether the host drafts (`suffix`); it must know all tokens for that, so steps can not
        overlap."""
        return self.kind == SUFFIX

    @property
    def promise(self) -> str:
        """How the text relates to the text without speculation."""
        if self.rule == COUPLED:
            return "the text is the same as without"
        return f"with {self.rule}, the distribution of texts is the same, not each token"

    def draft_probs_bytes(self, requests: int, vocab_size: int) -> int:
        """Return the bytes of the draft distributions of so many requests, float32; 0 if no rule
        reads them, or if draft tokens are certain."""
        return 0 if self.rule == COUPLED or self.folder is None else 4 * requests * self.tokens * vocab_size

    def limits_of(self, plain: Limits, lookahead: int = 0) -> Limits:
        """Return the limits of a worker with speculation, given those without. A step has decode
        requests or prompts, never both. `lookahead`: that of the drafter."""
        return replace(
            plain,
            draft_tokens=self.tokens,
            # Near the end of a text, nodes of a tree need KV slots after it. Beams write none.
            draft_cells=0 if self.tree is None else self.tokens,
            takes_proposals=self.from_host,
            lookahead=lookahead,
            keeps_history=True,
            allows_mixed_batches=False,
            can_overlap=plain.can_overlap and not self.from_host,
        )


def without_speculation(limits: Limits) -> Limits:
    """Return the limits of the same worker without speculation."""
    off = {"draft_tokens": 0, "draft_cells": 0, "takes_proposals": False, "lookahead": 0, "keeps_history": False}
    return replace(limits, **off, allows_mixed_batches=True, can_overlap=True)


class Described(Protocol):
    """The part of a model that `check_model` reads: its configuration and layers."""

    config: Any
    attention_layers: Any
    state_layers: Any


def choose_speculation(config: EngineConfig, folder: Path, ledger: DecisionLedger) -> Speculation | None:
    """Return what the configuration asks for, or, for "auto", the draft model that the checkpoint
    in `folder` brings; None without speculation. Records the decision, unless a trial follows;
    reads no weights. Raises ConfigError, with the name, for a drafter or draft tree that this
    device does not support, for `suffix` without a prefix cache, and for a draft model that is not
    there."""
    if config.speculative is not None:
        _check_kind(config.speculative)
    kind, why, is_tried = _kind(config, folder)
    if config.draft_model is not None and kind not in WITH_MODEL:
        found = f"a draft model is given, but speculative is {config.speculative!r}, which uses none"
        raise ConfigError(found, remedy="leave one of --draft-model and --speculative out")
    if kind == "off":
        if config.draft_width > 1 and config.speculative != "auto":
            asked = config.speculative or "not asked"
            found = f"draft_width is {config.draft_width}, and speculative is {asked!r}, which drafts no tokens"
            raise ConfigError(found, remedy=f"--speculative {', '.join(IN_TREES)}, or leave --draft-width out")
        remedy = "--speculative ngram, for texts that repeat themselves"
        ledger.record(Row("speculative", config.speculative or "not asked", "off", why, remedy))
        return None
    if kind == SUFFIX and not config.prefix_cache:
        found = "speculative is 'suffix', but the prefix cache is off, and draft tokens come from it"
        raise ConfigError(found, remedy="--speculative ngram, or leave the prefix cache on")
    rule = config.speculative_verify
    tree = tree_shape(config, kind, "" if rule == COUPLED else ONLY_CHAINS, writes_cells=True)
    where = draft_folder(config, folder, kind) if kind in WITH_MODEL else None
    lengths = _lengths(config, kind, where, ledger) if tree is None else (tree.nodes - 1,)
    made = Speculation(kind, lengths, where, is_tried, tree, rule)
    if not is_tried:
        told = f"{why}; {made.promise}"
        ledger.record(Row("speculative", config.speculative or "not asked", made.summary, told, "--speculative off"))
    return made


def _lengths(config: EngineConfig, kind: str, folder: Path | None, ledger: DecisionLedger) -> tuple[int, ...]:
    """Return the possible numbers of draft tokens: for a block, those that fit after its root; for
    several MTP layers, at most one for each, with a ledger row. Raises ConfigError if more were
    configured."""
    # Under a rule that keeps the distribution only, another number would change the text.
    fixed = None if config.speculative_verify == COUPLED else DRAFT_TOKENS
    lengths = lengths_of(config.draft_tokens or fixed, DRAFT_TOKENS)
    if kind == MTP and folder is not None and (heads := next_token_heads(folder, config)) > 1:
        lengths = tuple(sorted({min(each, heads) for each in lengths}))
        why = f"each of the draft's {heads} layers drafts one token per step"
        asked = "auto" if config.draft_tokens is None else str(config.draft_tokens)
        told = ", ".join(map(str, lengths))
        ledger.record(Row("draft tokens", asked, told, why, "--draft-tokens 1, for the first layer alone"))
    if kind != DFLASH or folder is None:
        return lengths
    most = read_json(folder / "config.json").get(BLOCK_SIZE, 0) - 1
    if config.draft_tokens is not None and config.draft_tokens > most:
        found = f"draft_tokens is {config.draft_tokens}, and a block of the draft has {most}"
        raise ConfigError(found, remedy=f"--draft-tokens {most}, or fewer")
    return tuple(sorted({min(each, most) for each in lengths}))


def _kind(config: EngineConfig, folder: Path) -> tuple[str, str, bool]:
    """Return the kind ("off": no speculation), the reason, and whether a trial must show that it is
    faster."""
    if config.speculative not in (None, "auto"):
        return config.speculative, "requested", False
    if config.draft_model is not None:
        kind = kind_of(given_folder(config.draft_model, folder))
        _check_kind(kind)
        return kind, "a draft model was given", False
    offered = None if not (folder / "config.json").is_file() else offered_head(folder)
    if offered is None:
        return "off", "this checkpoint has no draft model", False
    if config.speculative is None:
        return "off", f"this checkpoint has a draft ({offered}): --speculative auto uses it if it is faster", False
    if offered in GAPS:
        return "off", f"this checkpoint has a draft ({offered}), but {GAPS[offered]}", False
    if config.prompt_slices != "off":
        return "off", "prompts run in slices of layers, as requested", False
    return offered, "this checkpoint has it", True


def _check_kind(kind: str) -> None:
    if kind in GAPS:
        raise ConfigError(
            f"speculative is {kind!r}, but {GAPS[kind]}",
            wanted=f"one of {', '.join(SERVED)}, off",
            remedy="--speculative ngram, or --device cpu",
        )


def check_model(speculation: Speculation | None, model: Described) -> None:
    """Raise ConfigError for an encoder if there is speculation. Reads no weights, so it can be
    called before they are loaded."""
    if speculation is None:
        return
    found = f"speculative is {speculation.kind!r}, but"
    if model.config.is_encoder:
        raise ConfigError(f"{found} this model embeds: it drafts and samples no tokens", remedy="--speculative off")
    if speculation.tree is not None:
        check_trees(speculation.tree, "this model", model)


def check_trees(tree: TreeShape, what: str, model: Described) -> None:
    """Raise ConfigError if a draft tree can not be verified or drafted by this model (`what`)."""
    layers, reason = model.attention_layers, ""
    if model.state_layers:
        reason = "a state of each request, which can follow only one branch"
    elif any(layer.sliding_window is not None for layer in layers):
        reason = "sliding windows, which would count tokens of other branches of a tree"
    elif any(layer.top_k for layer in layers):
        reason = "an indexer, which selects tokens regardless of branches of a tree"
    if reason:
        raise ConfigError(f"draft_width is {tree.width}, but {what} has {reason}", remedy="--draft-width 1")
