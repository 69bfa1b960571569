"""A full disk: failed writes are reported with the reason, and everything else goes on."""

from __future__ import annotations

import ast
import asyncio
import errno
import io
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from sglcore.cli.serve import _show
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError, no_space
from sglcore.engine.model_download import _in_one_line
from sglcore.serving.apis.batches.batch_store import ACTIVE, BatchStore
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.http.http_app import make_app
from sglcore.serving.http.logs import Logs
from sglcore.serving.replicas.server_errors import StorageError
from tests.serving.apis.test_batches import PATH, PATIENCE, begun, written
from tests.serving.stubs import make_frontend

ROOT = Path(__file__).parents[3]
FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
Disk = Callable[[bool], None]


def full_database() -> sqlite3.OperationalError:
    """The error that SQLite raises."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class Database:
    """A SQLite connection with a disk that can become full."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self.real, self.is_full, self.is_lost = real, False, False

    def execute(self, text: str, *values: Any) -> sqlite3.Cursor:
        if self.is_lost:
            raise sqlite3.OperationalError("disk I/O error")
        if self.is_full and not text.startswith("SELECT"):
            raise full_database()
        return self.real.execute(text, *values)

    def __enter__(self) -> None:
        self.real.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.real.__exit__(*error)

    def close(self) -> None:
        self.real.close()


@contextmanager
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *, where: str) -> Iterator[tuple[BatchStore, Disk]]:
    """A store, and a function that fills its disk or frees it again. `where`: full for files, for
    the database, or for both."""
    store = BatchStore(folder)
    database = Database(store._database)
    store._database = cast(sqlite3.Connection, database)

    def fill(is_full: bool) -> None:
        database.is_full = is_full and where != "files"
        if is_full and where != "database":
            monkeypatch.setattr(os, "fsync", refuse)
        else:
            monkeypatch.undo()

    def refuse(number: int) -> None:
        raise FULL_DISK

    try:
        yield store, fill
    finally:
        fill(False)
        store.close()


