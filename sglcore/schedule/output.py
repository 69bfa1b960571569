"""What an engine tells of a request: plain values, the same from the scheduler to the server's frontend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from sglcore.device.worker import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural-log probability under the model's raw logits; `rank` 1 is the most likely. `top` holds the
    most likely (token id, log-probability) pairs that were asked for."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The tokens that sample `index` of a request emitted in a step, and why it ended if it did (then it is the last).

    `logprobs` runs along `token_ids` (None: not asked for). `stop_cause`: the stop token's id, counted in `token_ids`, or
    the stop string. `cached_tokens` (-1: not said) and `prompt_logprobs`, of prompt tokens 1 and on, come with the first
    token. `processed` (-1: not said): prompt tokens that were handed to the device, for requests that ask for progress.
    `refused`: the sample could never run, or not go on, by the caller's fault that `error` names; `retry_after` (0: not): it may
    run in so many seconds, for others kept it from it. `is_unserved`: nothing of it was made, for want of what `error` names,
    which may come back. `proposed` (-1: none could be): proposals
    that the step verified, of which all tokens but the last were right.
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
    proposed: int = -1
    is_unserved: bool = False
    retry_after: float = 0.0

    @property
    def finished(self) -> bool:
        """No further output of this sample will come."""
        return self.finish_reason is not None

    @property
    def is_progress(self) -> bool:
        """It tells only how far the prompt is."""
        return self.processed >= 0


def token_logprobs(ids: list[int], found: TokenLogprobs, wanted: int) -> list[TokenLogprob]:
    """Records for N tokens, each with its `wanted` most likely alternatives."""
    top_ids, top_values = np.asarray(found.top_ids), np.asarray(found.top_logprobs)
    return [
        TokenLogprob(
            token_id,
            float(found.chosen[place]),
            int(found.ranks[place]),
            tuple(zip(top_ids[place, :wanted].tolist(), top_values[place, :wanted].tolist(), strict=True)),
        )
        for place, token_id in enumerate(ids)
    ]
