"""Bodies and answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sglcore.serving.apis.body import (
    Answer,
    Body,
    Count,
    ErrorDetail,
    Int,
    Items,
    Positive,
    PromptProgress,
    Usage,
)
from sglcore.serving.apis.sampling import GenerationFields

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class Part(Body):
    """A piece of a message's content: text, or a refusal that an assistant gave. Models here read text alone."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            wanted = "a part of type text: this server reads no parts of type {kind}"
            raise PydanticCustomError("part_kind", wanted, {"kind": kind[:40]})
        if isinstance(kind, str) and not isinstance(value.get(kind), str):
            raise PydanticCustomError("part_kind", "a part with a string in its field {kind}", {"kind": kind})
        return value


class FunctionCall(Body):
    """A call that an assistant made; `arguments` is JSON text."""

    name: str
    arguments: str


class CalledTool(Body):
    """A tool call of an earlier answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: Int | None = None


class Message(Body):
    """One message of a conversation. A null field is as good as none, so an answer's message can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        """Only an assistant may have said nothing: a template would write the word None for it."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content, which a message of role {role} has", {"role": self.role})
        return self

    def plain(self) -> dict[str, Any]:
        """The message as templates take it: no empty fields, a developer is a system, reasoning under one name."""
        found = self.model_dump(exclude_none=True, exclude={"annotations"})
        if self.role == "developer":
            found["role"] = "system"
        if "reasoning" in found:
            found.setdefault("reasoning_content", found.pop("reasoning"))
        if self.refusal is not None and self.content is None:
            found["content"] = self.refusal
        found.pop("refusal", None)
        for call in found.get("tool_calls", ()):
            call.pop("index", None)
            call.setdefault("type", "function")
        return found


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as templates take it."""
        found = self.model_dump(exclude_none=True)
        found["function"].pop("strict", None)
        return found


class ChosenName(Body):
    """A function by its name."""

    name: FunctionName


class ChosenTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenName


class ChatBody(GenerationFields):
    """A request for the next message of a conversation.

    `max_completion_tokens` and `max_tokens` are one thing (none: as many as the context holds). `chat_template_kwargs` go
    to the checkpoint's template, and so does `reasoning_effort`. `parallel_tool_calls` false keeps the first call of an
    answer alone.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        }
    )

    messages: Items[Message] = Field(min_length=1)
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Items[Literal["text"]] | None = None
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None

    def warnings(self) -> tuple[str, ...]:
        """The ignored fields, and those that only hold where a call is forced or the answer streams."""
        names = list(super().warnings())
        if self.return_progress and not self.stream:
            names.append("return_progress")
        if self.tool_choice in (None, "auto", "none") and any(tool.function.strict for tool in self.tools or ()):
            names.append("tools.function.strict")
        return tuple(sorted(names))


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


ChatFinish = Literal["stop", "length", "tool_calls", "abort", "error"]


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
