"""Chooses the drafter by the configuration, and checks what this device and the model support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.config.draft_kinds import DRAFT_TOKENS
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.drafts.draft_config import draft_folder, given_folder, kind_of, offered_head
from sglcore.step.draft_length import lengths_of
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
COUPLED = "coupled"
"""The acceptance rule: a draft token is accepted if it is the token that the model draws."""
RULE_GAPS: Mapping[str, str] = MappingProxyType(
    {
        "rejection": "this device compares drawn tokens and keeps no draft probabilities",
        "block": "this device compares drawn tokens and keeps no draft probabilities",
    }
)
"""Acceptance rules of the core that this device does not support, and why."""

TREE_GAP = "this device verifies one draft token per position, no draft trees"


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a start has chosen: `kind`, the drafter's name; `lengths`, ascending, the possible
    numbers of draft tokens per request and step; the `folder` of the draft model (None: the kind
    has none); and `is_tried`: it is kept only if a trial shows that it is faster."""

    kind: str
    lengths: tuple[int, ...]
    folder: Path | None = None
    is_tried: bool = False

    @property
    def tokens(self) -> int:
        """The most draft tokens of a request per step: the last of `lengths`."""
        return self.lengths[-1]

    @property
    def summary(self) -> str:
        """The drafter and the numbers of draft tokens as text, for the ledger."""
        fewer = f"{', '.join(map(str, self.lengths[:-1]))} or " if self.lengths[1:] else ""
        return f"{self.kind}, {fewer}{self.tokens} tokens a step"

    @property
    def from_host(self) -> bool:
        """Whether the host drafts (`suffix`); it must know all tokens for that, so steps can not
        overlap."""
        return self.kind == SUFFIX

    def limits_of(self, plain: Limits, lookahead: int = 0) -> Limits:
        """Return the limits of a worker with speculation, given those without. A step has decode
        requests or prompts, never both. `lookahead`: that of the drafter."""
        return replace(
            plain,
            draft_tokens=self.tokens,
            takes_proposals=self.from_host,
            lookahead=lookahead,
            keeps_history=True,
            allows_mixed_batches=False,
            can_overlap=plain.can_overlap and not self.from_host,
        )


PROMISE = "the text is the same as without"
"""How the text relates to the text without speculation."""


def without_speculation(limits: Limits) -> Limits:
    """Return the limits of the same worker without speculation."""
    off = {"draft_tokens": 0, "takes_proposals": False, "lookahead": 0, "keeps_history": False}
    return replace(limits, **off, allows_mixed_batches=True, can_overlap=True)


class Described(Protocol):
    """The part of a model that `check_model` reads: its configuration."""

    config: Any


def choose_speculation(config: EngineConfig, folder: Path, ledger: DecisionLedger) -> Speculation | None:
    """Return what the configuration asks for, or, for "auto", the draft model that the checkpoint
    in `folder` brings; None without speculation. Records the decision, unless a trial follows;
    reads no weights. Raises ConfigError, with the name, for a drafter, rule or draft tree that this
    device does not support, for `suffix` without a prefix cache, and for a draft model that is not
    there."""
    _check_rule(config.speculative_verify)
    if config.speculative is not None:
        _check_kind(config.speculative)
    if config.draft_width > 1 or config.draft_depth is not None:
        asked = f"draft_width is {config.draft_width} and draft_depth {config.draft_depth}"
        raise ConfigError(f"{asked}, but {TREE_GAP}", remedy="leave --draft-width and --draft-depth out")
    kind, why, is_tried = _kind(config, folder)
    if config.draft_model is not None and kind not in WITH_MODEL:
        found = f"a draft model is given, but speculative is {config.speculative!r}, which uses none"
        raise ConfigError(found, remedy="leave one of --draft-model and --speculative out")
    if kind == "off":
        remedy = "--speculative ngram, for texts that repeat themselves"
        ledger.record(Row("speculative", config.speculative or "not asked", "off", why, remedy))
        return None
    if kind == SUFFIX and not config.prefix_cache:
        found = "speculative is 'suffix', but the prefix cache is off, and draft tokens come from it"
        raise ConfigError(found, remedy="--speculative ngram, or leave the prefix cache on")
    where = draft_folder(config, folder, kind) if kind in WITH_MODEL else None
    made = Speculation(kind, _lengths(config, kind, where), where, is_tried)
    if not is_tried:
        told = f"{why}; {PROMISE}"
        ledger.record(Row("speculative", config.speculative or "not asked", made.summary, told, "--speculative off"))
    return made


def _lengths(config: EngineConfig, kind: str, folder: Path | None) -> tuple[int, ...]:
    """Return the possible numbers of draft tokens; for a block, those that fit after its root.
    Raises ConfigError if more were configured."""
    lengths = lengths_of(config.draft_tokens, DRAFT_TOKENS)
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


def _check_rule(rule: str) -> None:
    if rule in RULE_GAPS:
        raise ConfigError(
            f"speculative_verify is {rule!r}, but {RULE_GAPS[rule]}",
            wanted=COUPLED,
            remedy="leave --speculative-verify out, or use --device cpu",
        )
