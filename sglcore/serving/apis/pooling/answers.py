"""Answers of /v1/embeddings, /v1/score, /v1/rerank and /classify, as the OpenAPI document describes
them."""

from __future__ import annotations

from typing import Literal

from sglcore.serving.apis.answer import Answer


class PoolingUsage(Answer):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingAnswer(Answer):
    """The common fields of these answers."""

    model: str
    system_fingerprint: str
    usage: PoolingUsage


class Embedding(Answer):
    """One vector: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(PoolingAnswer):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]


class Score(Answer):
    """The score of a pair: the output of the head, or the cosine of two vectors."""

    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(PoolingAnswer):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[Score]


class DocumentAnswer(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: DocumentAnswer | None = None


class RerankAnswer(PoolingAnswer):
    """Documents, the most relevant first."""

    id: str
    results: list[Ranked]


class Label(Answer):
    """The most probable label of one input, and the probabilities of all in their order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(PoolingAnswer):
    """The labels in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[Label]
