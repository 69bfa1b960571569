"""Runs batches: sends each line to the server's own endpoints, a few at a time, until each line has
a result."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.batches.lines import LONGEST_LINE, Line, read_lines
from sglcore.serving.replicas.server_errors import StorageError, failure

Call = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]
"""Calls an endpoint with its path, a JSON body and the request's id; returns the status and the
JSON of the answer."""
RETRY_SECONDS = 1.0
"""Seconds before a request is sent again that the server could not accept (429 or 503)."""
MOST_DEATHS = 3
"""A request fails after its engine ended during this number of attempts."""
POLL_SECONDS = 1.0
"""Seconds between two checks of a running batch: whether it was cancelled or has expired."""

log = logging.getLogger("sglcore.serving")


class BatchRunner:
    """Runs the batches of a store one after another, the oldest first, on the caller's event loop;
    the disk is read and written in threads."""

    def __init__(
        self, store: BatchStore, call: Call, at_once: int, *, longest: int = LONGEST_LINE, wait: float = RETRY_SECONDS
    ) -> None:
        """`call` sends a request to an endpoint of this server; `at_once`: maximum number of
        requests in progress; `longest`: maximum bytes of a line; `wait`: seconds before an attempt
        is repeated that failed with status 429 or 503. Nothing runs before `run`."""
        self.store, self._longest = store, longest
        self._call, self._at_once, self._wait = call, at_once, wait
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Wake `run`, or let it look at its batch now: called after a batch was added or cancelled
        in the store. Does not wait. Call it on the event loop."""
        self._news.set()

    async def run(self) -> None:
        """Run batches until this task is cancelled; waits for `tell` while there are none. A batch
        that was interrupted continues at the next start, without the lines that have results."""
        while True:
            self._news.clear()
            active = await self._active()
            for batch in active:
                await self._try(batch)
            if not active:
                await self._rest()

    async def _active(self) -> list[dict[str, Any]]:
        """Return the batches that have not ended, oldest first; retries every `wait` seconds until
        the store can be read, and logs the first failure."""
        is_told = False
        while True:
            try:
                return await asyncio.to_thread(self.store.active)
            except (OSError, sqlite3.Error) as error:
                if not is_told:
                    log.error("batches cannot be read; the server tries again every %g s: %s", self._wait, error)
                is_told = True
                await asyncio.sleep(self._wait)

    async def _rest(self) -> None:
        """Wait for the next `tell`.

        Until then, retry to write failed batches that could not be written.
        """
        while not await asyncio.to_thread(self.store.settle):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._wait)
                return
        await self._news.wait()

    async def _try(self, batch: dict[str, Any]) -> None:
        """Run a batch to its end, also one that was begun before; an error makes this batch fail
        and is logged, not raised."""
        try:
            await self._run(batch)
        except (StorageError, OSError, sqlite3.Error) as error:
            log.error("the batch %s failed: %s", batch["id"], error)
            await self._fail(batch, [_storage_fault(error)])
        except Exception as error:
            log.exception("the batch %s failed", batch["id"])
            await self._fail(batch, [_fault("internal_error", f"{type(error).__name__}: {error}")])

    async def _run(self, batch: dict[str, Any]) -> None:
        name = batch["id"]
        lines, faults = await asyncio.to_thread(self._lines, batch)
        if faults:
            return await self._fail(batch, faults)
        counts = {"total": len(lines), "completed": 0, "failed": 0}
        waiting = ("validating", "in_progress")
        begun = await asyncio.to_thread(self.store.move, name, "in_progress", of=waiting, request_counts=counts)
        end = "completed"
        if begun["status"] == "in_progress":
            done = await asyncio.to_thread(self.store.lines_done, name)
            end = await self._answer_all(begun, [line for line in lines if line.number not in done])
        elif begun["status"] == "cancelling":
            end = "cancelled"
        if end == "completed":
            await asyncio.to_thread(self.store.move, name, "finalizing", of=("in_progress",))
        await asyncio.to_thread(self.store.finish, name, end)

    def _lines(self, batch: dict[str, Any]) -> tuple[list[Line], list[dict[str, Any]]]:
        with self.store.content(batch["input_file_id"], "input_file_id").open("rb") as stream:
            return read_lines(stream, batch["endpoint"], self._longest)

    async def _answer_all(self, batch: dict[str, Any], lines: list[Line]) -> str:
        """Get a result for each line, store it, and return how the batch ended: "completed",
        "cancelled" or "expired". Waits for that. An error answer is a result too.

        Requests that are still in progress then are cancelled. Raises StorageError if a result
        cannot be stored.
        """
        rest = iter(lines)

        async def work() -> None:
            for line in rest:
                await self._answer(batch, line)

        workers = [asyncio.create_task(work()) for _ in range(self._at_once)]
        try:
            while pending := _pending(workers):
                known = await asyncio.to_thread(self.store.get, "batches", batch["id"], "batch_id")
                if known["status"] == "cancelling":
                    return "cancelled"
                if time.time() > batch["expires_at"]:
                    return "expired"
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({*pending, news}, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                self._news.clear()
            return "completed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, batch: dict[str, Any], line: Line) -> None:
        request_id, deaths = f"batch_req_{secrets.token_hex(12)}", 0
        while True:
            status, body = await self._call(batch["endpoint"], line.body, request_id)
            deaths += b'"engine_died"' in body and status == 503
            if status not in (429, 503) or deaths == MOST_DEATHS:
                break
            await asyncio.sleep(self._wait)
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        result = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}
        text, is_answer = msgspec.json.encode(result), status < 400
        await asyncio.to_thread(self.store.add_result, batch["id"], line.number, text, is_answer=is_answer)

    async def _fail(self, batch: dict[str, Any], faults: list[dict[str, Any]]) -> None:
        await asyncio.to_thread(self.store.fail, batch, errors={"object": "list", "data": faults})


def _pending(workers: list[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Return the tasks that have not ended. Raises the exception of the first task that failed."""
    for worker in workers:
        if worker.done():
            worker.result()
    return {worker for worker in workers if not worker.done()}


def _storage_fault(error: Exception) -> dict[str, Any]:
    told = failure(error)
    if told is not None:
        return _fault(told.code or "", told.message)
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return _fault("storage_failed", f"the files of this batch cannot be read: {reason}")


def _fault(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
