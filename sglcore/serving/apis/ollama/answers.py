"""Answers of the endpoints below /api, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal

from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.openai.answers import ChosenLogprobAnswer


class OllamaError(Answer):
    """An error: a single text."""

    error: str


class Called(Answer):
    """A called function; `index` is the position of the call in the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class CallMade(Answer):
    """A complete call; calls are not streamed in parts."""

    id: str
    function: Called


class MessageMade(Answer):
    """The assistant's message; in a stream, its new part."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[CallMade] | None = None


class Timed(Answer):
    """Facts at the end of an answer; times are nanoseconds."""

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class AnswerMade(Timed):
    """The common fields of chats, continued texts and the lines of their streams. Counts and times
    are set if `done` is true. The same request with the same seed and fingerprint gives the same
    text. `warnings`: parts of the schema that are not enforced and that the answer violates, or the
    reason why this is not known."""

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
    """The next message."""

    message: MessageMade


class OllamaText(AnswerMade):
    """The text."""

    response: str
    thinking: str | None = None


class Vectors(Timed):
    """Vectors of length 1, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]


class OneVector(Answer):
    """A vector as the model returns it."""

    embedding: list[float]


class Details(Answer):
    """Facts about a model's files: `quantization_level` is the data type of most of the weights."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Answer):
    """A model by one of its names; `size` of its weight files in bytes."""

    name: str
    model: str
    size: int
    digest: str
    details: Details


class ListedFile(Listed):
    """An available model."""

    modified_at: str


class ListedRun(Listed):
    """A loaded model. It stays loaded, with all of its bytes in the device's memory."""

    expires_at: str
    size_vram: int
    context_length: int


class ModelsThere(Answer):
    """All names of the served model."""

    models: list[ListedFile]


class ModelsLoaded(Answer):
    """All names of the served model; none before it is loaded."""

    models: list[ListedRun]


class Shown(Answer):
    """Facts about a model. `template` is a Jinja template, `parameters` are the defaults of
    requests."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "insert", "thinking", "embedding"]]
    modified_at: str


class Version(Answer):
    """The version of Ollama's protocol, which clients use to find the supported features, and this
    server's own version.
    """

    version: str
    sglcore: str
