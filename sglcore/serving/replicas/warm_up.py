"""Generates tokens before an engine counts as ready, by the path that will serve.

Devices whose steps run ahead of the host compile or load kernels when they are first used, which
takes seconds, and all requests would wait for it. There the warm-up uses each way to sample a token
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sglcore.core.errors import SglcoreError
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import State
from sglcore.schedule.request_errors import RequestError

PROMPT_TOKENS = 4
BESIDE_TOKENS = (8, 16, 32, 64)
"""Lengths of prompts, in tokens, that are prefilled in steps with another request, one after
another."""
BESIDE_STEPS = 16
"""Tokens that the other request generates: enough that it still runs when the last prompt
arrives."""
PLAIN = (SamplingParams(temperature=0.0), SamplingParams())
DRAWS = (
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=8),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=8, top_p=0.9, min_p=0.05),
    SamplingParams(xtc_probability=0.5),
    SamplingParams(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 1.0}),
    SamplingParams(logprobs=2, prompt_logprobs=2),
)
"""Sampling parameters for each combination for which kernels differ."""


class WarmUpError(SglcoreError):
    """The model was started, but generates or embeds nothing; the start fails with exit code 1."""

    exit_code = 1


def warm_up(engine: TokenEngine) -> None:
    """Generate for short prompts, by each way to sample a token if the worker runs ahead of the
    host, or embed one prompt if the model only embeds; waits. The outputs are dropped. Raises
    WarmUpError if no token or embedding is made."""
    limits = engine.limits
    if not limits.generates:
        _embed(engine, _prompt(engine, PROMPT_TOKENS))
        return
    for params in PLAIN:
        _generate(engine, params)
    if limits.runs_ahead:
        for params in DRAWS:
            with suppress(RequestError):  # a model that refuses it needs none of its kernels
                _generate(engine, params)
        _generate(engine, PLAIN[0], tokens=BESIDE_STEPS, beside=BESIDE_TOKENS)


def _prompt(engine: TokenEngine, tokens: int) -> list[int]:
    limits = engine.limits
    count = max(1, min(tokens, limits.max_model_len - 1))
    return [min(1 + at % 8, limits.vocab_size - 1) for at in range(count)]


def _generate(engine: TokenEngine, params: SamplingParams, tokens: int = 2, beside: Sequence[int] = ()) -> None:
    """Generate `tokens` tokens for one short prompt, and run until nothing is left; waits.
    `beside`: lengths in tokens of further prompts, one added after each step, with one token each.
    Raises WarmUpError if a sample fails or no token is made."""
    params, lengths = replace(params, max_tokens=tokens, ignore_eos=True), iter(beside)
    engine.add("warm-up", _prompt(engine, PROMPT_TOKENS), params, seed=0)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        if (length := next(lengths, None)) is not None:
            engine.add(f"warm-up {length}", _prompt(engine, length), replace(params, max_tokens=1), seed=0)
    errors = [each.error for each in outputs if each.error]
    if errors or not any(each.token_ids for each in outputs):
        raise WarmUpError(
            f"the model started but its first token failed: {errors[0] if errors else 'none came'}",
            remedy="run `sglcore doctor`, and check the checkpoint and the dtype",
        )


def _embed(engine: TokenEngine, ids: list[int]) -> None:
    request = engine.embed("warm-up", ids)
    while request.state is not State.FINISHED:
        engine.step()
    if request.embedding is None:
        raise WarmUpError(f"the model started but its first embedding failed: {request.error}")
