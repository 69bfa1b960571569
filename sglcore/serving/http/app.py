"""The application: every endpoint over one frontend, and one place where errors become answers."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore import __version__
from sglcore.device.errors import SglcoreError
from sglcore.sampling.params import SamplingError
from sglcore.serving.apis.anthropic import route as messages
from sglcore.serving.apis.openai import chat, completions, embeddings, models
from sglcore.serving.apis.responses import route as responses
from sglcore.serving.apis.server import info, metrics, probes, tokenizer_info, tokens
from sglcore.serving.apis.shared import ERRORS
from sglcore.serving.http.bodies import refused
from sglcore.serving.http.openapi import Application
from sglcore.serving.http.page import route as page
from sglcore.serving.http.sse import encode
from sglcore.serving.replicas.errors import INVALID, Failure, told
from sglcore.serving.replicas.frontend import Frontend

_ROUTERS = (
    probes,
    models,
    completions,
    chat,
    responses,
    messages,
    embeddings,
    tokens,
    tokenizer_info,
    info,
    metrics,
    page,
)


def make_app(frontend: Frontend) -> FastAPI:
    """All endpoints. Their documentation is at /openapi.json; the pages that would load scripts of other hosts are off."""
    app = Application(
        needs_key=bool(frontend.config.api_key),
        responses={status: ERRORS[status] for status in (401, 403, 500)},
        title="sglcore",
        version=__version__,
        summary="An OpenAI-compatible server for language models on any device",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
    )
    for module in _ROUTERS:
        app.include_router(module.routes(frontend))
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    for kind in (SglcoreError, SamplingError):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Catch)
    return app


class Catch:
    """Answers what nobody expected with an id that the log has too, so that no traceback reaches a client."""

    def __init__(self, app: ASGIApp) -> None:
        """`app` is what may fail."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; waits for its end."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watch(message: AsgiEvent) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            found = told(error)
            if started:
                raise ConnectionAbortedError("the answer had begun and can not be ended") from error
            await answer(found, scope["path"])(scope, receive, send)


def answer(found: Failure, path: str) -> Response:
    """The response of a failure, in the schema that clients of the path expect."""
    return Response(encode(found.body(path)), found.status, dict(found.headers), "application/json")


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _on_error(request, refused(error))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, detail, headers = request.url.path, str(error.detail), dict(error.headers or {})
    if detail == HTTPStatus(error.status_code).phrase:
        detail = f"{request.method} {path[:200]}: {detail.lower()}; /openapi.json lists the endpoints"
    if error.status_code == 405 and isinstance(request.app, Application):
        # Routes of one path may have one method each; the router names those of the first route only.
        headers["allow"] = ", ".join(request.app.methods(path)) or headers.get("Allow", "")
        headers.pop("Allow", None)
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
    return answer(Failure(error.status_code, detail, INVALID, code=code, headers=headers), path)


async def _on_error(request: Request, error: Exception) -> Response:
    return answer(told(error), request.url.path)
