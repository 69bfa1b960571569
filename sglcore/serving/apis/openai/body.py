"""Models of the request bodies of /v1/chat/completions and /v1/completions, independent of the
engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from sglcore.serving.apis.request_params import GenerationFields
from sglcore.serving.apis.shared_body import Body, Count, Ignored, Int, Items, Positive

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class Part(Body):
    """A part of a message's content: text (in `text`), or a refusal of the assistant (in
    `refusal`). Parts of other types are refused when the body is parsed."""

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

    def plain(self) -> dict[str, Any]:
        """Return the part in the form that chat templates read, `{"type": "text", "text": ...}`; a
        refusal becomes text."""
        return {"type": "text", "text": self.text if self.type == "text" else self.refusal}


class FunctionCall(Body):
    """A function that the assistant called; `arguments` is JSON text."""

    name: str
    arguments: str


class CalledTool(Body):
    """A tool call in an earlier message of the assistant; `index` has no effect."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: Ignored[Int] = None


class Message(Body):
    """One message of a conversation. A null field is the same as no field, so the message of an
    answer can be sent back without changes. `reasoning` is another name of `reasoning_content`;
    `annotations` are not used."""

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
        """Return the message; raise pydantic's error if `content` is missing and the role is not
        assistant: a template would write the word None. The content may be empty."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content, which a message of role {role} has", {"role": self.role})
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read: without null fields, role
        "developer" as "system", reasoning as `reasoning_content`, and a refusal as content if there
        is no other content."""
        found = self.model_dump(exclude_none=True, exclude={"annotations"})
        if isinstance(self.content, list):
            found["content"] = [part.plain() for part in self.content]
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
    """A function that the model may call; `parameters` is the JSON schema of its arguments.
    `strict` itself has no effect: arguments are enforced, as far as possible, if a call is forced
    or the answer has a response format."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call; functions are the only kind, and another type is refused when
    the body is parsed."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates read, without `strict`."""
        found = self.model_dump(exclude_none=True)
        found["function"].pop("strict", None)
        return found


class ChosenName(Body):
    """The name of a function."""

    name: FunctionName


class ChosenTool(Body):
    """The function that the model must call; whether the request has it among its tools is not
    checked here."""

    type: Literal["function"]
    function: ChosenName


class TemplateFields(Body):
    """Fields for the checkpoint's chat template. By default `continue_final_message` is false, and
    `add_generation_prompt` is its opposite. `chat_template_kwargs`: further variables of the
    template."""

    tools: Items[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(TemplateFields, GenerationFields):
    """The body of /v1/chat/completions: a request for the next message of a conversation.

    `max_completion_tokens` and `max_tokens` are the same field (none: up to the end of the
    context); different values are refused by `chat_request`. `chat_template_kwargs` and
    `reasoning_effort` are passed to the checkpoint's template. `tool_choice` None: "auto" with
    tools, "none" without. With `parallel_tool_calls` false, only the first call of an answer is
    kept.
    """

    messages: Items[Message] = Field(min_length=1)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Count | None = None
    modalities: Items[Literal["text"]] | None = None
    metadata: Ignored[dict[str, Any]] = None
    prediction: Ignored[dict[str, Any]] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    service_tier: Ignored[str] = None
    store: Ignored[bool] = None
    verbosity: Ignored[str] = None

    def warnings(self) -> tuple[str, ...]:
        """Return the names of fields that the request sets without effect, sorted: the ignored
        fields, and `tools.function.strict` if a tool sets `strict` to true and no call is
        forced."""
        names = super().warnings()
        if self.tool_choice in (None, "auto", "none") and any(tool.function.strict for tool in self.tools or ()):
            return tuple(sorted((*names, "tools.function.strict")))
        return names


Ids = Annotated[Items[Count], Field(min_length=1)]


def _form(value: Any) -> str:
    """Return the tag of a prompt's form, decided by its first item: "text" (also for other values
    that are no list), "texts" (also for an empty list), "ids" or "lists" (several prompts as lists
    of ids)."""
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
    """The body of /v1/completions: a request to continue one prompt or several.

    `max_tokens` is 16 by default. `logprobs`: number of alternatives for each token, 0 for only the
    chosen one, None for no log-probabilities. `echo` puts the prompt before the text, and with
    `logprobs` its log-probabilities; only then may `max_tokens` be 0. `add_special_tokens`: whether
    a text gets the special tokens that the checkpoint adds to a prompt, such as BOS (None: true).
    `suffix`, and a `best_of` other than `n`, are refused, not here but by `completion_request`.
    """

    prompt: Prompts
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    metadata: Ignored[dict[str, Any]] = None
    store: Ignored[bool] = None
    service_tier: Ignored[str] = None


def as_prompts(found: Any) -> list[Any]:
    """Return the prompts of a value of type `Prompts` as a list, each a text or a list of token
    ids; one prompt becomes a list of one."""
    return [found] if isinstance(found, str) or isinstance(found[0], int) else list(found)
