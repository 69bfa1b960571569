"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from sglcore.engine.outputs import Completion
from sglcore.serving.apis.body import usage
from sglcore.serving.apis.logprobs import chat_logprobs, prompt_scores
from sglcore.serving.apis.openai.chat_body import ChatAnswer, ChatBody, ChatChunk
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
from sglcore.serving.chat.parsers.delta import Delta
from sglcore.serving.chat.run import ChatEvent, ChatMessage, ChatRequest, ChatRun, collect_chat, start_chat
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.http.sse import DONE, EventStream, event, while_connected
from sglcore.serving.replicas.errors import Failure, InvalidRequest, Unanswered
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.runs import check_answered, drafted, sample_failure


def routes(frontend: Frontend) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["chat"], route_class=JsonRoute)
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/v1/chat/completions",
        responses=documented(ChatAnswer, stream=ChatChunk),
        summary="The next message of a conversation",
    )
    async def chat(body: ChatBody, request: Request) -> Response:
        call = _Call(frontend, texts, body)
        if not body.stream:
            return await while_connected(request, call.answer())
        run = await start_chat(frontend, call.request)
        return EventStream(_Stream(call, run).chunks(), run, headers=call.warnings(run))

    return router


class _Call:
    """One request: what it wants, and the parts of its answer."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: ChatBody) -> None:
        self.frontend, self.texts, self.body = frontend, texts, body
        self.model = check_model(frontend, body.model)
        check_generates(frontend)
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.request = chat_request(frontend, body, self.id)

    async def answer(self) -> Response:
        """The whole answer; waits for all samples."""
        body = self.body
        async with await start_chat(self.frontend, self.request) as run:
            messages = await collect_chat(run)
        output = run.generation.output
        check_answered([output])
        answer = {
            **self.frame("chat.completion"),
            "choices": [self._choice(*found) for found in zip(messages, output.outputs, strict=True)],
            "usage": self.usage(run),
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_scores(self.texts, output.prompt_logprobs, body.prompt_logprobs)
        return as_json(answer, self.warnings(run))

    def frame(self, kind: str) -> dict[str, Any]:
        """What the answer, and every part of a stream, begins with."""
        return frame(self.frontend, kind, self.id, self.created, self.model)

    def warnings(self, run: ChatRun) -> dict[str, str]:
        """The header about fields that had no effect, those for the template among them."""
        values = self.body.chat_template_kwargs or {}
        unread = (f"chat_template_kwargs.{name}" if name in values else name for name in run.ignored)
        return warned((*self.body.warnings(), *unread))

    def usage(self, run: ChatRun) -> dict[str, Any]:
        """The tokens so far."""
        output = run.generation.output
        made = sum(len(sample.token_ids) for sample in output.outputs)
        return usage(len(output.prompt_token_ids), made, output.cached_tokens, *drafted([output]))

    def logprobs(self, found: Any) -> dict[str, Any] | None:
        """The record of tokens, if it is wanted."""
        return None if found is None else chat_logprobs(self.texts, found, self.body.top_logprobs or 0)

    def _choice(self, message: ChatMessage, sample: Completion) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.content is None and not message.tool_calls:
            found["content"] = ""
        if message.reasoning is not None:
            found["reasoning_content"] = message.reasoning
        if message.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        choice = {
            "index": message.index,
            "message": found,
            "logprobs": self.logprobs(message.logprobs),
            **ending(sample, message.finish_reason),
        }
        return {**choice, "token_ids": sample.token_ids} if self.body.return_token_ids else choice


class _Stream:
    """The events of one request: their constant beginning is written once."""

    def __init__(self, call: _Call, run: ChatRun) -> None:
        self._call, self._run = call, run
        options = call.body.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        frame = event({**call.frame("chat.completion.chunk"), **({"usage": None} if self._tells_usage else {})})
        self._prefix = frame[:-3] + b","  # without the end of the object and of the event
        self._begun: set[int] = set()
        self._failed: list[Failure] = []
        self._ended = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """All events, the last one [DONE] unless every sample failed."""
        async for found in self._run:
            if found.progress is not None:
                yield self._event({"choices": [], "prompt_progress": progress(found.progress)})
                continue
            if found.index not in self._begun:
                yield self._first(found.index)
            yield self._event({"choices": [self._choice(found)]})
        if self._failed and len(self._failed) == self._ended:
            raise Unanswered(self._failed[0])
        if self._tells_usage:
            call = self._call
            yield event({**call.frame("chat.completion.chunk"), "choices": [], "usage": call.usage(self._run)})
        yield DONE

    def _event(self, rest: dict[str, Any]) -> bytes:
        return self._prefix + event(rest)[7:]

    def _first(self, index: int) -> bytes:
        """The role comes before anything else of a sample."""
        self._begun.add(index)
        delta = {"role": "assistant", "content": ""}
        first: dict[str, Any] = {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if self._call.body.return_token_ids:
            first["prompt_token_ids"] = self._run.generation.output.prompt_token_ids
        return self._event(first)

    def _choice(self, found: ChatEvent) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": found.index,
            "delta": {} if found.delta is None else _delta(found.delta),
            "logprobs": self._call.logprobs(found.logprobs),
            "finish_reason": None,
        }
        if self._call.body.return_token_ids:
            choice["token_ids"] = found.token_ids
        if found.finish_reason is None:
            return choice
        sample = self._run.generation.output.outputs[found.index]
        failed = sample_failure(sample.finish_reason, sample.error)
        self._ended += 1
        if failed is not None:
            self._failed.append(failed)
        return {**choice, **ending(sample, found.finish_reason)}


def chat_request(frontend: Frontend, body: ChatBody, request_id: str) -> ChatRequest:
    """The chat that a body describes; raises InvalidRequest and SamplingError."""
    return ChatRequest(
        messages=[message.plain() for message in body.messages],
        params=sampling_params(
            body, frontend.config, max_tokens=_max_tokens(body), logprobs=_alternatives(frontend, body)
        ),
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        tool_choice=_choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        progress=bool(body.return_progress and body.stream),
        chat_template_kwargs=_template_values(body),
        add_generation_prompt=_adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        request_id=request_id,
        form=form_field(body),
    )


def _adds_prompt(body: ChatBody) -> bool:
    """Left out, it is the contrary of going on with the last message; both together are refused when it is rendered."""
    given = body.add_generation_prompt
    return not body.continue_final_message if given is None else given


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "tool_arguments":
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}


def _max_tokens(body: ChatBody) -> int | None:
    given = body.given("max_completion_tokens", "max_tokens")
    if len(set(given.values())) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ", wanted="one of them", param="max_completion_tokens"
        )
    return next(iter(given.values()), None)


def _alternatives(frontend: Frontend, body: ChatBody) -> int | None:
    check_limit("top_logprobs", body.top_logprobs, frontend.config.max_logprobs)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs without logprobs", wanted="logprobs true", param="top_logprobs")
    return None


def _choice_of(body: ChatBody) -> Any:
    """OpenAI's rule: with tools the model may call, without it can not."""
    if body.tool_choice is None:
        return "auto" if body.tools else "none"
    return body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()


def _template_values(body: ChatBody) -> dict[str, Any] | None:
    values = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        values.setdefault("reasoning_effort", body.reasoning_effort)
    return values or None
