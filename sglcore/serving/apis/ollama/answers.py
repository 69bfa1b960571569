"""Answers of the endpoints below /api, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal

from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.openai.answers import ChosenLogprobAnswer


class OllamaError(Answer):
    """Every error: one text."""

    error: str


class Called(Answer):
    """What is called; `index` is the call's place among those of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class CallMade(Answer):
    """A call, which is told as a whole."""

    id: str
    function: Called


class MessageMade(Answer):
    """The assistant's message, or in a stream what is new of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[CallMade] | None = None


class Timed(Answer):
    """What an answer says at its end; times are nanoseconds."""

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class AnswerMade(Timed):
    """What chats and continued texts have, and each line of their streams: counts and times stand
    where `done` is true. The seed and the fingerprint, with the same request, give the same text
    again. `warnings`: parts of its schema that are not enforced and that the answer does not keep
    to, or why that is not known."""

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
    """A vector as the model has it."""

    embedding: list[float]


class Details(Answer):
    """Of a model's files: `quantization_level` is the type in which most of the weights are."""

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
    """One that is there."""

    modified_at: str


class ListedRun(Listed):
    """One that is loaded, and stays: all of its bytes are where the device reads them."""

    expires_at: str
    size_vram: int
    context_length: int


class ModelsThere(Answer):
    """All names of the served model."""

    models: list[ListedFile]


class ModelsLoaded(Answer):
    """The same once it has been loaded, and nothing before."""

    models: list[ListedRun]


class Shown(Answer):
    """What is known of a model. `template` is Jinja's, and `parameters` are those of requests that
    name none."""

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
