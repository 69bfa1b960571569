"""The engine core: requests in, pieces of text out, one step at a time. It serves the offline API; a server can too.

Not thread-safe: one owner calls `add`, `abort` and `step`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from sglcore.device.worker import ModelWorker
from sglcore.engine.outputs import Completion, Piece, RequestOutput, TokenLogprob, token_logprobs
from sglcore.engine.text import GrowingText, TextCodec, TextError, eos_token_ids
from sglcore.sampling.params import SamplingParams, fresh_seed
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request, Update
from sglcore.schedule.results import check_request
from sglcore.schedule.scheduler import Scheduler

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Group:
    """One prompt with its n samples on their way."""

    output: RequestOutput
    params: SamplingParams
    requests: list[Request]
    texts: list[GrowingText] = field(default_factory=list)


class Engine:
    """Scheduler, worker and text in one place."""

    def __init__(
        self, worker: ModelWorker, model_path: Path, *, overlap: bool = True, prefix_cache: bool = True
    ) -> None:
        self.worker = worker
        self.codec = TextCodec(model_path)
        self.vocab_size = worker.limits.vocab_size
        self.eos_ids = frozenset(token_id for token_id in eos_token_ids(model_path) if token_id < self.vocab_size)
        self.scheduler = Scheduler(worker.limits, prefix_cache=prefix_cache)
        self.loop = Loop(self.scheduler, worker, overlap=overlap)
        self._groups: dict[str, Group] = {}
        self._closed = False
        self._numbers = count()

    @property
    def has_work(self) -> bool:
        """A call of `step` has something to do."""
        return self.loop.has_work

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
        """Queue a prompt; its output object fills up as steps run. Raises RequestError or TextError, and then nothing
        was queued."""
        if self._closed:
            raise TextError("this engine is closed", remedy="start another")
        name = request_id if request_id is not None else self._free_name()
        if name in self._groups:
            raise TextError(f"request id {name!r} is in use", remedy="give each request its own id")
        ids = self._tokens(prompt)
        self._check_ids(params)
        seed = params.seed if params.seed is not None else fresh_seed()
        requests = self._requests(name, ids, params, seed)
        scored: list[TokenLogprob | None] | None = [None] if params.prompt_logprobs is not None else None
        outputs = [Completion(i, seed, logprobs=_wanted(params)) for i in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        group = Group(RequestOutput(name, text, ids, outputs, scored), params, requests)
        self._queue(group)
        return group.output

    def abort(self, request_id: str) -> None:
        """End every sample of a request; what it produced so far stays. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        for request in group.requests if group is not None else ():
            update = self.scheduler.abort(request.rid)
            if update is not None:
                self._absorb(update)

    def step(self) -> list[Piece]:
        """Run one step of the loop; returns the news in order. Waits for the device."""
        try:
            updates = self.loop.step()
        except BaseException:
            for update in self.loop.drain():
                self._absorb_safely(update)
            raise
        return [piece for update in updates if (piece := self._absorb_safely(update)) is not None]

    def embed(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """float32 [hidden] for each prompt: the mean of its last hidden states, of length 1. Waits.

        All or none: a prompt that can not run is an error that names its place, before any work.
        """
        if self.worker.limits.generates:
            raise TextError("this checkpoint generates text", wanted="an encoder, such as BERT", remedy="use generate")
        requests: list[Request] = []
        try:
            queued = [self._embed_request(place, prompt) for place, prompt in enumerate(prompts)]
            for request in queued:
                requests.append(request)
                self.scheduler.add(request)
            while self.loop.has_work:
                self.step()
        except BaseException:
            for request in requests:
                self.scheduler.abort(request.rid)
            raise
        return [_embedding(request) for request in requests]

    def close(self) -> None:
        """Drop what is in flight and free the worker. Idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.drain()
            self.worker.close()

    def _free_name(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._groups)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise TextError(f"this prompt can not be read: {error}", wanted="text, or a list of token ids") from None

    def _embed_request(self, place: int, prompt: Prompt) -> Request:
        try:
            ids = np.array(self._tokens(prompt))
            request = Request(f"embed-{next(self._numbers)}", ids, SamplingParams(), task="embed")
            check_request(request, self.worker.limits)
        except (TextError, ValueError) as error:
            raise TextError(f"text {place}: {error}") from None
        return request

    def _check_ids(self, params: SamplingParams) -> None:
        """An id beyond the vocabulary would bias another row's logits."""
        highest = max((*params.logit_bias, *params.stop_token_ids), default=0)
        if highest >= self.vocab_size:
            raise TextError(
                f"logit_bias or stop_token_ids name token id {highest}",
                wanted=f"0..{self.vocab_size - 1}",
                remedy="use the ids of this model's tokenizer",
            )

    def _requests(self, name: str, ids: list[int], params: SamplingParams, seed: int) -> list[Request]:
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        prompt = np.array(ids)
        requests: list[Request] = []
        for index in range(params.n):
            leader = requests[0] if requests else None
            requests.append(Request(f"{name}/{index}", prompt, params, seed, index, stops, leader=leader))
        return requests

    def _queue(self, group: Group) -> None:
        params = group.params
        for request in group.requests:
            self.scheduler.add(request)
            group.texts.append(
                GrowingText(
                    self.codec,
                    params.stop,
                    skip_special=params.skip_special_tokens,
                    include_stop=params.include_stop_str_in_output,
                    prompt=group.output.prompt_token_ids,
                )
            )
        self._groups[group.output.request_id] = group

    def _absorb_safely(self, update: Update) -> Piece | None:
        """As `_absorb`; what goes wrong with one request's text ends that request and no other."""
        try:
            return self._absorb(update)
        except Exception as error:
            return self._fail(update.request, f"its text can not be made: {type(error).__name__}: {error}")

    def _fail(self, request: Request, reason: str) -> Piece:
        name = request.rid.rpartition("/")[0]
        group = self._groups[name]
        completion = group.output.outputs[request.sample_index]
        completion.finish_reason, completion.error = "error", reason
        self.scheduler.abort(request.rid)
        if group.output.finished:
            del self._groups[name]
        return Piece(name, request.sample_index, "", (), "error")

    def _absorb(self, update: Update) -> Piece | None:
        request = update.request
        if request.task == "embed":
            return None
        group, index = self._groups.get(request.rid.rpartition("/")[0]), request.sample_index
        if group is None or group.output.outputs[index].finish_reason is not None:
            return None  # its text ended at a stop string while more news of it were on their way
        completion, text = group.output.outputs[index], group.texts[index]
        shown = self._take_tokens(group, completion, text, update)
        if text.stopped_by is not None and not update.finished:
            self.scheduler.stop(request.rid, text.stopped_by)
        if update.finished or text.stopped_by is not None:
            shown += text.finish()
            self._end(group, completion, text, request)
        if group.output.finished:
            del self._groups[group.output.request_id]
        completion.text = text.text if completion.finish_reason else completion.text + shown
        return Piece(group.output.request_id, index, shown, tuple(update.token_ids), completion.finish_reason)

    def _take_tokens(self, group: Group, completion: Completion, text: GrowingText, update: Update) -> str:
        ids = update.token_ids
        completion.token_ids.extend(ids)
        if completion.logprobs is not None and update.logprobs is not None:
            completion.logprobs.extend(token_logprobs(ids, update.logprobs, group.params.logprobs or 0))
        visible = ids
        if update.finish_reason == "stop" and ids and isinstance(update.request.stop_cause, int):
            visible = ids[:-1]
        return text.push(visible)

    def _end(self, group: Group, completion: Completion, text: GrowingText, request: Request) -> None:
        stopped = text.stopped_by is not None
        completion.finish_reason = "stop" if stopped else request.finish_reason
        completion.stop_cause = text.stopped_by if stopped else request.stop_cause
        completion.error = request.error
        output = group.output
        output.cached_tokens = max(output.cached_tokens, request.cached_tokens)
        is_scored = request.scored_tokens == len(request.prompt_ids) - 1
        if output.prompt_logprobs is not None and len(output.prompt_logprobs) == 1 and is_scored:
            output.prompt_logprobs += _prompt_scores(request, group.params.prompt_logprobs or 0)


def _embedding(request: Request) -> np.ndarray:
    if request.embedding is None:
        raise TextError(f"{request.rid!r} has no embedding: {request.error or 'it was aborted'}")
    return request.embedding


def _wanted(params: SamplingParams) -> list[TokenLogprob] | None:
    return [] if params.logprobs is not None else None


def _prompt_scores(request: Request, wanted: int) -> list[TokenLogprob | None]:
    scores: list[TokenLogprob | None] = []
    for found in request.prompt_logprobs:
        first = len(scores) + 1
        ids = request.prompt_ids[first : first + len(found.chosen)].tolist()
        scores.extend(token_logprobs(ids, found, wanted))
    return scores
