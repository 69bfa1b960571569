"""Models of the request bodies of Ollama's endpoints, independent of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sglcore.serving.apis.openai.body import Function
from sglcore.serving.apis.request_params import SamplingFields, Stop, Stops
from sglcore.serving.apis.shared_body import Body, Count, CountOrAll, Ignored, Int, Items, Positive, TokenLimit

Word = Annotated[str, Field(min_length=1, max_length=256)]


class OllamaOptions(SamplingFields):
    """Sampling parameters by Ollama's names; None: not given.

    A `num_predict` below 0 means up to the end of the context. `repeat_penalty` and
    `repetition_penalty` are the same parameter; the first one counts. Penalties always count over
    the prompt and the output, as with `repeat_last_n` -1; `params_of` refuses another value
    together with a penalty. Options for loading a model have no effect: the model is already
    loaded.
    """

    num_predict: TokenLimit | None = None
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: CountOrAll | None = None
    stop: Stop | Stops | None = None
    num_ctx: Ignored[Int] = None
    num_keep: Ignored[Int] = None
    num_batch: Ignored[Int] = None
    num_gpu: Ignored[Int] = None
    main_gpu: Ignored[Int] = None
    num_thread: Ignored[Int] = None
    numa: Ignored[bool] = None
    low_vram: Ignored[bool] = None
    f16_kv: Ignored[bool] = None
    logits_all: Ignored[bool] = None
    vocab_only: Ignored[bool] = None
    embedding_only: Ignored[bool] = None
    use_mmap: Ignored[bool] = None
    use_mlock: Ignored[bool] = None
    penalize_newline: Ignored[bool] = None
    mirostat_tau: Ignored[float] = None
    mirostat_eta: Ignored[float] = None

    def warnings(self) -> tuple[str, ...]:
        """Return the names of the ignored fields that are set, and `repeat_last_n` if it is set and
        not -1; sorted."""
        window = () if self.repeat_last_n in (None, -1) else ("repeat_last_n",)
        return tuple(sorted((*super().warnings(), *window)))


class OllamaFunction(Body):
    """A function that the assistant called; `arguments` is a JSON object. `index` and `description`
    are accepted and not used."""

    name: str
    arguments: dict[str, Any]
    index: Int | None = None
    description: str | None = None


class OllamaCall(Body):
    """A tool call in an earlier message of the assistant."""

    id: Word | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """One message of a conversation. A message of role tool answers the call with the id
    `tool_call_id` or, without one, the first call of the function `tool_name` (None: of any
    function) that has no answer yet. `images` are refused, not here but by `chat_request`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> OllamaMessage:
        """Return the message; raise pydantic's error if `content` is missing and the role is not
        assistant: a template would write the word None. The content may be empty."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content, which a message of role {role} has", {"role": self.role})
        return self


class OllamaTool(Body):
    """A tool that the model may call; functions are the only kind."""

    type: Literal["function"] | None = None
    function: Function


class AnswerFields(Body):
    """The fields that chats and continued texts share. `stream` is true by default. `format` is
    "json" or a JSON schema (empty: free text); `think` turns reasoning on or off, or is a text that
    turns it on and names its effort (None: as the template does by default)."""

    sampled: ClassVar[Mapping[str, type[Body]]] = MappingProxyType({"options": OllamaOptions})

    model: str | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    stream: bool | None = None
    think: bool | Word | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    keep_alive: Ignored[float | str] = None
    truncate: Ignored[bool] = None
    shift: Ignored[bool] = None

    def warnings(self) -> tuple[str, ...]:
        """Return the names of the ignored fields that are set, those of `options` as
        `options.NAME`."""
        own = () if self.options is None else self.options.warnings()
        return (*super().warnings(), *(f"options.{name}" for name in own))


class OllamaChatBody(AnswerFields):
    """The body of /api/chat: a request for the next message of a conversation. Without messages,
    the answer says only that the model is loaded."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[OllamaTool] | None = None


class OllamaGenerateBody(AnswerFields):
    """The body of /api/generate: a request for the answer to a text, by the chat template; with
    `raw` for the continuation of the text, with `suffix` for the text between prompt and suffix.
    Without a prompt, the answer says only that the model is loaded. `images`, `template` and
    `context` are refused, not here but by `plain_prompt` and `text_request`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[Any] | None = None


class VectorFields(Body):
    """The fields that both embedding endpoints share. `model`: None for the first served name."""

    model: str | None = None
    options: Ignored[dict[str, Any]] = None
    keep_alive: Ignored[float | str] = None


class OllamaEmbedBody(VectorFields):
    """The body of /api/embed: a request for the vectors of one text or several. Long texts are
    truncated to the model's maximum, unless `truncate` is false: then they are refused.
    `dimensions`: the number of values of each vector (None: all)."""

    input: str | Items[str]
    truncate: bool | None = None
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(VectorFields):
    """A request for the vector of one text, to the older endpoint /api/embeddings. A long text is
    truncated to the model's maximum."""

    prompt: str


class OllamaShowBody(Body):
    """The body of /api/show: a request for facts about a model; `name` is the older name of the
    field `model`. The endpoint refuses a body with neither."""

    model: str | None = None
    name: str | None = None
    verbose: Ignored[bool] = None
    system: Ignored[str] = None
    template: Ignored[str] = None
    options: Ignored[dict[str, Any]] = None
