"""Random loads that keep an engine short of memory: long and short prompts, common prefixes and
aborts. The same seed gives the same load to every engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglcore.conformance.session import Result, result_of
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from tests.laws.engine import TokenEngine

GREEDY = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load: it arrives before step `step`, and is aborted `lasts` steps later (None:
    it runs to its end)."""

    step: int
    prompt: list[int]
    max_tokens: int
    lasts: int | None


def draw_load(seed: int, count: int, context: int, vocab_size: int = 97) -> list[Arrival]:
    """Draw a load of `count` requests of at most `context` tokens, in the order of arrival."""
    rnd = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rnd.randrange(3, vocab_size) for _ in range(length)]

    base, arrivals, step = text(context // 2), list[Arrival](), 0
    for _ in range(count):
        step += rnd.choice([0, 0, 0, 0, 1, 4])
        prompt = rnd.choice([text(rnd.randint(1, 7)), text(rnd.randint(20, context // 2)), base[:17], base[:33]])
        prompt = [*prompt, *text(rnd.randint(1, 3))]
        most = rnd.randint(2, min(50, context - len(prompt) - 1))
        arrivals.append(Arrival(step, prompt, most, rnd.randint(1, 40) if rnd.random() < 0.15 else None))
    return arrivals


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a load: the results of requests that ran to their end, by their index,
    the tokens of all, and the most requests that held memory at once."""

    results: dict[int, Result]
    tokens: list[list[int]]
    most_running: int


def run_load(engine: TokenEngine, load: Sequence[Arrival]) -> Ran:
    """Run a load to its end. Every page has one owner after each step, and none at the end."""
    requests = [
        Request(f"load{index}", np.array(each.prompt, np.int32), SamplingParams(**GREEDY, max_tokens=each.max_tokens))
        for index, each in enumerate(load)
    ]
    step, most = 0, 0
    while engine.loop.has_work or any(each.step >= step for each in load):
        for each, request in zip(load, requests, strict=True):
            if each.step == step:
                engine.scheduler.add(request)
            if each.lasts is not None and each.step + each.lasts == step and request.finish_reason is None:
                engine.scheduler.abort(request.rid)
        if engine.loop.has_work:
            engine.loop.step()
        engine.scheduler.audit()
        most, step = max(most, engine.scheduler.stats().running), step + 1
    stats = engine.scheduler.stats()
    assert stats.free_pages + stats.unused_cached_pages == stats.num_pages, stats
    ended = {index: result_of(each) for index, each in enumerate(requests) if each.finish_reason == "length"}
    return Ran(ended, [list(each.output_ids) for each in requests], most)
