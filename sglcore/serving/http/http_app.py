"""The web application: `make_app` returns it, with every endpoint, over one frontend; `running_app`
also runs its batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from sglcore import __version__
from sglcore.serving.apis.answer import documented_errors, shown
from sglcore.serving.apis.anthropic import route as anthropic
from sglcore.serving.apis.batches import route as batches
from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.apis.ollama import route as ollama
from sglcore.serving.apis.openai import route as openai
from sglcore.serving.apis.others import llama_server, sglang
from sglcore.serving.apis.pooling import route as pooling
from sglcore.serving.apis.responses import route as responses
from sglcore.serving.apis.server import control, info, probes, token_routes
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.http.http_errors import on_http, on_validation
from sglcore.serving.http.internal_requests import ask
from sglcore.serving.http.middleware.refusal import Refusals
from sglcore.serving.http.openapi import Application
from sglcore.serving.http.page import route as page
from sglcore.serving.http.routes import JsonRequest, Routes

log = logging.getLogger("sglcore.serving")
_ENDPOINTS = (
    openai,
    anthropic,
    responses,
    ollama,
    pooling,
    llama_server,
    sglang,
    token_routes,
    probes,
    info,
    control,
    page,
)
"""Modules with endpoints, the most used first: a request is compared with the routes in this
order."""


@asynccontextmanager
async def running_app(frontend: ChatFrontend) -> AsyncIterator[FastAPI]:
    """Return a context with the application, in which its batches run, if the server has a batch
    folder. Engines are not started here. Unfinished batches continue at the next start.

    Raises ConfigError for a batch folder that cannot be used.
    """
    folder = frontend.config.batch_folder
    if folder is None:
        yield make_app(frontend)
        return
    store = BatchStore(Path(folder).expanduser())
    runner = BatchRunner(
        store,
        lambda *asked: ask(app, *asked),
        frontend.config.max_batch_requests,
        longest=frontend.config.max_request_bytes,
    )
    app = make_app(frontend, runner)
    running = asyncio.create_task(runner.run())
    frontend.when_draining(running.cancel)
    try:
        yield app
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()


def make_app(frontend: ChatFrontend, runner: BatchRunner | None = None) -> FastAPI:
    """Return the application with all endpoints, and only one middleware, the innermost `Refusals`,
    which answers errors. `runner`: runs batches and has their store; None: batches are off. The
    OpenAPI document is at /openapi.json; documentation pages that load scripts from other hosts are
    off."""
    app = Application(
        needs_key=bool(frontend.config.api_key),
        responses=documented_errors((401, 403, 500)),
        title="sglcore",
        version=__version__,
        summary="An OpenAI-compatible server for language models on any device",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    router = Routes(frontend.config.sse_keep_alive, partial(_on_unknown, frontend))
    for module in _ENDPOINTS:
        module.add_routes(router, frontend)
    batches.add_routes(router, runner, frontend.config.max_batch_file_bytes)
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_middleware(Refusals, metrics=frontend.metrics)
    return app


def _on_unknown(frontend: ChatFrontend, request: Request, names: Sequence[str]) -> None:
    """Raise InvalidRequest about the first of a request's unknown fields if the server is strict;
    otherwise count them and log their names. `names`: the paths of the fields."""
    if frontend.config.strict_fields:
        assert isinstance(request, JsonRequest)
        request.unknown.refuse(request.decoded)
    path = request.scope["route"].path
    frontend.metrics.unknown_fields[path,] += len(names)
    name = request.scope.get("state", {}).get("request_id", "-")
    log.info("id=%s %s has unknown fields: %s", name, path, shown(names))
