"""Which kinds of speculation are refused with which other features, as data.

Start-up refusals and the table in docs/speculation.md are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglcore.config.draft_kinds import DRAFT_KINDS, NO_PREFIX_CACHE, RANKS, SHARDS

ALL, TREES = "all", "trees"
"""Used in place of a kind: every kind, and every kind with draft trees."""
CELLS, WINDOWS, ROWS = "keys and values", "windows", "rows"
STATE, OTHER_STATE, HISTORY, EMBEDS = "state", "other state", "history", "embeds"
DRAFT_STATE, DRAFT_RINGS = "draft state", "draft rings"
HOST_ROWS, OTHER_RULES, TEXT = "host rows", "rejection", "text"


@dataclass(frozen=True, slots=True)
class Combination:
    """A feature and the kinds of speculation that are refused with it, each with its reason.

    `name` is used in the documentation. Kinds that are not named work with the feature.
    """

    name: str
    refused: Mapping[str, str]


def _refused(name: str, **reasons: str) -> Combination:
    return Combination(name, MappingProxyType(reasons))


def _of_kinds(feature: str, name: str, **reasons: str) -> Combination:
    """Return the combination `name` of a feature that some kinds of DRAFT_KINDS refuse by their own
    `refused`, with further `reasons` by kind, ALL or TREES.
    """
    own = {kind.name: kind.refused[feature] for kind in DRAFT_KINDS.values() if feature in kind.refused}
    return _refused(name, **own, **reasons)


COMBINATIONS: Mapping[str, Combination] = MappingProxyType(
    {
        CELLS: _refused("a model that keeps keys and values of all tokens"),
        WINDOWS: _refused(
            "a model with sliding windows",
            trees="sliding windows, which would count tokens of other branches of a tree",
        ),
        ROWS: _refused(
            "a model that keeps rows of latents or of compressed blocks",
            trees="rows in a format that cannot be masked by branch of a tree",
        ),
        STATE: _refused(
            "a model that keeps a state of each request",
            trees="a state of each request, which can follow only one branch",
        ),
        OTHER_STATE: _refused(
            "a model of transformers' classes that keeps a state of each request",
            all=(
                "this model keeps a state of each request in transformers' classes, which cannot undo a "
                "rejected draft token"
            ),
        ),
        HISTORY: _refused(
            "a model with embeddings of n-grams",
            trees="embeddings of n-grams, whose tokens are those of only one branch",
        ),
        EMBEDS: _refused("a model that embeds", all="this model embeds: it drafts and samples no tokens"),
        DRAFT_STATE: _refused(
            "a draft that keeps a state of each request",
            all="a state of each request, which cannot undo its draft tokens",
        ),
        DRAFT_RINGS: _refused(
            "a draft that keeps its last tokens in rings",
            all="its last tokens in rings, where draft tokens overwrite tokens that it needs again",
        ),
        RANKS: _of_kinds(RANKS, "several ranks"),
        SHARDS: _of_kinds(SHARDS, "data-parallel shards (`--dp`)", trees="data-parallel shards agree only on chains"),
        HOST_ROWS: _refused(
            "rows in host memory (`--hisparse`)",
            trees="rows in a format that cannot be masked by branch of a tree",
        ),
        NO_PREFIX_CACHE: _of_kinds(NO_PREFIX_CACHE, "no prefix cache"),
        OTHER_RULES: _refused("`--speculative-verify rejection` or `block`", trees="these accept only chains"),
        TEXT: _refused("grammars, schemas and penalties, for which trees become chains"),
    }
)
"""Combinations by feature."""


def reason_against(beside: str, what: str) -> str:
    """Return why `what`, a kind of speculation or TREES, is refused with the feature `beside`, a
    key of COMBINATIONS; empty if they work together.
    """
    refused = COMBINATIONS[beside].refused
    return refused.get(what, refused.get(ALL, ""))


def reason_in_shards(kind: str, is_tree: bool) -> str:
    """Return why data-parallel shards cannot use this kind, or trees; empty if they can."""
    return reason_against(SHARDS, kind) or (reason_against(SHARDS, TREES) if is_tree else "")


def first_reason(beside: Mapping[str, object], what: str) -> str:
    """Return the first reason against `what`, a kind or TREES, among the features of `beside` with
    a true value; empty if there is none.
    """
    return next((reason_against(each, what) for each, is_there in beside.items() if is_there), "")
