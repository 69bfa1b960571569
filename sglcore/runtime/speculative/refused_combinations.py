"""Which kinds of speculation are refused with which other features, as data.

Start-up refusals and the table in docs/speculation.md are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ALL, TREES = "all", "trees"
"""Used in place of a kind: every kind, and every kind with draft trees."""
CELLS, WINDOWS, ROWS = "keys and values", "windows", "rows"
STATE, OTHER_STATE, HISTORY, EMBEDS = "state", "other state", "history", "embeds"
DRAFT_STATE, DRAFT_RINGS = "draft state", "draft rings"
RANKS, SHARDS, HOST_ROWS = "ranks", "shards", "host rows"
NO_PREFIX_CACHE, OTHER_RULES, TEXT = "no prefix cache", "rejection", "text"


@dataclass(frozen=True, slots=True)
class Combination:
    """A feature and the kinds of speculation that are refused with it, each with its reason.

    `name` is used in the documentation. Kinds that are not named work with the feature.
    """

    name: str
    refused: Mapping[str, str]


def _refused(name: str, **reasons: str) -> Combination:
    return Combination(name, MappingProxyType(reasons))


_UNCUT = "its draft is not cut for ranks"
_NOT_AGREED = "shards of requests agree on no plan of its draft's forwards"
COMBINATIONS: Mapping[str, Combination] = MappingProxyType(
    {
        CELLS: _refused("a model that keeps keys and values of all tokens"),
        WINDOWS: _refused("a model with windows", trees="windows, which count tokens of other branches of a tree too"),
        ROWS: _refused(
            "a model that keeps rows of latents or of compressed blocks",
            trees="rows of a form of its own, of which a tree's branches can not see their own alone",
        ),
        STATE: _refused(
            "a model that keeps a state of each request",
            trees="a state of each request, which goes on along one branch alone",
        ),
        OTHER_STATE: _refused(
            "a model of transformers' classes that keeps a state of each request",
            all="this model keeps a state of each request by transformers' classes, which can not go back to before a wrong proposal",
        ),
        HISTORY: _refused(
            "a model that reads the history of each token",
            all="this model reads the history of each token, which has no proposals",
        ),
        EMBEDS: _refused("a model that embeds", all="this model embeds: it proposes and draws no tokens"),
        DRAFT_STATE: _refused(
            "a draft that keeps a state of each request",
            all="a state of each request, which can not go back to before what it proposed",
        ),
        DRAFT_RINGS: _refused(
            "a draft that keeps its last tokens in rings",
            all="its last tokens in rings, where what it proposes takes the place of tokens that it needs again",
        ),
        RANKS: Combination(
            "several ranks",
            MappingProxyType({"dflash": _UNCUT, "frozen-mtp": _UNCUT}),
        ),
        SHARDS: Combination(
            "requests in shards (`--dp`)",
            MappingProxyType(
                {
                    "dflash": _NOT_AGREED,
                    "frozen-mtp": _NOT_AGREED,
                    TREES: "shards of requests agree on chains alone",
                }
            ),
        ),
        HOST_ROWS: _refused(
            "rows in host memory (`--hisparse`)",
            all="rows lie in host memory, of which a step brings those of one token of a request",
        ),
        NO_PREFIX_CACHE: _refused("no prefix cache", suffix="the prefix cache is off, which has what is proposed"),
        OTHER_RULES: _refused("`--speculative-verify rejection` or `block`", trees="these accept chains alone"),
        TEXT: _refused("grammars, schemas and penalties, for which trees become chains"),
    }
)
"""Combinations by feature."""


def reason_against(beside: str, what: str) -> str:
    """Return why a kind, or TREES, is refused with a feature; empty if they work together."""
    refused = COMBINATIONS[beside].refused
    return refused.get(what, refused.get(ALL, ""))


def reason_in_shards(kind: str, is_tree: bool) -> str:
    """Return why data-parallel shards cannot use this kind, or trees; empty if they can."""
    return reason_against(SHARDS, kind) or (reason_against(SHARDS, TREES) if is_tree else "")


def first_reason(beside: Mapping[str, object], what: str) -> str:
    """Return the first reason against a kind, or TREES, among the features with a true value."""
    return next((reason_against(each, what) for each, is_there in beside.items() if is_there), "")
