"""A scheduler and its loop over a worker: prompts in, results out. Does not use torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.conformance.inputs.hashed_grammar import HashedMatcher
from sglcore.conformance.law import LawBroken
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.engine.output_processor import HiddenParts
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import Limits, TokenLogprobs, least_shared_pages, most_window_pages

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

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each output token."""
        return [float(found.chosen[0]) for found in self.scores]

    @property
    def prompt_logprobs(self) -> list[float]:
        """The log-probability of each prompt token after the first, if they were requested."""
        return [float(value) for found in self.prompt_scores for value in found.chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """Settings of a `Session`: how its scheduler runs prompts (overlap, chunk size, order and
    number of pages, prefix cache), and how many steps lie between their arrivals (`stagger`)."""

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
    Where window pages share their memory, the window pages of one request are added. None: all."""
    window_pages: int | None = None
    """The same for sliding-window pages."""
    prefix_cache: bool = False
    """The prefix cache is on."""
    after_step: Callable[[Scheduler, int], None] | None = None
    """Called with the scheduler and the step's number after each step. None: nothing is."""


class Session:
    """Runs prompts through one scheduler (`scheduler`) and its loop (`loop`) on a worker: `run`, or
    `begin`, `step` until False, and `end`. The worker and its KV pages keep what earlier sessions
    wrote, and a further `begin` sees what the earlier one left."""

    def __init__(
        self,
        recorder: RecordingWorker,
        scheduler: Scheduler,
        loop: Loop,
        *,
        stagger: int = 0,
        after_step: Callable[[Scheduler, int], None] | None = None,
    ) -> None:
        """`recorder`: the worker to which the loop submits; `stagger` and `after_step`: see
        `Drive`."""
        self.recorder, self.scheduler, self.loop = recorder, scheduler, loop
        self._stagger, self._after_step = stagger, after_step
        self._count = 0
        self._step = 0
        self._every = 1
        self._requests: Sequence[Request] = ()
        self._waiting: list[Request] = []
        self._states: dict[str, HiddenParts] = {}
        self._masked: frozenset[str] = frozenset()

    def begin(
        self,
        prompts: Sequence[list[int]],
        lengths: int | Sequence[int],
        *,
        stagger: int | None = None,
        score_prompts: bool = False,
        grammars: Sequence[int | None] = (),
        changing: Collection[int] = (),
        optional: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> None:
        """Submit prompts that `step` will run. `lengths`: tokens to emit, for all or for each
        prompt; `stagger`: as in `Drive`, None: the session's own; `score_prompts`: request
        log-probabilities of prompt tokens; `grammars`: the seed of each prompt's stand-in for a
        grammar, None for no grammar; `changing`: the seeds of those that also add to logits;
        `optional`: further sampling parameters of each prompt. Greedy unless `sampling` says
        otherwise."""
        each = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
        scored = self.recorder.limits.vocab_size if score_prompts else None
        given = {"temperature": 0.0, "logprobs": SHOWN, "ignore_eos": True, "prompt_logprobs": scored, **sampling}
        own = [{**given, **more} for more in optional or [{}] * len(prompts)]
        requests = [
            self.request(prompt, SamplingParams(**{**values, "max_tokens": count}))
            for prompt, count, values in zip(prompts, each, own, strict=True)
        ]
        for request, seed in zip(requests, grammars, strict=False):
            matcher = None if seed is None else HashedMatcher(seed, self.recorder.limits.vocab_size)
            request.matcher, request.change = matcher, matcher if seed in changing else None
        self.submit(requests, stagger)

    def request(self, prompt: Sequence[int] | NDArray[np.int32], params: SamplingParams) -> Request:
        """Return a new request with a name of its own in this session."""
        self._count += 1
        return Request(f"r{self._count}", np.array(prompt, np.int32), params, seed=params.seed or 0)

    def submit(self, requests: Sequence[Request], stagger: int | None = None) -> None:
        """Submit requests of the caller's own, which `step` will run; `stagger` as for `begin`."""
        self._requests, self._waiting, self._step = requests, list(requests), 0
        self._every = self._stagger if stagger is None else stagger
        self._states = {each.rid: HiddenParts(each.params.return_hidden_states) for each in requests}
        self._masked = frozenset(each.rid for each in requests if each.matcher is not None)

    def step(self) -> bool:
        """Run one step of the loop; return whether there was something to run. Waits."""
        if not self._waiting and not self.loop.has_work:
            return False
        if not self._step % max(self._every, 1):
            self._admit(1 if self._every else len(self._waiting))
        for output in self.loop.step() if self.loop.has_work else ():
            if output.request_id in self._states:
                self._states[output.request_id].take(output, len(output.token_ids), output.finished)
        if self._after_step is not None:
            self._after_step(self.scheduler, self._step)
        self._step += 1
        return True

    @property
    def freed_windows(self) -> int:
        """Number of sliding-window pages that left the page lists of the requests of the last
        `begin` while they ran."""
        return sum(request.held.windows.first for request in self._requests)

    def finish(self) -> None:
        """Run all requests to their end. Waits. Checks that every page is accounted for."""
        while self.step():
            pass
        self.scheduler.audit()

    def end(self) -> list[Result]:
        """Return the results, in the order of the prompts, once `step` has returned False. Checks
        that every page is accounted for; raises LawBroken if a request ended with an error."""
        self.scheduler.audit()
        for request in self._requests:
            if request.finish_reason == "error":
                raise LawBroken(f"{request.rid} ended with an error: {request.error}")
        return [
            result_of(each, self._states[each.rid].whole(), is_masked=each.rid in self._masked)
            for each in self._requests
        ]

    def run(self, prompts: Sequence[list[int]], lengths: int | Sequence[int], **how: Any) -> list[Result]:
        """Run prompts to their end and return their results; arguments as for `begin`. Waits."""
        self.begin(prompts, lengths, **how)
        self.finish()
        return self.end()

    def _admit(self, count: int) -> None:
        for request in self._waiting[:count]:
            self.scheduler.add(request)
        del self._waiting[:count]


def open_session(recorder: RecordingWorker, drive: Drive) -> Session:
    """Return a session with a new scheduler on a worker without steps in flight."""
    recorder.next_scheduler()
    scheduler = make_scheduler(_narrowed(recorder.limits, drive), prefix_cache=drive.prefix_cache)
    if drive.scramble is not None:
        scramble(scheduler, drive.scramble)
    loop = Loop(scheduler, recorder, overlap=drive.overlap)
    return Session(recorder, scheduler, loop, stagger=drive.stagger, after_step=drive.after_step)


def scramble(scheduler: Scheduler, seed: int) -> None:
    """Put the free pages of a scheduler into a random order."""
    pool = scheduler.running.memory.pool
    taken = pool.take(pool.free)
    np.random.default_rng(seed).shuffle(taken)
    pool.give(taken)


def _narrowed(limits: Limits, drive: Drive) -> Limits:
    chunk = min(drive.chunk or limits.max_batch_tokens, limits.max_batch_tokens)
    pages = drive.pages or limits.num_pages
    if limits.window_unit:
        listed = most_window_pages(limits.window, chunk, limits.page_size, limits.lookahead)
        pages = least_shared_pages(pages, listed, limits.window_unit)
    pages = min(pages, limits.num_pages)
    windows = min(drive.window_pages or limits.num_window_pages, limits.num_window_pages)
    return replace(limits, num_pages=pages, num_window_pages=windows, max_batch_tokens=chunk)


def result_of(request: Request, states: NDArray[np.float32] | None = None, *, is_masked: bool = False) -> Result:
    """Return the result of a finished request, whatever its end. `states`: float32 [n, hidden], its
    hidden states; `is_masked`: it had a grammar."""
    return Result(
        request.prompt_ids.tolist(),
        list(request.output_ids),
        list(request.logprobs),
        list(request.prompt_logprobs),
        request.finish_reason or "",
        not is_masked and draws_best(request.params),
        max(request.cached_tokens, 0),
        states,
    )


def draws_best(params: SamplingParams) -> bool:
    """Return whether each token is the model's best one: greedy, and nothing changes a logit."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    changes = any(penalties) or params.logit_bias or params.min_tokens or params.is_bound
    return params.is_greedy and not changes
