"""The store of responses is bounded in number and in size."""

from __future__ import annotations

import pytest

from sglcore.serving.dialects.responses_store import ResponseStore, Stored
from sglcore.serving.errors import InvalidRequest


def test_the_store_keeps_the_newest_within_its_bounds() -> None:
    store = ResponseStore(3, most_bytes=100)
    for name, size in (("a", 10), ("b", 10), ("c", 10), ("d", 10), ("e", 85)):
        store.put(Stored({"id": name}, [], [], size))

    assert len(store) == 2
    assert store.get("d", "id").response == {"id": "d"}
    with pytest.raises(InvalidRequest, match="newest 3"):
        store.get("c", "id")
    store.drop("e", "id")
    store.put(Stored({"id": "f"}, [], [], 90))
    assert store.get("d", "id").size == 10
