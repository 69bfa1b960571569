"""A started device on one of the kit's models, driven by the engine's own scheduler: tokens in,
tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglcore.conformance.inputs.hashed_grammar import HashedMatcher
from sglcore.conformance.inputs.kit_models import FIRST_TOKEN, VOCAB
from sglcore.conformance.law import LawBroken
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.target import Geometry, StartedDevice
from sglcore.device.facts import Facts
from sglcore.engine.output_processor import HiddenParts
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import Limits, TokenLogprobs

SHOWN = 4
"""Number of alternative tokens to compare by log-probability, in addition to the chosen token."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request."""

    prompt: list[int]
    """The prompt."""
    tokens: list[int]
    """The output tokens."""
    scores: list[TokenLogprobs]
    """One record for each output token."""
    prompt_scores: list[TokenLogprobs]
    """Records of the prompt tokens after the first, if they were requested."""
    finish: str
    """Why it ended."""
    greedy: bool
    """Whether its tokens are the best ones for every seed."""
    cached: int
    """Number of prompt tokens from the prefix cache."""
    states: NDArray[np.float32] | None = None
    """float32 [n, hidden]: the hidden states. None: not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """Settings of a `Session`: how its scheduler runs prompts (overlap, chunk size, order and
    number of pages, prefix cache, scores of prompts), and how many steps lie between their arrivals
    (`stagger`)."""

    overlap: bool = False
    """Whether a step is submitted before the previous one is collected."""
    stagger: int = 0
    """Steps between the arrivals of two prompts. 0: all arrive at once."""
    chunk: int | None = None
    """Largest number of tokens of a step; the device's own limit is the upper bound. None: the
    device's."""
    scramble: int | None = None
    """The seed of the order in which pages are handed out. None: the usual order."""
    pages: int | None = None
    """Number of KV pages that the scheduler may use; the device's own number is the upper bound.
    None: all."""
    prefix_cache: bool = False
    """The prefix cache is on."""
    score_prompts: bool = False
    """Request log-probabilities of prompt tokens."""
    after_step: Callable[[Scheduler, int], None] | None = None
    """Called with the scheduler and the step's number after each step. None: nothing is."""


