"""Errors of requests that this engine refuses."""

from __future__ import annotations

from sglcore.device.errors import SglcoreError


class RequestError(SglcoreError, ValueError):
    """A request that can never run here."""


class ContextError(RequestError):
    """A prompt that is longer than the context."""
