"""Models of the request bodies of /v1/responses, independent of the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from sglcore.serving.apis.request_params import SamplingFields, Stop, Stops
from sglcore.serving.apis.shared_body import Body, Count, Ignored, Items, Other, Positive, by_kind, entries

Role = Literal["user", "assistant", "system", "developer"]
Id = Annotated[str, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16), entries(16)
]


class TextPart(Body):
    """A part of a message that is text; `annotations` and `logprobs` occur in an answer that is
    sent back and are not used."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Body):
    """A refusal of the model in an earlier answer."""

    type: Literal["refusal"]
    refusal: str


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")] | Other,
    by_kind({**dict.fromkeys(_TEXTS, "text"), "refusal": "refusal"}),
]


class MessageItem(Body):
    """A message of the conversation; role developer is the same as system. `id`, `status` and
    `phase` occur in an answer that is sent back and are not used."""

    type: Literal["message"] = "message"
    role: Role
    content: str | Items[Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A tool call of the model in an earlier answer. `call_id` names it for its result, `id` is not
    used. `arguments` is JSON text; empty text counts as `{}`."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: Any = None


class CallOutputItem(Body):
    """The result of a tool call: `call_id` is that of an earlier `CallItem`, which `chat_request`
    checks, not this model; `id` is not used."""

    type: Literal["function_call_output"]
    call_id: Id
    output: str | Items[Part]
    id: str | None = None
    status: str | None = None
    caller: Any = None


class ReasoningItem(Body):
    """Reasoning of an earlier answer that is sent back; `content` has the text (missing or empty:
    `summary` has it). `encrypted_content` has no effect."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[Part] | None = None
    content: Items[Part] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Other,
    by_kind(
        {name: name for name in ("message", "function_call", "function_call_output", "reasoning")}, default="message"
    ),
]


class FunctionTool(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments. They
    are enforced, as far as possible, if a call is forced or the answer has a format, whatever
    `strict` says."""

    type: Literal["function"]
    name: Id
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Ignored[dict[str, Any]] = None
    allowed_callers: Ignored[Items[str]] = None
    defer_loading: Ignored[bool] = None


class NamedTool(Body):
    """The function that the model must call; whether the request has it among its tools is not
    checked here."""

    type: Literal["function"]
    name: Id


Tool = Annotated[Annotated[FunctionTool, Tag("function")] | Other, by_kind({"function": "function"})]
Choice = Annotated[Annotated[NamedTool, Tag("function")] | Other, by_kind({"function": "function"})]


class PlainFormat(Body):
    """The format "text" (free text) or "json_object" (any JSON object)."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """A JSON schema that the answer must satisfy; it is always enforced, whatever `strict` says,
    except for parts that a header of the answer names."""

    type: Literal["json_schema"]
    name: Id | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class TextConfig(Body):
    """The format of the answer's text (None: free text); `verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """The effort of the model's reasoning, which is passed to the chat template (None: the
    template's default); the other fields have no effect."""

    effort: str | None = None
    summary: Ignored[str] = None
    generate_summary: Ignored[str] = None
    context: Ignored[str] = None
    mode: Ignored[str] = None


class StreamOptions(Body):
    """`include_obfuscation` requests padding, which this server never adds."""

    include_obfuscation: bool | None = None


class Conversation(Body):
    """The fields that requests for a response and for the number of its input tokens share.
    `previous_response_id`: the stored response with the conversation before `input`. `chat_request`
    refuses a missing `input` and any `conversation`; this model does not."""

    model: str | None = None
    input: str | Items[Item] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Any = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Count | None = None


class CountRequest(Conversation):
    """A request for the number of input tokens of a response, without generating it."""

    personality: Ignored[str] = None


class ResponsesRequest(Conversation, SamplingFields):
    """A request for a response. `stop`, `thinking_token_budget` and most sampling fields are
    extensions of this server. `store` is true by default; `max_output_tokens` None: up to the end
    of the context; log-probabilities are requested by `top_logprobs` or in `include`. `background`,
    `context_management`, `moderation` and `prompt` are refused, not here but by
    `response_request`."""

    background: bool | None = None
    context_management: list[Any] | None = None
    include: Items[str] | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Ignored[Positive] = None
    metadata: Metadata | None = None
    moderation: Any = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_options: Ignored[dict[str, Any]] = None
    prompt_cache_retention: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    service_tier: Ignored[str] = None
    store: bool | None = None
    top_logprobs: Count | None = None
    user: Ignored[str] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Stops | None = None