async def asked(store: BatchStore, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """Send requests to the routes of files and batches; no batch runs."""
    app = make_app(make_frontend(), BatchRunner(store, cast(Any, None), 1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return [await client.request(method, path, **given) for method, path, given in requests]


UPLOAD = ("POST", "/v1/files", {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", written({}))}})


@pytest.mark.parametrize("where", ["files", "database", "both"])
def test_an_upload_is_507_with_the_reason_and_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, monkeypatch, where=where) as (store, fill):
        fill(True)
        (refused,) = asyncio.run(asked(store, UPLOAD))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (507, "insufficient_storage", "server_error")
        assert "is full" in error["message"] or "No space left" in error["message"]
        assert "batch_folder" in error["message"] and "free space" in error["message"]
        assert not list((tmp_path / "files").iterdir()) and store.page("files", 9, None)["data"] == []
        fill(False)
        (kept,) = asyncio.run(asked(store, UPLOAD))
        assert kept.status_code == 200 and store.content(kept.json()["id"]).read_bytes() == written({})
    assert not caplog.records


def test_whatever_else_changes_the_folder_is_507_too_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch, where="database") as (store, fill):
        batch = begun(store)
        (file,) = store.page("files", 9, None)["data"]
        spare = store.add_file(b"x", "spare", "batch")["id"]
        new = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        changes = [
            ("POST", "/v1/batches", {"json": new}),
            ("POST", f"/v1/batches/{batch}/cancel", {}),
            ("DELETE", f"/v1/files/{spare}", {}),
        ]
        fill(True)
        assert [answer.status_code for answer in asyncio.run(asked(store, *changes))] == [507] * 3
        assert [each["status"] for each in store.active()] == ["validating"]
        assert store.content(spare).read_bytes() == b"x"
        fill(False)
        assert [answer.status_code for answer in asyncio.run(asked(store, *changes))] == [200] * 3


def test_what_sqlite_says_of_a_full_disk_is_known_by_its_code(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    name = begun(store)
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="full") as told:
        store.add_result(name, 1, b"x" * 100_000, is_answer=True)
    assert told.value.is_full and not store.lines_done(name)
    store.close()


async def until_over(store: BatchStore, call: Any, at_once: int = 1) -> None:
    """Run all active batches to their end."""
    runner = asyncio.create_task(BatchRunner(store, call, at_once, wait=0.0).run())
    async with asyncio.timeout(PATIENCE):
        while store.active():
            assert not runner.done(), runner.result()
            await asyncio.sleep(0.002)
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)


@pytest.mark.parametrize(
    ("where", "full_at", "kept"),
    [
        ("database", 4, ["error", "output"]),
        ("both", 4, []),
        ("files", 1, []),
        ("both", 1, []),
    ],
)
def test_a_batch_fails_with_the_reason_and_stays_so(
    where: str,
    full_at: int,
    kept: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = 0
    with opened(tmp_path, monkeypatch, where=where) as (store, fill):
        name = begun(store)

        async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
            nonlocal count
            count += 1
            if count == full_at:
                fill(True)
            return (400 if count == 1 else 200), b"{}"

        asyncio.run(until_over(store, call))
        batch = store.get("batches", name, "batch_id")
        (fault,) = batch["errors"]["data"]
        assert (batch["status"], fault["code"]) == ("failed", "insufficient_storage") and batch["failed_at"]
        assert "batch_folder" in fault["message"] and "free space" in fault["message"]
        assert store.page("batches", 9, None)["data"][0] == batch == store.move(name, "cancelling")
        assert count == (9 if where == "files" else full_at), "nothing is asked for a batch that can not be kept"
        (said,) = caplog.records
        assert said.exc_info is None and "free space" in said.message and name in said.message
        fill(False)
        assert store.settle() and not store.lines_done(name)
        batch = store.get("batches", name, "batch_id")
        other = begun(store)
        asyncio.run(until_over(store, call_well))
        assert store.get("batches", other, "batch_id")["status"] == "completed"
    again = BatchStore(tmp_path)
    assert again.get("batches", name, "batch_id") == batch and not again.active()
    again.close()


async def call_well(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    return 200, b"{}"


def test_what_a_batch_has_is_kept_where_there_is_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)
    name, real = begun(store), store.add_result

    def add_result(batch: str, line: int, *given: Any, **named: Any) -> None:
        if line == 5:
            raise StorageError("planted", is_full=True)
        real(batch, line, *given, **named)

    monkeypatch.setattr(store, "add_result", add_result)
    asyncio.run(until_over(store, call_well))
    batch = store.get("batches", name, "batch_id")
    assert (batch["status"], batch["request_counts"]["completed"]) == ("failed", 4)
    assert len(store.content(batch["output_file_id"]).read_bytes().splitlines()) == 4
    store.close()


def test_a_batch_that_failed_is_written_as_soon_as_there_is_room_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tries = BatchStore(tmp_path), 0
    real = store._update

    def update(batch: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 9:
            raise FULL_DISK
        real(batch)

    async def play() -> None:
        runner = asyncio.create_task(BatchRunner(store, call_well, 1, wait=0.001).run())
        async with asyncio.timeout(PATIENCE):
            while store._unwritten or tries < 9:
                await asyncio.sleep(0.002)
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)

    name = begun(store)
    monkeypatch.setattr(store, "_update", update)
    store.fail(store.get("batches", name, "batch_id"), errors={"data": []})
    asyncio.run(play())
    assert store.get("batches", name, "batch_id")["status"] == "failed" and tries == 9
    store.close()


def test_a_batch_that_can_not_be_kept_waits_for_none_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch, where="database") as (store, fill):
        name = begun(store)

        async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
            if body != b'{"n":1}':
                await asyncio.Event().wait()
            fill(True)
            return 200, b"{}"

        asyncio.run(until_over(store, call, at_once=3))
        assert store.get("batches", name, "batch_id")["status"] == "failed"


def test_a_batch_whose_file_is_gone_fails_and_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = BatchStore(tmp_path)
    lost, other = begun(store), begun(store)
    store.content(store.active()[0]["input_file_id"]).unlink()
    asyncio.run(until_over(store, call_well))
    batch = store.get("batches", lost, "batch_id")
    (fault,) = batch["errors"]["data"]
    assert (batch["status"], fault["code"]) == ("failed", "storage_failed")
    assert "No such file" in fault["message"] and str(tmp_path) not in fault["message"]
    assert store.get("batches", other, "batch_id")["status"] == "completed"
    assert [record.exc_info for record in caplog.records] == [None]
    store.close()


def test_batches_that_can_not_be_read_are_one_line_until_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, monkeypatch, where="database") as (store, _):
        name, database, real, tries = begun(store), cast(Any, store._database), store.active, 0

        def active() -> list[dict[str, Any]]:
            nonlocal tries
            tries += 1
            database.is_lost = tries < 20
            return real()

        async def play() -> None:
            runner = asyncio.create_task(BatchRunner(store, call_well, 1, wait=0.0).run())
            while database.is_lost or store.get("batches", name, "batch_id")["status"] in ACTIVE:
                await asyncio.sleep(0.002)
            runner.cancel()

        monkeypatch.setattr(store, "active", active)
        database.is_lost = True
        asyncio.run(play())
        (said,) = caplog.records
        assert said.exc_info is None and "disk I/O error" in said.message and tries >= 20


def test_a_log_goes_on_when_there_is_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw(io.RawIOBase):
        is_full, taken = True, b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any, /) -> int:
            if self.is_full:
                raise FULL_DISK
            self.taken += bytes(data)
            return len(data)

    raw, logger = Raw(), logging.getLogger("sglcore")
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(raw)))
    before = logger.level, logger.handlers, logger.propagate
    logs = Logs(ServerConfig())
    for number in range(400):  # more than a buffer holds
        logger.info("line %d is lost in all likelihood", number)
    while not logs._queue.empty() or logs.lost < 400:
        pass
    raw.is_full = False
    logger.info("the disk has room")
    logs.close()
    logger.level, logger.handlers, logger.propagate = before
    assert raw.taken.endswith(b"the disk has room\n") and logs.lost == 400


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_server_runs_though_nobody_can_read_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frontend: Any = SimpleNamespace(health=SimpleNamespace(ready=True, live=True), names=("m",))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        asyncio.run(_show(frontend, "http://here", quiet=True))
        full.flush()  # the interpreter does this at its end
        monkeypatch.undo()
    (said,) = caplog.records
    assert "http://here" in said.message and "No space left" in said.message and said.exc_info is None


