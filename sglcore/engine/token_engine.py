"""The token side of an engine: a scheduler and a worker, with token ids in and out, no text. It
runs the steps of the device.

Not thread-safe: one owner calls `add`, `abort`, `end_sample` and `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglcore.engine.disaggregation.transfer_messages import PageSide
from sglcore.engine.structured_output.grammar_cache import Compiling, Grammars
from sglcore.sampling.grammar_spec import GrammarBusy, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.disaggregation.remote_prefill import RemotePrompts
from sglcore.schedule.make_loop import make_loop
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput, FinishReason
from sglcore.schedule.result_checks import check_request
from sglcore.schedule.scheduler import Scheduler
from sglcore.worker.model_worker import ModelWorker

COMPILE_WAIT = 0.002
"""Seconds that a step waits for a grammar's compilation, or for another engine, if nothing else can
run."""


@dataclass(slots=True)
class SampleGroup:
    """A request in progress: its samples, the number of prompt tokens that was reported last as
    progress (-1: none), and the grammar that it still waits for (None: none)."""

    params: SamplingParams
    requests: list[Request]
    reported: int = -1
    compiling: Compiling | None = None


class TokenEngine:
    """Takes prompts as token ids and returns outputs, one step at a time."""

    def __init__(
        self,
        worker: ModelWorker,
        eos_ids: frozenset[int],
        *,
        overlap: bool = True,
        prefix_cache: bool = True,
        shards: int = 1,
        open_grammars: Callable[[], Grammars | None] = lambda: None,
        open_pages: Callable[[TokenEngine], PageSide] | None = None,
    ) -> None:
        """`eos_ids`: tokens that end an output unless a request ignores them. `shards`: number of
        data-parallel shards, each of which has the worker's limits. `open_grammars` returns the
        grammar compiler, and is called when a request needs one; if it returns None, such requests
        are refused. `open_pages` makes the `PageSide`, if prompts are prefilled on one engine and
        decoded on another."""
        self.worker = worker
        self.limits = worker.limits
        self.eos_ids = frozenset(token_id for token_id in eos_ids if token_id < self.limits.vocab_size)
        self.max_requests = self.limits.max_requests * shards
        """Requests that may run at the same time, over all shards."""
        self._remote: RemotePrompts | None = None
        self.scheduler, self.loop = make_loop(worker, shards, overlap=overlap, prefix_cache=prefix_cache)
        self._groups: dict[str, SampleGroup] = {}
        self._watched: dict[str, SampleGroup] = {}
        self._compiling: dict[str, SampleGroup] = {}
        self._unsent: list[EngineOutput] = []
        """Outputs of requests that ended outside the loop, kept until `step` or `drain` returns
        them."""
        self._open_grammars = open_grammars
        self._grammars: Grammars | None = None
        self.is_closed = False
        self.pages = None if open_pages is None else open_pages(self)

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` has something to do."""
        is_shared = self.pages is not None and self.pages.has_work
        return self.loop.has_work or is_shared or bool(self._compiling or self._unsent)

    @property
    def only_waits(self) -> bool:
        """Whether a call of `step` would submit and collect nothing: it waits for a grammar's
        compilation or for another engine, or there are no requests."""
        return not self.loop.has_work or self._awaits_prompts

    @property
    def lacks(self) -> str:
        """Why no request can be served now, because another engine is missing; empty: requests can
        be served."""
        return "" if self.pages is None else self.pages.lacks

    @property
    def remote(self) -> RemotePrompts:
        """The scheduler's interface for prompts that another engine prefills. Only without
        shards."""
        if self._remote is None:
            assert isinstance(self.scheduler, Scheduler)
            self._remote = RemotePrompts(self.scheduler)
        return self._remote

    @property
    def _awaits_prompts(self) -> bool:
        return self.pages is not None and self.remote.only_waits

    @property
    def num_compiling(self) -> int:
        """Number of requests that wait for the compilation of their grammar."""
        return len(self._compiling)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        progress: bool = False,
        embeds: PromptEmbeds | None = None,
        first_index: int = 0,
    ) -> list[Request]:
        """Queue a request with `params.n` samples of a prompt, given as token ids; with `embeds`,
        embeddings are run in their place. `seed`: that of all samples, which are numbered from
        `first_index` on and returned. A request with a grammar is queued in the scheduler once the
        grammar is compiled. `progress`: steps also return outputs with the progress of its prompt.
        Does not wait. Raises RequestError; then nothing was queued. `request_id` must not be in
        use."""
        prompt = np.asarray(prompt_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        requests: list[Request] = []
        for index in range(first_index, first_index + params.n):
            leader = requests[0] if requests else None
            name = f"{request_id}/{index}"
            requests.append(
                Request(name, prompt, params, seed, index, stops, leader=leader, embeds=embeds, request_id=request_id)
            )
        if self.pages is not None:
            self.pages.mark(requests)
        group = SampleGroup(params, requests)
        if not params.is_bound:
            self._queue(group)
        else:
            check_request(requests[0], self.limits)
            group.compiling = self._compile(params)
            self._compiling[request_id] = group
        self._groups[request_id] = group
        if progress:
            self._watched[request_id] = group
        return requests

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End every sample of a request; returns their last outputs. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if self._compiling.pop(request_id, None) is not None and group is not None:
            return self._end_unqueued(request_id, group, "abort")
        ended = [self.scheduler.abort(request.rid) for request in (group.requests if group is not None else ())]
        return self._received([output for output in ended if output is not None])

    def end_sample(self, request_id: str, index: int, cause: str | None) -> list[EngineOutput]:
        """End sample number `index` at the stop string `cause`, or (None) because its text cannot
        be made.

        Returns its last output; empty if it has ended.
        """
        name = f"{request_id}/{index}"
        output = self.scheduler.abort(name) if cause is None else self.scheduler.stop(name, cause)
        return [] if output is None else self._received([output])

    def step(self) -> list[EngineOutput]:
        """Run one step of the loop; returns the outputs in order. Waits for the device. If it
        raises, `drain` returns the outputs of the requests that the failure ended."""
        if self._compiling:
            self._take_compiled()
        if self.pages is not None:
            self._unsent += self._received(self.pages.begin(COMPILE_WAIT if self._awaits_prompts else 0.0))
        found = self._received(self.loop.step()) if self.loop.has_work else []
        outputs = self._after(self._take_unsent() + found)
        return self._progress() + outputs if self._watched else outputs

    def drain(self) -> list[EngineOutput]:
        """Collect the steps in flight without submitting new ones; returns the outputs. Waits."""
        found = self._received(self.loop.drain())
        return self._after(self._take_unsent() + found)

    def embed(self, name: str, prompt_ids: Sequence[int], token_types: Sequence[int] | None = None) -> Request:
        """Queue a prompt to embed or to score. When the returned request is FINISHED, it has an
        `embedding` or an `error`, and neither if it was aborted. `token_types`: the segment of each
        token (None: all 0). Does not wait. Raises RequestError; then it was not queued."""
        types = None if token_types is None else np.asarray(token_types, np.int32)
        request = Request(name, np.asarray(prompt_ids), SamplingParams(), task="embed", token_types=types)
        self.scheduler.add(request)
        return request

    def close(self) -> None:
        """Drop work in flight and free the worker; waits for the steps in flight. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            if self._grammars is not None:
                self._grammars.close()
            self.loop.drain()
            if self.pages is not None:
                self.pages.close()
            self.worker.close()

    def _after(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        return outputs if self.pages is None else self.pages.end(outputs)

    def _queue(self, group: SampleGroup) -> None:
        for request in group.requests:
            self.scheduler.add(request)

    def _compile(self, params: SamplingParams) -> Compiling:
        if not self.limits.takes_masks:
            raise RequestError("this device's sampler takes no masks, so it follows no grammars; leave the grammar out")
        if params.repetition is not None and not self.limits.takes_changes:
            raise RequestError(
                "this device's sampler takes no additions to logits, so there is no DRY; leave dry_multiplier out"
            )
        if self._grammars is None:
            self._grammars = self._open_grammars()
        if self._grammars is None:
            raise RequestError("this engine follows no grammars; the decision `grammar` says why")
        return self._grammars.compile(params.grammar, params.thinking, params.token_rules, params.repetition)

    def _take_unsent(self) -> list[EngineOutput]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _take_compiled(self) -> None:
        """Queue requests whose grammar is compiled; end those whose grammar failed.

        Waits up to COMPILE_WAIT for a grammar if nothing else can run.
        """
        if not self.loop.has_work:
            first = next(iter(self._compiling.values())).compiling
            assert first is not None
            first.wait(COMPILE_WAIT)
        for name, group in list(self._compiling.items()):
            if group.compiling is not None and group.compiling.is_done:
                del self._compiling[name]
                self._unsent += self._start_compiled(name, group, group.compiling)

    def _start_compiled(self, name: str, group: SampleGroup, compiled: Compiling) -> list[EngineOutput]:
        try:
            for request in group.requests:
                request.matcher, request.change = compiled.start_after(request.prompt_ids)
        except GrammarError as error:
            is_busy = isinstance(error, GrammarBusy)
            text, later = (error.found, error.retry_after) if is_busy else (str(error), 0.0)
            return self._end_unqueued(name, group, "error", text, refused=True, retry_after=later)
        except Exception as error:
            return self._end_unqueued(name, group, "error", f"its grammar failed: {type(error).__name__}: {error}")
        self._queue(group)
        return []

    def _end_unqueued(
        self, name: str, group: SampleGroup, reason: FinishReason, error: str = "", *, refused: bool = False,
        retry_after: float = 0.0,
    ) -> list[EngineOutput]:  # fmt: skip
        """Forget a request that the scheduler has not got yet, and return an output without tokens
        that ends each of its samples for `reason`. `error`, `refused` and `retry_after`: those of
        the outputs."""
        self._groups.pop(name, None)
        self._watched.pop(name, None)
        return [
            EngineOutput(name, request.sample_index, [], reason, None, error, refused=refused, retry_after=retry_after)
            for request in group.requests
        ]

    def _received(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Return the outputs without those of embedding requests and of unknown ones; forget the
        requests that have no sample left."""
        known = [output for output in outputs if output.request_id in self._groups]
        for output in known:
            if output.cached_tokens >= 0:
                self._watched.pop(output.request_id, None)
            if output.finished:
                self._forget(output.request_id)
        return known

    def _forget(self, name: str) -> None:
        group = self._groups.get(name)
        if group is not None and all(request.state is State.FINISHED for request in group.requests):
            self._groups.pop(name, None)
            self._watched.pop(name, None)

    def _progress(self) -> list[EngineOutput]:
        found: list[EngineOutput] = []
        for name, group in self._watched.items():
            leader = group.requests[0]
            if leader.cached_tokens >= 0 and group.reported < leader.held.num_cells <= len(leader.prompt_ids):
                group.reported = leader.held.num_cells
                found.append(EngineOutput(name, 0, cached_tokens=leader.cached_tokens, processed=leader.held.num_cells))
        return found
