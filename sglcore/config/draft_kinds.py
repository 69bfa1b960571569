"""The kinds of draft sources that `--speculative` accepts, as data. To add a kind, add its entry
here and the files that the entry names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sglcore.device.package import Ref

DRAFT_TOKENS = 4
"""Default for the maximum draft tokens per step."""
MTP = "mtp"
"""The kind of draft that is stored in its target's checkpoint, after the last layer."""
RANKS, SHARDS, NO_PREFIX_CACHE = "ranks", "shards", "no prefix cache"
"""Keys of `DraftKind.refused`: a model on several ranks, data-parallel shards (`--dp`), and a
prefix cache that is off."""

_STEPS = "sglcore.runtime.speculative.kinds"
_DRAFTS = "sglcore.models.drafts"
_UNCUT = "its draft is not divided among ranks"
_NOT_AGREED = "data-parallel shards do not agree on a plan of its draft's forwards"
_ONE_RANK: Mapping[str, str] = MappingProxyType({RANKS: _UNCUT, SHARDS: _NOT_AGREED})


@dataclass(frozen=True, slots=True)
class DraftKind:
    """One value of `--speculative`: where draft tokens come from, and the objects that implement
    it."""

    name: str
    """The value of `--speculative`."""
    source: str
    """Where its draft tokens come from, for help texts. Empty: from a draft model."""
    steps: Ref
    """The object that makes its drafter: a `KindSteps`, or a `LookupSteps` for a kind without a
    draft model."""
    checkpoint: Ref | None = None
    """How to recognise its draft models by their tensor names, and how to load them: a
    `DraftCheckpoint`. None: tensor names do not identify this kind, or it has no draft model."""
    has_model: bool = True
    """Whether a draft model makes its draft tokens."""
    takes_trees: bool = False
    """Whether it can draft trees (`--draft-width` above 1): only a model that drafts one token at a
    time can."""
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Why the kind cannot be used with a feature: reason by RANKS, SHARDS or NO_PREFIX_CACHE. No
    key: it can."""


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
    DraftKind(MTP, "", f"{_STEPS}.mtp_steps:STEPS", takes_trees=True),
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
"""Every `DraftKind` by its name."""
WITHOUT_MODEL = tuple(kind.name for kind in _KINDS if not kind.has_model)
"""Names of the kinds that look up draft tokens in texts, without a draft model."""
MODELS = tuple(kind.name for kind in _KINDS if kind.has_model)
"""Names of the kinds with a draft model."""
IN_TREES = tuple(kind.name for kind in _KINDS if kind.takes_trees)
"""Names of the kinds that can draft trees."""


def sources_text() -> str:
    """Return a phrase for the help of `--speculative`: the kinds that look up draft tokens, each
    with the text that it searches, and the names of the kinds with a draft model."""
    looked_up = ", ".join(f"{kind.name} ({kind.source})" for kind in _KINDS if not kind.has_model)
    return f"{looked_up}, a draft model ({', '.join(MODELS)})"
