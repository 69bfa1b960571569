"""Settings that several ranks do not support on this device."""

from __future__ import annotations

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row

NO_DRAFTS = "ranks measure their steps apart, and would choose different numbers of draft tokens"


def check_alone(config: EngineConfig, ledger: DecisionLedger) -> None:
    """Raise ConfigError for a kind of speculation, or a draft model, that was asked for by name.
    `--speculative auto` becomes off, with a row in the ledger."""
    asked = config.speculative
    if asked not in (None, "off", "auto") or config.draft_model is not None:
        what = f"speculative is {asked!r}" if config.draft_model is None else "a draft model is given"
        raise ConfigError(f"tp is {config.tp} and {what}, but {NO_DRAFTS}", remedy="--speculative off, or --tp 1")
    if asked == "auto":
        ledger.record(Row("speculative", asked, "off", NO_DRAFTS, "--tp 1"))
