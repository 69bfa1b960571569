"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Response

from sglcore.serving.apis.server.answers import ModelCard, ModelList
from sglcore.serving.apis.shared import ERRORS, as_json, check_model
from sglcore.serving.replicas.frontend import Frontend


def routes(frontend: Frontend) -> APIRouter:
    """The routes; they wait for nothing."""
    router = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        length = frontend.info.max_model_len if frontend.info is not None else None
        return ModelCard(
            id=name,
            object="model",
            created=frontend.created,
            owned_by="sglcore",
            max_model_len=length,
            root=frontend.names[0],
            parent=None,
        )

    @router.get("/v1/models", responses={200: {"model": ModelList}}, summary="The served names")
    async def all_models() -> Response:
        return as_json(ModelList(object="list", data=[card(name) for name in frontend.names]))

    @router.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, 404: ERRORS[404]}, summary="One name")
    async def one_model(name: str) -> Response:
        check_model(frontend, name)
        return as_json(card(name))

    return router
