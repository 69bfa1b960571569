"""Errors of requests that this engine refuses."""

from __future__ import annotations

from sglcore.core.errors import SglcoreError


class RequestError(SglcoreError, ValueError):
    """A request that can never run here. Also a ValueError."""

    def __init__(self, found: str, *, wanted: str = "", remedy: str = "", field: str | None = None) -> None:
        """`field`: the sampling parameter at fault (None: the prompt, or no single one)."""
        super().__init__(found, wanted=wanted, remedy=remedy)
        self.field = field


class ContextError(RequestError):
    """A prompt that is longer than the context, or, to be embedded, than a step."""
