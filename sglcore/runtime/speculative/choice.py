"""Whether proposals are verified at this start, and whose: what was asked for, what the checkpoint brings, what the model allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import Ref, resolve
from sglcore.runtime.speculative.length import lengths_of

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel

DRAFT_TOKENS = 4
"""Proposals of a step at most where nobody asks for a number."""
NGRAM, SUFFIX = WITHOUT_MODEL = ("ngram", "suffix")
"""Kinds that need no model: what followed in the same text, and in those of others first."""
EAGLE, EAGLE3, MTP, STANDALONE, DFLASH = MODELS = ("eagle", "eagle3", "mtp", "standalone", "dflash")
"""Kinds of models that propose."""
KINDS = ("auto", "off", *WITHOUT_MODEL, *MODELS)
COUPLED, REJECTION, BLOCK = RULES = ("coupled", "rejection", "block")
"""The first is the rule by which a proposal is right if it is what the target draws."""
DRAFT_LOADER: Ref = "sglcore.models.draft:load_draft"
DRAFT_KIND: Ref = "sglcore.models.draft:kind_of"
OFFERED: Ref = "sglcore.models.draft:offered_head"
"""How a draft becomes a model, of which kind one is, and which a checkpoint brings; references, because models build on the
runtime."""

LoadDraft = Callable[[Path, str], Any]
"""`load(folder, kind)`: the draft, with its `model` and its `aux_layers`."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the decode steps of one runner look like: so many rows of each request, `feature_size` numbers that each row brings,
    and the layers before which a drafter reads the model (none: it runs as it is)."""

    widths: tuple[int, ...] = (1,)
    feature_size: int = 0
    aux_layers: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Rows of a request at most."""
        return max(self.widths)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Proposals of this `kind`, as many a step as one of `lengths`, ascending. `draft` is the model that makes them (None: none
    does); `aux_layers` as in `StepShape`, None where it reads nothing of the target but its tokens. `rule`: by which they are
    accepted. `is_tried`: only if it turns out to be faster than no proposals."""

    kind: str
    lengths: tuple[int, ...]
    draft: LoadedModel | None = None
    aux_layers: tuple[int, ...] | None = None
    rule: str = COUPLED
    is_tried: bool = False

    @property
    def summary(self) -> str:
        """The kind, and how many proposals."""
        fewer = f"{', '.join(map(str, self.lengths[:-1]))} or " if self.lengths[1:] else ""
        return f"{self.kind}, {fewer}{self.tokens} tokens a step"

    @property
    def tokens(self) -> int:
        """Proposals of a step at most."""
        return self.lengths[-1]

    def laws_shape(self, requests: int, vocab_size: int) -> tuple[int, ...]:
        """That of what proposals of so many requests are drawn from, float32 [slots, k, V]; empty where nobody reads it."""
        return () if self.rule == COUPLED or self.draft is None else (requests + 1, self.tokens, vocab_size)

    def shape_of(self, model: LoadedModel) -> StepShape:
        """The decode steps of the target, or of the draft, which also runs a row a request; one that reads no features runs the new
        roots beside the target's rows."""
        widths = tuple(each + 1 for each in self.lengths)
        if model is not self.draft:
            return StepShape(widths, aux_layers=self.aux_layers or ())
        if self.kind == DFLASH:
            return StepShape((model.config.words["block_size"],))
        if self.aux_layers is None:
            return StepShape((1, *(each + 1 for each in widths)))
        return StepShape(tuple(sorted({1, *widths})), model.feature_size)


def most_drafts(config: EngineConfig) -> int:
    """Tokens of a request that a decode step may bring, the last one drawn and the proposals, as far as the configuration tells."""
    is_off = config.speculative == "off" or (config.speculative is None and config.draft_model is None)
    return 1 if is_off else 1 + _lengths(config)[-1]


def _lengths(config: EngineConfig, is_divided: bool = False) -> tuple[int, ...]:
    # A text that is exact in law only would change with the number; and ranks, each of which times its steps, would differ in it.
    fixed = None if config.speculative_verify == COUPLED and not is_divided else DRAFT_TOKENS
    return lengths_of(config.draft_tokens or fixed, DRAFT_TOKENS)


