"""Makes Anthropic's answers: the events of a streamed message, in order, and the complete
message."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sglcore.engine.outputs import RequestOutput
from sglcore.serving.apis.answer import named_events, warnings_of
from sglcore.serving.apis.anthropic.body import UNTHREADED
from sglcore.serving.apis.content_blocks import Block, BlockChange, Blocks
from sglcore.serving.apis.writer import Writer
from sglcore.serving.chat.run import ChatEvent, ChatRun
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import check_answered
from sglcore.serving.replicas.server_errors import Failure, told

Event = dict[str, Any]
_REASONS: Mapping[str, str] = MappingProxyType({"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"})


class MessageWriter(Writer[ChatRun]):
    """Writes the answer of one chat run, as a whole or as a stream. One writer serves one run."""

    def __init__(self, frontend: Frontend, name: str | None) -> None:
        super().__init__(frontend, name)
        self._max_model_len = frontend.info.max_model_len if frontend.info is not None else 0
        """Distinguishes an answer that filled the context from one that reached its own limit."""
        self._blocks = Blocks()
        self._reason = ""

    async def answer(self, run: ChatRun) -> dict[str, Any]:
        """Return the whole message; waits for the end of the run. Raises Unanswered if its sample
        failed."""
        await run.ended()
        async for event in run:
            self._take(event)
        message = self._begun(run.output)
        self._end(message, run.output)
        return message

    async def events(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of the message as they happen, from message_start to
        message_stop. An error before the first event of the run is raised before anything is
        yielded; Unanswered is raised at the end if the sample failed."""
        begin, events = await run.begin()
        message = self._begun(run.output)
        first = self._take(begin)
        yield named_events([{"type": "message_start", "message": message}, {"type": "ping"}, *first])
        async for event in events:
            made = self._take(event)
            if made:
                yield named_events(made)
        yield named_events(self._end(message, run.output))

    def on_error(self, error: Exception) -> bytes:
        """Return the encoded event for an error after the first event."""
        return named_events([error_body(told(error))])

    def _begun(self, output: RequestOutput) -> dict[str, Any]:
        """Return the message as it is before its first text, with a new id and no content;
        `input_tokens` still includes those from the prefix cache."""
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(output.prompt_token_ids), "output_tokens": 0},
            "system_fingerprint": self.fingerprint,
        }

    def _take(self, event: ChatEvent) -> list[Event]:
        if event.finish_reason is not None:
            self._reason = event.finish_reason
        return [made for change in self._blocks.take(event.delta) for made in _events(change)]

    def _end(self, message: dict[str, Any], output: RequestOutput) -> list[Event]:
        """Complete `message` in place, and return the events after the last text: the end of the
        open block, message_delta and message_stop. Raises Unanswered if the sample failed."""
        check_answered([output])
        made = [event for change in self._blocks.finish() for event in _events(change)]
        delta = self._ending(output)
        message |= {
            **delta,
            "content": [_whole(block) for block in self._blocks.all],
            "usage": _usage(output),
            "seed_used": output.outputs[0].seed,
            **warnings_of(output.outputs[0]),
        }
        last = {"type": "message_delta", "delta": delta, "usage": message["usage"], **warnings_of(output.outputs[0])}
        return [*made, last, {"type": "message_stop"}]

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        reason = _REASONS.get(self._reason, "end_turn")
        if reason == "end_turn" and isinstance(completion.stop_cause, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_cause}
        used = len(output.prompt_token_ids) + len(completion.token_ids)
        if reason == "max_tokens" and used >= self._max_model_len:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _events(change: BlockChange) -> list[Event]:
    block = change.block
    if change.kind == "opened":
        empty = _whole(replace(block, pieces=[]))
        return [{"type": "content_block_start", "index": block.index, "content_block": empty}]
    if change.kind == "grew":
        return [{"type": "content_block_delta", "index": block.index, "delta": _delta(block, change.text)}]
    stop = {"type": "content_block_stop", "index": block.index}
    if block.kind != "reasoning":
        return [stop]
    signature = {"type": "signature_delta", "signature": ""}
    return [{"type": "content_block_delta", "index": block.index, "delta": signature}, stop]


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "tool":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "tool":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Return the `usage` of a message at its end. As in Anthropic's API, `input_tokens` does not
    count tokens from the prefix cache; `cache_read_input_tokens` does."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
        **({} if output.max_tokens is None else {"max_tokens": output.max_tokens}),
    }


def error_body(failure: Failure) -> dict[str, Any]:
    """Return a failure in Anthropic's form, `{"type": "error", "error": {type, message}}`, as a
    value that is not encoded yet; the type follows from the HTTP status."""
    kind = _ERRORS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    details = {"details": {"error_code": failure.code}} if failure.code == UNTHREADED else {}
    return {"type": "error", "error": {"type": kind, "message": failure.message, **details}}


_ERRORS = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        529: "overloaded_error",
    }
)
