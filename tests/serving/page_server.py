"""A server with the web page and scripted answers, which records the page's requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from sglcore.serving.http.page import route as page
from sglcore.serving.http.routes import Routes

LEDGER = [
    {"topic": "attention", "requested": "auto", "effective": "reference", "reason": "first that serves the model",
     "remedy": "--attention-backend", "downgrade": False},
    {"topic": "graph", "requested": "full", "effective": "eager", "reason": "<b>no</b> graphs here", "remedy": "",
     "downgrade": True},
]  # fmt: skip
INFO = {
    "version": "0.0", "device": "acme", "device_evidence": "Acme 9", "model": "/m/small", "served_model_names": ["small"],
    "max_model_len": 1024, "limits": {"vocab_size": 64, "max_model_len": 1024}, "ledger": LEDGER, "phase": "ready",
}  # fmt: skip


@dataclass
class Script:
    """The server's answers, and the requests that it got. `chunks` end with [DONE] unless `is_cut`;
    `hold` keeps a stream open."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    hold: bool = False
    is_bytewise: bool = False
    refusal: tuple[int, dict[str, Any]] | None = None
    warnings: str = ""
    key: str = ""
    startup: dict[str, Any] | None = None
    generates: bool = True
    received: list[dict[str, Any]] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    seconds: int = 0

    def stats(self) -> dict[str, Any]:
        """Counters that grow by the same amount at each call."""
        self.seconds += 1
        n = self.seconds
        one = {"time": 1000.0 + n, "prompt_tokens": 100 * n, "generation_tokens": 250 * n, "running": 3, "waiting": 2,
               "kv_used": 0.25, "cached_tokens": 80 * n, "prompt_tokens_computed": 20 * n, "requests": n,
               "hisparse_rows": 1000 * n, "hisparse_hits": 960 * n}  # fmt: skip
        return {**one, "replicas": [{**one, "state": "starting" if self.startup else "ready"}]}


def chat(text: str = "", **more: Any) -> dict[str, Any]:
    """A chunk of a chat answer."""
    delta = {**({"content": text} if text else {}), **more}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def ended(reason: str, **more: Any) -> dict[str, Any]:
    """The chunk with the finish reason."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason, **more}]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the usage."""
    details = {"cached_tokens": cached}
    figures = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": figures}


def make_app(script: Script) -> FastAPI:
    """The page and the endpoints that it uses, driven by the script."""
    app = FastAPI()
    router = Routes()
    page.add_routes(router, None)
    app.include_router(router)

    @app.get("/readyz")
    async def readyz() -> Response:
        return JSONResponse(script.startup or {"phase": "ready"}, 503 if script.startup else 200)

    @app.get("/server_info")
    async def info(request: Request) -> Response:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "found no API key that is known", "type": "authentication"}}, 401)
        return JSONResponse({**INFO, "limits": {**INFO["limits"], "generates": script.generates}})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "small", "object": "model"}]})

    @app.get("/server_info/stats")
    async def stats() -> Response:
        return JSONResponse(script.stats())

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def answer(request: Request) -> Response:
        text = (await request.body()).decode()
        script.raw.append(text)
        script.received.append({"path": request.url.path, **json.loads(text)})
        script.keys.append(request.headers.get("authorization", ""))
        headers = {"x-sglcore-warnings": script.warnings} if script.warnings else {}
        if script.refusal:
            return JSONResponse(script.refusal[1], script.refusal[0], headers=headers)
        return StreamingResponse(_body(script), headers=headers, media_type="text/event-stream")

    return app


async def _body(script: Script) -> AsyncIterator[bytes]:
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in script.chunks]
    events += [] if script.is_cut or script.hold else ["data: [DONE]"]
    content = "".join(f"{event}\r\n\r\n" for event in events).encode()
    size = 1 if script.is_bytewise else max(len(content), 1)
    for place in range(0, len(content), size):
        yield content[place : place + size]
        await asyncio.sleep(0)
    if script.hold:
        try:
            await asyncio.Event().wait()
        finally:
            script.left.set()
