"""Bodies and answers of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from sglcore.schedule.output import FinishReason
from sglcore.serving.apis.body import Answer, Count, ErrorDetail, Items, Positive, PromptProgress, Usage
from sglcore.serving.apis.sampling import GenerationFields

Ids = Annotated[Items[Count], Field(min_length=1)]


def _form(value: Any) -> str:
    """Which of the forms a prompt wants to have: its first item tells."""
    first = value[0] if isinstance(value, list) and value else ""
    if isinstance(first, str):
        return "texts" if isinstance(value, list) else "text"
    return "lists" if isinstance(first, list) else "ids"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Items[str], Field(min_length=1), Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Items[Ids], Field(min_length=1), Tag("lists")],
    Discriminator(_form),
]
"""One prompt or several, as text or as token ids."""


class CompletionBody(GenerationFields):
    """A request to continue texts.

    `logprobs`: alternatives to report of each token, 0 for the chosen one alone. `echo` puts the prompt before the text,
    and with `logprobs` its log-probabilities; only then may `max_tokens` be 0. `add_special_tokens` is whether a text
    gets what the checkpoint puts around a prompt, such as BOS.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "store", "service_tier"})

    prompt: Prompts
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def warnings(self) -> tuple[str, ...]:
        """The ignored fields, and those that only hold where the answer streams."""
        silent = ("return_progress",) if self.return_progress and not self.stream else ()
        return tuple(sorted((*super().warnings(), *silent)))


class CompletionLogprobsAnswer(Answer):
    """Lists along the tokens; the first token of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One sample of one prompt: `index` counts the samples of the first prompt, then those of the next.

    `seed_used` with the same prompt gives the same text again. `stop_reason` is the stop token or string that ended it.
    With `finish_reason` "error" or "abort" the sample failed, and `error` says why.
    """

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    seed_used: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    error: ErrorDetail | None = None


class CompletionAnswer(Answer):
    """The completions of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CompletionChunk(CompletionAnswer):
    """A part of a stream: text of one choice, or how far a prompt is, or at the end the usage."""

    prompt_progress: PromptProgress | None = None


def as_prompts(found: Any) -> list[Any]:
    """The prompts of a `Prompts`, each a text or a list of token ids."""
    return [found] if isinstance(found, str) or isinstance(found[0], int) else list(found)
