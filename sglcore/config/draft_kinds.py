"""The kinds of drafts, as data. To add one, add its entry here and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sglcore.device.package import Ref

RANKS, SHARDS, NO_PREFIX_CACHE = "ranks", "shards", "no prefix cache"
"""Features that some kinds are refused with."""

_STEPS = "sglcore.runtime.speculative.kinds"
_DRAFTS = "sglcore.models.drafts"
_UNCUT = "its draft is not divided among ranks"
_NOT_AGREED = "data-parallel shards do not agree on a plan of its draft's forwards"
_ONE_RANK: Mapping[str, str] = MappingProxyType({RANKS: _UNCUT, SHARDS: _NOT_AGREED})


@dataclass(frozen=True, slots=True)
class DraftKind:
    """A kind of drafts, as `--speculative` names it."""

    name: str
    """The name that users give."""
    source: str
    """Where its draft tokens come from, for help texts. Empty: a draft model of this name."""
    steps: Ref
    """How it runs: a `KindSteps`, or a `LookupSteps` without a model."""
    checkpoint: Ref | None = None
    """How its drafts lie in a checkpoint: a `DraftCheckpoint`. None: the names of tensors do not
    tell."""
    has_model: bool = True
    """A draft model makes its tokens."""
    takes_trees: bool = False
    """It can draft trees: its model drafts one token at a time."""
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The reasons against it, by feature."""


_KINDS = (
    DraftKind("ngram", "earlier text of the request", f"{_STEPS}.lookup_steps:NGRAM", has_model=False),
    DraftKind(
        "suffix",
        "text of earlier requests, else ngram",
        f"{_STEPS}.lookup_steps:SUFFIX",
        has_model=False,
        refused=MappingProxyType({NO_PREFIX_CACHE: "the prefix cache is off, and draft tokens come from it"}),
    ),
    DraftKind("eagle", "", f"{_STEPS}.eagle_steps:STEPS", f"{_DRAFTS}.eagle:CHECKPOINT", takes_trees=True),
    DraftKind("eagle3", "", f"{_STEPS}.eagle_steps:STEPS", f"{_DRAFTS}.eagle3:CHECKPOINT", takes_trees=True),
    DraftKind("mtp", "", f"{_STEPS}.mtp_steps:STEPS", takes_trees=True),
    DraftKind("standalone", "", f"{_STEPS}.standalone_steps:STEPS", takes_trees=True),
    DraftKind("dflash", "", f"{_STEPS}.dflash_steps:STEPS", f"{_DRAFTS}.dflash:CHECKPOINT", refused=_ONE_RANK),
    DraftKind(
        "frozen-mtp",
        "",
        f"{_STEPS}.frozen_mtp_steps:STEPS",
        f"{_DRAFTS}.gemma4_assistant:CHECKPOINT",
        takes_trees=True,
        refused=_ONE_RANK,
    ),
)
DRAFT_KINDS: Mapping[str, DraftKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""All kinds by name."""
WITHOUT_MODEL = tuple(kind.name for kind in _KINDS if not kind.has_model)
"""Kinds that look up their tokens in texts."""
MODELS = tuple(kind.name for kind in _KINDS if kind.has_model)
"""Kinds with a draft model."""
IN_TREES = tuple(kind.name for kind in _KINDS if kind.takes_trees)
"""Kinds that may draft trees."""


def sources_text() -> str:
    """Describe where the drafts of each kind come from, for the help of `--speculative`."""
    looked_up = ", ".join(f"{kind.name} ({kind.source})" for kind in _KINDS if not kind.has_model)
    return f"{looked_up}, a draft model ({', '.join(MODELS)})"
