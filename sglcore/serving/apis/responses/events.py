"""Makes the answers of /v1/responses: the events of a streamed response, in order, and the complete
response."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sglcore.engine.outputs import RequestOutput
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.answer import named_events, warnings_of
from sglcore.serving.apis.content_blocks import Block, BlockChange, Blocks
from sglcore.serving.apis.logprob_records import chat_logprobs
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.responses.items import input_items
from sglcore.serving.apis.responses.response_store import ResponseStore, Stored
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.apis.writer import Writer
from sglcore.serving.chat.run import ChatEvent, ChatRun
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import check_answered, failure_of
from sglcore.serving.replicas.server_errors import Failure, told

Event = dict[str, Any]
_PREFIX = MappingProxyType({"text": "msg", "reasoning": "rs", "tool": "fc"})
_CUT = MappingProxyType({"length": "max_output_tokens"})
"""Finish reasons of incomplete answers -> OpenAI's words for them."""


def draft(body: ResponsesRequest, params: SamplingParams, model: str, mark: str) -> dict[str, Any]:
    """Return the response as it is before its first text, with a new id and status "in_progress":
    the request's fields, with defaults for those that it lacks. `model`: the name to show; `mark`:
    the fingerprint of the engine."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    choice = body.tool_choice
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "tools": [_shown_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "system_fingerprint": mark,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}


class ResponseWriter(Writer[ChatRun]):
    """Writes the answer of one chat run, as a whole or as a stream, and stores it at its end, even
    a failed one, unless the request sets `store` to false. One writer serves one run."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: ResponsesRequest, store: ResponseStore) -> None:
        super().__init__(frontend, body.model)
        self._response: dict[str, Any] = {}
        self._blocks = Blocks()
        self._codec, self._texts, self._body, self._store = frontend.codec, texts, body, store
        self._top: int | None = None
        """Number of most likely tokens in log-probabilities; None: no log-probabilities."""
        self._reason: str | None = None
        self._sent = 0

    async def answer(self, run: ChatRun) -> dict[str, Any]:
        """Return the whole response; waits for the end of the run. Raises Unanswered if its sample
        failed; the failed response is stored before."""
        self._begin(run)
        await run.ended()
        self._response["system_fingerprint"] = self.fingerprint
        async for event in run:
            self._take(event)
        self._end(run, failure_of(run.output.outputs[0]))
        check_answered(run.outputs)
        return self._response

    async def events(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of the response as they happen. An error before the first event
        of the run is raised, so that it has an HTTP status of its own; a later error is not raised:
        it becomes the last event, response.failed."""
        self._begin(run)
        first, events = await run.begin()
        self._response["system_fingerprint"] = self.fingerprint
        begin = [{"type": f"response.{word}", "response": self._response} for word in ("created", "in_progress")]
        yield named_events([*self._number(begin), *self._take(first)])
        try:
            async for event in events:
                made = self._take(event)
                if made:
                    yield named_events(made)
            failure = failure_of(run.output.outputs[0])
        except Exception as error:
            failure = told(error)
        yield named_events(self._end(run, failure))

    def _keep(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Store the response, and the conversation with the answer at its end. `messages`: those of
        the run; if the request has instructions, the first one is left out, because they do not
        belong to the conversation."""
        asked = messages[1:] if self._body.instructions else messages
        self._store.put(Stored(self._response, input_items(self._body.input or ""), [*asked, self._said()]))

    def _said(self) -> dict[str, Any]:
        """Return the answer so far as a message of OpenAI's chat endpoint; fields of kinds that it
        lacks are left out."""
        texts = [block.text for block in self._blocks.all if block.kind == "text"]
        calls = [block for block in self._blocks.all if block.kind == "tool"]
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning := self._reasoning():
            message["reasoning_content"] = reasoning
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in calls
            ]
        return message

    def _begin(self, run: ChatRun) -> None:
        self._response = draft(self._body, run.request.params, self.model, self.fingerprint)
        self._top = run.request.params.logprobs

    def _take(self, event: ChatEvent) -> list[Event]:
        """Add a part of the answer to the blocks, and return the events for it, numbered; perhaps
        none."""
        if event.finish_reason is not None:
            self._reason = event.finish_reason
        changes = self._blocks.take(event.delta, (event.logprobs or ()) if self._top is not None else ())
        return self._number([made for change in changes for made in self._change(change)])

    def _end(self, run: ChatRun, failure: Failure | None) -> list[Event]:
        """Complete and store the response, and return the events after the last text, numbered: the
        end of the open block and the whole response. An answer without any block gets an empty
        text, unless it failed. `failure`: why the run failed (None: it did not)."""
        changes = [] if failure is not None else self._blocks.force_text()
        changes += self._blocks.finish()
        made = [event for change in changes for event in self._change(change)]
        self._complete(run.output, failure)
        if self._body.store is not False:
            self._keep(run.request.messages)
        kind = f"response.{self._response['status']}"
        return self._number([*made, {"type": kind, "response": self._response}])

    def _complete(self, output: RequestOutput, failure: Failure | None) -> None:
        cut = _CUT.get(self._reason or "")
        status = "failed" if failure is not None else "incomplete" if cut else "completed"
        self._response |= {
            "status": status,
            "output": [self._item(block, self._status_of(block)) for block in self._blocks.all],
            "usage": _usage(output, self._count_reasoning()),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": cut} if cut else None,
            "seed_used": output.outputs[0].seed,
            **warnings_of(output.outputs[0]),
        }
        if failure is not None:
            self._response["error"] = {"code": "server_error", "message": failure.message}

    def _reasoning(self) -> str:
        return "".join(block.text for block in self._blocks.all if block.kind == "reasoning")

    def _count_reasoning(self) -> int:
        reasoning = self._reasoning()
        return len(self._codec.encode(reasoning, special=False)) if reasoning else 0

    def _status_of(self, block: Block) -> str:
        """Return the status of a block: "incomplete" for the last block of an answer that was cut
        or failed, else "completed"."""
        is_last = block is self._blocks.all[-1]
        was_cut = self._reason not in ("stop", "tool_calls")
        return "incomplete" if is_last and was_cut else "completed"

    def _change(self, change: BlockChange) -> list[Event]:
        if change.kind == "opened":
            return self._opened(change.block)
        return self._closed(change.block) if change.kind == "closed" else [self._grew(change)]

    def _opened(self, block: Block) -> list[Event]:
        block.id = f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}"
        block = replace(block, pieces=[], logprobs=[])
        item = self._item(block, "in_progress") | ({} if block.kind == "tool" else {"content": []})
        added = {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind == "tool":
            return [added]
        return [added, {"type": "response.content_part.added", **_place(block), "part": self._part(block)}]

    def _grew(self, change: BlockChange) -> Event:
        block = change.block
        if block.kind == "tool":
            kind, place = "response.function_call_arguments.delta", _item_place(block)
        elif block.kind == "reasoning":
            kind, place = "response.reasoning_text.delta", _place(block)
        else:
            shown = {"logprobs": self._logprobs(change.logprobs)}
            return {"type": "response.output_text.delta", **_place(block), "delta": change.text, **shown}
        return {"type": kind, **place, "delta": change.text}

    def _closed(self, block: Block) -> list[Event]:
        item = self._item(block, self._status_of(block))
        done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        if block.kind == "tool":
            kind = "response.function_call_arguments.done"
            return [{"type": kind, **_item_place(block), "name": block.name, "arguments": block.text}, done]
        part = self._part(block)
        told = {"type": "response.reasoning_text.done", **_place(block), "text": block.text}
        if block.kind == "text":
            told |= {"type": "response.output_text.done", "logprobs": part["logprobs"]}
        return [told, {"type": "response.content_part.done", **_place(block), "part": part}, done]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.kind == "tool":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"id": block.id, "type": "function_call", "status": status, **call}
        if block.kind == "reasoning":
            parts = {"summary": [], "content": [self._part(block)], "encrypted_content": None}
            return {"id": block.id, "type": "reasoning", "status": status, **parts}
        message = {"role": "assistant", "content": [self._part(block)]}
        return {"id": block.id, "type": "message", "status": status, **message}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(self._texts, found, self._top or 0)["content"] if found else []

    def _number(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sent
            self._sent += 1
        return events


def _place(block: Block) -> dict[str, Any]:
    return {**_item_place(block), "content_index": 0}


def _item_place(block: Block) -> dict[str, Any]:
    return {"item_id": block.id, "output_index": block.index}


def _usage(output: RequestOutput, reasoning: int) -> dict[str, Any]:
    """Return the answer's `usage`; `reasoning`: number of tokens of the reasoning's text, tokenised
    again; more than the number of output tokens is not reported."""
    prompt, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    cut = {} if output.max_tokens is None else {"max_output_tokens": output.max_tokens}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, made), **cut},
        "total_tokens": prompt + made,
    }
