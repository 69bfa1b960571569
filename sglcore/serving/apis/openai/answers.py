"""Answers of /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models, as the document describes them."""

from __future__ import annotations

from typing import Any, Literal

from sglcore.schedule.output import FinishReason
from sglcore.serving.apis.answer import Answer, ErrorDetail
from sglcore.serving.chat.run import ChatFinish


class PromptTokensDetails(Answer):
    """`cached_tokens` of the prompt were taken from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Tokens that were proposed: those that are in the answer, and those that were wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens of a request over all of its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptProgress(Answer):
    """How much of a prompt has been computed."""

    total: int
    cached: int
    processed: int


class TokenLogprobAnswer(Answer):
    """One token: its text, its log-probability, its bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprobAnswer(TokenLogprobAnswer):
    """A chosen token with the most likely ones at its place."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Answer):
    """Log-probabilities along the tokens of a choice."""

    content: list[ChosenLogprobAnswer] | None
    refusal: None = None


class CallAnswer(Answer):
    """What is called; `arguments` is JSON text, in a stream a part of it."""

    name: str | None = None
    arguments: str


class ToolCallAnswer(Answer):
    """A call; in a stream `index` tells which one the part belongs to, and only the first part has an id and a name."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallAnswer


class MessageAnswer(Answer):
    """The assistant's message, or in a stream what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChoiceEnd(Answer):
    """What a choice and its last part have: `seed_used` gives the same text again; `error` says why a sample failed."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None = None
    seed_used: int | None = None
    token_ids: list[int] | None = None
    error: ErrorDetail | None = None


class ChatChoice(ChoiceEnd):
    """One sample."""

    message: MessageAnswer


class ChatDelta(ChoiceEnd):
    """What is new of one sample."""

    delta: MessageAnswer


class ChatFrame(Answer):
    """What the answer and every part of a stream have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ChatAnswer(ChatFrame):
    """All samples of the next message."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatChunk(ChatFrame):
    """A part of a stream: what is new of one choice, or how far the prompt is, or at the end the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    prompt_progress: PromptProgress | None = None


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


class Embedding(Answer):
    """One vector: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: str
    usage: EmbeddingUsage


class ModelCard(Answer):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    root: str
    parent: None = None


class ModelList(Answer):
    """All names under which the model is served."""

    object: Literal["list"]
    data: list[ModelCard]
