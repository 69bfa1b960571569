"""The sources of a chat's answers: a model in this process, or a server."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglcore.bench.address import Address, ServerError, refusal, unreachable
from sglcore.core.errors import SglcoreError

if TYPE_CHECKING:
    from sglcore.engine.llm import LLM
    from sglcore.engine.tokenizers.chat_template import Message
    from sglcore.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    `tokens` is the number of tokens that came with it. A server reports all tokens with the last
    part, which has no text, and 0 with the others. `is_reasoning`: the text is the model's
    reasoning, not its answer.
    """

    text: str
    tokens: int = 0
    is_reasoning: bool = False


class ContextFull(SglcoreError):
    """A conversation does not fit the model's context length."""


class Source(Protocol):
    """What `sglcore chat` gets answers from, one at a time: `LocalSource` or `ServerSource`."""

    def stream(self, messages: Sequence[Message]) -> Iterator[Part]:
        """Yield the parts of the answer to `messages` as they arrive; blocks while it waits.

        Raises SglcoreError if the answer fails, ContextFull if the messages are too long, and
        ValueError for input that the model does not accept. After `stop`, it ends without an error.
        """
        ...

    def stop(self) -> None:
        """End the answer in progress: its `stream` ends without an error. Does not wait. Can be
        called from a signal handler."""
        ...


class LocalSource:
    """The `Source` that is a model in this process; the sampling parameters `params` apply to every
    answer."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._is_stopped = False

    def stream(self, messages: Sequence[Message]) -> Iterator[Part]:
        """Implements `Source.stream`; a stop takes effect after the step in progress. Raises as
        that method says."""
        from sglcore.schedule.request_errors import ContextError

        self._is_stopped = False
        try:
            with closing(self._llm.stream(self._llm.chat_prompt(messages), self._params)) as deltas:
                for delta in deltas:
                    yield Part(delta.text, len(delta.token_ids))
                    if delta.finish_reason == "error":
                        raise SglcoreError(delta.error)
                    if self._is_stopped:
                        return
        except ContextError as error:
            raise ContextFull(str(error)) from None

    def stop(self) -> None:
        """Implements `Source.stop`: the answer ends after the step in progress."""
        self._is_stopped = True


class ServerSource:
    """The `Source` that is a server with /v1/chat/completions. `fields`, such as model and
    temperature, are added to the body of every request."""

    def __init__(self, where: Address, fields: Mapping[str, object]) -> None:
        self._where = where
        self._fields = dict(fields)
        self._socket: socket.socket | None = None
        self._is_stopped = False

    def stream(self, messages: Sequence[Message]) -> Iterator[Part]:
        """Implements `Source.stream`; a stop closes the connection, which ends the request on the
        server.

        Raises ServerError if the server cannot be reached, answers with an error, or ends the
        stream early.
        """
        self._is_stopped = False
        connection = self._where.connect(timeout=600.0)
        try:
            yield from self._parts(connection, messages)
        except (OSError, http.client.HTTPException) as error:
            if not self._is_stopped:
                raise unreachable(self._where, error) from None
        finally:
            self._socket = None
            connection.close()

    def stop(self) -> None:
        """Implements `Source.stop`: shut the connection down, if there is one."""
        self._is_stopped = True
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)

    def _parts(self, connection: http.client.HTTPConnection, messages: Sequence[Message]) -> Iterator[Part]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**self._fields, "messages": list(messages), **options})
        connection.connect()
        self._socket = connection.sock
        if self._is_stopped:  # while the connection was opened
            return
        path = f"{self._where.folder}/v1/chat/completions"
        connection.request("POST", path, body, {**self._where.headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            content = response.read()
            kind = ContextFull if b'"context_length_exceeded"' in content else ServerError
            raise kind(f"{self._where} answered {response.status}: {refusal(content)}")
        for line in iter(response.readline, b""):
            content = line.removeprefix(b"data:").strip()
            if content == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield from chunk_parts(content)
        if not self._is_stopped:
            raise ServerError(f"{self._where} ended the stream before the answer was whole", remedy="ask again")


def chunk_parts(content: bytes) -> Iterator[Part]:
    """Yield the parts in one event of a streamed chat completion, none for one without text and
    counts; `content` is its JSON.

    Raises ServerError if the event is an error.
    """
    chunk = json.loads(content)
    if chunk.get("error"):
        raise ServerError(f"the server failed: {refusal(content)}")
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("reasoning_content"):
            yield Part(delta["reasoning_content"], is_reasoning=True)
        if delta.get("content"):
            yield Part(delta["content"])
    if chunk.get("usage"):
        yield Part("", chunk["usage"].get("completion_tokens", 0))
