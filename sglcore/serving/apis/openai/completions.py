"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.body import usage
from sglcore.serving.apis.logprobs import CompletionLogprobs, prompt_scores
from sglcore.serving.apis.openai.completions_body import CompletionAnswer, CompletionBody, CompletionChunk, as_prompts
from sglcore.serving.apis.params import check_limit, form_field, sampling_params
from sglcore.serving.apis.shared import (
    as_json,
    check_generates,
    check_model,
    documented,
    ending,
    frame,
    progress,
    warned,
)
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.http.sse import DONE, EventStream, event, while_connected
from sglcore.serving.replicas.errors import Failure, InvalidRequest, Unanswered
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.runs import Runs, check_answered, sample_failure, start_runs

DEFAULT_MAX_TOKENS = 16
"""What the API continues a text by if nobody says."""


def routes(frontend: Frontend) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["completions"], route_class=JsonRoute)
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/v1/completions", responses=documented(CompletionAnswer, stream=CompletionChunk), summary="Continue texts"
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        call = _Call(frontend, texts, body)
        if not body.stream:
            return await while_connected(request, call.answer())
        runs = await call.start()
        return EventStream(_Stream(call, runs).chunks(), runs, headers=warned(body.warnings()))

    return router


class _Call:
    """One request: what it wants, and the parts of its answer."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: CompletionBody) -> None:
        self.frontend, self.texts, self.body = frontend, texts, body
        self.model = check_model(frontend, body.model)
        check_generates(frontend)
        _check(body)
        self.prompts = as_prompts(body.prompt)
        check_limit("prompt", len(self.prompts), frontend.config.max_prompts, "prompts")
        most = max(frontend.config.max_prompts, frontend.config.max_n)
        check_limit("n", len(self.prompts) * (body.n or 1), most, "samples of all prompts together")
        self.params = self._params()
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.scores_prompt = bool(body.echo) and body.logprobs is not None

    async def start(self) -> Runs:
        """Give the prompts to the engines; raises what refuses them."""
        return await start_runs(
            self.frontend,
            self.prompts,
            self.params,
            special=self.body.add_special_tokens is not False,
            progress=bool(self.body.return_progress and self.body.stream),
            name=self.id,
            form=form_field(self.body),
        )

    async def answer(self) -> Response:
        """The whole answer; waits for all samples."""
        async with await self.start() as runs:
            outputs = await runs.wait()
        check_answered(outputs)
        samples = [(output, sample) for output in outputs for sample in output.outputs]
        answer = {
            **self.frame(),
            "choices": [self._choice(place, *found) for place, found in enumerate(samples)],
            "usage": self.usage(runs),
        }
        return as_json(answer, warned(self.body.warnings()))

    def frame(self) -> dict[str, Any]:
        """What the answer, and every part of a stream, begins with."""
        return frame(self.frontend, "text_completion", self.id, self.created, self.model)

    def usage(self, runs: Runs) -> dict[str, Any]:
        """The tokens so far; a prompt that was only scored has no others."""
        prompt, made, *others = runs.counts()
        return usage(prompt, 0 if self.body.max_tokens == 0 else made, *others)

    def echoed(self, output: RequestOutput) -> str:
        """The prompt as text, if it is wanted."""
        if not self.body.echo:
            return ""
        return output.prompt if output.prompt is not None else self._decode(output.prompt_token_ids)

    def _params(self) -> SamplingParams:
        body, config = self.body, self.frontend.config
        check_limit("logprobs", body.logprobs, config.max_logprobs)
        given = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
        if body.echo and body.logprobs is not None:
            body = body.model_copy(update={"prompt_logprobs": max(body.logprobs, body.prompt_logprobs or 0)})
        return sampling_params(body, config, max_tokens=max(given, 1), logprobs=body.logprobs)

    def _choice(self, place: int, output: RequestOutput, sample: Completion) -> dict[str, Any]:
        body = self.body
        is_scored_only = body.max_tokens == 0
        choice: dict[str, Any] = {
            "index": place,
            "text": self.echoed(output) + ("" if is_scored_only else sample.text),
            "logprobs": self._logprobs(output, sample) if body.logprobs is not None else None,
            **ending(sample, "length" if is_scored_only and sample.finish_reason == "stop" else sample.finish_reason),
        }
        if body.return_token_ids:
            choice["token_ids"] = [] if is_scored_only else sample.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_scores(self.texts, output.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _logprobs(self, output: RequestOutput, sample: Completion) -> dict[str, list[Any]]:
        record = CompletionLogprobs(self.texts, shows_special=self.params.skip_special_tokens is False)
        wanted = self.body.logprobs or 0
        ids, found = ([], []) if self.body.max_tokens == 0 else (sample.token_ids, sample.logprobs or [])
        if self.scores_prompt:
            ids, found = output.prompt_token_ids + ids, [*(output.prompt_logprobs or []), *found]
        return record.record(ids, found, wanted)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.frontend.codec.decode(ids, skip_special_tokens=self.params.skip_special_tokens)


class _Stream:
    """The events of one request: its constant parts are written once."""

    def __init__(self, call: _Call, runs: Runs) -> None:
        self._call, self._runs = call, runs
        self._body = call.body
        options = call.body.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        frame = event({**call.frame(), **({"usage": None} if self._tells_usage else {})})
        self._prefix = frame[:-3] + b","  # without the end of the object and of the event
        self._begun: set[int] = set()
        self._records: dict[int, CompletionLogprobs] = {}
        self._failed: list[Failure] = []
        self._ended = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """All events, the last one [DONE] unless every sample failed."""
        call, n = self._call, self._call.params.n
        async for place, item in self._runs.read():
            if isinstance(item, PromptProgress):
                yield self._event({"choices": [], "prompt_progress": progress(item)})
                continue
            chunk = self._chunk(place * n + item.index, self._runs.generations[place].output, item)
            if chunk is not None:
                yield self._event({"choices": [chunk]})
        if self._failed and len(self._failed) == self._ended:
            raise Unanswered(self._failed[0])
        if self._tells_usage:
            yield event({**call.frame(), "choices": [], "usage": call.usage(self._runs)})
        yield DONE

    def _event(self, rest: dict[str, Any]) -> bytes:
        return self._prefix + event(rest)[7:]

    def _chunk(self, index: int, output: RequestOutput, delta: TextDelta) -> dict[str, Any] | None:
        """What is new of one choice; None if there is nothing to tell yet."""
        text = delta.text
        is_first = index not in self._begun
        if is_first:
            self._begun.add(index)
            text = self._call.echoed(output) + text
        ids = self._body.return_token_ids
        if not (text or delta.finish_reason or delta.logprobs or (ids and delta.token_ids)):
            return None
        chunk: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if delta.logprobs is not None:
            chunk["logprobs"] = self._logprobs(index, output, delta)
        if ids:
            chunk["token_ids"] = delta.token_ids
            if is_first:
                chunk["prompt_token_ids"] = output.prompt_token_ids
        if delta.finish_reason is not None:
            chunk |= self._ending(output.outputs[delta.index])
        return chunk

    def _ending(self, sample: Completion) -> dict[str, Any]:
        self._ended += 1
        failed = sample_failure(sample.finish_reason, sample.error)
        if failed is not None:
            self._failed.append(failed)
        return ending(sample, sample.finish_reason)

    def _logprobs(self, index: int, output: RequestOutput, delta: TextDelta) -> dict[str, list[Any]]:
        record = self._records.get(index)
        if record is None:
            offset = len(self._call.echoed(output))
            shows_special = self._call.params.skip_special_tokens is False
            record = CompletionLogprobs(self._call.texts, offset=offset, shows_special=shows_special)
            self._records[index] = record
        return record.record(delta.token_ids, delta.logprobs or (), self._body.logprobs or 0)


def _check(body: CompletionBody) -> None:
    """Refuse by name what the server can not do."""
    if body.suffix:
        raise InvalidRequest(
            "suffix: this server does not fill in between two texts", remedy="leave suffix out", param="suffix"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {body.n or 1}",
            wanted="the same number: every sample is returned",
            remedy="leave best_of out",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0 without echo", wanted="at least 1", param="max_tokens")
    if not body.stream:
        return
    if body.max_tokens == 0 or (body.echo and body.logprobs is not None):
        raise InvalidRequest(
            "a prompt's log-probabilities are known as a whole",
            remedy="leave stream out when you ask for echo with logprobs, or for max_tokens 0",
            param="stream",
        )
