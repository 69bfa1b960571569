"""POST /tokenize and /detokenize, GET /tokenizer_info: they need only the tokenizer, so they answer
before the model is loaded.

/tokenizer_info is for clients that count and cut tokens themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Response
from pydantic import Field

from sglcore.engine.tokenizers.text_codec import LONG_TEXT
from sglcore.serving.apis.answer import Answer, as_json, documented
from sglcore.serving.apis.checks import check_model
from sglcore.serving.apis.openai.body import Message, TemplateFields
from sglcore.serving.apis.openai.request import template_request
from sglcore.serving.apis.shared_body import Body, Count, Items
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import render
from sglcore.serving.replicas.server_errors import InvalidRequest, blame

T = TypeVar("T")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizeBody(TemplateFields):
    """A text, or the messages of a chat, to convert to token ids.

    Exactly one of `prompt`, `content` and `messages` is given, which the endpoint checks.
    `add_special_tokens`: whether the special tokens are added that the checkpoint puts around a
    prompt (default: true for `prompt`, false for `messages`, which have those of their template).
    The fields of `TemplateFields` are only for messages. `return_token_strs`: the answer has each
    token's text too. The fields of llama-server: `content` is a text too, without these special
    tokens unless `add_special` is true; `with_pieces` gives each token's id and text.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenPiece(Answer):
    """A token's id and its text; a token that is a part of a character has its bytes, written
    `bytes:\\xe2`."""

    id: int
    piece: str


class TokenizeAnswer(Answer):
    """The token ids, with `with_pieces` each as a `TokenPiece`; their number `count`; the text of
    each in `token_strs`, if the request wants it; and the context length, the maximum number of
    tokens of a prompt and its answer together (null before the model is loaded)."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids to convert to text, special tokens included. The endpoint refuses an id that the
    tokenizer lacks."""

    model: str | None = None
    tokens: Items[Count]


class DetokenizeAnswer(Answer):
    """The text, twice: in vLLM's field `prompt` and in llama-server's field `content`."""

    prompt: str
    content: str


class TokenizerInfo(Answer):
    """Special tokens as text, null for those that the checkpoint does not have; the text of the
    chat template, null if there is none; the number of tokens of the tokenizer, added ones
    included."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add the endpoints to the router; they need no engine. They raise TextError if the server runs
    without a tokenizer."""
    texts = TokenTexts(frontend.codec)

    @router.post("/tokenize", tags=["tokens"], responses=documented(TokenizeAnswer))
    async def tokenize(body: TokenizeBody) -> Response:
        """Convert text or messages to token ids."""
        check_model(frontend, body.model)
        frontend.codec.need_text("/tokenize")
        ids = await _ids(frontend, body)
        length = frontend.info.max_model_len if frontend.info is not None else None
        answer = {"tokens": ids, "count": len(ids), "max_model_len": length}
        if body.with_pieces:
            answer["tokens"] = [{"id": token_id, "piece": texts.text(token_id)} for token_id in ids]
        if body.return_token_strs:
            answer["token_strs"] = await _beside(len(ids), lambda: [texts.text(token_id) for token_id in ids])
        return as_json(answer)

    @router.post("/detokenize", tags=["tokens"], responses=documented(DetokenizeAnswer))
    async def detokenize(body: DetokenizeBody) -> Response:
        """Convert token ids to text."""
        check_model(frontend, body.model)
        frontend.codec.need_text("/detokenize")
        size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)

        def read() -> str:
            unknown = next((token_id for token_id in body.tokens if texts.is_unknown(token_id)), None)
            if unknown is not None:
                raise InvalidRequest(
                    f"tokens has the id {unknown}", wanted=f"ids of this tokenizer's {size} tokens", param="tokens"
                )
            return frontend.codec.decode(body.tokens, skip_special_tokens=False)

        text = await _beside(len(body.tokens), read)
        return as_json({"prompt": text, "content": text})

    @router.get("/tokenizer_info", tags=["tokens"], responses={200: {"model": TokenizerInfo}})
    async def tokenizer_info() -> Response:
        """Return the special tokens and the chat template."""
        frontend.codec.need_text("/tokenizer_info")
        template = frontend.codec.template
        found = {name: template.special_tokens.get(name) or None for name in _SPECIAL}
        size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)
        return as_json({**found, "chat_template": template.source(), "vocab_size": size})


async def _beside(tokens: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which handles `tokens` tokens; waits for it. Above LONG_TEXT
    tokens it runs in a thread, outside the event loop."""
    return await asyncio.to_thread(work) if tokens > LONG_TEXT else work()


async def _ids(frontend: ChatFrontend, body: TokenizeBody) -> list[int]:
    given = body.given("prompt", "content", "messages")
    if len(given) != 1:
        found = " and ".join(given) or "neither prompt nor messages"
        raise InvalidRequest(f"found {found}", wanted="one of them", param="prompt")
    if body.messages is None:
        name, text = next(iter(given.items()))
        _check_alone(body, name)
        special = bool(body.add_special) if name == "content" else body.add_special_tokens is not False
        with blame(name):
            return await frontend.tokenize(text, special=special)
    assert body.messages is not None
    with blame("messages"):
        rendered = await render(frontend, template_request(body, body.messages))
        return await frontend.tokenize(rendered.text, special=bool(body.add_special_tokens))


def _check_alone(body: TokenizeBody, text: str) -> None:
    """Raise InvalidRequest if a request with a text sets one of `TemplateFields`, which are only
    for messages. `text`: the name of the field with the text, for the error."""
    given = next(iter(body.given(*TemplateFields.model_fields)), None)
    if given is not None:
        raise InvalidRequest(f"found {given} with {text}", wanted="messages", param=given)
