"""Files and batches: by OpenAI's own client, and across the death of the server process."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.serving.apis.batches.batch_store import ACTIVE, BatchStore
from sglcore.serving.apis.batches.lines import LONGEST_LINE
from sglcore.serving.apis.batches.lines import read_lines as read_stream
from sglcore.serving.apis.batches.route import BatchBody, _batch
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.apis.batches.upload import read_form
from sglcore.serving.http.http_app import running_app
from sglcore.serving.http.middleware import with_middleware
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.in_process import served_here
from tests.serving.stubs import make_frontend

PATH = "/v1/completions"
PATIENCE = 60.0


def read_lines(content: bytes, endpoint: str, longest: int = LONGEST_LINE) -> Any:
    return read_stream(io.BytesIO(content), endpoint, longest)


def written(*bodies: dict[str, Any], url: str = PATH) -> bytes:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("batches")
    settings = ServerConfig(batch_folder=str(folder), max_batch_requests=3)
    with served_here(None, settings, dtype="float32", max_requests=4, threads=1, kv_cache_memory=32 << 20) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(batch_id)).status in ACTIVE:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = map(json.loads, client.files.content(file_id).read().splitlines())
    return {line["custom_id"]: line["response"] for line in lines}


def test_openais_client_runs_a_batch_whose_answers_are_those_of_the_endpoint(client: openai.OpenAI) -> None:
    bodies = [{"model": "sglcore-demo", "prompt": f"{name} and", "max_tokens": 6, "seed": 3} for name in "ABCDE"]
    content = written(*bodies, {"prompt": "A", "temperature": -1})
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, client.files.content(file.id).read()) == (len(content), "in.jsonl", content)
    batch = client.batches.create(
        input_file_id=file.id, endpoint=PATH, completion_window="24h", metadata={"for": "a test"}
    )
    assert batch.status == "validating" and batch.metadata == {"for": "a test"}
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.completed_at is not None and batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
    found = answers(client, batch.output_file_id)
    for number, body in enumerate(bodies):
        text = client.completions.create(**body).choices[0].text  # pyright: ignore[reportCallIssue, reportArgumentType]
        answer = found[f"r{number}"]
        assert (answer["status_code"], answer["body"]["choices"][0]["text"]) == (200, text)
    refused = answers(client, batch.error_file_id)["r5"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")
    assert client.batches.list(limit=1).data[0].id == batch.id
    names = [each.id for each in client.files.list(purpose="batch")]
    assert names == [file.id] and client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_that_is_cancelled_keeps_what_it_has(client: openai.OpenAI) -> None:
    bodies = [{"prompt": "A", "max_tokens": 2}] + [{"prompt": "A", "max_tokens": 2000, "ignore_eos": True}] * 40
    file = client.files.create(file=written(*bodies), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
    while not (counts := client.batches.retrieve(batch.id).request_counts) or not counts.completed:
        time.sleep(0.01)
    with pytest.raises(openai.BadRequestError, match="reads this file"):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and "r0" in answers(client, batch.output_file_id)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_a_file_with_a_fault_is_not_run_and_its_lines_are_named(client: openai.OpenAI) -> None:
    file = client.files.create(file=written({"prompt": "A"}, {"stream": True}) + b"\nnothing", purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h").id)
    assert batch.status == "failed" and batch.errors is not None and batch.output_file_id is None
    assert [(each.line, each.code) for each in batch.errors.data or ()] == [
        (2, "invalid_request"),
        (3, "invalid_json_line"),
    ]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.batches.create(input_file_id="file-0", endpoint=PATH, completion_window="24h")


def test_lines_of_other_endpoints_methods_and_names_are_refused() -> None:
    twice = written({}) + b"\n\n" + written({})
    assert [each["code"] for each in read_lines(twice, PATH)[1]] == ["duplicate_custom_id"]
    assert read_lines(written({}, url="/v1/embeddings"), PATH)[1][0]["code"] == "mismatched_endpoint"
    assert read_lines(written({}).replace(b"POST", b"GET"), PATH)[1][0]["code"] == "invalid_method"
    assert read_lines(b"\n", PATH)[1][0]["code"] == "empty_file"
    assert [line.number for line in read_lines(b"\r\n" + written({}, {}), PATH)[0]] == [2, 3]
    (whole,) = written({"prompt": "a"}).splitlines()
    assert not read_lines(whole, PATH, len(whole))[1]
    (fault,) = read_lines(whole, PATH, len(whole) - 1)[1]
    assert fault["code"] == "request_too_large" and "max_request_bytes" in fault["message"]


def test_a_file_comes_out_of_its_form_byte_for_byte() -> None:
    content = bytes(range(256)) + "—\r\n--almost\r\n\r\n\u2028".encode()
    head = b'--xx\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xx\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    fields, file = read_form("multipart/form-data; boundary=xx", head + content + b"\r\n--xx--\r\n")
    assert (fields, file) == ({"purpose": "batch"}, ("a b.jsonl", content))


FILE = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'


@pytest.mark.parametrize("boundary", ["xx", '"xx"'])
@pytest.mark.parametrize(
    ("body", "content"),
    [
        (FILE + b"\r\n\r\n--xx--", b""),
        (FILE + b"\r\na\r\n--xxy\r\n--xx-\r\n--xx--", b"a\r\n--xxy\r\n--xx-"),
        (b"--xx\r\n\r\nno head\r\n" + FILE + b"\r\na--xx\r\n--xx \t\r\n\r\n\r\n--xx--", b"a--xx"),
        (b"before\r\n" + FILE + b"Content-Type: text/plain\r\n\r\n\xff\r\n--xx--\r\nafter\r\n--xx", b"\xff"),
        (FILE + b"Content-Transfer-Encoding: base64\r\n\r\nYWJj\r\n--xx--", b"abc"),
        (FILE + b"Content-Transfer-Encoding: Quoted-Printable\r\n\r\na=3Db=\r\nc\r\n--xx--", b"a=bc"),
        (FILE + b"Content-Transfer-Encoding: 8bit\r\n\r\na=3Db\r\n--xx--", b"a=3Db"),
        (FILE + b"\r\none\r\n" + FILE + b"\r\ntwo\r\n--xx--", b"one"),
    ],
)
def test_a_form_is_cut_at_its_boundaries_and_nowhere_else(boundary: str, body: bytes, content: bytes) -> None:
    assert read_form(f"multipart/form-data; boundary={boundary}", body)[1] == ("f", content)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("multipart/form-data; boundary=xx", FILE + b"\r\nabc", "no end"),
        ("multipart/form-data; boundary=xx", b"", "no end"),
        ("multipart/form-data; boundary=xx", b"--xx\r\n\r\n--xx--", "no file"),
        ("multipart/form-data", FILE, "no boundary"),
        ("application/json", b"{}", "not a form"),
    ],
)
def test_a_form_that_is_none_is_refused(kind: str, body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_form(kind, body)


def upload(folder: Path, size: int, **settings: Any) -> tuple[int, dict[str, Any]]:
    """The status and JSON answer of an upload of a file of `size` bytes, through all middleware."""

    async def play() -> tuple[int, dict[str, Any]]:
        frontend: Any = make_frontend()
        frontend.config = ServerConfig(batch_folder=str(folder), **settings)
        async with running_app(frontend) as app:
            transport = httpx.ASGITransport(with_middleware(app, frontend))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                file = {"file": ("f", b"x" * size)}
                answer = await client.post("/v1/files", data={"purpose": "batch"}, files=file)
        return answer.status_code, answer.json()

    return asyncio.run(play())


def test_a_file_of_a_batch_has_a_limit_of_its_own(tmp_path: Path) -> None:
    assert ServerConfig().max_batch_file_bytes == 200 << 20
    limits = {"max_request_bytes": 100, "max_batch_file_bytes": 3000}
    status, answer = upload(tmp_path, 3000, **limits)
    assert (status, answer["bytes"]) == (200, 3000)
    for size in (3001, 200_000):
        status, answer = upload(tmp_path, size, **limits)
        assert status == 413 and "--max-batch-file-bytes" in answer["error"]["message"]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.apis.batches.batch_store import BatchStore
from tests.serving.apis.test_batches import begun

asked = 0

async def call(path, body, request_id):
    global asked
    asked += 1
    if asked > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return 200, b'{"first": true}'

async def main():
    store = BatchStore(Path(sys.argv[1]))
    begun(store)
    await BatchRunner(store, call, 2).run()

asyncio.run(main())
"""


