"""Results for callers: the text of a prompt's samples, and its new parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request_output import FinishReason, TokenLogprob


@dataclass(slots=True)
class Completion:
    """One sample of a prompt, as it grows and at its end: text, tokens and log-probabilities so
    far, why it ended or failed (None and empty before), and counts of its draft tokens. The engine
    changes it in place."""

    index: int
    """The number of the sample, from 0. With `seed` it reproduces the sample."""
    seed: int
    """The seed of the request."""
    text: str = ""
    """The final text so far."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens, a stop token included."""
    logprobs: list[TokenLogprob] | None = None
    """One record for each of `token_ids`. None: not requested."""
    hidden_states: NDArray[np.float32] | None = None
    """float32 [tokens, hidden], once the sample has ended: the hidden states of the prompt's tokens
    and of all output tokens but the last, which the model has not read ("all"); or [1, hidden],
    that from which the last token was drawn ("last"). None: not requested, or no token was
    drawn."""
    finish_reason: FinishReason | None = None
    """Why it ended. None: it has not ended."""
    stop_cause: int | str | None = None
    """The stop token's id, or the stop string or pattern. None: it ended for another reason."""
    error: str = ""
    """Why it failed; empty: it did not."""
    refused: bool = False
    """Whether it failed because of the caller's error."""
    warnings: list[str] = field(default_factory=list)
    """Parts of its JSON schema that are not enforced and that it violates, or why that is unknown.
    Only a server checks; empty otherwise."""
    verified_steps: int = 0
    """Steps that verified draft tokens; each added one token more than were accepted."""
    proposed_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. `prompt_logprobs`: one record for each prompt token, the first
    None, because nothing predicts it; None: not requested. `cached_tokens`: prompt tokens that came
    from the prefix cache. `max_tokens`: the limit of each completion by the context; None: the
    context allows as many as were requested."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    max_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The new part of a growing completion."""

    request_id: str
    """Name of the request."""
    index: int
    """Number of the sample."""
    text: str
    """Final text."""
    token_ids: tuple[int, ...]
    """The tokens, a stop token included."""
    finish_reason: FinishReason | None = None
    """Why the completion ended. None: it has not ended."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each of `token_ids`. None: not requested."""
    error: str = ""
    """Why it failed; empty: it did not."""
    hidden_states: NDArray[np.float32] | None = None
    """float32 [n, hidden]: the new ones of `Completion.hidden_states` ("last": only at the end).
    None: none."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The progress of a prompt of `total` tokens: `processed` tokens are done or on the device,
    `cached` of them from the prefix cache."""

    request_id: str
    total: int
    cached: int
    processed: int
