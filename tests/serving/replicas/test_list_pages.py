"""Paged lists: a client that follows them gets every item once, and the last page says that it is
the last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.responses.items import page_of

Page = Callable[[int, str | None], dict[str, Any]]
COUNTS = (0, 1, 2, 3, 4, 6)


def follow(page: Page, limit: int, wanted: list[str]) -> None:
    """Follow all pages; check that every page but the last is full, and that no page is empty
    unless all are."""
    found, after = list[str](), None
    while True:
        answer = page(limit, after)
        ids = [each["id"] for each in answer["data"]]
        found += ids
        assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        assert ids or not wanted
        if not answer["has_more"]:
            break
        assert len(ids) == limit
        after = ids[-1]
    assert found == wanted, limit


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("count", COUNTS)
def test_items_of_a_response_come_once_and_the_last_page_says_so(count: int, order: str) -> None:
    items = [{"id": f"item{place}"} for place in range(count)]
    wanted = [item["id"] for item in (items if order == "asc" else items[::-1])]
    for limit in range(1, count + 2):
        follow(lambda most, after: page_of(items, most, order, after), limit, wanted)


@pytest.mark.parametrize("ascending", [False, True])
def test_files_and_batches_come_once_and_the_last_page_says_so(ascending: bool, tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    ids: dict[str, list[str]] = {"files": [], "batches": []}
    for count in range(5):
        for table, known in ids.items():
            page = partial(store.page, table, ascending=ascending)
            for limit in range(1, count + 2):
                follow(page, limit, known if ascending else known[::-1])
        ids["files"].append(store.add_file(b"x", "name", "batch")["id"])
        ids["batches"].append(f"batch{count}")
        store.add_batch({"id": f"batch{count}", "status": "completed", "request_counts": {}})
    store.close()
