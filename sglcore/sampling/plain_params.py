"""Sampling parameters as plain values, to send them to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields
from types import MappingProxyType
from typing import Any

from sglcore.sampling.grammar_spec import Grammar, Thinking, TokenRules
from sglcore.sampling.params import SamplingParams

_DEFAULTS = MappingProxyType({item.name: getattr(SamplingParams(), item.name) for item in fields(SamplingParams)})


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, by name, as plain values: a record
    (grammar, token rules, reasoning) as the tuple of its fields, the logit bias as a dict.
    """
    packed: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            packed[name] = _plain(value)
    return packed


def unpack_params(packed: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that `pack_params` wrote; its tuples may have become lists. Raises
    SamplingError or GrammarError for invalid ones.
    """
    values = dict(packed)
    if "grammar" in values:
        values["grammar"] = Grammar(*values["grammar"])
    if "token_rules" in values:
        values["token_rules"] = TokenRules(*map(tuple, values["token_rules"]))
    if "thinking" in values:
        values["thinking"] = Thinking(*values["thinking"])
    return SamplingParams(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return astuple(value) if isinstance(value, (Grammar, Thinking, TokenRules)) else value
