"""Laws of level C2 (runner): requests with a grammar in one batch with requests without one."""

from __future__ import annotations

from types import MappingProxyType

from sglcore.conformance.inputs.hashed_grammar import follows, wins
from sglcore.conformance.inputs.prompts import VOCAB, random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, NotApplicable
from sglcore.conformance.mutants import mutants_worker as worker

LENGTHS = (5, 30, 1, 17, 9)
GRAMMARS = (3, None, 4, None, 5)
"""The seed of each prompt's grammar; None: no grammar."""

DRAWS = (MappingProxyType({}), MappingProxyType({"temperature": 1.0, "seed": 9, "top_k": 20}))
"""Greedy, and sampled."""


def masks_hold(trial: Trial) -> None:
    """Run requests with a grammar's masks together with others. Raises LawBroken if a masked row
    draws a token that its mask forbids, or if the log-probabilities of any row, which are those
    before the mask, differ from the reference's; NotApplicable if the worker takes no masks.
    """
    harness = trial.kit.harness("dense")
    if not harness.limits.takes_masks:
        raise NotApplicable("this worker takes no masks")
    prompts = random_prompts(41, LENGTHS)
    for draw in DRAWS:
        found = harness.run(prompts, 8, chunk=12, stagger=1, sampling={**draw, "grammars": GRAMMARS})
        for seed, result in zip(GRAMMARS, found, strict=True):
            if seed is not None and not follows(seed, VOCAB, result.tokens):
                raise LawBroken(f"the tokens {result.tokens} are not allowed by their masks")
        trial.compare(harness, found)


def changes_hold(trial: Trial) -> None:
    """Run requests that add to their logits in each step together with others. Raises LawBroken if
    such a row draws another token than the raised one, or if the log-probabilities of any row,
    which do not include what was added, differ from the reference's; NotApplicable if the worker
    does not change logits.
    """
    harness = trial.kit.harness("dense")
    if not harness.limits.takes_changes:
        raise NotApplicable("this worker does not change single logits")
    prompts, sampling = random_prompts(42, LENGTHS), {"grammars": GRAMMARS, "changing": GRAMMARS}
    found = harness.run(prompts, 8, chunk=12, stagger=1, sampling={**sampling, "temperature": 1.0, "seed": 9})
    for seed, result in zip(GRAMMARS, found, strict=True):
        if seed is not None and not wins(seed, VOCAB, result.tokens):
            raise LawBroken(f"the tokens {result.tokens} are not the tokens with the raised logits")
    trial.compare(harness, found)


LAWS: tuple[Law, ...] = (
    Law(
        name="changes_hold",
        level="C2",
        says="What a step adds to logits of a row counts there, in that step, and no other row notices.",
        check=changes_hold,
        mutants=(worker.LEAVES_CHANGES_OUT,),
        tolerance=LOGPROBS,
        interpreted=frozenset(),
    ),
    Law(
        name="masks_hold",
        level="C2",
        says="A row with a mask draws what it allows, and no other row notices.",
        check=masks_hold,
        mutants=(worker.LEAVES_MASKS_OUT, worker.MASKS_THE_NEXT_ROW),
        tolerance=LOGPROBS,
        interpreted=frozenset(),
    ),
)
