"""Messages between engines, other than pages: typed records as msgpack. Nothing is unpickled.
`PageSide` is the protocol of an engine's prefill or decode side."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sglcore.engine.ranks.codec import decode, encode
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.model_worker import TokenLogprobs


class Ask(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A decode engine's request: prefill a prompt, write its pages, and sample its first token.

    `lease`: the lease of `pages`, which are the decode engine's pages for the prompt from page
    `first_page` on; it has the earlier ones. `prompt` (token ids) and `pages` are int32 as
    little-endian bytes. `params`: the sampling parameters as plain values by name, made by
    `pack_params`.
    """

    lease: int
    prompt: bytes
    params: dict[str, Any]
    seed: int
    sample_index: int
    first_page: int
    pages: bytes


class First(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The answer to `Ask`: all pages of the lease are written, and `token` is the first token.

    With the seed, draws depend only on the number of tokens, so the decode engine needs nothing
    else to continue. `cached_tokens`: prompt tokens that came from the prompt engine's prefix
    cache. `logprobs` (of the token) and `prompt_logprobs` are made by `pack_logprobs`; empty: not
    requested.
    """

    lease: int
    token: int
    cached_tokens: int
    logprobs: bytes = b""
    prompt_logprobs: list[bytes] = msgspec.field(default_factory=list)


class Refusal(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The answer to `Ask` if the prompt is not computed; nothing more is written to the lease.

    `refused`: True: the request itself is invalid, and no engine would take it. False: another
    engine may succeed.
    """

    lease: int
    error: str
    refused: bool = False


class PageSide(Protocol):
    """The part of a token engine's loop that exchanges pages with other engines: `PromptSide` or
    `DecodeSide`."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `begin` may have something to do."""
        ...

    @property
    def lacks(self) -> str:
        """Why no request can be served now; empty: requests can be served."""
        ...

    def mark(self, requests: list[Request]) -> None:
        """Prepare new requests, before the scheduler gets them. Raises RequestError for one that
        cannot be served."""
        ...

    def begin(self, seconds: float) -> list[EngineOutput]:
        """Process what other engines have sent; called before each step. Waits at most `seconds`
        for it. Returns the outputs that this produced."""
        ...

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Send what the step has made for other engines; called after each step with its outputs.
        Returns the outputs that are for this engine's own clients."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `begin` has something to process."""
        ...

    def close(self) -> None:
        """Disconnect from all other engines. Idempotent."""
        ...


def pack_logprobs(found: TokenLogprobs) -> bytes:
    """Return the log-probabilities of some tokens as bytes, in the form of `codec.encode`."""
    return encode(found)


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """Return the log-probabilities that `pack_logprobs` encoded."""
    return decode(bytearray(packed))