def test_a_download_that_finds_no_room_says_where_to_make_it() -> None:
    said = r"No space left on device; free space for the cache .*hub, or set HF_HOME"
    with pytest.raises(ConfigError, match=said), _in_one_line("owner/one", None):
        raise FULL_DISK


def test_a_start_that_finds_no_room_is_one_line() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")
    assert no_space(error) == "/tmp/x: No space left on device; free some space, or write elsewhere"
    assert not no_space(OSError(errno.EACCES, "no")) and not no_space(ValueError("no"))


HERE = "tests/serving/http/test_full_disk.py"
START = f"{HERE}::test_a_start_that_finds_no_room_is_one_line"
COMMAND = "tests/cli/test_main.py::test_a_full_disk_is_one_line"
KERNELS = "devices/cpu/tests/test_first_start.py::test_a_disk_without_room_is_told_with_the_remedy"
WRITERS = MappingProxyType(
    {
        "sglcore/serving/apis/batches/batch_store.py": f"{HERE}::test_a_batch_fails_with_the_reason_and_stays_so",
        "sglcore/serving/http/logs.py": "tests/serving/http/test_logs.py::test_a_full_disk_disturbs_no_request_and_is_counted",
        "sglcore/serving/replicas/socket_folder.py": COMMAND,
        "sglcore/engine/ranks/link_measurement.py": START,
        "sglcore/engine/ranks/team.py": START,
        "sglcore/models/transformers_backend/equivalence_check.py": START,
        "sglcore/cli/bench.py": COMMAND,
        "sglcore/cli/bench_links.py": COMMAND,
        "sglcore/cli/conform.py": COMMAND,
        "devices/cpu/sglcore_cpu/shared_sums.py": "tests/parallel/nodes/test_hosts.py::test_the_memory_of_all_ranks_is_there_before_it_is_used",
        "devices/cpu/sglcore_cpu/first_start.py": KERNELS,
        "devices/cpu/sglcore_cpu/compile.py": KERNELS,
    }
)
"""Our files that write files, with the test of their behaviour on a full disk."""
OPENS = re.compile(r"^[rbt]*[wax+]")
WRITES = (
    "write_text",
    "write_bytes",
    "TemporaryDirectory",
    "mkdtemp",
    "mkstemp",
    "NamedTemporaryFile",
    "save_file",
    "ftruncate",
)
"""Calls that write, in addition to `open`."""


def writes(tree: ast.AST) -> bool:
    """Whether code opens or makes a file for writing."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in WRITES or (name == "open" and any(map(OPENS.match, texts))):
            return True
        if name == "connect" and getattr(getattr(node.func, "value", None), "id", "") == "sqlite3":
            return True
    return False


def test_whatever_writes_files_has_a_test_of_a_full_disk() -> None:
    files = [*(ROOT / "sglcore").rglob("*.py"), *(ROOT / "devices").glob("*/sglcore_*/**/*.py")]
    known = {path.relative_to(ROOT).as_posix(): path for path in files}
    found = {
        name for name, path in known.items() if "/conformance/" not in name and writes(ast.parse(path.read_text()))
    }
    assert found == WRITERS.keys()
    for test in WRITERS.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
