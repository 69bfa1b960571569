"""Models of the answers of /v1/chat/completions, /v1/completions and /v1/models, for the OpenAPI
document."""

from __future__ import annotations

from typing import Any, Literal

from sglcore.schedule.request_output import FinishReason
from sglcore.serving.apis.answer import Answer, ErrorDetail
from sglcore.serving.chat.run import ChatFinish


class PromptTokensDetails(Answer):
    """`cached_tokens`: tokens of the prompt that were taken from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Numbers of draft tokens that were accepted and rejected; left out without draft tokens.
    `max_tokens` is the number of tokens that fit into the context after the prompt, if the request
    allowed more (else left out)."""

    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    max_tokens: int | None = None


class Usage(Answer):
    """Numbers of tokens of a request over all of its prompts and samples. A prompt counts once,
    however many samples it has; `total_tokens` is the sum of the two numbers before it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptProgress(Answer):
    """The progress of a prompt of `total` tokens: `processed` are done or on the device, `cached`
    of them from the prefix cache."""

    total: int
    cached: int
    processed: int


class TokenLogprobAnswer(Answer):
    """One token: its text, its natural-log probability (-9999.0 stands for zero probability), and
    its UTF-8 bytes, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprobAnswer(TokenLogprobAnswer):
    """A chosen token, and the most likely tokens at its position, the most likely first; the chosen
    one may be missing there."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Answer):
    """The log-probability of each token of a choice; in a stream, of its new tokens."""

    content: list[ChosenLogprobAnswer] | None
    refusal: None = None


class CallAnswer(Answer):
    """A called function; `arguments` is JSON text, in a stream a part of that text."""

    name: str | None = None
    arguments: str


class ToolCallAnswer(Answer):
    """A tool call. In a stream, `index` is the number of the call to which the part belongs, and
    only the first part of a call has an id and a name."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallAnswer


class MessageAnswer(Answer):
    """The assistant's message; in a stream, its new part, with only the fields that changed.
    `content` is null for a message that consists of tool calls."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class Frame(Answer):
    """The common fields of completions, chats and every part of their streams. `created`: seconds
    since 1970; `model`: the served name; in a stream, `usage` is in the last part or in every part,
    and only if requested."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None


class ChoiceEnd(Answer):
    """The common fields of a choice and its last part, in completions and chats.

    `seed_used` reproduces the sample. `hidden_states`: the last one, or with "all" one for each
    token of the prompt and each token of the output but the last. `warnings`: parts of the schema
    that are not enforced and that the text violates, or the reason why this is not known. `error`:
    why the sample failed, if it did.
    """

    index: int
    stop_reason: int | str | None = None
    seed_used: int | None = None
    token_ids: list[int] | None = None
    hidden_states: list[float] | list[list[float]] | None = None
    warnings: list[str] | None = None
    error: ErrorDetail | None = None


class ChatEnd(ChoiceEnd):
    """The fields of a chat's choice that say how it ended, and its log-probabilities (null: not
    requested); `finish_reason` is null in parts before the last."""

    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChoice(ChatEnd):
    """One sample of the next message."""

    message: MessageAnswer


class ChatDelta(ChatEnd):
    """The new part of one sample of the next message."""

    delta: MessageAnswer


class ChatAnswer(Frame):
    """The answer to a chat: all samples of the next message."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatChunk(Frame):
    """A part of a stream: the new part of one choice, or the progress of the prompt, or at the end
    the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    prompt_token_ids: list[int] | None = None
    prompt_progress: PromptProgress | None = None


class CompletionLogprobsAnswer(Answer):
    """Lists with one entry for each token; null for the first token of a prompt, which nothing
    predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceEnd):
    """One sample of one prompt: `index` counts the samples of the first prompt, then those of the
    next.

    `seed_used` with the same prompt gives the same text again. `stop_reason` is the stop string or
    the token of `stop_token_ids` that ended it, null for an end token of the model. With
    `finish_reason` "error" or "abort" the sample failed, and `error` says why.
    """

    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(Frame):
    """The answer to a request for completions: all samples of all prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(CompletionAnswer):
    """A part of a stream: text of one choice, the progress of a prompt, or at the end the usage."""

    prompt_progress: PromptProgress | None = None


class ModelCard(Answer):
    """The served model under one of its names, `id`; `root` is its first name. `max_model_len`:
    maximum tokens of a prompt and its answer together (null before the model is loaded); `created`:
    seconds since 1970 at which this server started."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    root: str
    parent: None = None


class ModelList(Answer):
    """The served model, once for each of its names."""

    object: Literal["list"]
    data: list[ModelCard]
