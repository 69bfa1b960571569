"""Errors of requests that this engine refuses."""

from __future__ import annotations

from sglcore.device.errors import SglcoreError


class RequestError(SglcoreError, ValueError):
    """A request that can never run here. Also a ValueError."""


class ContextError(RequestError):
    """A prompt that is longer than the context, or, to be embedded, than a step."""
