"""Models of the request bodies of /v1/embeddings, /v1/score, /v1/rerank and /v1/classify,
independent of the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sglcore.serving.apis.openai.body import Prompts
from sglcore.serving.apis.shared_body import Body, CountOrAll, Ignored, Items, Positive

Texts = Annotated[Items[str], Field(min_length=1)]
OneOrMore = Annotated[Texts, BeforeValidator(lambda found: [found] if isinstance(found, str) else found)]


class PoolingFields(Body):
    """The common fields of these requests. `truncate_prompt_tokens` is the number of tokens to
    which longer texts are truncated, or -1 for the maximum of the model; `truncate` true is the
    same as -1. Without both, texts that are too long are refused."""

    model: str | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncate: bool | None = None
    user: Ignored[str] = None

    @property
    def most(self) -> int | None:
        """The number of tokens to which longer texts are truncated, -1 for the model's maximum;
        None: they are refused."""
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return -1 if self.truncate else None


class EmbeddingBody(PoolingFields):
    """A request for the vectors of one input or several. `dimensions` keeps the first numbers of
    each vector, scaled to length 1 if the whole vector has length 1; `prompt_name` names a prompt
    of the checkpoint, which is put before each text."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None


class ScoreBody(PoolingFields):
    """A request to score pairs of texts: one `text_1` with each `text_2`, or each `text_1` with the
    `text_2` at the same place."""

    text_1: OneOrMore
    text_2: OneOrMore


class DocumentText(Body):
    """A document as an object."""

    text: str


class RerankBody(PoolingFields):
    """A request to sort documents by their relevance to a query and to return the first `top_n`
    (all by default). `max_tokens_per_doc` truncates each document before."""

    query: str
    documents: Annotated[Items[str | DocumentText], Field(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None


class ClassifyBody(PoolingFields):
    """A request for the labels of one input or several."""

    input: Prompts
