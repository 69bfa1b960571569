"""Bodies of the endpoints below /api: what a client of Ollama may send. It does not know the
engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sglcore.serving.apis.openai.body import Function
from sglcore.serving.apis.request_params import LastN, SamplingFields, Stop, Stops
from sglcore.serving.apis.shared_body import Body, Count, Ignored, Int, Items, Positive

Word = Annotated[str, Field(min_length=1, max_length=256)]


class OllamaOptions(SamplingFields):
    """How an answer is sampled, by Ollama's names.

    A `num_predict` below 0 means up to the end of the context. Penalties count over the prompt and
    the output, which is -1 as `repeat_last_n`. Options for loading a model have no effect: the
    model is already loaded.
    """

    num_predict: Annotated[Int, Field(ge=-2)] | None = None
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: LastN | None = None
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
        """Return the ignored fields, and a penalty window without effect."""
        window = () if self.repeat_last_n in (None, -1) else ("repeat_last_n",)
        return tuple(sorted((*super().warnings(), *window)))


class OllamaFunction(Body):
    """A function that an assistant called; `arguments` is an object."""

    name: str
    arguments: dict[str, Any]
    index: Int | None = None
    description: str | None = None


class OllamaCall(Body):
    """A call of an earlier answer."""

    id: Word | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """One message of a conversation. A message of role tool answers the call of its `tool_call_id`
    or, without one, the first of that `tool_name` that has no answer."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> OllamaMessage:
        """Check that only an assistant has an empty message: a template would write the word None
        for another role."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content, which a message of role {role} has", {"role": self.role})
        return self


class OllamaTool(Body):
    """A tool; functions are the only kind."""

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
    """A request for the next message of a conversation."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[OllamaTool] | None = None


class OllamaGenerateBody(AnswerFields):
    """A request for the answer to a text; with `raw` for its continuation, with `suffix` for the
    text between the prompt and the suffix.
    """

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
    """A request for the vectors of one text or several. Long texts are truncated, unless `truncate`
    is false."""

    input: str | Items[str]
    truncate: bool | None = None
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(VectorFields):
    """A request for the vector of a text, in the form used before /api/embed."""

    prompt: str


class OllamaShowBody(Body):
    """A request for the facts about a model; `name` is the older name of the field."""

    model: str | None = None
    name: str | None = None
    verbose: Ignored[bool] = None
    system: Ignored[str] = None
    template: Ignored[str] = None
    options: Ignored[dict[str, Any]] = None
