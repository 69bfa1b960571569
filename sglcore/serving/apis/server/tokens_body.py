"""Bodies and answers of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sglcore.serving.apis.body import Answer, Body, Count, Items
from sglcore.serving.apis.openai.chat_body import Message, Tool


class TokenizeBody(Body):
    """A text, or the messages of a chat, as the model's token ids.

    `add_special_tokens` is whether a text gets what the checkpoint puts around a prompt (true unless said otherwise);
    messages have what their template writes. The fields after it belong to messages.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Items[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(Answer):
    """The ids, and the number that a prompt and its answer may have together."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids, to be read as text with the special tokens in it."""

    model: str | None = None
    tokens: Items[Count]


class DetokenizeAnswer(Answer):
    """The text of token ids."""

    prompt: str
