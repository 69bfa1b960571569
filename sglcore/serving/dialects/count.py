"""The tokens of a conversation's prompt, without running it."""

from __future__ import annotations

from sglcore.serving.chat_run import ChatAsk, render
from sglcore.serving.errors import blame
from sglcore.serving.front import Front


async def count_prompt(front: Front, ask: ChatAsk, param: str) -> int:
    """How many tokens the prompt of a chat has; waits for the tokenizer. Raises InvalidRequest that blames `param`."""
    with blame(param):
        return len(await front.tokenize((await render(front, ask)).text, special=False))
