"""An answer as a message of Anthropic's API: the events of its stream, in order, and the message that they come to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from sglcore.engine.outputs import RequestOutput
from sglcore.serving.apis.blocks import Block, BlockChange, Blocks
from sglcore.serving.chat.run import ChatEvent
from sglcore.serving.replicas.errors import Failure, ended_badly

Event = dict[str, Any]
_REASONS: Mapping[str, str] = MappingProxyType({"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"})


class MessageWriter:
    """One answer as it grows. `message` is whole after `end`; `failure` is set when the sample ended badly.

    `max_model_len`: the context, to tell an answer that filled it from one that reached its own limit.
    """

    def __init__(self, model: str, prompt_tokens: int, *, max_model_len: int, fingerprint: str) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
            "system_fingerprint": fingerprint,
        }
        self.failure: Failure | None = None
        self._max_model_len = max_model_len
        self._blocks = Blocks()
        self._reason = ""

    def start(self) -> list[Event]:
        """The events before the first word."""
        return [{"type": "message_start", "message": dict(self.message)}, {"type": "ping"}]

    def take(self, event: ChatEvent) -> list[Event]:
        """The events that a part of the answer makes."""
        if event.finish_reason is not None:
            self._reason = event.finish_reason
            if event.finish_reason in ("error", "abort"):
                self.failure = ended_badly(event.finish_reason, event.error)
        return [made for change in self._blocks.take(event.delta) for made in _events(change)]

    def end(self, output: RequestOutput) -> list[Event]:
        """The events after the last word; `message` is whole then."""
        made = [event for change in self._blocks.finish() for event in _events(change)]
        delta = self._ending(output)
        self.message |= {
            **delta,
            "content": [_whole(block) for block in self._blocks.all],
            "usage": _usage(output),
            "seed_used": output.outputs[0].seed,
        }
        last = {"type": "message_delta", "delta": delta, "usage": self.message["usage"]}
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
        return [{"type": "content_block_start", "index": block.index, "content_block": _empty(block)}]
    if change.kind == "grew":
        return [{"type": "content_block_delta", "index": block.index, "delta": _delta(block, change.text)}]
    signed = [{"type": "signature_delta", "signature": ""}] if block.kind == "reasoning" else []
    return [
        *({"type": "content_block_delta", "index": block.index, "delta": delta} for delta in signed),
        {"type": "content_block_stop", "index": block.index},
    ]


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "tool":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if block.kind == "reasoning" else _text("")


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "tool":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "tool":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return _text(block.text)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _input(block: Block) -> dict[str, Any]:
    """The arguments of a call as an object: of an answer that was cut, what is whole. Text that is none is kept as it is."""
    try:
        found = from_json(block.text or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": block.text}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Anthropic counts the tokens that came from the cache apart from `input_tokens`."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }
