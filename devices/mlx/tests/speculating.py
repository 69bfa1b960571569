"""Helpers of the speculative decoding tests: requests with different sampling, drafters that know
the output, and comparisons. Does not use torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from devices.mlx.tests.parity import VOCAB, TokenEngine, random_prompts
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from sglcore.step.draft_length import LengthController
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.verify import NONE
from sglcore_mlx.speculative.worker import SpeculativeWorker

TOKENS = 24
SAMPLING: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9, "top_k": 40, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 1.3, "seed": 8, "min_tokens": 9, "stop_token_ids": list(range(3, 20)), "logit_bias": {30: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 1.0, "seed": 9, "logit_bias": {30: 2.0**30, 31: 2.0**30}},
)
"""The last one draws one of two tokens, so that draft tokens of earlier text are sometimes
right."""
PROMPTS = [prompt * 2 for prompt in random_prompts(3, (7, 13, 20, 5, 8, 9, 3))]
"""Each repeats itself, so that penalties have a large effect."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Results of requests, and counts of draft tokens."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[str | None]
    steps: int
    proposed: int
    accepted: int
    emitted: float
    retractions: int
    hits: int


Prepare = Callable[[list[Request]], None]


def run(
    engine: TokenEngine,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    samplings: Sequence[Mapping[str, Any]] = SAMPLING,
    tokens: int = TOKENS,
    prepare: Prepare = lambda requests: None,
    session: Any = None,
    **how: Any,
) -> Ran:
    """Run the prompts, each with its own sampling. `prepare` is called with all requests first;
    `how` are the fields of `Drive`."""
    session = session or engine.session(**how)
    requests: list[Request] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        params = SamplingParams(**sampling, max_tokens=tokens, logprobs=0, ignore_eos=True)
        given = {"seed": params.seed or 0, "stop_ids": frozenset(params.stop_token_ids)}
        requests.append(Request(f"r{index}", np.array(prompt, np.int32), params, **given))
    prepare(requests)
    waiting, step, stagger = list(requests), 0, how.get("stagger", 0)
    while waiting or session.loop.has_work:
        if not step % max(stagger, 1):
            for request in waiting[: 1 if stagger else None]:
                session.scheduler.add(request)
                waiting.remove(request)
        if session.loop.has_work:
            session.loop.step()
        step += 1
    session.scheduler.audit()
    assert not [request.error for request in requests if request.error]
    stats, counted = session.scheduler.stats(), sums_of(session.scheduler.drafts)
    return Ran(
        [list(request.output_ids) for request in requests],
        [[float(found.chosen[0]) for found in request.logprobs] for request in requests],
        [request.finish_reason for request in requests],
        stats.steps,
        counted.proposed,
        counted.accepted,
        1 + counted.accepted / max(counted.steps, 1),
        stats.retractions,
        stats.hit_tokens,
    )


def check_same(found: Ran, wanted: Ran) -> None:
    """Assert equal tokens, finish reasons and log-probabilities. On a CPU one row rounds as several
    rows do; the tolerance allows for other CPUs' matrix libraries."""
    assert found.tokens == wanted.tokens
    assert found.reasons == wanted.reasons
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


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
