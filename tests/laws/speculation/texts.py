"""Requests that run together, each with its own sampling, and comparisons of their texts. Does not
use torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglcore.conformance.session import Session
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request

TOKENS = 24
"""Tokens of each text."""
SAMPLING: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9, "top_k": 40, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 1.3, "seed": 8, "min_tokens": 9, "stop_token_ids": list(range(3, 20)), "logit_bias": {30: 2.0}},
)


@dataclass
class Ran:
    """The results of requests, the number of steps, and counts of the session so far: draft tokens,
    preempted requests, and tokens from the prefix cache."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[str | None]
    decodes: int
    proposed: int
    accepted: int
    retractions: int
    hits: int


def run(
    engine: Session,
    prompts: Sequence[Sequence[int]],
    tokens: int = TOKENS,
    samplings: Sequence[Mapping[str, Any]] = SAMPLING,
    prepare: Callable[[list[Request]], None] = lambda requests: None,
) -> Ran:
    """Run the prompts, each with its own sampling, after `prepare` has seen all requests. Every
    page is accounted for after each step."""
    requests = list[Request]()
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        params = SamplingParams(**sampling, max_tokens=tokens, logprobs=0, ignore_eos=True)
        stops = frozenset(params.stop_token_ids)
        requests.append(Request(f"r{index}", np.array(prompt, np.int32), params, seed=params.seed or 0, stop_ids=stops))
    prepare(requests)
    engine.submit(requests)
    before = engine.scheduler.stats().steps
    while engine.step():
        engine.scheduler.audit()
    stats, counted = engine.scheduler.stats(), sums_of(engine.scheduler.drafts)
    assert stats.free_pages + stats.cached_pages == stats.num_pages, stats
    errors = [request.error for request in requests if request.error]
    assert not errors, errors
    return Ran(
        [list(request.output_ids) for request in requests],
        [[float(found.chosen[0]) for found in request.logprobs] for request in requests],
        [request.finish_reason for request in requests],
        stats.steps - before,
        counted.proposed,
        counted.accepted,
        stats.retractions,
        stats.hit_tokens,
    )


def check_same(found: Ran, wanted: Ran, tolerance: float = 2e-4) -> None:
    """Tokens, finish reasons and log-probabilities are equal."""
    assert found.tokens == wanted.tokens, (found.tokens, wanted.tokens)
    assert found.reasons == wanted.reasons, (found.reasons, wanted.reasons)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)
