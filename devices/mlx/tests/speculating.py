"""Helpers of the speculative decoding tests: requests with different sampling, drafters that know
the output, and comparisons. Does not use torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from devices.mlx.tests.parity import TokenEngine
from sglcore.conformance.inputs.prompts import VOCAB, random_prompts
from sglcore.schedule.request import Request
from sglcore.step.draft_length import LengthController
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.verify import NONE
from sglcore_mlx.speculative.worker import SpeculativeWorker
from tests.laws.speculation import texts
from tests.laws.speculation.texts import TOKENS, Ran

SAMPLING: Sequence[Mapping[str, Any]] = (
    *texts.SAMPLING,
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 1.0, "seed": 9, "logit_bias": {30: 2.0**30, 31: 2.0**30}},
)
"""The last one draws one of two tokens, so that draft tokens of earlier text are sometimes
right."""
PROMPTS = [prompt * 2 for prompt in random_prompts(3, (7, 13, 20, 5, 8, 9, 3))]
"""Each repeats itself, so that penalties have a large effect."""


def run(
    engine: TokenEngine,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    samplings: Sequence[Mapping[str, Any]] = SAMPLING,
    tokens: int = TOKENS,
    prepare: Callable[[list[Request]], None] = lambda requests: None,
    session: Any = None,
    **how: Any,
) -> Ran:
    """Run the prompts, each with its own sampling, as `texts.run` does. `how` are the fields of
    `Drive`."""
    return texts.run(session or engine.session(**how), prompts, tokens, samplings, prepare)


def check_same(found: Ran, wanted: Ran) -> None:
    """Assert equal tokens, finish reasons and log-probabilities. On a CPU one row rounds as several
    rows do; the tolerance allows for other CPUs' matrix libraries."""
    texts.check_same(found, wanted, 1e-5)


def stepper_of(engine: TokenEngine) -> SpeculativeStepper:
    """Return the stepper of an engine with speculation."""
    worker = engine.worker
    assert isinstance(worker, SpeculativeWorker) and isinstance(worker._stepper, SpeculativeStepper)
    return worker._stepper


def plant(engine: TokenEngine, drafter: str, wanted: Ran, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Replace the engine's drafter with one that knows the wanted output."""
    texts = [[*prompt, *output] for prompt, output in zip(prompts, wanted.tokens, strict=True)]
    stepper_of(engine).drafter = DRAFTERS[drafter](texts)


class Knowing:
    """Drafter that is always right. It reads each text on the host, so it waits for the device,
    which no real drafter does."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]
        self._random = np.random.default_rng(0)

    def __call__(self, known: mx.array, last: mx.array, tokens: int) -> mx.array:
        """As `ngram.propose`. NONE past the end of a text and for unknown texts: with overlap a
        request can run one step past its last token."""
        rows = zip(np.array(known), np.array(last).tolist(), strict=True)
        return mx.array(np.stack([self.propose(row[: end + 1].tolist(), tokens) for row, end in rows]))

    def propose(self, known: list[int], tokens: int) -> NDArray[np.int32]:
        """Return the next tokens of the known text."""
        found = np.full(tokens, NONE, np.int32)
        for text in self._texts:
            if text[: len(known)] == known:
                following = text[len(known) : len(known) + tokens]
                found[: len(following)] = following
        return found


class Adversary(Knowing):
    """Drafter that is never right."""

    def propose(self, known: list[int], tokens: int) -> NDArray[np.int32]:
        return (np.maximum(super().propose(known, tokens), 0) + 1) % VOCAB


class Guessing(Knowing):
    """Drafter that is right for a random number of tokens, and sometimes proposes fewer or none."""

    def propose(self, known: list[int], tokens: int) -> NDArray[np.int32]:
        right = super().propose(known, tokens)
        first = int(self._random.integers(tokens + 1))
        if first < tokens:
            right[first] = (max(right[first], 0) + 1) % VOCAB
            right[first + int(self._random.integers(tokens)) :] = NONE
        return right


DRAFTERS: Mapping[str, type[Knowing]] = MappingProxyType(
    {"oracle": Knowing, "adversary": Adversary, "guessing": Guessing}
)


class AtRandom(LengthController):
    """Chooses a random number of draft tokens at each step."""

    def __init__(self, most: int) -> None:
        super().__init__(tuple(range(most + 1)))
        self._random = np.random.default_rng(1)

    def choose(self, requests: int) -> None:
        """Choose a random length."""
        self.tokens = int(self._random.integers(len(self.lengths)))
