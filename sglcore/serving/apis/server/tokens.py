"""POST /tokenize and /detokenize. They need the tokenizer alone, so they answer before the model is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Response

from sglcore.engine.text import LONG_TEXT
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.server.tokens_body import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from sglcore.serving.apis.shared import as_json, check_model, documented
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.run import ChatRequest, render
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.replicas.errors import InvalidRequest, blame
from sglcore.serving.replicas.frontend import Frontend

T = TypeVar("T")


def routes(frontend: Frontend) -> APIRouter:
    """The routes; they ask no engine."""
    router = APIRouter(tags=["tokens"], route_class=JsonRoute)
    texts = TokenTexts(frontend.codec)

    @router.post("/tokenize", responses=documented(TokenizeAnswer), summary="Text or messages as token ids")
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(frontend, body.model)
        ids = await _ids(frontend, body)
        length = frontend.info.max_model_len if frontend.info is not None else None
        answer = {"tokens": ids, "count": len(ids), "max_model_len": length}
        if body.return_token_strs:
            answer["token_strs"] = await _beside(len(ids), lambda: [texts.text(token_id) for token_id in ids])
        return as_json(answer)

    @router.post("/detokenize", responses=documented(DetokenizeAnswer), summary="Token ids as text")
    async def detokenize(body: DetokenizeBody) -> Response:
        check_model(frontend, body.model)
        size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)

        def read() -> str:
            unknown = next((token_id for token_id in body.tokens if texts.is_unknown(token_id)), None)
            if unknown is not None:
                raise InvalidRequest(
                    f"tokens has the id {unknown}", wanted=f"ids of this tokenizer's {size} tokens", param="tokens"
                )
            return frontend.codec.decode(body.tokens, skip_special_tokens=False)

        return as_json({"prompt": await _beside(len(body.tokens), read)})

    return router


async def _beside(tokens: int, work: Callable[[], T]) -> T:
    """What `work` makes; beside the event loop if it is about many tokens."""
    return await asyncio.to_thread(work) if tokens > LONG_TEXT else work()


async def _ids(frontend: Frontend, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        found = "neither prompt nor messages" if body.prompt is None else "prompt and messages"
        raise InvalidRequest(f"found {found}", wanted="one of them", param="prompt")
    if body.prompt is not None:
        _check_alone(body)
        with blame("prompt"):
            return await frontend.tokenize(body.prompt, special=body.add_special_tokens is not False)
    assert body.messages is not None
    request = ChatRequest(
        messages=[message.plain() for message in body.messages],
        params=SamplingParams(),
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    with blame("messages"):
        rendered = await render(frontend, request)
        return await frontend.tokenize(rendered.text, special=bool(body.add_special_tokens))


def _check_alone(body: TokenizeBody) -> None:
    """The fields that belong to messages do nothing for a text."""
    names = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    given = next(iter(body.given(*names)), None)
    if given is not None:
        raise InvalidRequest(f"found {given} beside prompt", wanted="messages", param=given)
