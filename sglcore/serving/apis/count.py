"""The tokens of a conversation's prompt, without running it."""

from __future__ import annotations

from sglcore.serving.chat.run import ChatRequest, render
from sglcore.serving.replicas.errors import blame
from sglcore.serving.replicas.frontend import Frontend


async def count_prompt(frontend: Frontend, request: ChatRequest, param: str) -> int:
    """How many tokens the prompt of a chat has; waits for the tokenizer. Raises InvalidRequest that blames `param`."""
    with blame(param):
        return len(await frontend.tokenize((await render(frontend, request)).text, special=False))
