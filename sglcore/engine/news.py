"""What the token side of an engine tells the text side: plain values, so that the two may stand in different processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglcore.engine.outputs import TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenNews(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """News of sample `index` of a request: the tokens it emitted, and why it ended if it did (then it is the last news).

    `logprobs` runs along `token_ids` (None: not asked for). `stop_cause`: the stop token's id, counted in `token_ids`, or
    the stop string. `cached_tokens` (-1: not said) and `prompt_logprobs`, of prompt tokens 1 and on, come with the first
    token. `processed` (-1: not said): prompt tokens that were handed to the device, for requests that ask for progress.
    `refused`: the request could never run, by the caller's fault that `error` names.
    """

    request_id: str
    index: int
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    error: str = ""
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = -1
    prompt_logprobs: list[TokenLogprob] | None = None
    processed: int = -1
    refused: bool = False

    @property
    def is_progress(self) -> bool:
        """It tells only how far the prompt is."""
        return self.processed >= 0
