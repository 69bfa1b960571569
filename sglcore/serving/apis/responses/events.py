"""An answer as a response: the events of its stream, in order, and the response that they come to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sglcore.engine.outputs import RequestOutput
from sglcore.schedule.output import TokenLogprob
from sglcore.serving.apis.blocks import Block, BlockChange, Blocks
from sglcore.serving.apis.logprobs import chat_logprobs
from sglcore.serving.apis.responses.request import said
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.run import ChatEvent
from sglcore.serving.replicas.errors import Failure, ended_badly

Event = dict[str, Any]
_PREFIX = MappingProxyType({"text": "msg", "reasoning": "rs", "tool": "fc"})
_CUT = MappingProxyType({"length": "max_output_tokens"})
"""Finish reasons of answers that are incomplete, and OpenAI's words for them."""


class ResponseWriter:
    """One answer as it grows. `response` is the response so far; `failure` is set when the sample ended badly.

    `count` gives the tokens of a text; `tokens` names them in log-probabilities, of which the `top` most likely tokens are shown (None: none at all).
    """

    def __init__(
        self,
        response: Mapping[str, Any],
        *,
        tokens: TokenTexts,
        count: Callable[[str], int],
        top: int | None,
    ) -> None:
        self.response: dict[str, Any] = dict(response)
        self.failure: Failure | None = None
        self._blocks = Blocks()
        self._tokens, self._count = tokens, count
        self._top, self._shown = top or 0, top is not None
        self._reason: str | None = None
        self._sent = 0

    def start(self) -> list[Event]:
        """The events before the first word."""
        return self._number(
            [
                {"type": "response.created", "response": dict(self.response)},
                {"type": "response.in_progress", "response": dict(self.response)},
            ]
        )

    def take(self, event: ChatEvent) -> list[Event]:
        """The events that a part of the answer makes."""
        if event.finish_reason is not None:
            self._reason = event.finish_reason
            if event.finish_reason in ("error", "abort"):
                self.failure = ended_badly(event.finish_reason, event.error)
        changes = self._blocks.take(event.delta, (event.logprobs or ()) if self._shown else ())
        return self._number([made for change in changes for made in self._change(change)])

    def end(self, output: RequestOutput) -> list[Event]:
        """The events after the last word; `response` is whole then."""
        changes = [] if self.failure is not None else self._blocks.force_text()
        changes += self._blocks.finish()
        made = [event for change in changes for event in self._change(change)]
        self._complete(output)
        kind = f"response.{self.response['status']}"
        return self._number([*made, {"type": kind, "response": self.response}])

    def said(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        texts = [block.text for block in self._blocks.all if block.kind == "text"]
        return said(
            self._reasoning(),
            "".join(texts) if texts else None,
            [
                {"id": block.call_id, "name": block.name, "arguments": block.text}
                for block in self._blocks.all
                if block.kind == "tool"
            ],
        )

    def _complete(self, output: RequestOutput) -> None:
        cut = _CUT.get(self._reason or "")
        status = "failed" if self.failure is not None else "incomplete" if cut else "completed"
        self.response |= {
            "status": status,
            "output": [self._item(block, self._status_of(block)) for block in self._blocks.all],
            "usage": _usage(output, self._count(self._reasoning())),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": cut} if cut else None,
            "seed_used": output.outputs[0].seed,
        }
        if self.failure is not None:
            self.response["error"] = {"code": "server_error", "message": self.failure.message}

    def _reasoning(self) -> str:
        return "".join(block.text for block in self._blocks.all if block.kind == "reasoning")

    def _status_of(self, block: Block) -> str:
        """Only the last block of an answer that was cut is incomplete."""
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
        return chat_logprobs(self._tokens, found, self._top)["content"] if found else []

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
    """Token counts; those of the reasoning are counted over its text."""
    prompt, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, made)},
        "total_tokens": prompt + made,
    }
