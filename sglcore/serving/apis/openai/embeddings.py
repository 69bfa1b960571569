"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from sglcore.serving.apis.openai.completions_body import as_prompts
from sglcore.serving.apis.openai.embeddings_body import EmbeddingAnswer, EmbeddingBody
from sglcore.serving.apis.params import check_limit
from sglcore.serving.apis.shared import as_json, check_model, check_ready, documented, fingerprint, warned
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.http.sse import while_connected
from sglcore.serving.replicas.errors import InvalidRequest, blame
from sglcore.serving.replicas.frontend import Frontend


def routes(frontend: Frontend) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["embeddings"], route_class=JsonRoute)

    @router.post("/v1/embeddings", responses=documented(EmbeddingAnswer), summary="Vectors of texts")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        return await while_connected(request, _answer(frontend, body))

    return router


async def _answer(frontend: Frontend, body: EmbeddingBody) -> Response:
    model = check_model(frontend, body.model)
    check_ready(frontend)
    inputs = as_prompts(body.input)
    check_limit("input", len(inputs), frontend.config.max_prompts, "texts")
    if frontend.info is not None and frontend.info.generates:
        raise InvalidRequest(
            "this model generates text and has no embeddings",
            wanted="an encoder, such as BERT, or this one with --task embed",
            remedy="use /v1/completions, or serve one of those",
            param="model",
            code="model_does_not_embed",
        )
    with blame("input"):
        found = await frontend.embed(inputs, body.prompt_name)
    width = len(found[0].vector)
    if body.dimensions not in (None, width):
        raise InvalidRequest(
            f"dimensions is {body.dimensions}", wanted=f"{width}, which this model has", param="dimensions"
        )
    tokens = sum(one.tokens for one in found)
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": _written(one.vector, body.encoding_format)}
            for place, one in enumerate(found)
        ],
        "model": model,
        "system_fingerprint": fingerprint(frontend),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return as_json(answer, warned(body.warnings()))


def _written(vector: np.ndarray, form: str | None) -> Any:
    data = np.ascontiguousarray(vector, dtype="<f4")
    return base64.b64encode(data.tobytes()).decode("ascii") if form == "base64" else data.tolist()
