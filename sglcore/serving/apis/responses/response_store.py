"""Keeps the newest responses in memory, for requests that refer to them, limited in number and in
size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sglcore.serving.replicas.server_errors import InvalidRequest

MOST_BYTES = 64 << 20
"""Maximum bytes of JSON of all stored responses together."""


class Stored(NamedTuple):
    """A response with an `id`, in the form of the answer; the items of the request's input; and the
    messages of the conversation, without instructions, with the answer at its end."""

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]


class ResponseStore:
    """The newest responses: at most `most`, and at most `most_bytes` of JSON together; a new one
    evicts the oldest. Nothing survives the process.

    They are kept as JSON: the same values as objects may take twenty times the memory.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: Stored) -> None:
        """Store a copy of a response, as JSON, and evict the oldest ones above the limits. Its id
        must be new: nothing checks that. A response that is larger than the limit of bytes by
        itself is not kept and evicts nothing."""
        data = msgspec.json.encode(stored)
        if len(data) > self._most_bytes:
            return
        self._kept[stored.response["id"]] = data
        self._size += len(data)
        while len(self._kept) > self._most or self._size > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._size -= len(gone)

    def get(self, response_id: str, param: str) -> Stored:
        """Return a copy of the response with this id; it stays as old as it was. Raises
        InvalidRequest (status 404) about the request's field `param` if it is not stored."""
        found = self._kept.get(response_id)
        if found is None:
            raise InvalidRequest(
                f"there is no response {response_id[:80]!r}",
                wanted=f"one of the newest {self._most} that were made with store=true since this server started",
                remedy="send the whole conversation as input",
                param=param,
                code="not_found",
                status=404,
            )
        return Stored(*msgspec.json.decode(found))

    def drop(self, response_id: str, param: str) -> None:
        """Delete a response. Raises InvalidRequest (status 404) about the request's field `param`
        if it is not stored."""
        self.get(response_id, param)
        self._size -= len(self._kept.pop(response_id))
