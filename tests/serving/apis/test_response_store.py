"""The store of responses is bounded in number and in bytes, and keeps only bytes."""

from __future__ import annotations

import msgspec
import pytest

from sglcore.serving.apis.responses.response_store import ResponseStore, Stored
from sglcore.serving.replicas.server_errors import InvalidRequest


def stored(name: str, size: int) -> Stored:
    """A response of `size` bytes."""
    kept = msgspec.json.encode(({"id": name, "x": ""}, [], []))
    return Stored({"id": name, "x": "x" * (size - len(kept))}, [], [])


def test_the_store_keeps_the_newest_within_its_bounds() -> None:
    store = ResponseStore(3, most_bytes=200)
    for name, size in (("a", 40), ("b", 40), ("c", 40), ("d", 40), ("e", 155)):
        store.put(stored(name, size))

    assert len(store) == 2
    assert store.get("d", "id").response["id"] == "d"
    with pytest.raises(InvalidRequest, match="newest 3"):
        store.get("c", "id")
    store.drop("e", "id")
    store.put(stored("f", 160))
    assert store.get("d", "id").response["id"] == "d"


def test_a_response_beyond_the_limit_is_not_kept_and_costs_no_other() -> None:
    store = ResponseStore(3, most_bytes=100)
    for name, size in (("a", 40), ("b", 101), ("c", 60)):
        store.put(stored(name, size))
    assert [store.get(name, "id").response["id"] for name in "ac"] == ["a", "c"]
    with pytest.raises(InvalidRequest, match="no response 'b'"):
        store.get("b", "id")


def test_what_is_kept_comes_back_and_is_the_readers_own() -> None:
    store = ResponseStore(3)
    store.put(Stored({"id": "a", "n": [1]}, [{"item": "é"}], [{"role": "user", "content": "q"}]))
    found = store.get("a", "id")
    found.response["n"].append(2)
    found = store.get("a", "id")
    assert (found.response, found.items) == ({"id": "a", "n": [1]}, [{"item": "é"}])
    assert found.messages == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(("size", "kept"), [(99, "b"), (100, "b"), (101, "a")])
def test_a_response_of_just_the_limit_is_kept(size: int, kept: str) -> None:
    store = ResponseStore(3, most_bytes=100)
    store.put(stored("a", 40))
    store.put(stored("b", size))
    assert len(store) == 1 and store.get(kept, "id").response["id"] == kept
