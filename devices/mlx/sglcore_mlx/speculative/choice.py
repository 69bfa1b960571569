"""Chooses the drafter by the configuration, and checks what this device and the model support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from sglcore.config.engine_config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.worker import Limits
from sglcore.step.draft_length import lengths_of

DRAFT_TOKENS = 4
"""Default maximum of draft tokens per step."""
NGRAM, SUFFIX = SERVED = ("ngram", "suffix")
"""The supported drafters: `ngram` drafts from the request's own text, `suffix` first from texts of
the prefix cache."""
_NO_MODEL = "this device has no worker for draft models"
GAPS: Mapping[str, str] = MappingProxyType(
    {
        "eagle": _NO_MODEL,
        "eagle3": _NO_MODEL,
        "mtp": _NO_MODEL,
        "standalone": _NO_MODEL,
        "dflash": _NO_MODEL,
        "frozen-mtp": _NO_MODEL,
    }
)
"""Drafters of the core that this device does not support, and why."""
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
    """What a start has chosen: `kind`, the drafter's name, and `lengths`, ascending, the possible
    numbers of draft tokens per request and step."""

    kind: str
    lengths: tuple[int, ...]

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

    def limits_of(self, plain: Limits) -> Limits:
        """Return the limits of a worker with speculation, given those without. A step has decode
        requests or prompts, never both."""
        return replace(
            plain,
            draft_tokens=self.tokens,
            takes_proposals=self.from_host,
            keeps_history=True,
            allows_mixed_batches=False,
            can_overlap=plain.can_overlap and not self.from_host,
        )


class Described(Protocol):
    """The part of a model that `check_model` reads: its configuration, and its layers with
    recurrent states."""

    config: Any
    state_layers: tuple[Any, ...]


def choose_speculation(config: EngineConfig, ledger: DecisionLedger) -> Speculation | None:
    """Return what the configuration asks for, None without speculation, and record the decision;
    reads no model. Raises ConfigError, with the name, for a drafter, rule or draft tree that this
    device does not support, and for `suffix` without a prefix cache."""
    kind = config.speculative
    _check_rule(config.speculative_verify)
    if kind is not None and kind in GAPS:
        raise ConfigError(
            f"speculative is {kind!r}, but {GAPS[kind]}",
            wanted=f"one of {', '.join(SERVED)}, off",
            remedy="--speculative ngram, or --device cpu",
        )
    if config.draft_model is not None:
        raise ConfigError(
            f"a draft model is given, but {_NO_MODEL}", remedy="leave --draft-model out, or use --device cpu"
        )
    if config.draft_width > 1 or config.draft_depth is not None:
        asked = f"draft_width is {config.draft_width} and draft_depth {config.draft_depth}"
        raise ConfigError(f"{asked}, but {TREE_GAP}", remedy="leave --draft-width and --draft-depth out")
    if kind not in SERVED:
        why = "requested" if kind == "off" else _NO_MODEL
        remedy = "--speculative ngram, for texts that repeat themselves"
        ledger.record(Row("speculative", kind or "not asked", "off", why, remedy))
        return None
    if kind == SUFFIX and not config.prefix_cache:
        found = "speculative is 'suffix', but the prefix cache is off, and draft tokens come from it"
        raise ConfigError(found, remedy="--speculative ngram, or leave the prefix cache on")
    made = Speculation(kind, lengths_of(config.draft_tokens, DRAFT_TOKENS))
    why = "requested; the text is the same as without"
    ledger.record(Row("speculative", kind, made.summary, why, "--speculative off"))
    return made


def check_model(speculation: Speculation | None, model: Described) -> None:
    """Raise ConfigError for a model that can not undo a token (encoders, recurrent states) if there
    is speculation. Reads no weights, so it can be called before they are loaded."""
    if speculation is None:
        return
    found = f"speculative is {speculation.kind!r}, but"
    if model.config.is_encoder:
        raise ConfigError(f"{found} this model embeds: it drafts and samples no tokens", remedy="--speculative off")
    if model.state_layers:
        kept = "keeps a state of each request, which cannot undo a rejected draft token"
        raise ConfigError(f"{found} {model.config.architecture} {kept}", remedy="--speculative off")


def _check_rule(rule: str) -> None:
    if rule in RULE_GAPS:
        raise ConfigError(
            f"speculative_verify is {rule!r}, but {RULE_GAPS[rule]}",
            wanted=COUPLED,
            remedy="leave --speculative-verify out, or use --device cpu",
        )
