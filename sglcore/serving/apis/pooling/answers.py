"""Models of the answers of /v1/embeddings, /v1/score, /v1/rerank and /v1/classify, for the OpenAPI
document."""

from __future__ import annotations

from typing import Literal

from sglcore.serving.apis.answer import Answer


class PoolingUsage(Answer):
    """Numbers of tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class PoolingAnswer(Answer):
    """The common fields of answers to embedding, scoring, reranking and classification."""

    model: str
    system_fingerprint: str
    usage: PoolingUsage


class Embedding(Answer):
    """The vector of input number `index`: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(PoolingAnswer):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]


class Score(Answer):
    """The score of pair number `index`: the output of the classification head, or the cosine of two
    vectors."""

    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(PoolingAnswer):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[Score]


class DocumentAnswer(Answer):
    """A document, as text."""

    text: str


class Ranked(Answer):
    """A document's index in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: DocumentAnswer | None = None


class RerankAnswer(PoolingAnswer):
    """The documents, the most relevant first."""

    id: str
    results: list[Ranked]


class Label(Answer):
    """The most probable label of input number `index`, and the probabilities of all labels in their
    order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(PoolingAnswer):
    """The labels, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[Label]
