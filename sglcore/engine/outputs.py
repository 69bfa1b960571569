"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglcore.schedule.output import FinishReason, TokenLogprob


@dataclass(slots=True)
class Completion:
    """One sample of a prompt. `seed` reproduces it together with `index`; `stop_cause` is the stop token or string; `refused`: it
    could not go on, by the fault of whoever asked. `warnings`: parts of its schema that are not enforced, and that it does not keep
    to, or why that is not known; only a server looks. Of its tokens,
    `verified_steps` steps brought one each and, beside it, those of `proposed_tokens` that were right: `accepted_tokens`."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    error: str = ""
    refused: bool = False
    warnings: list[str] = field(default_factory=list)
    verified_steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. `prompt_logprobs[0]` is None: nothing predicts the first token. `max_tokens` is what the
    context holds of each completion, if more was asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    max_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new of one completion while it grows: text that is final, tokens, and why it ended if it did. `logprobs` runs
    along `token_ids` (None: not asked for)."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is: of `total` tokens, `processed` are done or on the device, `cached` of them by the cache."""

    request_id: str
    total: int
    cached: int
    processed: int
