"""An engine over a random checkpoint, with token ids as input and output, and checks of its
log-probabilities."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglcore.config.engine_config import resolve_config
from sglcore.conformance.inputs.hashed_grammar import HashedMatcher
from sglcore.engine.start import start
from sglcore.runtime.overlap.slices import Slices, SliceSteps
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts

TOLERANCE = 2e-4
BUCKETS = (2, 6)
"""Batch sizes of decode graphs: batches of one, three, four and five rows are padded."""

TOKEN_BUCKETS = (48,)
"""Token counts of prefill graphs; the one of 48 takes batches of 24 tokens and more. A test with
shorter prompts sets its own."""


def environ() -> dict[str, str]:
    """Return the variables that a test's engine may read: only the place of the lane's machine
    files."""
    return {name: os.environ[name] for name in ("SGLCORE_SYSTEM_ROOT",) if name in os.environ}


def on_this_device() -> dict[str, str]:
    """Return engine settings for the lane's device; except on cpu, they choose functions that a
    simulated device runs fast."""
    device = os.environ["LANE_DEVICE"]
    return {"device": device} | ({} if device == "cpu" else {"attention_backend": "gathered", "kernels": "reference"})


@dataclass(frozen=True, slots=True)
class Result:
    """One request's tokens with their log-probabilities, and those of its prompt if it was
    scored."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


class Watched:
    """A worker that records the paths of its steps and sums their hisparse counts."""

    def __init__(self, worker: TpModelWorker) -> None:
        self.worker = worker
        self.paths: set[str] = set()
        self.swaps = SwapCounts()

    @property
    def limits(self) -> Limits:
        return self.worker.limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        return self.worker.submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        result = self.worker.collect(ticket)
        self.paths.add(result.path)
        self.swaps += result.swaps or SwapCounts()
        return result

    def close(self) -> None:
        self.worker.close()


class TokenEngine:
    """Scheduler and worker over a checkpoint in float32, without text. `paths`: the paths of its
    steps."""

    def __init__(self, folder: Path, *, scramble_pages: int | None = None, **settings: Any) -> None:
        defaults = {"dtype": "float32", "threads": 1, "max_requests": 6, "page_size": 4, "kv_cache_memory": 8 << 20}
        defaults |= {"graph_buckets": BUCKETS, "max_batch_tokens": 128, "graph_token_buckets": TOKEN_BUCKETS}
        defaults |= on_this_device()
        config = resolve_config({**defaults, **settings, "model": str(folder)}, environ())
        worker = start(config).worker
        assert isinstance(worker, TpModelWorker)
        self.worker = worker
        self.scheduler = make_scheduler(worker.limits, prefix_cache=config.prefix_cache)
        if scramble_pages is not None:
            self._scramble(scramble_pages)
        self.watched = watched = Watched(worker)
        self.paths = watched.paths
        self.loop = Loop(self.scheduler, watched, overlap=config.overlap is not False)
        self._count = 0

    def run(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        *,
        score_prompts: bool = False,
        stagger: int = 0,
        grammars: Sequence[int | None] = (),
        changing: int | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """Run prompts to their end, adding one every `stagger` steps (0: all at once); greedy
        unless `sampling` says otherwise. `grammars`: the seed of each prompt's grammar, None for no
        grammar; the grammar with seed `changing` also changes logits."""
        params = SamplingParams(
            **{"temperature": 0.0, "logprobs": 0, "ignore_eos": True, **sampling},
            max_tokens=max_tokens,
            prompt_logprobs=0 if score_prompts else None,
        )
        requests = [self._request(prompt, params) for prompt in prompts]
        for request, seed in zip(requests, grammars, strict=False):
            matcher = None if seed is None else HashedMatcher(seed, self.worker.limits.vocab_size)
            request.matcher, request.change = matcher, matcher if seed == changing else None
        waiting = list(requests)
        step = 0
        while waiting or self.loop.has_work:
            while waiting and (not stagger or step % stagger == 0):
                self.scheduler.add(waiting.pop(0))
                if stagger:
                    break
            if self.loop.has_work:
                self.loop.step()
            step += 1
        self.scheduler.audit()
        return [_result(request) for request in requests]

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        self._count += 1
        return Request(f"r{self._count}", np.array(prompt, np.int32), params, seed=params.seed or 0)

    def _scramble(self, seed: int) -> None:
        """Put the free pages into a random order."""
        pool = self.scheduler.running.memory.pool
        taken = pool.take(pool.free)
        np.random.default_rng(seed).shuffle(taken)
        pool.give(taken)


def _result(request: Request) -> Result:
    assert request.finish_reason == "length", request.error
    return Result(
        request.prompt_ids.tolist(),
        list(request.output_ids),
        [float(found.chosen[0]) for found in request.logprobs],
        [float(value) for found in request.prompt_logprobs for value in found.chosen],
    )


def check_logprobs(results: Sequence[Result], oracle: Any, tolerance: float = TOLERANCE) -> None:
    """Every log-probability equals transformers' for the same text, within the tolerance."""
    for result in results:
        ids = result.prompt + result.tokens
        with torch.no_grad():
            expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(result.prompt)
        wanted = [float(expected[start + i - 1, token]) for i, token in enumerate(result.tokens)]
        np.testing.assert_allclose(result.logprobs, wanted, atol=tolerance, rtol=0)
        if result.prompt_logprobs:
            wanted = [float(expected[i - 1, ids[i]]) for i in range(1, start)]
            np.testing.assert_allclose(result.prompt_logprobs, wanted, atol=tolerance, rtol=0)


def check_greedy(results: Sequence[Result], oracle: Any) -> None:
    """Every greedy token is transformers' own, unless its logit is within twice the tolerance of
    the largest."""
    for result in results:
        ids = result.prompt + result.tokens
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0]
        for i, token in enumerate(result.tokens):
            row = logits[len(result.prompt) + i - 1]
            assert float(row.max() - row[token]) <= 2 * TOLERANCE, (i, token, int(row.argmax()))


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int = 97) -> list[list[int]]:
    """Return random token ids, 3 and above."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, size=length).tolist() for length in lengths]


def describe(folder: Path) -> str:
    """Return the architecture named by a checkpoint."""
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def running_slices(engine: TokenEngine) -> Slices:
    """Return the object that runs an engine's prefill slices."""
    (steps,) = engine.worker.kinds
    assert isinstance(steps, SliceSteps)
    return steps.slices
