"""`sglcore serve`: not part of this release; it says so instead of pretending."""

from __future__ import annotations

from sglcore.device.errors import SglcoreError


def serve() -> None:
    """Serve a model over HTTP (not part of this release)."""
    raise SglcoreError(
        "serving over HTTP is not part of this release",
        remedy="use `sglcore generate`, or the Python API `from sglcore import LLM`",
    )
