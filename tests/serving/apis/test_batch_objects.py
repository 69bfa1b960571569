"""Files and batches as their endpoints give them: forms, lists, states, and what is refused. No
batch runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.batches.batch_store import ACTIVE, BatchStore
from sglcore.serving.apis.batches.lines import read_lines
from sglcore.serving.apis.batches.route import BatchBody, _batch
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.http.http_app import make_app, running_app
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.apis.test_batches import PATH, PATIENCE, begun, written
from tests.serving.stubs import Application, make_frontend

FORM = "multipart/form-data; boundary=xx"
MOST = 300


@cache
def shared() -> tuple[BatchRunner, FastAPI]:
    """A runner and the endpoints over it, made once: each `Kept` gives it a store."""
    frontend: Any = make_frontend()
    frontend.config = ServerConfig(max_batch_file_bytes=MOST)
    runner = BatchRunner(cast(Any, None), cast(Any, None), 1)
    return runner, make_app(frontend, runner)


class Kept:
    """The endpoints over a store, with a limit of `MOST` bytes for a file."""

    def __init__(self, folder: Path) -> None:
        self.runner, self._app = shared()
        self.runner.store = self.store = BatchStore(folder)
        self.runner._news.clear()

    def send(self, method: str, path: str, **given: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **given)

        return asyncio.run(ask())

    def upload(self, content: bytes, kind: str = FORM, **fields: str) -> httpx.Response:
        """Send a form with a file and these fields."""
        parts = [(f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts.append(('name="file"; filename="in.jsonl"', content))
        body = b"".join(
            b"--xx\r\ncontent-disposition: form-data; %s\r\n\r\n%s\r\n" % (name.encode(), value)
            for name, value in parts
        )
        return self.send("POST", "/v1/files", content=body + b"--xx--\r\n", headers={"content-type": kind})


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    found = Kept(tmp_path)
    yield found
    found.store.close()


def asked(**given: Any) -> BatchBody:
    return BatchBody.model_validate({"input_file_id": "f", "endpoint": PATH, "completion_window": "24h", **given})


def test_a_new_batch_has_done_nothing_and_ends_in_a_day() -> None:
    made = _batch(asked(metadata={"a": "b"}))
    assert made["expires_at"] - made["created_at"] == 24 * 3600
    assert {name for name, value in made.items() if value is None} == {
        *("errors", "output_file_id", "error_file_id"),
        *(
            f"{state}_at"
            for state in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        ),
    }
    assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert (made["status"], made["endpoint"], made["metadata"]) == ("validating", PATH, {"a": "b"})
    assert _batch(asked())["metadata"] is None and made["id"] != _batch(asked())["id"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/v1/messages"},
        {"completion_window": "1h"},
        {"metadata": {str(place): "" for place in range(17)}},
        {"metadata": {"a": 1}},
    ],
)
def test_a_batch_that_can_not_be_run_is_refused(wrong: Any) -> None:
    asked(metadata={str(place): "" for place in range(16)})
    with pytest.raises(ValidationError):
        asked(**wrong)


@pytest.mark.parametrize("kind", [FORM, "Multipart/Form-Data; boundary=xx"])
def test_a_file_is_kept_with_its_name_and_what_else_the_form_has_is_told(kept: Kept, kind: str) -> None:
    answer = kept.upload(b"abc", kind, purpose="batch", z="1", a="2")
    found = answer.json()
    assert answer.headers["x-sglcore-warnings"] == "ignored: a, z"
    assert (found["bytes"], found["filename"], found["purpose"], found["status"]) == (
        3,
        "in.jsonl",
        "batch",
        "processed",
    )
    again = kept.send("GET", f"/v1/files/{found['id']}")
    assert again.json() == found and kept.send("GET", f"/v1/files/{found['id']}/content").content == b"abc"
    assert "x-sglcore-warnings" not in kept.upload(b"abc", purpose="batch").headers


def test_a_file_has_as_many_bytes_as_are_allowed_and_a_purpose(kept: Kept) -> None:
    assert kept.upload(b"x" * MOST, purpose="batch").status_code == 200
    large = kept.upload(b"x" * (MOST + 1), purpose="batch")
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    for fields in ({}, {"purpose": "vision"}):
        refused = kept.upload(b"x", **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "purpose")
    assert len(kept.store.page("files", 9, None)["data"]) == 1


@pytest.mark.parametrize("name", ["name=file", 'name="file"'])
def test_a_file_without_a_name_is_called_file(kept: Kept, name: str) -> None:
    body = f'--xx\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xx\r\ncontent-disposition: form-data; {name}\r\n\r\na\r\n--xx--'
    assert (
        kept.send("POST", "/v1/files", content=body.encode(), headers={"content-type": FORM}).json()["filename"]
        == "file"
    )


def test_files_are_listed_by_purpose_in_either_order(kept: Kept) -> None:
    ids = [kept.store.add_file(b"x", "n", purpose)["id"] for purpose in ("batch", "batch_output", "batch")]

    def listed(**params: Any) -> list[int]:
        answer = kept.send("GET", "/v1/files", params=params)
        assert answer.status_code == 200, answer.text
        return [ids.index(each["id"]) for each in answer.json()["data"]]

    assert listed() == listed(purpose="") == listed(order="desc") == listed(limit=10000) == [2, 1, 0]
    assert listed(order="asc") == [0, 1, 2] and listed(purpose="batch") == [2, 0] and listed(purpose="x") == []
    assert listed(after=ids[1]) == [0] and listed(after=ids[1], order="asc") == [2] and listed(limit=1) == [2]
    for wrong, param in (({"limit": 0}, "limit"), ({"limit": 10001}, "limit"), ({"order": "up"}, "order")):
        refused = kept.send("GET", "/v1/files", params=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    missed = kept.send("GET", "/v1/files", params={"after": "file-0"})
    assert (missed.status_code, missed.json()["error"]["param"]) == (404, "after")


def test_batches_are_listed_twenty_at_a_time_with_their_counts(kept: Kept) -> None:
    names = [begun(kept.store) for _ in range(22)]
    kept.store.add_result(names[-1], 1, b"{}", is_answer=True)
    kept.store.add_result(names[-1], 2, b"{}", is_answer=False)
    page = kept.send("GET", "/v1/batches").json()
    assert [each["id"] for each in page["data"]] == names[:1:-1] and page["has_more"] is True
    assert page["data"][0]["request_counts"] == {"total": 0, "completed": 1, "failed": 1}
    assert page["data"][1]["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    rest = kept.send("GET", "/v1/batches", params={"after": page["last_id"], "limit": 100}).json()
    assert [each["id"] for each in rest["data"]] == names[1::-1] and rest["has_more"] is False
    for limit in (0, 101):
        assert kept.send("GET", "/v1/batches", params={"limit": limit}).status_code == 400


@pytest.mark.parametrize(
    ("state", "status"),
    [
        *((state, 200) for state in ("validating", "in_progress", "cancelling")),
        *((state, 400) for state in ("finalizing", "completed", "failed", "expired", "cancelled")),
    ],
)
def test_a_batch_is_cancelled_until_its_files_are_written(kept: Kept, state: str, status: int) -> None:
    name = begun(kept.store)
    if state != "validating":
        kept.store.move(name, state)
    kept.runner._news.clear()
    answer = kept.send("POST", f"/v1/batches/{name}/cancel")
    assert answer.status_code == status and kept.runner._news.is_set() is (status == 200)
    found = kept.send("GET", f"/v1/batches/{name}").json()
    assert found["status"] == ("cancelling" if status == 200 else state)
    assert status == 200 or state in answer.json()["error"]["message"]


def test_a_new_batch_wakes_the_runner_and_needs_its_file(kept: Kept) -> None:
    file = kept.store.add_file(written({}), "n", "batch")["id"]
    body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
    missed = kept.send("POST", "/v1/batches", json={**body, "input_file_id": "file-0"})
    assert (missed.status_code, missed.json()["error"]["param"]) == (404, "input_file_id")
    assert not kept.runner._news.is_set() and not kept.store.active()
    assert kept.send("POST", "/v1/batches", json=body).json()["status"] == "validating"
    assert kept.runner._news.is_set() and len(kept.store.active()) == 1


@pytest.mark.parametrize("state", ["in_progress", "completed"])
def test_a_file_is_kept_as_long_as_a_batch_may_read_it(kept: Kept, state: str) -> None:
    name = begun(kept.store)
    kept.store.move(name, state)
    file = kept.store.get("batches", name, "batch_id")["input_file_id"]
    path = kept.store.content(file)
    answer = kept.send("DELETE", f"/v1/files/{file}")
    assert answer.status_code == (400 if state in ACTIVE else 200) and path.exists() is (state in ACTIVE)
    if state == "completed":
        assert answer.json() == {"id": file, "object": "file", "deleted": True}
    else:
        assert answer.json()["error"]["param"] == "file_id" and name in answer.json()["error"]["message"]


@cache
def without_folder() -> Application:
    return Application(make_frontend())


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/files/a", "file_id"),
        ("GET", "/v1/files/a/content", "file_id"),
        ("DELETE", "/v1/files/a", "file_id"),
        ("GET", "/v1/batches/a", "batch_id"),
        ("POST", "/v1/batches/a/cancel", "batch_id"),
    ],
)
def test_what_is_not_there_is_missed_by_its_kind_and_without_a_folder_nothing_is(
    kept: Kept, method: str, path: str, param: str
) -> None:
    missed = kept.send(method, path)
    error = missed.json()["error"]
    assert (missed.status_code, error["param"], error["code"]) == (404, param, "not_found")
    assert f"no {'file' if 'file' in param else 'batch'} 'a'" in error["message"]
    without = without_folder().send(method, path)
    assert (without.status_code, without.json()["error"]["code"]) == (404, "no_batch_folder")


def test_states_are_entered_from_those_that_are_meant_and_have_their_times(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    first, second = begun(store), begun(store)
    assert [each["id"] for each in store.active()] == [first, second]
    moved = store.move(
        first, "in_progress", of=("validating",), request_counts={"total": 3, "completed": 0, "failed": 0}
    )
    assert moved["in_progress_at"] and moved["request_counts"]["total"] == 3
    same = store.move(first, "finalizing", of=("validating",))
    assert (same["status"], same["finalizing_at"]) == ("in_progress", None)
    for line, is_answer in ((2, True), (1, False), (1, True)):
        store.add_result(first, line, b'{"line": %d}' % line, is_answer=is_answer)
    store.finish(first, "completed")
    ended = store.get("batches", first, "batch_id")
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 0} and ended["completed_at"]
    assert ended["error_file_id"] is None and [each["id"] for each in store.active()] == [second]
    assert store.move(first, "cancelling")["status"] == "completed"
    (made,) = [each for each in store.page("files", 9, None)["data"] if each["purpose"] == "batch_output"]
    assert (made["id"], made["filename"]) == (ended["output_file_id"], f"{first}_output.jsonl")
    store.close()


def test_results_of_ended_batches_and_unknown_files_are_gone_when_a_folder_is_opened(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    ended, goes_on = begun(store), begun(store)
    store.move(ended, "completed")
    for name in (ended, goes_on):
        store.add_result(name, 1, b"{}", is_answer=True)
    store.close()
    (tmp_path / "files" / "file-unknown").touch()
    store = BatchStore(tmp_path)
    assert store.lines_done(ended) == set() and store.lines_done(goes_on) == {1}
    assert len(list((tmp_path / "files").iterdir())) == 2
    store.close()


@pytest.mark.parametrize(
    ("text", "numbers", "codes"),
    [
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"stream": false}}', [1], []),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"stream": null}}', [1], []),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, "more": 1}', [1], []),
        (b' \t\r\n{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n\n', [2], []),
        (b'{"custom_id": "a", "method": "post", "url": "/v1/completions", "body": {}}', [1], ["invalid_method"]),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', [], ["invalid_json_line"]),
        (b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}', [], ["invalid_json_line"]),
        (b'{"method": "POST", "url": "/v1/completions", "body": {}}', [], ["invalid_json_line"]),
        (b"", [], ["empty_file"]),
        (b"  \n\t\n", [], ["empty_file"]),
    ],
)
def test_a_line_is_a_request_with_a_name(text: bytes, numbers: list[int], codes: list[str]) -> None:
    lines, faults = read_lines(text.splitlines(keepends=True), PATH)
    assert ([line.number for line in lines], [fault["code"] for fault in faults]) == (numbers, codes)


def test_a_name_is_taken_by_the_first_line_that_has_it_whatever_is_wrong_with_that() -> None:
    good = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"prompt": "x"}}
    _, faults = read_lines([json.dumps({**good, "method": "GET"}).encode(), json.dumps(good).encode()], PATH)
    assert [(fault["line"], fault["code"], fault["param"]) for fault in faults] == [
        (1, "invalid_method", "method"),
        (2, "duplicate_custom_id", "custom_id"),
    ]
    (line,), _ = read_lines([json.dumps(good).encode()], PATH)
    assert (line.custom_id, json.loads(line.body)) == ("a", {"prompt": "x"})


def test_a_server_runs_so_many_requests_of_a_batch_at_once_and_none_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    running, most, ids = 0, 0, list[Any]()

    async def generate(*given: Any, **named: Any) -> Any:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        ids.append(named["request_id"])
        await asyncio.sleep(0.01)
        running -= 1
        raise InvalidRequest("planted")

    frontend: Any = make_frontend(generate)
    frontend.config = ServerConfig(batch_folder="~/kept", max_batch_requests=3, max_request_bytes=200)

    async def play() -> dict[str, Any]:
        async with (
            running_app(frontend) as app,
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
        ):

            async def run(*bodies: dict[str, Any]) -> dict[str, Any]:
                files = {"file": ("f", written(*bodies))}
                file = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()["id"]
                body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
                name = (await client.post("/v1/batches", json=body)).json()["id"]
                while (found := (await client.get(f"/v1/batches/{name}")).json())["status"] in ACTIVE:
                    await asyncio.sleep(0.005)
                return found

            ended = await run(*({"prompt": "a"} for _ in range(9)))
            assert (ended["status"], ended["request_counts"]["failed"], most) == ("completed", 9, 3)
            return await run({"prompt": "a" * 300})

    refused = asyncio.run(asyncio.wait_for(play(), PATIENCE))
    assert (refused["status"], refused["errors"]["data"][0]["code"]) == ("failed", "request_too_large")
    assert (tmp_path / "kept" / "batches.sqlite").exists() and len(set(ids)) == 9
