"""Prompts longer than any context, for every endpoint that takes one: refused after reading only
their beginning."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.engine.tokenizers.text_length import LEAST_PIECE, USUAL
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.http.http_app import make_app
from tests.serving.staged_replicas import Stage, info
from tests.serving.stubs import make_frontend

LONG = "word " * 200_000
TALK = [{"role": "user", "content": LONG}]
TEXT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": TALK},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/completion": {"prompt": LONG},
    "/infill": {"input_prefix": LONG, "input_suffix": "b"},
    "/generate": {"text": LONG},
    "/api/chat": {"messages": TALK},
    "/api/generate": {"prompt": LONG},
}
VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": LONG},
    "/api/embed": {"input": LONG, "truncate": False},
}
SCORES: dict[str, dict[str, Any]] = {
    "/v1/score": {"text_1": "a", "text_2": LONG},
    "/v1/rerank": {"query": "a", "documents": [LONG]},
}
LABELS: dict[str, dict[str, Any]] = {"/v1/classify": {"input": LONG}}
NO_CODES = {"/v1/messages", "/api/chat", "/api/generate", "/api/embed"}
"""Protocols with errors that have no code."""
CUTS = {"/api/embeddings"}
"""Endpoints that truncate long prompts."""
RUNS_NO_PROMPT = {
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/show",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}/cancel",
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/flush_cache",
    "/reset_prefix_cache",
    "/abort_request",
    "/abort_requests",
    "/pause",
    "/resume",
    "/pause_generation",
    "/continue_generation",
}


class Counted:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.read = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tokenizer, name)
        if not name.startswith("encode"):
            return found

        def encode(given: Any, *others: Any, **named: Any) -> Any:
            texts = (
                [given]
                if isinstance(given, str)
                else [part for each in given for part in ([each] if isinstance(each, str) else each)]
            )
            self.read += sum(map(len, texts))
            return found(given, *others, **named)

        return encode


async def refusals(
    bodies: dict[str, dict[str, Any]], labels: int | None = None
) -> dict[str, tuple[int, Any, int, str]]:
    """(status, code, characters read, message) of each answer. The model generates (`labels` None),
    classifies with this number of labels, or embeds (0)."""
    stage = Stage(is_remote=False)
    frontend = ChatFrontend(EngineConfig(), ServerConfig(), launcher=stage)
    stage.supervisor = frontend.supervisor
    await frontend.start()
    try:
        engine = await stage.launched()
        known = info(generates=labels is None)
        engine.become_ready(generates=labels is None)
        while not frontend.health.ready:
            await asyncio.sleep(0.001)
        frontend.supervisor.info = replace(known, limits={**known.limits, "num_labels": labels or 0})
        frontend.codec.tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
        counted = Counted(frontend.codec.tokenizer)
        frontend.codec.tokenizer = counted  # pyright: ignore[reportAttributeAccessIssue]
        transport = httpx.ASGITransport(make_app(frontend))
        found: dict[str, tuple[int, Any, int, str]] = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, body in bodies.items():
                counted.read = 0
                answer = await client.post(path, json=body)
                said = answer.json().get("error", {})
                error = {"message": said} if isinstance(said, str) else said
                found[path] = (answer.status_code, error.get("code"), counted.read, error.get("message", ""))
        return found
    finally:
        await frontend.stop()


@pytest.mark.parametrize(("bodies", "labels"), [(TEXT, None), (VECTORS, 0), (SCORES, 1), (LABELS, 2)])
def test_no_endpoint_reads_the_end_of_a_prompt_whose_beginning_is_too_long(
    bodies: dict[str, dict[str, Any]], labels: int | None
) -> None:
    most = 2 * (USUAL * info().limits["max_model_len"] + LEAST_PIECE)
    for path, (status, code, read, message) in asyncio.run(refusals(bodies, labels)).items():
        assert status == 400 and read <= most < len(LONG) / 10, (path, status, read, message)
        assert path in NO_CODES or code == "context_length_exceeded", (path, code)
        assert f"{len(LONG) // 1000}" in message and "shorten the prompt" in message, (path, message)


def test_every_endpoint_that_takes_a_prompt_is_among_them() -> None:
    paths = {path for path, operations in make_app(make_frontend()).openapi()["paths"].items() if "post" in operations}
    asked = {*TEXT, *VECTORS, *SCORES, *LABELS, *CUTS}
    assert paths >= asked | RUNS_NO_PROMPT
    aliases = {path for path in paths - asked - RUNS_NO_PROMPT if f"/v1{path}" not in asked}
    assert aliases <= {"/v2/rerank"}
