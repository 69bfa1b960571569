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
    which longer inputs are truncated, or -1 for the maximum of the model; `truncate` true is the
    same as -1 and has no effect if `truncate_prompt_tokens` is set. Without both, inputs above the
    maximum are refused."""

    model: str | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncate: bool | None = None
    user: Ignored[str] = None

    @property
    def most(self) -> int | None:
        """The number of tokens to which longer inputs are truncated, -1 for the model's maximum;
        None: inputs above the maximum are refused."""
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return -1 if self.truncate else None


class EmbeddingBody(PoolingFields):
    """A request for the vectors of one input or several, each a text or token ids. `dimensions`
    keeps the first numbers of each vector, scaled to length 1 if the whole vector has length 1;
    `prompt_name` names a prompt of the checkpoint, which is put before each text (None: the
    checkpoint's default prompt, if it has one). `encoding_format`: "float" by default."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None


class ScoreBody(PoolingFields):
    """A request to score pairs of texts: one `text_1` with each `text_2`, or each `text_1` with the
    `text_2` at the same place. Other numbers of texts are refused by the endpoint, not here. A
    single text may be sent without a list."""

    text_1: OneOrMore
    text_2: OneOrMore


class DocumentText(Body):
    """A document as an object; `documents` may also have plain texts."""

    text: str


class RerankBody(PoolingFields):
    """A request to sort documents by their relevance to a query and to return the first `top_n`
    (all by default). Each document is cut to its first `max_tokens_per_doc` tokens before it is
    scored (None: not cut). `return_documents`: whether the answer has their texts, as scored (by
    default true for /v1/rerank, false for /v2/rerank)."""

    query: str
    documents: Annotated[Items[str | DocumentText], Field(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None


class ClassifyBody(PoolingFields):
    """A request for the labels of one input or several, each a text or token ids."""

    input: Prompts
