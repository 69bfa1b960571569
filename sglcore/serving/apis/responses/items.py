"""The input of a stored response as a list of items, and its pages, for GET
/v1/responses/{id}/input_items."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from sglcore.serving.apis.responses.body import MessageItem
from sglcore.serving.replicas.server_errors import InvalidRequest

_PREFIX = MappingProxyType({"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"})


def input_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the items of a request's input, in the form of the answer. `given`: a text, which
    becomes one message of the user, or parsed items. Each has an id (its own, or a new one) and a
    status, and a message has content parts."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    return [_item(item) for item in given]


def page_of(items: Sequence[Mapping[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """Return a page of at most `limit` items in OpenAI's form: a dict with `data`, the ids of its
    first and last item (None: empty page) and `has_more`. `items` are in the order of the
    conversation, which `order` "asc" keeps and any other reverses. `after`: the id of the item
    before the page in that order (None: from the first).

    Raises InvalidRequest if there is no item `after`.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    first = 0
    if after is not None:
        first = next((place + 1 for place, item in enumerate(ordered) if item["id"] == after), -1)
    if first < 0:
        raise InvalidRequest(
            f"there is no item {str(after)[:80]!r}", wanted="the id of an item of this response", param="after"
        )
    data = list(islice(ordered, first, first + limit))
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + limit < len(ordered),
    }


def _item(item: Any) -> dict[str, Any]:
    found = item.model_dump(exclude_none=True)
    kind = found.setdefault("type", "message")
    found.setdefault("id", f"{_PREFIX[kind]}_{uuid.uuid4().hex}")
    found.setdefault("status", "completed")
    if kind == "message" and isinstance(found["content"], str):
        word = "output_text" if found["role"] == "assistant" else "input_text"
        extra = {"annotations": []} if word == "output_text" else {}
        found["content"] = [{"type": word, "text": found["content"], **extra}]
    if kind == "reasoning":
        found.setdefault("summary", [])
    return found