def begun(store: BatchStore) -> str:
    file = store.add_file(written(*({"n": number} for number in range(9))), "in.jsonl", "batch")
    batch = _batch(BatchBody(input_file_id=file["id"], endpoint=PATH, completion_window="24h"))
    store.add_batch(batch)
    return batch["id"]


def test_what_a_killed_server_had_answered_is_kept_and_the_rest_is_run_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "files" / "file-half-written").write_bytes(b"nobody knows of it")
    store = BatchStore(tmp_path)
    (batch,) = store.active()
    done = store.lines_done(batch["id"])
    asked: list[bytes] = []

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(body)
        deaths = sum(each == body for each in asked)
        # After the engine died once, a request is retried; one at which it dies each time is not
        # retried for ever.
        if deaths == 1 and body == b'{"n":7}':
            return 429, b"{}"
        if deaths == 1 or body == b'{"n":8}':
            return 503, b'{"error": {"code": "engine_died"}}'
        return 200, b'{"second": true}'

    async def finish() -> None:
        runner = asyncio.create_task(BatchRunner(store, call, 9, wait=0.0).run())
        while store.active():
            await asyncio.sleep(0.01)
        runner.cancel()

    asyncio.run(finish())
    batch = store.get("batches", batch["id"], "batch_id")
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 9, "completed": 8, "failed": 1}
    assert 3 <= len(done) <= 5 and len(set(asked)) == 9 - len(done)
    lines = store.content(batch["output_file_id"]).read_bytes().splitlines()
    found = {json.loads(line)["custom_id"]: json.loads(line)["response"]["body"] for line in lines}
    assert {name for name, body in found.items() if "first" in body} == {f"r{number - 1}" for number in done}
    assert len(found) == 8 and not (tmp_path / "files" / "file-half-written").exists()
    with pytest.raises(ConfigError, match="batch_folder"):
        BatchStore(tmp_path)
    store.close()
    BatchStore(tmp_path).close()


