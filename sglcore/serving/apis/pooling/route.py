"""POST /v1/embeddings, /v1/score, /v1/rerank, /v2/rerank and /v1/classify."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from sglcore.serving.apis.answer import as_json, documented
from sglcore.serving.apis.pooling.answers import ClassifyAnswer, EmbeddingAnswer, RerankAnswer, ScoreAnswer
from sglcore.serving.apis.pooling.body import ClassifyBody, DocumentText, EmbeddingBody, RerankBody, ScoreBody
from sglcore.serving.apis.pooling.request import classified, described, embedded, scored, shortened
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add the five endpoints to the router: embeddings, score, classify, and rerank in two
    versions. They wait for an engine's answer."""

    @router.post("/v1/embeddings", tags=["embeddings"], responses=documented(EmbeddingAnswer))
    async def embeddings(body: EmbeddingBody) -> Response:
        """Compute a vector for each input, in order."""
        found = await embedded(frontend, body)
        data = [
            {"object": "embedding", "index": place, "embedding": _written(one.vector, body.encoding_format)}
            for place, one in enumerate(found)
        ]
        tokens = sum(one.tokens for one in found)
        return as_json({"object": "list", "data": data, **described(frontend, body, tokens)}, body.warnings())

    _add_score(router, frontend)
    _add_classify(router, frontend)
    for path in ("/v1/rerank", "/v2/rerank"):
        _add_rerank(router, frontend, path)


def _add_score(router: APIRouter, frontend: Frontend) -> None:
    @router.post("/v1/score", tags=["scores"], responses=documented(ScoreAnswer))
    async def score(body: ScoreBody) -> Response:
        """Score how well pairs of texts match."""
        firsts = body.text_1 * len(body.text_2) if len(body.text_1) == 1 else body.text_1
        if len(firsts) != len(body.text_2):
            found = f"found {len(firsts)} of text_1 and {len(body.text_2)} of text_2"
            raise InvalidRequest(found, wanted="one text_1, or one for each text_2", param="text_1")
        pairs = list(zip(firsts, body.text_2, strict=True))
        found = await scored(frontend, body, pairs, "text_2")
        data = [{"object": "score", "index": place, "score": value} for place, value in enumerate(found.values)]
        return as_json({**_listed("score", data), **described(frontend, body, found.tokens)}, body.warnings())


def _add_rerank(router: APIRouter, frontend: Frontend, path: str) -> None:
    @router.post(path, tags=["scores"], responses=documented(RerankAnswer))
    async def rerank(body: RerankBody) -> Response:
        """Sort documents by relevance, the most relevant first."""
        texts = [each.text if isinstance(each, DocumentText) else each for each in body.documents]
        if body.max_tokens_per_doc is not None:
            texts = await shortened(frontend, texts, body.max_tokens_per_doc)
        found = await scored(frontend, body, [(body.query, text) for text in texts], "documents")
        order = sorted(range(len(texts)), key=lambda place: -found.values[place])[: body.top_n]
        shows = body.return_documents if body.return_documents is not None else path != "/v2/rerank"
        results = [
            {
                "index": place,
                "relevance_score": found.values[place],
                **({"document": {"text": texts[place]}} if shows else {}),
            }
            for place in order
        ]
        answer = {"id": f"rerank-{secrets.token_hex(12)}", "results": results}
        return as_json({**answer, **described(frontend, body, found.tokens)}, body.warnings())


def _add_classify(router: APIRouter, frontend: Frontend) -> None:
    @router.post("/v1/classify", tags=["scores"], responses=documented(ClassifyAnswer))
    async def classify(body: ClassifyBody) -> Response:
        """Return the most probable label, and the probabilities of all labels, of each input."""
        labels, tokens = await classified(frontend, body)
        return as_json({**_listed("classify", labels), **described(frontend, body, tokens)}, body.warnings())


def _listed(prefix: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "data": data,
    }


def _written(vector: np.ndarray, form: str | None) -> Any:
    data = np.ascontiguousarray(vector, dtype="<f4")
    return base64.b64encode(data.tobytes()).decode("ascii") if form == "base64" else data.tolist()
