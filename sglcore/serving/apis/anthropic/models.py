"""The served names as Anthropic's API lists models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

VERSION = "anthropic-version"
"""The header that every client of this API sends."""


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return one model; `created` is in seconds since 1970."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return all models on one page."""
    data = [model_card(name, created) for name in names]
    return {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
