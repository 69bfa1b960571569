"""The token side of an engine: scheduler and worker, token ids in and out, no text. It owns the device's steps.

Not thread-safe: one owner calls `add`, `abort`, `stop` and `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglcore.device.worker import ModelWorker
from sglcore.engine.grammar import Compiling, Grammars
from sglcore.engine.news import FinishReason, TokenNews
from sglcore.engine.outputs import TokenLogprob, token_logprobs
from sglcore.sampling.grammar import Grammar, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request, RequestError, State, Update
from sglcore.schedule.results import check_request
from sglcore.schedule.scheduler import Scheduler

COMPILE_WAIT = 0.002
"""Seconds that a step waits for a compiler when there is nothing else to do."""


@dataclass(slots=True)
class Asked:
    """A request on its way: its samples, how far its prompt was when that was last told, and the grammar that it still
    waits for."""

    params: SamplingParams
    requests: list[Request]
    told: int = -1
    compiling: Compiling | None = None


class TokenEngine:
    """Prompts as token ids in, news of tokens out, one step at a time."""

    def __init__(
        self,
        worker: ModelWorker,
        eos_ids: frozenset[int],
        *,
        overlap: bool = True,
        prefix_cache: bool = True,
        open_grammars: Callable[[], Grammars | None] = lambda: None,
    ) -> None:
        """`open_grammars` gives what compiles the grammars of requests, and is called when the first asks for one; None:
        such requests are refused."""
        self.worker = worker
        self.limits = worker.limits
        self.eos_ids = frozenset(token_id for token_id in eos_ids if token_id < self.limits.vocab_size)
        self.scheduler = Scheduler(self.limits, prefix_cache=prefix_cache)
        self.loop = Loop(self.scheduler, worker, overlap=overlap)
        self._asked: dict[str, Asked] = {}
        self._watched: dict[str, Asked] = {}
        self._compiling: dict[str, Asked] = {}
        self._untold: list[TokenNews] = []
        """Of requests that ended before the scheduler had them; kept until a step does not raise."""
        self._open_grammars = open_grammars
        self._grammars: Grammars | None = None
        self._closed = False

    @property
    def has_work(self) -> bool:
        """A call of `step` has something to do."""
        return self.loop.has_work or bool(self._compiling or self._untold)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def is_closed(self) -> bool:
        """Nothing can be added any more."""
        return self._closed

    def add(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, seed: int, *, progress: bool = False
    ) -> None:
        """Queue a prompt with its `params.n` samples, under a grammar once that is compiled. Raises RequestError, and then
        nothing was queued; does not wait."""
        prompt = np.asarray(prompt_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        requests: list[Request] = []
        for index in range(params.n):
            leader = requests[0] if requests else None
            requests.append(Request(f"{request_id}/{index}", prompt, params, seed, index, stops, leader=leader))
        asked = Asked(params, requests)
        if params.grammar is None:
            self._queue(asked)
        else:
            check_request(requests[0], self.limits)
            asked.compiling = self._compile(params.grammar)
            self._compiling[request_id] = asked
        self._asked[request_id] = asked
        if progress:
            self._watched[request_id] = asked

    def abort(self, request_id: str) -> list[TokenNews]:
        """End every sample of a request; its last news. Unknown ids are ignored."""
        asked = self._asked.get(request_id)
        if self._compiling.pop(request_id, None) is not None and asked is not None:
            return self._end_unqueued(request_id, asked, "abort")
        ended = [self.scheduler.abort(request.rid) for request in (asked.requests if asked is not None else ())]
        return self._tell([update for update in ended if update is not None])

    def abort_sample(self, request_id: str, index: int) -> list[TokenNews]:
        """End one sample; its last news."""
        update = self.scheduler.abort(f"{request_id}/{index}")
        return [] if update is None else self._tell([update])

    def stop(self, request_id: str, index: int, cause: str) -> list[TokenNews]:
        """End a sample whose text reached a stop string; its last news."""
        update = self.scheduler.stop(f"{request_id}/{index}", cause)
        return [] if update is None else self._tell([update])

    def step(self) -> list[TokenNews]:
        """Run one step of the loop; returns the news in order. Waits for the device. If it raises, the news of the
        requests that the failure ended are in `drain`."""
        if self._compiling:
            self._take_compiled()
        told = self._tell(self.loop.step()) if self.loop.has_work else []
        news = self._take_untold() + told
        return self._progress() + news if self._watched else news

    def drain(self) -> list[TokenNews]:
        """Collect what is in flight and submit nothing; returns the news."""
        told = self._tell(self.loop.drain())
        return self._take_untold() + told

    def embed(self, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[Request]:
        """Queue prompts to embed, all or none: raises RequestError before any was queued. Their `embedding` is there when
        they are FINISHED, or `error` says why not."""
        queued = [
            Request(name, np.array(ids), SamplingParams(), task="embed")
            for name, ids in zip(names, prompts, strict=True)
        ]
        for request in queued:
            check_request(request, self.limits)
        for request in queued:
            self.scheduler.add(request)
        return queued

    def close(self) -> None:
        """Drop what is in flight and free the worker. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._grammars is not None:
                self._grammars.close()
            self.loop.drain()
            self.worker.close()

    def _queue(self, asked: Asked) -> None:
        for request in asked.requests:
            self.scheduler.add(request)

    def _compile(self, grammar: Grammar) -> Compiling:
        if not self.limits.takes_masks:
            raise RequestError("this device's sampler takes no masks, so it follows no grammars; leave the grammar out")
        if self._grammars is None:
            self._grammars = self._open_grammars()
        if self._grammars is None:
            raise RequestError("this engine follows no grammars; the decision `grammar` says why")
        return self._grammars.ask(grammar)

    def _take_untold(self) -> list[TokenNews]:
        untold, self._untold = self._untold, []
        return untold

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar is ready; those whose grammar can not be compiled end. Waits a moment for a
        compiler if nothing else can run."""
        if not self.loop.has_work:
            first = next(iter(self._compiling.values())).compiling
            assert first is not None
            first.wait(COMPILE_WAIT)
        for name, asked in list(self._compiling.items()):
            if asked.compiling is not None and asked.compiling.is_done:
                del self._compiling[name]
                self._untold += self._start_compiled(name, asked, asked.compiling)

    def _start_compiled(self, name: str, asked: Asked, compiled: Compiling) -> list[TokenNews]:
        try:
            for request in asked.requests:
                request.matcher = compiled.start()
        except GrammarError as error:
            return self._end_unqueued(name, asked, "error", str(error), refused=True)
        except Exception as error:
            return self._end_unqueued(name, asked, "error", f"its grammar failed: {type(error).__name__}: {error}")
        self._queue(asked)
        return []

    def _end_unqueued(
        self, name: str, asked: Asked, reason: FinishReason, error: str = "", *, refused: bool = False
    ) -> list[TokenNews]:
        """The last news of a request that the scheduler never had."""
        self._asked.pop(name, None)
        self._watched.pop(name, None)
        return [
            TokenNews(name, request.sample_index, [], reason, None, error, refused=refused)
            for request in asked.requests
        ]

    def _tell(self, updates: Sequence[Update]) -> list[TokenNews]:
        news = [self._news(update) for update in updates if update.request.task != "embed"]
        for each in news:
            if each.finish_reason is not None:
                self._forget(each.request_id)
        return news

    def _news(self, update: Update) -> TokenNews:
        request = update.request
        name, index = request.rid.rpartition("/")[0], request.sample_index
        asked = self._asked[name]
        news = TokenNews(name, index, update.token_ids)
        if update.logprobs is not None:
            news.logprobs = token_logprobs(update.token_ids, update.logprobs, asked.params.logprobs or 0)
        if len(request.output_ids) == len(update.token_ids):
            self._tell_prompt(news, asked, request)
        if update.finish_reason is not None:
            news.finish_reason, news.stop_cause, news.error = request.finish_reason, request.stop_cause, request.error
        return news

    def _tell_prompt(self, news: TokenNews, asked: Asked, request: Request) -> None:
        """What is known of the prompt once its first token is there."""
        news.cached_tokens = request.cached_tokens
        if asked.params.prompt_logprobs is not None and request.scored_tokens == len(request.prompt_ids) - 1:
            news.prompt_logprobs = _prompt_scores(request, asked.params.prompt_logprobs)
        self._watched.pop(news.request_id, None)

    def _forget(self, name: str) -> None:
        asked = self._asked.get(name)
        if asked is not None and all(request.state is State.FINISHED for request in asked.requests):
            self._asked.pop(name, None)
            self._watched.pop(name, None)

    def _progress(self) -> list[TokenNews]:
        found: list[TokenNews] = []
        for name, asked in self._watched.items():
            leader = asked.requests[0]
            if leader.cached_tokens >= 0 and asked.told < leader.num_cells <= len(leader.prompt_ids):
                asked.told = leader.num_cells
                found.append(TokenNews(name, 0, cached_tokens=leader.cached_tokens, processed=leader.num_cells))
        return found


def _prompt_scores(request: Request, wanted: int) -> list[TokenLogprob]:
    scores: list[TokenLogprob] = []
    for found in request.prompt_logprobs:
        first = len(scores) + 1
        ids = request.prompt_ids[first : first + len(found.chosen)].tolist()
        scores.extend(token_logprobs(ids, found, wanted))
    return scores
