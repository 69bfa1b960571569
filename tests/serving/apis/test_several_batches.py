"""Several batches, files and lines at once: what is done for the first is done for each of them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Batch, FileObject

from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.batches.lines import MOST_FAULTS, read_lines
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.apis.batches.upload import read_form
from sglcore.serving.replicas.server_errors import InvalidRequest, StorageError
from tests.serving.apis.test_batch_objects import Kept, kept
from tests.serving.apis.test_batches import FILE, PATIENCE, begun, finished, written
from tests.serving.apis.test_failed_batches import unwritable

__all__ = ["kept"]


def failed(store: BatchStore, count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of batches whose failure could not be written, and can be from now on."""
    names = [begun(store) for _ in range(count)]
    with monkeypatch.context() as patch:
        unwritable(store, patch)
        for name in names:
            store.fail(store.get("batches", name, "batch_id"), errors={"data": [name]})
    return names


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_failure_that_waited_is_written_when_there_is_room(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    names = failed(store, count, monkeypatch)
    assert store.settle()
    store.close()
    again = BatchStore(tmp_path)
    shown = [again.get("batches", name, "batch_id") for name in names]
    assert [(each["status"], each["errors"]) for each in shown] == [("failed", {"data": [name]}) for name in names]
    again.close()


def test_a_failure_that_can_not_be_written_leaves_those_after_it_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    names = failed(store, 3, monkeypatch)
    tried: list[str] = []
    real = store._update

    def update(batch: Any) -> None:
        tried.append(batch["id"])
        if len(tried) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(batch)

    monkeypatch.setattr(store, "_update", update)
    assert not store.settle() and tried == names[:2]
    assert store.settle() and tried == [*names[:2], *names[1:]]
    assert store.settle() and len(tried) == 4
    store.close()


def test_a_new_batch_runs_while_the_failure_of_another_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = BatchStore(tmp_path), asyncio.Event()
    (lost,) = failed(store, 1, monkeypatch)
    real = store._update

    def update(batch: Any) -> None:
        if batch["id"] == lost:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(batch)

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.set()
        return 200, b"{}"

    async def play() -> None:
        served = BatchRunner(store, call, 1, wait=PATIENCE)
        running = asyncio.create_task(served.run())
        await asyncio.sleep(0.02)
        begun(store)
        served.tell()
        await asyncio.wait_for(asked.wait(), PATIENCE / 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr(store, "_update", update)
    asyncio.run(play())
    monkeypatch.undo()
    store.close()


def test_results_of_each_batch_that_goes_on_are_kept_when_a_folder_is_opened(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    names = [begun(store) for _ in range(3)]
    for place, name in enumerate(names, 1):
        store.add_result(name, place, b"{}", is_answer=True)
    store.close()
    store = BatchStore(tmp_path)
    assert [store.lines_done(name) for name in names] == [{1}, {2}, {3}]
    store.close()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_file_is_kept_whichever_of_the_batches_reads_it(place: int, tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = [begun(store) for _ in range(3)][place]
    with pytest.raises(InvalidRequest, match=f"{name} reads this file"):
        store.delete_file(store.get("batches", name, "batch_id")["input_file_id"])
    store.close()


@pytest.mark.parametrize("full_at", [1, 2])
def test_of_two_files_of_results_none_stays_if_one_can_not_be_written(
    full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written, real = BatchStore(tmp_path), 0, os.fsync
    name = begun(store)
    for line in (1, 2):
        store.add_result(name, line, b"{}", is_answer=line == 1)
    before = set((tmp_path / "files").iterdir())

    def fsync(number: int) -> None:
        nonlocal written
        written += 1
        if written == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError):
        store.finish(name, "completed")
    monkeypatch.undo()
    assert set((tmp_path / "files").iterdir()) == before and store.lines_done(name) == {1, 2}
    store.finish(name, "completed")
    ended = store.get("batches", name, "batch_id")
    assert store.content(ended["output_file_id"]) != store.content(ended["error_file_id"])
    store.close()


def test_a_line_has_one_id_for_all_of_its_attempts_and_a_batch_passes_through_its_states(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    asked: dict[bytes, list[str]] = {}

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.setdefault(body, []).append(request_id)
        return (429 if len(asked[body]) < 3 else 200), b"{}"

    asyncio.run(finished(store, call))
    batch = store.get("batches", name, "batch_id")
    lines = [json.loads(line) for line in store.content(batch["output_file_id"]).read_bytes().splitlines()]
    ids = {line["custom_id"]: line["id"] for line in lines}
    assert asked == {b'{"n":%d}' % number: [ids[f"r{number}"]] * 3 for number in range(9)}
    assert len(set(ids.values())) == 9
    assert [(line["response"]["request_id"], line["error"]) for line in lines] == [
        (each, None) for each in ids.values()
    ]
    times = [batch[f"{state}_at"] for state in ("created", "in_progress", "finalizing", "completed")]
    assert None not in times and times == sorted(times)
    assert all(batch[f"{state}_at"] is None for state in ("failed", "expired", "cancelling", "cancelled"))
    store.close()


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_ends_early_leaves_no_request_running(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    name, left, now = begun(store), list[bytes](), [0.0]
    monkeypatch.setattr("sglcore.serving.apis.batches.runner.POLL_SECONDS", 0.01)
    monkeypatch.setattr("sglcore.serving.apis.batches.runner.time", SimpleNamespace(time=lambda: now[0]))

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        if body == b'{"n":2}':
            if end == "cancelled":
                store.move(name, "cancelling")
            else:
                now[0] = float("inf")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            assert store.get("batches", name, "batch_id")["status"] != end, "its requests end before the batch"
            left.append(body)
        raise AssertionError

    async def play() -> None:
        running = asyncio.create_task(BatchRunner(store, call, 3).run())
        async with asyncio.timeout(PATIENCE):
            while store.active():
                await asyncio.sleep(0.002)
        assert sorted(left) == [b'{"n":%d}' % number for number in range(3)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
    assert store.get("batches", name, "batch_id")["status"] == end
    store.close()


def test_the_first_file_of_a_form_is_the_file_and_another_is_told_like_any_other_field() -> None:
    fields, file = read_form("multipart/form-data; boundary=xx", FILE + b"\r\none\r\n" + FILE + b"\r\ntwo\r\n--xx--")
    assert (fields, file) == ({"file": "two"}, ("f", b"one"))


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"])
def test_a_batch_of_each_endpoint_is_the_same_whoever_asks_for_it(kept: Kept, endpoint: str) -> None:
    file = kept.store.add_file(written({}, url=endpoint), "n", "batch")["id"]
    about = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": endpoint}}
    made = kept.send("POST", "/v1/batches", json=about).json()
    assert {name: made[name] for name in about} == about and made["object"] == "batch"
    Batch.model_validate(made, strict=True)
    before = int(time.time())
    assert type(made["created_at"]) is int and before - 60 <= made["created_at"] <= before
    assert kept.send("GET", f"/v1/batches/{made['id']}").json() == made
    assert kept.send("GET", "/v1/batches").json()["data"] == [made]


def test_the_answer_to_a_cancellation_has_the_counts_so_far(kept: Kept) -> None:
    name = begun(kept.store)
    kept.store.move(name, "in_progress", request_counts={"total": 9, "completed": 0, "failed": 0})
    for line in (1, 2, 3):
        kept.store.add_result(name, line, b"{}", is_answer=line > 1)
    for _ in range(2):
        found = kept.send("POST", f"/v1/batches/{name}/cancel").json()
        assert found["request_counts"] == {"total": 9, "completed": 2, "failed": 1} and found["cancelling_at"]
        assert found == kept.send("GET", f"/v1/batches/{name}").json()


def test_a_file_is_downloaded_as_bytes_of_no_kind_and_has_an_age_in_seconds(kept: Kept) -> None:
    made = kept.upload(bytes(range(256)), purpose="batch").json()
    FileObject.model_validate(made, strict=True)
    assert type(made["created_at"]) is int and 0 <= time.time() - made["created_at"] < 60
    answer = kept.send("GET", f"/v1/files/{made['id']}/content")
    assert (answer.content, answer.headers["content-type"]) == (bytes(range(256)), "application/octet-stream")


@pytest.mark.parametrize("table", ["files", "batches"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_page_names_the_first_and_the_last_of_its_objects(kept: Kept, table: str, count: int) -> None:
    for _ in range(count):
        begun(kept.store)
    page = kept.send("GET", f"/v1/{table}").json()
    ids = [each["id"] for each in page["data"]] or [None]
    assert page.keys() == {"object", "data", "first_id", "last_id", "has_more"} and page["object"] == "list"
    assert (page["first_id"], page["last_id"], len(page["data"])) == (ids[0], ids[-1], count)


def test_results_have_a_file_of_their_kind_each(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    for line in (2, 1, 10, 9):
        store.add_result(name, line, b"%d" % line, is_answer=line < 9)
    store.add_result(name, 2, b"second", is_answer=True)
    store.finish(name, "completed")
    batch = store.get("batches", name, "batch_id")
    for kind, text in (("output", b"1\nsecond\n"), ("error", b"9\n10\n")):
        file = batch[f"{kind}_file_id"]
        about = store.get("files", file, "file_id")
        assert (about["filename"], about["bytes"]) == (f"{name}_{kind}.jsonl", len(text))
        assert store.content(file).read_bytes() == text
    assert batch["request_counts"] == {"total": 0, "completed": 2, "failed": 2}
    assert store.get("batches", name, "batch_id") == batch, "counts stay when the results are gone"
    store.close()


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "mismatched_endpoint", "url"),
        ({"body": {"stream": True}}, "invalid_request", "body.stream"),
        ({"custom_id": "first"}, "duplicate_custom_id", "custom_id"),
        ({"body": None}, "invalid_json_line", None),
    ],
)
def test_each_fault_of_a_file_has_its_line_and_its_field(change: Any, code: str, param: str | None) -> None:
    good = {"custom_id": "first", "method": "POST", "url": "/v1/completions", "body": {}}
    wrong = [{**good, "custom_id": f"r{place}", **change} for place in range(MOST_FAULTS + 5)]
    _, faults = read_lines([json.dumps(each).encode() for each in (good, *wrong)], "/v1/completions")
    assert [(each["line"], each["code"], each["param"]) for each in faults] == [
        (place + 2, code, param) for place in range(MOST_FAULTS)
    ]
    _, few = read_lines([json.dumps(each).encode() for each in (good, wrong[0])], "/v1/completions")
    assert len(few) == 1 and few[0]["message"]


@pytest.mark.parametrize(("status", "kind"), [(200, "output"), (202, "output"), (399, "output"), (400, "error")])
def test_a_line_is_answered_unless_its_status_is_an_error(tmp_path: Path, status: int, kind: str) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return status, b'{"a": 1}'

    asyncio.run(finished(store, call))
    batch = store.get("batches", name, "batch_id")
    lines = [json.loads(line) for line in store.content(batch[f"{kind}_file_id"]).read_bytes().splitlines()]
    assert [(each["response"]["status_code"], each["error"]) for each in lines] == [(status, None)] * 9
    assert lines[0]["response"]["body"] == {"a": 1} and lines[0]["custom_id"] == "r0"
    store.close()
