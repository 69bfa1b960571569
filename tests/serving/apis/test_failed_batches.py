"""A batch whose failure can not be written: it is kept until it can, and changes no other end."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.replicas.server_errors import StorageError
from tests.serving.apis.test_batches import begun


def unwritable(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every write of a batch fail."""

    def refuse(*given: Any, **named: Any) -> None:
        raise StorageError("planted", is_full=True)

    monkeypatch.setattr(store, "finish", refuse)
    monkeypatch.setattr(store, "_update", refuse)


def test_a_failure_is_written_at_the_latest_when_the_folder_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    with monkeypatch.context() as patch:
        unwritable(store, patch)
        store.fail(store.get("batches", name, "batch_id"), errors={"data": []})
        assert not store.settle() and not store.active()
    shown = store.get("batches", name, "batch_id")
    assert (shown["status"], shown["errors"]) == ("failed", {"data": []}) and shown["failed_at"]
    store.close()
    again = BatchStore(tmp_path)
    assert again.get("batches", name, "batch_id") == shown
    again.close()


@pytest.mark.parametrize("state", ["completed", "cancelled", "expired"])
def test_a_batch_that_has_ended_otherwise_does_not_fail_afterwards(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    old = store.get("batches", begun(store), "batch_id")
    store.move(old["id"], state)
    unwritable(store, monkeypatch)
    store.fail(old, errors={"data": []})
    assert store.get("batches", old["id"], "batch_id")["status"] == state and store.settle()
    monkeypatch.undo()
    store.close()


def test_a_batch_fails_though_its_folder_can_not_even_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)
    batch = store.get("batches", begun(store), "batch_id")

    def lost(*given: Any, **named: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        unwritable(store, patch)
        patch.setattr(store, "get", lost)
        store.fail(batch, errors={"data": []})
    shown = store.get("batches", batch["id"], "batch_id")
    assert (shown["status"], shown["errors"]) == ("failed", {"data": []})
    assert store.page("batches", 9, None)["data"] == [shown] and not store.active()
    assert store.settle() and store.get("batches", batch["id"], "batch_id") == shown
    store.close()


def test_results_of_a_batch_that_failed_are_gone_as_soon_as_its_failure_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    lost, other = begun(store), begun(store)
    for name in (lost, other):
        store.add_result(name, 1, b"{}", is_answer=True)
    with monkeypatch.context() as patch:
        unwritable(store, patch)
        store.fail(store.get("batches", lost, "batch_id"), errors={"data": []})
    assert store.settle() and (store.lines_done(lost), store.lines_done(other)) == (set(), {1})
    store.close()
