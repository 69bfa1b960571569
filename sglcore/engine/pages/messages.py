"""Messages between engines, other than pages: typed records as msgpack. Nothing is unpickled."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sglcore.device.worker import TokenLogprobs
from sglcore.engine.ranks.codec import decode, encode
from sglcore.schedule.output import EngineOutput
from sglcore.schedule.request import Request


class Ask(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Prefill a prompt and sample its first token.

    `pages` are the lease's pages for the prompt from page `first_page` on. `prompt` and `pages` are
    int32 as little-endian bytes.
    """

    lease: int
    prompt: bytes
    params: dict[str, Any]
    seed: int
    sample_index: int
    first_page: int
    pages: bytes


class First(msgspec.Struct, array_like=True, tag=2, gc=False):
    """All pages of the lease are written.

    Sampling depends on the number of tokens, so the first token is enough to continue.
    Log-probabilities are encoded records, if they were requested.
    """

    lease: int
    token: int
    cached_tokens: int
    logprobs: bytes = b""
    prompt_logprobs: list[bytes] = msgspec.field(default_factory=list)


class Refusal(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The prompt will not come, and no more is written to the lease.

    `refused`: the requester made the error.
    """

    lease: int
    error: str
    refused: bool = False


class PageSide(Protocol):
    """What an engine's loop has to do with another engine."""

    @property
    def has_work(self) -> bool:
        """A call of `begin` may have something to do."""
        ...

    @property
    def lacks(self) -> str:
        """Why no request can be served now; empty: they can."""
        ...

    def mark(self, requests: list[Request]) -> None:
        """Requests are about to be queued. Raises RequestError for what cannot be."""
        ...

    def begin(self, seconds: float) -> list[EngineOutput]:
        """Before a step: what has come; waits so long for it."""
        ...

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """After one: send what there is to send; returns the outputs that are for this engine's own
        clients."""
        ...

    def fileno(self) -> int:
        """Readable while there is something to take in."""
        ...

    def close(self) -> None:
        """Part with all other engines. Idempotent."""
        ...


def pack_logprobs(found: TokenLogprobs) -> bytes:
    """As bytes."""
    return encode(found)


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """The inverse."""
    return decode(bytearray(packed))
