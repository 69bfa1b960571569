"""Laws of level C2 (runner): draft tokens, several of a request verified in one step, change no
result."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken
from sglcore.conformance.laws.laws_runner import FLAT, c2, check_computes
from sglcore.conformance.mutants import mutants_speculative as broken
from sglcore.conformance.target import Target
from sglcore.device.facts import Facts

TOKENS = 3
"""Draft tokens of a step."""
BUCKETS = (1, 2, 4)
COIN: Mapping[int, float] = MappingProxyType({30: FLAT, 31: FLAT})
"""The logit bias with which only two tokens are drawn, so that n-gram drafts are sometimes
accepted."""


def proposals_change_nothing(trial: Trial) -> None:
    """Draft by n-grams, so that some draft tokens are accepted and some rejected, with the next
    step planned ahead and not; the case names a kind of graph or "off". Raises LawBroken where
    log-probabilities differ from the reference's, or if all or no draft tokens were accepted."""
    _verify(trial, "dense", (5, 14, 9, 21, 3))


def proposals_change_no_rows(trial: Trial) -> None:
    """Check what `proposals_change_nothing` checks, with compressed attention: blocks that end
    anywhere among verified tokens, and stored tokens that do not fill a block yet. Raises
    NotApplicable if the device does not compute in float32."""
    check_computes(trial.target, "compressed")
    _verify(trial, "compressed", (14, 9))


def proposals_change_no_states(trial: Trial) -> None:
    """Check what `proposals_change_nothing` checks, with recurrent states, which must take in
    accepted tokens only."""
    _verify(trial, "hybrid", (5, 14, 9))


def _verify(trial: Trial, model: str, lengths: tuple[int, ...]) -> None:
    kind, sizes = trial.case.partition("/")[0], {"graph_buckets": BUCKETS, "graph_token_buckets": (32,)}
    with trial.opened(model, speculative="ngram", draft_tokens=TOKENS, graph=kind, **sizes) as harness:
        harness.recorder.keep = True
        for overlap in sorted({False, harness.limits.can_overlap}):
            sampling = {"temperature": 1.0, "seed": 11, "logit_bias": dict(COIN)}
            prompts = random_prompts(12, lengths[: 2 if trial.is_interpreted else None])
            count = 8 if trial.is_interpreted else 24
            trial.compare(harness, harness.run(prompts, count, overlap=overlap, stagger=1, sampling=sampling))
        _check_verified(harness)


def _check_verified(harness: Harness) -> None:
    """Raise LawBroken unless some draft tokens were accepted and others rejected; otherwise the
    results prove nothing."""
    verified = [(result, result.proposed) for _, result in harness.recorder.steps if result.proposed is not None]
    proposed = sum(int(each.sum()) for _, each in verified)
    right = sum(int((np.diff(result.token_offsets) - 1).sum()) for result, _ in verified)
    if not 0 < right < proposed:
        raise LawBroken(f"{right} of {proposed} draft tokens were accepted; wanted some, and not all")


def _kinds(target: Target) -> tuple[str, ...]:
    """Return the law's cases: "off", for eager steps, and the kind of graph that the device uses by
    default, once if that is "off" too."""
    facts: Facts = target.facts()
    return tuple(dict.fromkeys(("off", facts.graph_kind("auto"))))


LAWS: tuple[Law, ...] = (
    c2(
        "proposals_change_nothing",
        "Several tokens of a request in one decode step, of which some are kept, give what one by one gives.",
        proposals_change_nothing,
        broken.SEES_AHEAD,
        broken.KEEPS_WRONG_ONES,
        broken.STANDS_STILL,
        needs=frozenset({"proposals"}),
        cases=_kinds,
    ),
    c2(
        "proposals_change_no_rows",
        "Tokens of a request in one decode step make and see the rows that they do one by one.",
        proposals_change_no_rows,
        broken.ROW_BY_ROW,
        needs=frozenset({"rows", "proposals"}),
        cases=lambda _: ("auto/compressed",),
    ),
    c2(
        "proposals_change_no_states",
        "A state has taken in what was right of several tokens of a request in one decode step, and nothing else.",
        proposals_change_no_states,
        broken.TAKES_IN_ALL,
        broken.GOES_ON_AT_ONCE,
        needs=frozenset({"proposals"}),
        cases=lambda _: ("auto/hybrid",),
    ),
)