def choose_speculation(
    config: EngineConfig,
    model: LoadedModel,
    folder: Path,
    ledger: DecisionLedger,
    load: LoadDraft,
    is_divided: bool = False,
) -> Speculation | None:
    """As the configuration asks; `is_divided`: on several ranks, which verify as many proposals each step. Raises ConfigError for a kind that there is not, for a model that can not take a token back, and
    what loading the draft raises."""
    asked, rule = config.speculative or "not asked", config.speculative_verify
    for setting, value, allowed in (
        ("speculative", config.speculative or "off", KINDS),
        ("speculative_verify", rule, RULES),
    ):
        if value not in allowed:
            raise ConfigError(f"{setting} is {value!r}", wanted=f"one of {', '.join(allowed)}")
    kind, why, is_tried = _kind(config, model, folder)
    if config.draft_model is not None and kind not in MODELS:
        remedy = "leave one of --draft-model and --speculative out"
        raise ConfigError(f"a draft model is given, and speculative is {asked!r}, which has none", remedy=remedy)
    if kind == "off":
        ledger.record(Row("speculative", asked, "off", why, "--speculative ngram, for texts that repeat themselves"))
        return None
    reason = _reason_against(model)
    if reason:
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy="--speculative off")
    if kind == SUFFIX and not config.prefix_cache:
        found = "speculative is 'suffix', and the prefix cache is off, which has what is proposed"
        raise ConfigError(found, remedy="--speculative ngram, or leave the prefix cache on")
    made = Speculation(kind, _lengths(config, is_divided), rule=rule, is_tried=is_tried)
    if kind in MODELS:
        made = _with_draft(config, made, load(_draft_folder(config, folder, kind), kind))
    if not is_tried:
        ledger.record(Row("speculative", asked, made.summary, f"{why}; {promise(rule)}", "--speculative off"))
    return made


def _with_draft(config: EngineConfig, made: Speculation, draft: Any) -> Speculation:
    """By a draft that was loaded. Raises ConfigError for one that can not propose beyond verified tokens, or not as many."""
    if reason := _reason_against_draft(draft.model):
        raise ConfigError(f"the draft keeps {reason}", remedy="use another draft")
    if made.kind == DFLASH:
        made = replace(made, lengths=_lengths_in_block(config, made, draft.model.config.words["block_size"]))
    return replace(made, draft=draft.model, aux_layers=draft.aux_layers)


def _lengths_in_block(config: EngineConfig, made: Speculation, block: int) -> tuple[int, ...]:
    """Those that a block has room for beside its root. Raises ConfigError where more were asked for."""
    most = block - 1
    if config.draft_tokens is not None and made.tokens > most:
        found = f"draft_tokens is {made.tokens}, and a block of the draft has {most}"
        raise ConfigError(found, remedy=f"--draft-tokens {most}, or fewer")
    return tuple(sorted({min(each, most) for each in made.lengths}))


def promise(rule: str) -> str:
    """What texts are as without proposals."""
    if rule == COUPLED:
        return "the text is the same as without"
    return (
        f"by {rule}, texts are exact in law, not in tokens; what is proposed takes a number a token of the vocabulary"
    )


def _kind(config: EngineConfig, model: LoadedModel, folder: Path) -> tuple[str, str, bool]:
    """What proposes, why, and whether only if that is faster."""
    if config.speculative not in (None, "auto"):
        return config.speculative, "asked for", False
    if config.draft_model is not None:
        return resolve(DRAFT_KIND)(_given_folder(config.draft_model)), "a draft model was given", False
    if model.config.is_encoder:
        return "off", "this model embeds", False
    offered = resolve(OFFERED)(folder)
    if offered is None:
        return "off", "this checkpoint brings nothing that proposes tokens", False
    if reason := _reason_against(model):
        return "off", reason, False
    if config.speculative is None:
        return (
            "off",
            f"this checkpoint brings a draft ({offered}): --speculative auto takes it where it is faster",
            False,
        )
    return offered, "this checkpoint brings it", True


def _given_folder(text: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {text!r}", wanted="that of a draft", remedy="correct --draft-model")
    return folder


def _draft_folder(config: EngineConfig, folder: Path, kind: str) -> Path:
    """Where a model of this kind is: in the folder that was given, or beside the model's own weights, in a folder that is called as
    the kind or as whatever the checkpoint brings."""
    if config.draft_model is not None:
        return _given_folder(config.draft_model)
    if (folder / kind / "config.json").is_file():
        return folder / kind
    brought = resolve(DRAFT_KIND if kind == MTP and folder.is_dir() else OFFERED)(folder)
    if brought != kind:
        raise ConfigError(
            f"speculative is {kind!r}, and this checkpoint brings no such draft", remedy="--draft-model FOLDER"
        )
    return folder


def _reason_against(model: LoadedModel) -> str:
    """Why proposals can not be verified on this model; empty if they can."""
    if model.config.is_encoder:
        return "this model embeds: it proposes and draws no tokens"
    if model.state_layers:
        return "this model keeps a state of each request, which can not go back to before a wrong proposal"
    if model.reads_history:
        return "this model reads the history of each token, which has no proposals"
    return ""


def _reason_against_draft(draft: LoadedModel) -> str:
    """What a model keeps that what it proposes beyond the verified tokens would spoil; empty if nothing."""
    if draft.state_layers:
        return "a state of each request, which can not go back to before what it proposed"
    if any(kept.ring for layer in draft.attention_layers for kept in layer.rows.values()):
        return "its last tokens in rings, where what it proposes takes the place of tokens that it needs again"
    return ""
