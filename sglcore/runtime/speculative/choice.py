"""Whether proposals are verified at this start, and whose: what was asked for, what the checkpoint brings, what the model allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel

DRAFT_TOKENS = 4
"""Proposals of a step where nobody asks for another number."""
KINDS = ("auto", "off", "ngram")


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the decode steps of one runner look like: so many rows of each request, `feature_size` numbers that each row brings,
    and the layers before which the drafter reads the model (None: it runs as it is)."""

    widths: tuple[int, ...] = (1,)
    feature_size: int = 0
    aux_layers: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Rows of a request at most."""
        return max(self.widths)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Proposals of this `kind`, `tokens` of them a step; `draft` is the model that makes them (None: none does)."""

    kind: str
    tokens: int
    draft: LoadedModel | None = None

    def shape_of(self, model: LoadedModel) -> StepShape:
        """The decode steps of the target, or of the draft."""
        return StepShape((self.tokens + 1,))


def choose_speculation(config: EngineConfig, model: LoadedModel, ledger: DecisionLedger) -> Speculation | None:
    """As the configuration asks. Raises ConfigError for a kind that there is not, and for a model that can not take a token back."""
    asked = config.speculative
    if asked not in KINDS:
        raise ConfigError(f"speculative is {asked!r}", wanted=f"one of {', '.join(KINDS)}")
    if asked in ("auto", "off"):
        reason = "asked for" if asked == "off" else "this checkpoint brings nothing that proposes tokens"
        ledger.record(Row("speculative", asked, "off", reason, "--speculative ngram, for texts that repeat themselves"))
        return None
    reason = _reason_against(model)
    if reason:
        raise ConfigError(f"speculative is {asked!r}, and {reason}", remedy="--speculative off")
    tokens = config.draft_tokens or DRAFT_TOKENS
    what = f"{tokens} tokens a step, by what followed the last ones before"
    ledger.record(Row("speculative", asked, what, "the text is the same as without", "--speculative off"))
    return Speculation(asked, tokens)


def _reason_against(model: LoadedModel) -> str:
    """Why proposals can not be verified on this model; empty if they can."""
    if model.config.is_encoder:
        return "this model embeds: it proposes and draws no tokens"
    if model.state_layers:
        return "this model keeps a state of each request, which can not go back to before a wrong proposal"
    if model.reads_history:
        return "this model reads the history of each token, which has no proposals"
    return ""
