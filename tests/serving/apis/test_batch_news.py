"""What wakes the runner of batches: no news is lost, and none makes it look again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.serving.apis.batches import runner as running
from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.batches.runner import BatchRunner
from tests.serving.apis.test_batches import PATIENCE, begun


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    found = BatchStore(tmp_path)
    yield found
    found.close()


async def call_well(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    return 200, b"{}"


async def while_runs(runner: BatchRunner, work: Callable[[], Awaitable[None]]) -> None:
    """Do this while the runner runs its batches."""
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(PATIENCE):
        await work()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def over(store: BatchStore, name: str) -> None:
    """Wait for the end of a batch."""
    while store.get("batches", name, "batch_id")["status"] != "completed":
        await asyncio.sleep(0.002)


def test_a_batch_that_is_added_while_the_batches_are_listed_is_run(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, added = store.active, list[str]()
    runner = BatchRunner(store, call_well, 1)

    def active() -> list[dict[str, Any]]:
        found = real()
        if not added:
            added.append(begun(store))
            runner.tell()
        return found

    async def end() -> None:
        while not added:
            await asyncio.sleep(0.002)
        await over(store, added[0])

    monkeypatch.setattr(store, "active", active)
    asyncio.run(while_runs(runner, end))


def test_a_batch_that_is_added_to_a_runner_at_rest_is_run(store: BatchStore) -> None:
    runner = BatchRunner(store, call_well, 1)

    async def add() -> None:
        for _ in range(3):
            name = begun(store)
            runner.tell()
            await over(store, name)
            await asyncio.sleep(0.01)

    asyncio.run(while_runs(runner, add))


def test_a_batch_that_runs_is_looked_at_once_for_each_news_and_leaves_no_task(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, real, looks, asked, go_on = begun(store), store.get, 0, 0, asyncio.Event()

    def get(*given: Any) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return real(*given)

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        await go_on.wait()
        return 200, b"{}"

    async def turns() -> None:
        for _ in range(30):
            await asyncio.to_thread(store.active)

    runner = BatchRunner(store, call, 2)

    async def tell() -> None:
        while asked < 2:
            await asyncio.sleep(0.002)
        await turns()
        tasks = len(asyncio.all_tasks())
        for _ in range(8):
            before = looks
            runner.tell()
            while looks == before:
                await asyncio.sleep(0)
        await turns()
        assert looks == before + 1 and len(asyncio.all_tasks()) <= tasks
        go_on.set()
        await over(store, name)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(running, "POLL_SECONDS", PATIENCE)
    asyncio.run(while_runs(runner, tell))


def test_a_batch_that_runs_is_looked_at_without_news_too_and_leaves_no_task(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, real, looks, tasks = begun(store), store.get, 0, list[int]()

    def get(*given: Any) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return real(*given)

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        while looks < 30:
            await asyncio.sleep(0.001)
        tasks.append(len(asyncio.all_tasks()))
        store.move(name, "cancelling")
        await asyncio.Event().wait()
        raise AssertionError

    async def end() -> None:
        while store.active():
            await asyncio.sleep(0.002)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(running, "POLL_SECONDS", 0.001)
    asyncio.run(while_runs(BatchRunner(store, call, 2), end))
    assert store.get("batches", name, "batch_id")["status"] == "cancelled" and max(tasks) < 15


def test_a_batch_that_is_added_while_another_runs_is_run_after_it(store: BatchStore) -> None:
    names, asked = [begun(store)], list[int]()

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(len(names))
        if len(asked) in (1, 12):
            names.append(begun(store))
            runner.tell()
            await asyncio.to_thread(store.active)
        return 200, b"{}"

    runner = BatchRunner(store, call, 1)

    async def end() -> None:
        while len(names) < 3:
            await asyncio.sleep(0.002)
        for name in names:
            await over(store, name)

    asyncio.run(while_runs(runner, end))
    assert len(asked) == 27


@pytest.mark.parametrize("done", [(2, 5), (9,), (1, 2, 3), tuple(range(1, 10))])
def test_a_batch_goes_on_with_the_lines_that_have_no_result_wherever_they_stand(
    store: BatchStore, done: tuple[int, ...]
) -> None:
    name, asked = begun(store), list[bytes]()
    store.move(name, "in_progress", request_counts={"total": 9, "completed": 0, "failed": 0})
    for line in done:
        store.add_result(name, line, b"kept", is_answer=True)

    async def call(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(body)
        return 200, b"{}"

    asyncio.run(while_runs(BatchRunner(store, call, 1), lambda: over(store, name)))
    assert asked == [b'{"n":%d}' % (line - 1) for line in range(1, 10) if line not in done]
    batch = store.get("batches", name, "batch_id")
    lines = store.content(batch["output_file_id"]).read_bytes().splitlines()
    assert [place for place, line in enumerate(lines, 1) if line == b"kept"] == list(done)
    assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
