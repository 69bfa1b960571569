"""What an engine reports about a request: plain values, the same from the scheduler to the server's
frontend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from sglcore.worker.model_worker import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural-log probability of one token under the model's raw logits. `rank` 1 is the most
    likely token. `top` holds the requested number of most likely (token id, log-probability) pairs.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The tokens that one sample of a request emitted in a step, or only its prefill progress
    (`is_progress`). The output with a `finish_reason` is the sample's last.
    """

    request_id: str
    """Name of the request."""
    index: int
    """Index of the sample."""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """The tokens, a stop token included."""
    finish_reason: FinishReason | None = None
    """Why the sample ended. None: it has not ended."""
    stop_cause: int | str | None = None
    """The stop token's id, or the stop string. None: it ended for another reason."""
    error: str = ""
    """Why the sample failed; empty: it did not fail."""
    logprobs: list[TokenLogprob] | None = None
    """One record for each of `token_ids`. None: not requested."""
    cached_tokens: int = -1
    """Number of prompt tokens that the prefix cache had, with the first token. -1: not reported."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Records of prompt tokens 1 and on, with the first token. None: not requested, or sent
    before."""
    hidden_states: bytes = b""
    """float32 [n, `hidden_size`] in little-endian bytes: one hidden state for each of `token_ids`,
    from which it was drawn. With the first tokens, and if those of the prompt are requested, the
    states of the prompt's tokens but the last stand before them. Empty: not requested."""
    hidden_size: int = 0
    """Elements of a hidden state. 0: there are none."""
    processed: int = -1
    """Number of prompt tokens that were submitted to the device, for requests that follow their
    progress. -1: not reported."""
    refused: bool = False
    """The caller is at fault: the sample could never run, or could not continue (see `error`)."""
    proposed: int = -1
    """Number of draft tokens that the step verified. All of `token_ids` except the last are
    accepted ones. -1: no speculation."""
    is_unserved: bool = False
    """The engine could not serve the sample, for a reason that may go away. `error` names it."""
    retry_after: float = 0.0
    """Seconds after which to try again, if the engine was too busy. 0: not reported."""

    @property
    def finished(self) -> bool:
        """Whether this is the last output of the sample."""
        return self.finish_reason is not None

    @property
    def is_progress(self) -> bool:
        """Whether this output reports only prefill progress."""
        return self.processed >= 0


def token_logprobs(ids: list[int], found: TokenLogprobs, wanted: int) -> list[TokenLogprob]:
    """Return records for N tokens `ids` from `found`, which has one entry for each, with the
    `wanted` most likely alternatives of each."""
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
