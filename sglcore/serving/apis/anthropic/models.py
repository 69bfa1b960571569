"""The list of served model names in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

VERSION = "anthropic-version"
"""The request header by which a client of this API is recognised."""


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return the object of one model name in Anthropic's form; `created`: seconds since 1970. The
    name is not checked."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the list of all models on one page; `names` is not empty, `created`: seconds since
    1970."""
    data = [model_card(name, created) for name in names]
    return {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
