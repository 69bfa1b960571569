"""C2: requests under a grammar beside free ones."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from sglcore.conformance import mutants_worker as worker
from sglcore.conformance.checkpoint import VOCAB
from sglcore.conformance.harness import random_prompts
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, NotApplicable
from sglcore.conformance.matcher import follows
from sglcore.conformance.trial import Trial

LENGTHS = (5, 30, 1, 17, 9)
GRAMMARS = (3, None, 4, None, 5)
"""The seed of each prompt's grammar; None: it is free."""

DRAWS = (MappingProxyType({}), MappingProxyType({"temperature": 1.0, "seed": 9, "top_k": 20}))
"""Greedy, and drawn."""


def masks_hold(trial: Trial) -> None:
    """Masked rows keep to their masks, and the log-probabilities of all rows are the reference's, mask or not."""
    harness = trial.kit.harness("dense")
    if not harness.limits.takes_masks:
        raise NotApplicable("this worker takes no masks")
    prompts = random_prompts(41, LENGTHS)
    for draw in DRAWS:
        found = harness.run(prompts, 8, chunk=12, stagger=1, sampling={**draw, "grammars": GRAMMARS})
        for seed, result in zip(GRAMMARS, found, strict=True):
            if seed is not None and not follows(seed, VOCAB, result.tokens):
                raise LawBroken(f"the tokens {result.tokens} are not those of their masks")
        # The best token under a mask is not the reference's best.
        constrained = [seed is not None for seed in GRAMMARS]
        trial.compare(
            harness,
            [
                replace(result, greedy=result.greedy and not bound)
                for result, bound in zip(found, constrained, strict=True)
            ],
        )


LAWS: tuple[Law, ...] = (
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
