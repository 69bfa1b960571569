"""Models of the answers of /v1/embeddings, /v1/score, /v1/rerank and /v1/classify, for the OpenAPI
document."""

from __future__ import annotations

from typing import Literal

from sglcore.serving.apis.answer import Answer


class PoolingUsage(Answer):
    """The number of tokens of all inputs together; both fields are equal, because nothing is
    generated."""

    prompt_tokens: int
    total_tokens: int


class PoolingAnswer(Answer):
    """The common fields of answers to embedding, scoring, reranking and classification. `model`:
    the served name; `system_fingerprint` changes with whatever may change a result."""

    model: str
    system_fingerprint: str
    usage: PoolingUsage


class Embedding(Answer):
    """The vector of input number `index` (from 0): a list of numbers, or with `encoding_format`
    "base64" the base64 of its float32 values in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(PoolingAnswer):
    """Answer of /v1/embeddings, as the OpenAPI document shows it: the vectors, in the order of the
    inputs."""

    object: Literal["list"]
    data: list[Embedding]


class Score(Answer):
    """The score of pair number `index` (from 0): the output of a classification head with one
    label, or, from a model without one, the cosine of the vectors of the two texts."""

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
    """A document's index in the request (from 0), and its relevance to the query, in which higher
    is more relevant. `document` is left out unless the request wants it (`return_documents`; by
    default, only /v1/rerank has it)."""

    index: int
    relevance_score: float
    document: DocumentAnswer | None = None


class RerankAnswer(PoolingAnswer):
    """The documents, the most relevant first, at most `top_n` of the request."""

    id: str
    results: list[Ranked]


class Label(Answer):
    """The most probable label of input number `index` (from 0), and the probabilities of all
    `num_classes` labels in the order of the checkpoint."""

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
