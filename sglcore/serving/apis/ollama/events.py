"""Makes Ollama's answers: the lines of a stream, and the complete object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sglcore.engine.outputs import RequestOutput
from sglcore.serving.apis.answer import LINES, StreamForm, encode, warnings_of
from sglcore.serving.apis.content_blocks import Block, BlockChange, Blocks
from sglcore.serving.apis.logprob_records import chat_logprobs
from sglcore.serving.apis.ollama.body import AnswerFields
from sglcore.serving.apis.ollama.names import served_name
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.apis.writer import Writer
from sglcore.serving.chat.run import ChatEvent, ChatRun
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import check_answered
from sglcore.serving.replicas.server_errors import Failure, told


@dataclass(frozen=True, slots=True)
class Said:
    """The content of one line of a stream, or of a whole answer: text, reasoning (`thinking`) and
    complete tool calls, each `{id, function: {index, name, arguments}}`. Empty where there is
    none."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Mapping[str, Any]] = field(default=())


Shape = Callable[[Said], dict[str, Any]]
"""Returns the fields in which an endpoint's answer has the content."""


def as_message(said: Said) -> dict[str, Any]:
    """Return the content in the form of /api/chat: `{"message": {role, content}}`, with `thinking`
    and `tool_calls` in the message if there are any."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thinking:
        message["thinking"] = said.thinking
    if said.calls:
        message["tool_calls"] = said.calls
    return {"message": message}


def as_text(said: Said) -> dict[str, Any]:
    """Return the content in the form of /api/generate: `response`, and `thinking` if there is any.
    Tool calls are left out."""
    return {"response": said.content, **({"thinking": said.thinking} if said.thinking else {})}


def line(value: Any) -> bytes:
    """Return the JSON of a value as one line of a stream, UTF-8 with a line feed."""
    return encode(value) + b"\n"


def error_body(failure: Failure) -> dict[str, Any]:
    """Return a failure in Ollama's form, `{"error": message}`, as a value that is not yet encoded
    as JSON."""
    return {"error": failure.message}


def now() -> str:
    """Return the current time in the form of `created_at`: ISO 8601 in UTC, with microseconds."""
    return written(time.time())


def written(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the form of `created_at`: ISO 8601 in UTC, with
    microseconds, such as `2025-01-31T12:00:00.000000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class LinesWriter(Writer[ChatRun]):
    """Writes the answer to one request, as a whole or as a stream, with the model name that the
    request used. `shape`: the function that puts the content into the endpoint's answer,
    `as_message` or `as_text`."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: AnswerFields, shape: Shape) -> None:
        super().__init__(frontend, served_name(frontend, body.model))
        self.model = body.model or self.model
        self._texts, self._shown, self._shape = texts, body.top_logprobs or 0, shape
        self._began = time.perf_counter()
        self._blocks = Blocks()
        self._calls: list[dict[str, Any]] = []
        self._reason = "stop"

    @property
    def form(self) -> StreamForm:
        """The content type and keep-alive of this stream. The keep-alive is a line without content,
        with `done` false, because readers take every line for a part of the answer."""
        return StreamForm(LINES, line(self._part(Said())))

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, for which nothing runs: it has no
        content and `done_reason` "load"."""
        return {**self._part(Said()), "done": True, "done_reason": "load"}

    async def answer(self, run: ChatRun) -> dict[str, Any]:
        """Return the whole answer; waits for the end of the run. Raises Unanswered if its sample
        failed."""
        await run.ended()
        logprobs: list[Any] = []
        async for event in run:
            logprobs += event.logprobs or ()
            self._take(event)
        self._close()
        said = Said(self._text("text"), self._text("reasoning"), self._calls)
        return {**self._part(said), **self._ending(run), **self._logprobs(logprobs)}

    async def events(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """Yield the encoded lines as they are generated; the last one has `done` true and the
        counts. Raises Unanswered if the sample failed. An error before the first event of the run
        is raised before anything is yielded."""
        first, others = await run.begin()
        for part in self._lines(first):
            yield part
        async for event in others:
            for part in self._lines(event):
                yield part
        for said in self._close():
            yield line(self._part(said))
        yield line({**self._part(Said()), **self._ending(run)})

    def on_error(self, error: Exception) -> bytes:
        """Return the encoded line for an error after the first line; it is the last line."""
        return line(error_body(told(error)))

    def _part(self, said: Said) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), **self._shape(said), "done": False}

    def _lines(self, event: ChatEvent) -> list[bytes]:
        """Return the encoded lines of an event; empty if it has nothing to show.

        The event's log-probabilities are in the first line; an empty line is made for them if there
        is no other.
        """
        found = self._take(event)
        if event.logprobs and not found:
            found = [Said()]
        extra = self._logprobs(event.logprobs)
        return [line({**self._part(said), **(extra if not place else {})}) for place, said in enumerate(found)]

    def _take(self, event: ChatEvent) -> list[Said]:
        if event.finish_reason is not None:
            self._reason = "length" if event.finish_reason == "length" else "stop"
        return self._said(self._blocks.take(event.delta))

    def _close(self) -> list[Said]:
        return self._said(self._blocks.finish())

    def _said(self, changes: Sequence[BlockChange]) -> list[Said]:
        """Return the content of block changes, one item for each line: text and reasoning as they
        grow, a tool call when it is complete. Other changes have no item."""
        found: list[Said] = []
        for change in changes:
            if change.kind == "grew" and change.text and change.block.kind == "text":
                found.append(Said(content=change.text))
            elif change.kind == "grew" and change.text and change.block.kind == "reasoning":
                found.append(Said(thinking=change.text))
            elif change.kind == "closed" and change.block.kind == "tool":
                found.append(Said(calls=[self._call(change.block)]))
        return found

    def _call(self, block: Block) -> dict[str, Any]:
        function = {"index": len(self._calls), "name": block.name, "arguments": block.arguments}
        self._calls.append({"id": block.call_id, "function": function})
        return self._calls[-1]

    def _text(self, kind: str) -> str:
        return "".join(block.text for block in self._blocks.all if block.kind == kind)

    def _logprobs(self, found: Sequence[Any] | None) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self._texts, found, self._shown)["content"]} if found else {}

    def _ending(self, run: ChatRun) -> dict[str, Any]:
        """Return the fields that the last line, or the whole answer, has in addition: reason,
        durations, counts, seed. Raises Unanswered if the sample failed."""
        check_answered(run.outputs)
        output: RequestOutput = run.output
        end = time.perf_counter()
        first = run.first_token_at or end
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(end - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(first - self._began),
            "eval_count": len(output.outputs[0].token_ids),
            "eval_duration": _nanoseconds(end - first),
            "seed_used": output.outputs[0].seed,
            **warnings_of(output.outputs[0]),
            "system_fingerprint": self.fingerprint,
        }


def _nanoseconds(seconds: float) -> int:
    """Return seconds in nanoseconds, at least 1, because clients divide by the value."""
    return max(int(seconds * 1e9), 1)