class Session:
    """Runs prompts through one scheduler on a harness's worker: `run`, or `begin`, `step` until
    False, and `end`. The worker and its KV pages keep what earlier sessions wrote, and a further
    `begin` sees what the earlier one left."""

    def __init__(self, recorder: RecordingWorker, drive: Drive) -> None:
        recorder.next_scheduler()
        limits = _narrowed(recorder.limits, drive)
        self.scheduler = make_scheduler(limits, prefix_cache=drive.prefix_cache)
        if drive.scramble is not None:
            self._scramble(drive.scramble)
        self._loop = Loop(self.scheduler, recorder, overlap=drive.overlap)
        self._drive = drive
        self._count = 0
        self._step = 0
        self._requests: list[Request] = []
        self._waiting: list[Request] = []
        self._states: dict[str, HiddenParts] = {}

    def begin(
        self,
        prompts: Sequence[list[int]],
        lengths: int | Sequence[int],
        *,
        grammars: Sequence[int | None] = (),
        changes: bool = False,
        optional: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> None:
        """Submit prompts that `step` will run. `lengths`: tokens to emit, for all or for each
        prompt; `grammars`: the seed of each prompt's stand-in for a grammar, None for no grammar;
        `changes`: the stand-in also adds to logits; `optional`: further sampling parameters of each
        prompt. Greedy unless `sampling` says otherwise."""
        each = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
        own = [{**sampling, **more} for more in optional or [{}] * len(prompts)]
        self._requests = [self._request(*given) for given in zip(prompts, each, own, strict=True)]
        self._states = {each.rid: HiddenParts(each.params.return_hidden_states) for each in self._requests}
        for request, seed in zip(self._requests, grammars, strict=False):
            matcher = None if seed is None else HashedMatcher(seed, VOCAB)
            request.matcher, request.change = matcher, matcher if changes else None
        self._waiting, self._step = list(self._requests), 0

    def step(self) -> bool:
        """Run one step of the scheduler's loop; return whether there was something to run. Waits.
        Prompts arrive as `Drive.stagger` says."""
        if not self._waiting and not self._loop.has_work:
            return False
        if not self._step % max(self._drive.stagger, 1):
            self._admit(self._waiting)
        for output in self._loop.step() if self._loop.has_work else ():
            self._states[output.request_id].take(output, len(output.token_ids), output.finished)
        if self._drive.after_step is not None:
            self._drive.after_step(self.scheduler, self._step)
        self._step += 1
        return True

    @property
    def freed_windows(self) -> int:
        """Number of sliding-window pages that left the page lists of the requests of the last
        `begin` while they ran."""
        return sum(request.held.windows.first for request in self._requests)

    def end(self) -> list[Result]:
        """Return the results, in the order of the prompts, once `step` has returned False. Checks
        that every page is accounted for; raises LawBroken if a request ended with an error."""
        self.scheduler.audit()
        return [_result(request, self._states[request.rid].whole()) for request in self._requests]

    def run(self, prompts: Sequence[list[int]], lengths: int | Sequence[int], **sampling: Any) -> list[Result]:
        """Run prompts to their end and return their results; arguments as for `begin`. Waits."""
        self.begin(prompts, lengths, **sampling)
        while self.step():
            pass
        return self.end()

    def _admit(self, waiting: list[Request]) -> None:
        for _ in range(1 if self._drive.stagger else len(waiting)):
            if waiting:
                self.scheduler.add(waiting.pop(0))

    def _request(self, prompt: list[int], count: int, sampling: Mapping[str, Any]) -> Request:
        self._count += 1
        scored = VOCAB if self._drive.score_prompts else None
        values = {"temperature": 0.0, "logprobs": SHOWN, "ignore_eos": True, "prompt_logprobs": scored, **sampling}
        params = SamplingParams(**{**values, "max_tokens": count})
        return Request(f"r{self._count}", np.array(prompt, np.int32), params, seed=params.seed or 0)

    def _scramble(self, seed: int) -> None:
        pool = self.scheduler.running.memory.pool
        taken = pool.take(pool.free)
        np.random.default_rng(seed).shuffle(taken)
        pool.give(taken)


class Harness:
    """A started device on one of the kit's models, with a `RecordingWorker` (`recorder`) around its
    worker. Sessions run prompts on it, one at a time. `geometry`: head size, page size and dtype of
    this start."""

    def __init__(
        self,
        model: str,
        started: StartedDevice,
        geometry: Geometry,
        facts: Facts,
        pool: TokenToKVPool | None,
        cell_device: str,
    ) -> None:
        """`pool`: the device's keys and values, None if the kit has no access to them;
        `cell_device`: the device of the tensors that the pool reads into and writes from."""
        self._pool = pool
        self.cell_device = cell_device
        self.model = model
        self.started = started
        self.geometry = geometry
        self.facts = facts
        self.recorder = RecordingWorker(started.worker)

    @property
    def limits(self) -> Limits:
        """Limits of the worker, not narrowed by any session."""
        return self.recorder.limits

    @property
    def pool(self) -> TokenToKVPool:
        """The keys and values of a device with the capability "cells"; raises AssertionError for
        another."""
        assert self._pool is not None
        return self._pool

    def settle(self) -> None:
        """Wait for the device if it has streams, so that writes of the kit itself come before any
        work on the runtime's streams."""
        if self.facts.has_streams:
            torch.accelerator.synchronize()

    def session(self, **how: Any) -> Session:
        """Return a session with a fresh scheduler on this worker. `how`: fields of `Drive`."""
        return Session(self.recorder, Drive(**how))

    def run(
        self, prompts: Sequence[list[int]], lengths: int | Sequence[int], *, sampling: Any = None, **how: Any
    ) -> list[Result]:
        """Run prompts under a scheduler of their own and return their results. Waits. `lengths`:
        tokens to emit; `sampling`: further keywords of `Session.begin`; `how`: fields of `Drive`.
        """
        return self.session(**how).run(prompts, lengths, **(sampling or {}))

    def close(self) -> None:
        """Close the worker, which frees the device's memory."""
        self.recorder.close()


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return one prompt for each of `lengths`, lists of random token ids of the kit's vocabulary
    that are not special; equal arguments give equal prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(FIRST_TOKEN, VOCAB, size=length).tolist() for length in lengths]


def _narrowed(limits: Limits, drive: Drive) -> Limits:
    pages = min(drive.pages or limits.num_pages, limits.num_pages)
    chunk = min(drive.chunk or limits.max_batch_tokens, limits.max_batch_tokens)
    return replace(limits, num_pages=pages, max_batch_tokens=chunk)


def _result(request: Request, states: NDArray[np.float32] | None) -> Result:
    if request.finish_reason == "error":
        raise LawBroken(f"{request.rid} ended with an error: {request.error}")
    assert isinstance(request.params, SamplingParams)
    return Result(
        request.prompt_ids.tolist(),
        list(request.output_ids),
        list(request.logprobs),
        list(request.prompt_logprobs),
        request.finish_reason or "",
        request.params.is_greedy,
        max(request.cached_tokens, 0),
        states,
    )
