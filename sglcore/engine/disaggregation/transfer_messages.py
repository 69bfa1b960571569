"""Messages between engines, other than pages: typed records as msgpack. Nothing is unpickled."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sglcore.device.worker import TokenLogprobs
from sglcore.engine.ranks.codec import decode, encode
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput


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
    """The prompt will not be computed, and nothing more is written to the lease.

    `refused`: the error is the requester's.
    """

    lease: int
    error: str
    refused: bool = False


class PageSide(Protocol):
    """The part of an engine's loop that deals with other engines."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `begin` may have something to do."""
        ...

    @property
    def lacks(self) -> str:
        """Why no request can be served now; empty: requests can be served."""
        ...

    def mark(self, requests: list[Request]) -> None:
        """Prepare requests that are about to be queued. Raises RequestError for one that cannot be
        served."""
        ...

    def begin(self, seconds: float) -> list[EngineOutput]:
        """Take what has arrived, before a step; waits at most `seconds` for it."""
        ...

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Send what there is to send, after a step; returns the outputs for this engine's own
        clients."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while there is something to take."""
        ...

    def close(self) -> None:
        """Disconnect from all other engines. Idempotent."""
        ...


def pack_logprobs(found: TokenLogprobs) -> bytes:
    """Encode as bytes."""
    return encode(found)


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """Decode what `pack_logprobs` encoded."""
    return decode(bytearray(packed))
