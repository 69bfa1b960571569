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
    """Sampling parameters by Ollama's names.

    A `num_predict` below 0 means up to the end of the context. Penalties always count over the
    prompt and the output, as with `repeat_last_n` -1; another value is refused together with a
    penalty. Options for loading a model have no effect: the model is already loaded.
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
        """Return the ignored fields, and `repeat_last_n` if it is set and not -1."""
        window = () if self.repeat_last_n in (None, -1) else ("repeat_last_n",)
        return tuple(sorted((*super().warnings(), *window)))


class OllamaFunction(Body):
    """A function that the assistant called; `arguments` is a JSON object."""

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
    `tool_call_id` or, without one, the first call of the function `tool_name` that has no answer
    yet."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> OllamaMessage:
        """Require `content` for every role but assistant: a template would write the word None for
        another role."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content, which a message of role {role} has", {"role": self.role})
        return self


class OllamaTool(Body):
    """A tool that the model may call; functions are the only kind."""

    type: Literal["function"] | None = None
    function: Function


class AnswerFields(Body):
    """The fields that chats and continued texts share. `stream` is true by default. `format` is
    "json" or a JSON schema; `think` turns reasoning on or off, or sets its effort."""

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
        """Return the ignored fields, including those of `options`."""
        own = () if self.options is None else self.options.warnings()
        return (*super().warnings(), *(f"options.{name}" for name in own))


class OllamaChatBody(AnswerFields):
    """The body of /api/chat: a request for the next message of a conversation."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[OllamaTool] | None = None


class OllamaGenerateBody(AnswerFields):
    """The body of /api/generate: a request for the answer to a text; with `raw` for the
    continuation of the text, with `suffix` for the text between prompt and suffix."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[Any] | None = None


class VectorFields(Body):
    """The fields that both embedding endpoints share."""

    model: str | None = None
    options: Ignored[dict[str, Any]] = None
    keep_alive: Ignored[float | str] = None


class OllamaEmbedBody(VectorFields):
    """The body of /api/embed: a request for the vectors of one text or several. Long texts are
    truncated to the context, unless `truncate` is false."""

    input: str | Items[str]
    truncate: bool | None = None
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(VectorFields):
    """A request for the vector of one text, to the older endpoint /api/embeddings."""

    prompt: str


class OllamaShowBody(Body):
    """The body of /api/show: a request for facts about a model; `name` is the older name of the
    field `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Ignored[bool] = None
    system: Ignored[str] = None
    template: Ignored[str] = None
    options: Ignored[dict[str, Any]] = None
