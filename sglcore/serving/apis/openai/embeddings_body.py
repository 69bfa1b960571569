"""Bodies and answers of /v1/embeddings."""

from __future__ import annotations

from typing import ClassVar, Literal

from sglcore.serving.apis.body import Answer, Body, Positive
from sglcore.serving.apis.openai.completions_body import Prompts


class EmbeddingBody(Body):
    """A request for the vectors of one input or several. `dimensions` may only name the model's own number; `prompt_name` is
    that of a prompt of the checkpoint's, which stands before each text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None
    user: str | None = None


class Embedding(Answer):
    """One vector: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: str
    usage: EmbeddingUsage
