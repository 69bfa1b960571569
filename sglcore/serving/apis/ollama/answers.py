"""Models of the answers of Ollama's endpoints, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.openai.answers import ChosenLogprobAnswer


class OllamaError(Answer):
    """The body of an error response of Ollama's endpoints: the error's text."""

    error: str


class Called(Answer):
    """A called function; `index` is the position of the call in the answer, from 0."""

    index: int
    name: str
    arguments: dict[str, Any]


class CallMade(Answer):
    """A complete tool call; calls are not streamed in parts."""

    id: str
    function: Called


class MessageMade(Answer):
    """The assistant's message; in a stream, its new part. `content` is empty where there is no
    text; `thinking` and `tool_calls` are left out where there are none."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[CallMade] | None = None


class Timed(Answer):
    """The whole duration of an answer in nanoseconds, a `load_duration` of 0, because the model is
    loaded already, and the number of prompt tokens."""

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class AnswerMade(Timed):
    """The common fields of chats, continued texts and the lines of their streams. Counts and
    durations (nanoseconds) are set if `done` is true. The same request with the same seed and
    fingerprint gives the same text. `warnings`: parts of the schema that are not enforced and that
    the answer violates, or the reason why this is not known."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ChosenLogprobAnswer] | None = None
    seed_used: int | None = None
    warnings: list[str] | None = None
    system_fingerprint: str | None = None


class OllamaChat(AnswerMade):
    """The answer of /api/chat: the next message of a conversation; in a stream, its new part."""

    message: MessageMade


class OllamaText(AnswerMade):
    """The answer of /api/generate: the generated text; in a stream, its new part. `thinking` is
    left out where there is none."""

    response: str
    thinking: str | None = None


class Vectors(Timed):
    """The answer of /api/embed: vectors of length 1, in the order of the inputs; no vectors for an
    empty input."""

    model: str
    embeddings: list[list[float]]


class OneVector(Answer):
    """The answer of /api/embeddings: the vector of a text, not scaled to length 1; an empty list
    for an empty text."""

    embedding: list[float]


class Details(Answer):
    """Facts about a model's files. `format`: safetensors or gguf; `family`: the architecture;
    `quantization_level`: the quantisation method, or the data type of most of the weights;
    `parameter_size`: the number of parameters, such as 7.2B (empty: not known). `parent_model` is
    always empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Answer):
    """The model under one of its served names. `name` and `model` both have the name with its tag;
    `size` is the size of its weight files in bytes; `digest` identifies configuration and weights
    (64 hexadecimal digits)."""

    name: str
    model: str
    size: int
    digest: str
    details: Details


class ListedFile(Listed):
    """A model that can be requested; `modified_at` is the last change of its weight files (ISO
    8601, UTC)."""

    modified_at: str


class ListedRun(Listed):
    """A loaded model. It stays loaded, so `expires_at` is far in the future; `size_vram` is the
    size of its weight files in bytes, not the measured use of memory; `context_length` is the
    maximum number of tokens of a prompt and its answer together."""

    expires_at: str
    size_vram: int
    context_length: int


class ModelsThere(Answer):
    """The answer of /api/tags: the served model, once for each of its names."""

    models: list[ListedFile]


class ModelsLoaded(Answer):
    """The answer of /api/ps: the served model, once for each of its names; empty before it is
    loaded."""

    models: list[ListedRun]


class Shown(Answer):
    """The answer of /api/show: facts about a model. `template` is its Jinja chat template (empty:
    none), `parameters` are the default sampling parameters of requests, one on each line,
    `modelfile` has the same as lines of a Modelfile; `model_info`: sizes by GGUF names."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "insert", "thinking", "embedding"]]
    modified_at: str


class Version(Answer):
    """The answer of /api/version. `version`: the version of Ollama's API that this server
    implements, by which clients find the supported features; `sglcore`: this server's own version.
    """

    version: str
    sglcore: str