@pytest.mark.parametrize("state", ["validating", "in_progress"])
def test_a_batch_that_was_cancelled_before_its_turn_asks_nothing_and_keeps_what_it_has(
    state: str, tmp_path: Path
) -> None:
    """While another batch ran, or before the server that ran it was restarted."""
    store = BatchStore(tmp_path)
    name, other = begun(store), begun(store)
    if state == "in_progress":
        store.move(name, "in_progress", request_counts={"total": 9, "completed": 0, "failed": 0})
        store.add_result(name, 2, b"{}", is_answer=True)
    store.move(name, "cancelling")
    asked: list[bytes] = []

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(body)
        return 200, b"{}"

    asyncio.run(finished(store, call))
    batch = store.get("batches", name, "batch_id")
    assert batch["status"] == "cancelled" and batch["completed_at"] is None and batch["cancelled_at"]
    assert batch["request_counts"]["completed"] == (state == "in_progress") == (batch["output_file_id"] is not None)
    assert store.get("batches", other, "batch_id")["status"] == "completed" and len(asked) == 9
    store.close()


def test_a_batch_whose_time_is_over_expires(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    store.move(name, "validating", expires_at=1)

    asked: list[bytes] = []

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(body)
        await asyncio.Event().wait()
        raise AssertionError

    asyncio.run(finished(store, call))
    assert store.get("batches", name, "batch_id")["status"] == "expired" and len(asked) <= 2
    store.close()


async def finished(store: BatchStore, call: Any) -> None:
    """Run the batches of a store, two requests at a time."""
    runner = asyncio.create_task(BatchRunner(store, call, 2, wait=0.0).run())
    while store.active():
        await asyncio.sleep(0.005)
    runner.cancel()


def test_a_request_is_tried_until_three_engines_have_ended_at_it_however_often_it_had_to_wait(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    full, loading = (429, b'{"error": {"code": "engine_died"}}'), (503, b'{"error": {"code": "not_ready"}}')
    died = (503, b'{"error": {"code": "engine_died"}}')
    answers = {
        b'{"n":0}': [full, full, loading, died, full, loading, died, full, full, died, (200, b"{}")],
        b'{"n":1}': [died, died, (200, b"{}")],
        b'{"n":2}': [(400, b"{}"), (200, b"{}")],
        b'{"n":3}': [(500, died[1]), (200, b"{}")],
    }

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return answers[body].pop(0) if body in answers else (200, b"{}")

    asyncio.run(finished(store, call))
    assert [len(rest) for rest in answers.values()] == [1, 0, 1, 1]
    batch = store.get("batches", name, "batch_id")
    assert batch["request_counts"] == {"total": 9, "completed": 6, "failed": 3}
    lines = [json.loads(line) for line in store.content(batch["error_file_id"]).read_bytes().splitlines()]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in lines] == [
        ("r0", 503),
        ("r2", 400),
        ("r3", 500),
    ]
    store.close()


def test_a_batch_that_was_cut_off_at_its_end_is_ended_by_the_next_server(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    store.move(name, "in_progress", request_counts={"total": 9, "completed": 0, "failed": 0})
    for line in (3, 1):
        store.add_result(name, line, b'{"line": %d}' % line, is_answer=True)
    store.move(name, "finalizing")

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        raise AssertionError

    asyncio.run(finished(store, call))
    batch = store.get("batches", name, "batch_id")
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 9, "completed": 2, "failed": 0}
    assert batch["expires_at"] - batch["created_at"] == 24 * 3600 and batch["error_file_id"] is None
    assert store.content(batch["output_file_id"]).read_bytes() == b'{"line": 1}\n{"line": 3}\n'
    assert not store.lines_done(name)
    store.close()


def test_a_defect_ends_its_batch_and_not_the_others(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    names = [begun(store), begun(store)]
    asked: list[bytes] = []

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(body)
        if len(asked) < 3:
            raise ValueError("planted")
        return 200, b"{}"

    asyncio.run(finished(store, call))
    first, second = (store.get("batches", name, "batch_id") for name in names)
    assert (first["status"], second["status"]) == ("failed", "completed")
    assert "planted" in first["errors"]["data"][0]["message"]
    store.close()


def test_files_come_in_pages_and_leave_nothing_behind(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    one, two, three = (store.add_file(b"x", name, "batch")["id"] for name in "abc")
    store.add_file(b"x", "d", "batch_output")

    def page(limit: int, after: str | None = None, **given: Any) -> tuple[list[str], bool]:
        found = store.page("files", limit, after, purpose="batch", **given)
        return [each["id"] for each in found["data"]], found["has_more"]

    assert page(2) == ([three, two], True) and page(2, two) == ([one], False) and page(3) == ([three, two, one], False)
    assert page(1, ascending=True) == ([one], True) and page(2, one, ascending=True) == ([two, three], False)
    path = store.content(two)
    store.delete_file(two)
    assert not path.exists() and page(3) == ([three, one], False)
    store.close()


def test_a_server_that_drains_waits_for_no_batch_and_the_next_one_runs_it(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = store.add_file(written({"prompt": "a"}), "in.jsonl", "batch")
    store.add_batch(_batch(BatchBody(input_file_id=file["id"], endpoint=PATH, completion_window="24h")))
    store.close()

    async def serve() -> None:
        begun, left, told = asyncio.Event(), asyncio.Event(), list[Callable[[], object]]()

        async def generate(*given: Any, **named: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        frontend: Any = make_frontend(generate)
        frontend.config, frontend.when_draining = ServerConfig(batch_folder=str(tmp_path)), told.append
        async with running_app(frontend):
            await asyncio.wait_for(begun.wait(), PATIENCE)
            told[0]()
            await asyncio.wait_for(left.wait(), PATIENCE)

    asyncio.run(serve())
    store = BatchStore(tmp_path)  # the first server has released it
    assert [each["status"] for each in store.active()] == ["in_progress"]
    store.close()


def test_closing_waits_for_a_query_of_another_thread(tmp_path: Path) -> None:
    """A database that is closed below a running query ends the process by a segmentation fault."""
    store = BatchStore(tmp_path)
    begun(store)
    closing = threading.Thread(target=store.close)
    with store._lock:
        closing.start()
        closing.join(0.2)
        assert closing.is_alive() and store._database.execute("SELECT count(*) FROM batches").fetchone() == (1,)
    closing.join(PATIENCE)
    with pytest.raises(sqlite3.ProgrammingError):
        store.active()
