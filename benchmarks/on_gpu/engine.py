"""A model end to end in the engine: decode steps of several batch sizes with greedy and top-p
sampling, and prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sglcore.engine.core import Engine
from sglcore.engine.outputs import RequestOutput
from sglcore.sampling.params import SamplingParams

from .made import opened
from .run import Run, share

GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0.0})
TOP_P: Mapping[str, Any] = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "seed": 7})
SHOWN = 8
"""How many tokens of one request are compared with a peer's on the same weights."""
TIMES = 3
"""Number of measurements after a warm-up; the best counts."""


def measure(run: Run) -> None:
    """Report a row for each batch size and sampling method, and for each prompt length."""
    sizes, geometry = run.sizes, run.geometry
    with opened(run, geometry, max_requests=max(sizes.batches)) as made:
        run.report.note(ledger=made.ledger, ready_seconds=made.seconds, state=run.state(), about=run.about())
        engine = made.engine
        run.report.note(first_tokens=first_tokens(engine, run))
        for batch in sizes.batches:
            for way, params in (("greedy", GREEDY), ("top-p", TOP_P)):
                if way == "greedy" or batch in sizes.draws:
                    seconds = _best(run, lambda: _decode(engine, run, batch, params))  # noqa: B023  called at once
                    bound = run.bounds.us(geometry.step_bytes(batch, sizes.prompt + sizes.tokens / 2))
                    _row(run, f"decode {way}", batch, batch, seconds, bound)
        for length in sizes.prompts:
            seconds = _best(run, lambda: _prompt(engine, length))  # noqa: B023
            bound = run.bounds.us(geometry.weights * 2, geometry.prompt_flops(length))
            _row(run, "prompt", length, length, seconds, bound)
        run.report.note(state_after=run.state())


def prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    """Return random token ids, int [batch][length], so that prompts have no common prefix."""
    draw = np.random.default_rng(batch * 10_007 + length)
    return [list(map(int, row)) for row in draw.integers(10, vocab - 10, (batch, length))]


def first_tokens(engine: Engine, run: Run) -> list[int]:
    """Return SHOWN greedy tokens after one prompt."""
    params = SamplingParams(max_tokens=SHOWN, ignore_eos=True, **GREEDY)
    output = engine.add(prompts(1, run.sizes.prompt, engine.vocab_size)[0], params)
    while not output.finished:
        engine.step()
    return list(output.outputs[0].token_ids)


def fill(engine: Engine, run: Run, batch: int, tokens: int, **params: Any) -> list[RequestOutput]:
    """Add `batch` requests and run until each has its first token."""
    given = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
    outputs = [engine.add(ids, given) for ids in prompts(batch, run.sizes.prompt, engine.vocab_size)]
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    return outputs


def drain(engine: Engine) -> None:
    """Run until all requests are finished."""
    while engine.has_work:
        engine.step()


def _decode(engine: Engine, run: Run, batch: int, params: Mapping[str, Any]) -> float:
    """Return seconds per step, from the step after which every request has a token to the one in
    which the first request ends."""
    outputs = fill(engine, run, batch, run.sizes.tokens, **params)

    def count() -> int:
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    had, begin = count(), time.perf_counter()
    while not any(output.finished for output in outputs):
        engine.step()
    steps, seconds = (count() - had) / batch, time.perf_counter() - begin
    drain(engine)
    return seconds / max(steps, 1)


def _prompt(engine: Engine, length: int) -> float:
    """Return seconds from adding a prompt to its first token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, **GREEDY)
    (ids,) = prompts(1, length, engine.vocab_size)
    begin = time.perf_counter()
    output = engine.add(ids, params)
    while not output.finished:
        engine.step()
    return time.perf_counter() - begin


def _best(run: Run, measured: Callable[[], float]) -> float | None:
    found = [measured() for _ in range(1 if run.is_dry else 1 + TIMES)]
    return None if run.is_dry else min(found[1:])


def _row(run: Run, what: str, size: int, tokens: int, seconds: float | None, bound: float | None) -> None:
    us = None if seconds is None else seconds * 1e6
    speed = None if seconds is None else tokens / seconds
    run.report.row(what=what, size=size, us=us, tokens_a_second=speed, bound_us=bound, share=share(bound, us))
