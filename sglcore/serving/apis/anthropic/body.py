"""Models of the request bodies and errors of /v1/messages (Anthropic's API), independent of the
engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.request_params import SamplingFields, Stops
from sglcore.serving.apis.shared_body import Body, Ignored, Items, Other, Positive, by_kind

Word = Annotated[str, Field(min_length=1, max_length=256)]
CacheControl = dict[str, Any]


class TextBlock(Body):
    """A part of a message that is text; the other fields have no effect."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the chat template gets it, and the signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Reasoning of an earlier answer that only the service that made it can read; it is ignored:
    the chat template does not get it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A tool call of the model in an earlier answer; `input`: its arguments."""

    type: Literal["tool_use"]
    id: Word
    name: Word
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: None = None


Texts = Annotated[Annotated[TextBlock, Tag("text")] | Other, by_kind({"text": "text"})]


class ToolResultBlock(Body):
    """The result of a tool call: `tool_use_id` is the `id` of an earlier `ToolUseBlock`, which
    `chat_request` checks, not this model. `is_error` has no effect."""

    type: Literal["tool_result"]
    tool_use_id: Word
    content: str | Items[Texts] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Other,
    by_kind({name: name for name in _KINDS}),
]


class Message(Body):
    """One message of the conversation: a text, or blocks. Which blocks fit the role is checked by
    `chat_request`, not here."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class CustomTool(Body):
    """A function that the model may call; `input_schema` is the JSON schema of its arguments. They
    are enforced, as far as possible, if a call is forced or the answer has a format, whatever
    `strict` says."""

    type: Literal["custom"] | None = None
    name: Word
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored[CacheControl] = None
    input_examples: Ignored[Items[dict[str, Any]]] = None
    allowed_callers: Ignored[Items[str]] = None
    defer_loading: Ignored[bool] = None
    eager_input_streaming: Ignored[bool] = None


Tool = Annotated[Annotated[CustomTool, Tag("custom")] | Other, by_kind({"custom": "custom"}, default="custom")]


class ToolChoice(Body):
    """Whether the model must call a tool: "auto": it may; "any": it must call one; "tool": it must
    call the tool `name`; "none": no tools are shown to it. `chat_request` refuses "tool" without a
    name. With `disable_parallel_tool_use` only the first call of an answer is kept."""

    type: Literal["auto", "any", "tool", "none"]
    name: Word | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model should think before it answers ("adaptive": as its template does by
    default), and with how many tokens at most (None: no limit)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Ignored[str] = None


class JsonFormat(Body):
    """The format of an answer that must be a JSON value of this schema; it is enforced, except for
    parts that a header of the answer names."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The format of the answer (None: free text), and the effort of the reasoning, which is passed
    to the chat template (None: the template's default)."""

    effort: str | None = None
    format: JsonFormat | None = None


class CountRequest(Body):
    """The body of /v1/messages/count_tokens: the part of a request for a message that decides the
    number of input tokens. `output_format` is an older name of `output_config.format`, which counts
    first; `mcp_servers` are refused, not here but by `chat_request`."""

    model: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)]
    system: str | Items[Texts] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    mcp_servers: list[Any] | None = None
    cache_control: Ignored[CacheControl] = None
    context_management: Ignored[dict[str, Any]] = None
    speed: Ignored[str] = None
    user_profile_id: Ignored[str] = None
    workspace_id: Ignored[str] = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, SamplingFields):
    """The body of /v1/messages: a request for the next message of the assistant. `max_tokens` is
    required; `container` and `thread` are refused, not here but by `message_request`."""

    max_tokens: Positive
    stop_sequences: Stops | None = None
    metadata: Ignored[dict[str, Any]] = None
    service_tier: Ignored[str] = None
    container: Any = None
    thread: Any = None
    diagnostics: Ignored[Any] = None
    inference_geo: Ignored[str] = None
    stream: bool | None = None


UNTHREADED = "thread_unsupported_request"
"""The error code that tells a client to send whole conversations."""


class MessagesErrorDetail(Answer):
    """An error: its type, one of Anthropic's such as "not_found_error", and message; `details` has
    an `error_code` for clients that can use another method (left out for other errors)."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesError(Answer):
    """The body of an error response of Anthropic's endpoints."""

    type: Literal["error"]
    error: MessagesErrorDetail
