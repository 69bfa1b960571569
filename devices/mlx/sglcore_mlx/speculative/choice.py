"""Whether a start verifies proposals, and whose: what was asked for, what this device has, what the
model allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from sglcore.device.config import EngineConfig
from sglcore.device.draft_length import lengths_of
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.worker import Limits

DRAFT_TOKENS = 4
"""Proposals of a step at most where nobody asks for a number."""
NGRAM, SUFFIX = SERVED = ("ngram", "suffix")
"""What followed in the same text, and in those of others first."""
_NO_MODEL = "a model that proposes has no worker on this device"
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
"""Kinds that the core knows and this device does not have, and why."""
COUPLED = "coupled"
"""The rule by which a proposal is right if it is what the target draws."""
RULE_GAPS: Mapping[str, str] = MappingProxyType(
    {
        "rejection": "draws of proposals are compared here, and their probabilities are not kept",
        "block": "draws of proposals are compared here, and their probabilities are not kept",
    }
)
"""The same for rules."""

TREE_GAP = "this device verifies one proposal for each place, no trees"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Proposals of this `kind`, as many of each request and step as one of `lengths`, ascending."""

    kind: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Proposals of a step at most."""
        return self.lengths[-1]

    @property
    def summary(self) -> str:
        """The kind, and how many proposals."""
        fewer = f"{', '.join(map(str, self.lengths[:-1]))} or " if self.lengths[1:] else ""
        return f"{self.kind}, {fewer}{self.tokens} tokens a step"

    @property
    def from_host(self) -> bool:
        """Steps bring proposals of the host, which has to know all tokens for them."""
        return self.kind == SUFFIX

    def limits_of(self, plain: Limits) -> Limits:
        """What a worker that verifies them can hold and do, from what it can without. Steps bring
        decode rows or prompts, never both."""
        return replace(
            plain,
            draft_tokens=self.tokens,
            takes_proposals=self.from_host,
            keeps_history=True,
            allows_mixed_batches=False,
            can_overlap=plain.can_overlap and not self.from_host,
        )


class Described(Protocol):
    """Of a model: its configuration, and the layers that keep a state of each request."""

    config: Any
    state_layers: tuple[Any, ...]


def choose_speculation(config: EngineConfig, ledger: DecisionLedger) -> Speculation | None:
    """As the configuration asks. No model is read. Raises ConfigError for what this device does not
    have, by its name."""
    kind = config.speculative
    _check_rule(config.speculative_verify)
    if kind is not None and kind in GAPS:
        raise ConfigError(
            f"speculative is {kind!r}, and {GAPS[kind]}",
            wanted=f"one of {', '.join(SERVED)}, off",
            remedy="--speculative ngram, or --device cpu",
        )
    if config.draft_model is not None:
        raise ConfigError(
            f"a draft model is given, and {_NO_MODEL}", remedy="leave --draft-model out, or use --device cpu"
        )
    if config.draft_width > 1 or config.draft_depth is not None:
        asked = f"draft_width is {config.draft_width} and draft_depth {config.draft_depth}"
        raise ConfigError(f"{asked}, and {TREE_GAP}", remedy="leave --draft-width and --draft-depth out")
    if kind not in SERVED:
        why = "asked for" if kind == "off" else _NO_MODEL
        remedy = "--speculative ngram, for texts that repeat themselves"
        ledger.record(Row("speculative", kind or "not asked", "off", why, remedy))
        return None
    if kind == SUFFIX and not config.prefix_cache:
        found = "speculative is 'suffix', and the prefix cache is off, which has what is proposed"
        raise ConfigError(found, remedy="--speculative ngram, or leave the prefix cache on")
    made = Speculation(kind, lengths_of(config.draft_tokens, DRAFT_TOKENS))
    why = "asked for; the text is the same as without"
    ledger.record(Row("speculative", kind, made.summary, why, "--speculative off"))
    return made


def check_model(speculation: Speculation | None, model: Described) -> None:
    """Raise ConfigError for a model that can not take a token back; its weights may still be
    empty."""
    if speculation is None:
        return
    found = f"speculative is {speculation.kind!r}, and"
    if model.config.is_encoder:
        raise ConfigError(f"{found} this model embeds: it proposes and draws no tokens", remedy="--speculative off")
    if model.state_layers:
        kept = "keeps a state of each request, which can not go back to before a wrong proposal"
        raise ConfigError(f"{found} {model.config.architecture} {kept}", remedy="--speculative off")


def _check_rule(rule: str) -> None:
    if rule in RULE_GAPS:
        raise ConfigError(
            f"speculative_verify is {rule!r}, and {RULE_GAPS[rule]}",
            wanted=COUPLED,
            remedy="leave --speculative-verify out, or use --device cpu",
        )
