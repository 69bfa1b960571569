"""GET /tokenizer_info: the special tokens and the chat template, for clients that count and cut tokens themselves."""

from __future__ import annotations

from fastapi import APIRouter, Response

from sglcore.serving.apis.body import Answer
from sglcore.serving.http.sse import encode
from sglcore.serving.replicas.frontend import Frontend

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerInfo(Answer):
    """Special tokens as text, null for those that the checkpoint has not; the template's text, null if there is none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int


def routes(frontend: Frontend) -> APIRouter:
    """The route; it waits for nothing."""
    router = APIRouter(tags=["tokens"])

    @router.get(
        "/tokenizer_info", responses={200: {"model": TokenizerInfo}}, summary="Special tokens and the chat template"
    )
    async def tokenizer_info() -> Response:
        template = frontend.codec.template
        found = {name: template.special_tokens.get(name) or None for name in _SPECIAL}
        size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)
        return Response(
            encode({**found, "chat_template": template.source(), "vocab_size": size}), 200, None, "application/json"
        )

    return router
