"""Stores files and batches in a folder: content as files, metadata in SQLite. Nothing is lost when
the process is killed: a result is durable before it is counted, and a file before it is listed.

Every method waits for the disk and may be called from any thread.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglcore.core.errors import NO_SPACE, ConfigError
from sglcore.serving.replicas.server_errors import InvalidRequest, StorageError

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that has not ended."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY, id TEXT UNIQUE, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, id TEXT UNIQUE, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT, line INTEGER, is_answer INTEGER, value BLOB, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""


class BatchStore:
    """The files and batches in one folder, which only one server may use at a time. Files and
    batches are dicts in the form of OpenAI's API.

    A failed write raises StorageError and stores no part of the object; a failed read raises
    OSError or sqlite3.Error.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder, or make it with its parents; removes files that were not stored
        completely. Raises ConfigError if the folder cannot be used, for example because another
        server has it open."""
        self._files = folder / "files"
        self._lock = threading.Lock()
        self._unwritten: dict[str, dict[str, Any]] = {}
        """Batches that have failed, but not yet on the disk."""
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(folder / "batches.sqlite", check_same_thread=False, timeout=1.0)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(_TABLES)
            known = {row[0] for row in self._database.execute("SELECT id FROM files")}
            for path in self._files.iterdir():
                if path.name not in known:
                    path.unlink()
            self._drop_old_results()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"batch_folder {folder} cannot be used: {error}",
                wanted="a folder that this server alone may write to",
                remedy="name another with --batch-folder",
            ) from None

    def close(self) -> None:
        """Write failed batches that are not written yet, if possible, and close the database.

        Waits for the end of other threads' queries: closing the database during one would crash the
        process.
        """
        self.settle()
        with self._lock:
            self._database.close()

    def add_file(self, content: bytes | memoryview, filename: str, purpose: str) -> dict[str, Any]:
        """Store a file under a new id; returns its object. `purpose`: "batch" for the input of a
        batch, which is not checked here."""
        with self._undone() as made:
            value = self._write((content,), filename, purpose, made)
            with self._lock, self._database:
                self._put("files", value)
        return value

    def content(self, file_id: str, param: str = "file_id") -> Path:
        """Return the path of a file's content. Raises InvalidRequest (status 404) about the
        request's field `param` if no such file is stored."""
        self.get("files", file_id, param)
        return self._files / file_id

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises InvalidRequest if it does not exist (status 404) or if it is the
        input of a batch that has not ended."""
        self.get("files", file_id, "file_id")
        reader = next((each["id"] for each in self.active() if each["input_file_id"] == file_id), None)
        if reader is not None:
            raise InvalidRequest(f"the batch {reader} reads this file", remedy="cancel it first", param="file_id")
        with self._transaction():
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        (self._files / file_id).unlink(missing_ok=True)

    def add_batch(self, batch: Mapping[str, Any]) -> None:
        """Store a new batch, an object in OpenAI's form with a new id. It does not start it:
        `BatchRunner.tell` does."""
        with self._transaction():
            self._put("batches", batch)

    def get(self, table: str, object_id: str, param: str) -> dict[str, Any]:
        """Return the object of a file or a batch; `table`: "files" or "batches". A batch that has
        not ended has its current counts. Raises InvalidRequest (status 404) about the request's
        field `param` if there is none."""
        with self._lock:
            row = self._database.execute(f"SELECT value FROM {table} WHERE id = ?", (object_id,)).fetchone()
        if row is None:
            what = "file" if table == "files" else "batch"
            raise InvalidRequest(f"found no {what} {object_id[:60]!r}", param=param, code="not_found", status=404)
        return self._shown(table, self._known(row[0]))

    def page(
        self, table: str, limit: int, after: str | None, *, ascending: bool = False, purpose: str | None = None
    ) -> dict[str, Any]:
        """Return a page of at most `limit` objects of `table` ("files" or "batches"), newest first
        unless `ascending`, in OpenAI's form: a dict with `data`, the ids of its first and last
        object (None: empty page) and `has_more`. `after`: the last id of the page before (None: the
        first page); `purpose`: files of this purpose only (None: all). Raises InvalidRequest
        (status 404) if there is no object `after`."""
        if after is not None:
            self.get(table, after, "after")
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        where = f"WHERE number {sign} (SELECT number FROM {table} WHERE id = ?)" if after else "WHERE ? IS NULL"
        with self._lock:
            rows = self._database.execute(f"SELECT value FROM {table} {where} ORDER BY number {order}", (after,))
            wanted = (value for row in rows if purpose in (None, (value := json.loads(row[0])).get("purpose")))
            found: list[dict[str, Any]] = [value for value, _ in zip(wanted, range(limit + 1), strict=False)]
        data = [self._shown(table, self._unwritten.get(value["id"], value)) for value in found[:limit]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}

    def active(self) -> list[dict[str, Any]]:
        """Return the objects of the batches that have not ended (status in ACTIVE), oldest first,
        without current counts."""
        with self._lock:
            rows = self._database.execute("SELECT value FROM batches ORDER BY number").fetchall()
        return [value for row in rows if (value := self._known(row[0]))["status"] in ACTIVE]

    def move(self, batch_id: str, status: str, *, of: Iterable[str] = ACTIVE, **known: Any) -> dict[str, Any]:
        """Set a batch's `status`, the time of that status (`STATUS_at`) and the fields `known`, if
        its status is in `of`; otherwise change nothing and raise nothing. Returns the batch as it
        is then; it must exist."""
        with self._transaction():
            return self._move(batch_id, status, of, known)

    def add_result(self, batch_id: str, line: int, result: bytes, *, is_answer: bool) -> None:
        """Store the result of a line (`line`: its number, from 1) as JSON without a newline, as it
        will be in the file of answers or, if not `is_answer`, of errors. It replaces an earlier
        result of that line."""
        with self._transaction():
            row = (batch_id, line, is_answer, result)
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", row)

    def lines_done(self, batch_id: str) -> set[int]:
        """Return the numbers (from 1) of the lines that have results; empty for a batch that has
        ended, because its results are in files."""
        with self._lock:
            rows = self._database.execute("SELECT line FROM results WHERE batch = ?", (batch_id,))
            return {row[0] for row in rows}

    def finish(self, batch_id: str, status: str, **known: Any) -> None:
        """Write the files of a batch's results, at most one of answers and one of errors, and set
        its last `status` with their ids, the counts and the fields `known`, all or nothing. A batch
        that has ended keeps its status."""
        with self._transaction() as made:
            known["request_counts"] = self._counts(batch_id)
            for name in self._kinds(batch_id):
                rows = self._results(batch_id, name)
                value = self._write(rows, f"{batch_id}_{name}.jsonl", "batch_output", made)
                self._put("files", value)
                known[f"{name}_file_id"] = value["id"]
            self._move(batch_id, status, ACTIVE, known)
            self._database.execute("DELETE FROM results WHERE batch = ?", (batch_id,))

    def fail(self, batch: dict[str, Any], **known: Any) -> None:
        """Set a batch's status to "failed" with the fields `known`, and write the files of its
        results if there is space. Does not raise StorageError.

        If nothing can be written, the batch has failed all the same in this process, and `settle`
        writes the status later.
        """
        try:
            return self.finish(batch["id"], "failed", **known)
        except StorageError:
            with suppress(sqlite3.Error):
                batch = self.get("batches", batch["id"], "batch_id")
        if batch["status"] in ACTIVE:
            self._unwritten[batch["id"]] = batch | {"status": "failed", "failed_at": int(time.time()), **known}
        self.settle()

    def settle(self) -> bool:
        """Write the status of failed batches that is not written yet, if the disk allows it; does
        not raise StorageError.

        Return whether all are written, also if there were none.
        """
        for batch_id, batch in list(self._unwritten.items()):
            try:
                with self._transaction():
                    self._update(batch)
            except StorageError:
                return False
            del self._unwritten[batch_id]
            self._drop_old_results()
        return True

    @contextmanager
    def _transaction(self) -> Iterator[list[Path]]:
        with self._undone() as made, self._lock, self._database:
            yield made

    @contextmanager
    def _undone(self) -> Iterator[list[Path]]:
        """Yield a list to which the block appends paths of new files; they are removed again if the
        block fails.

        An OSError or sqlite3.Error of the block is raised as StorageError, other errors unchanged.
        """
        made: list[Path] = []
        try:
            yield made
        except BaseException as error:
            for path in made:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            if isinstance(error, OSError | sqlite3.Error):
                raise _storage_error(error) from error
            raise

    def _write(
        self, content: Iterable[bytes | memoryview], filename: str, purpose: str, made: list[Path]
    ) -> dict[str, Any]:
        """Write the pieces of `content` to a new file, which is durable afterwards, and append its
        path to `made` before writing; returns its object. The database does not get the object
        here."""
        file_id, size = f"file-{secrets.token_hex(12)}", 0
        made.append(self._files / file_id)
        with made[-1].open("xb") as stream:
            for piece in content:
                size += stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        known = {"bytes": size, "created_at": int(time.time()), "filename": filename, "purpose": purpose}
        return {"id": file_id, "object": "file", **known, "status": "processed"}

    def _kinds(self, batch_id: str) -> list[str]:
        """Return the kinds of result files that a batch gets, in this order: "output" if a line was
        answered, "error" if one failed. The caller holds the lock."""
        rows = self._database.execute("SELECT DISTINCT is_answer FROM results WHERE batch = ?", (batch_id,))
        return sorted(("output" if row[0] else "error" for row in rows), reverse=True)

    def _results(self, batch_id: str, kind: str) -> Iterator[bytes]:
        """Return an iterator over the lines of a batch's result file of this kind ("output" or
        "error"), by line number, each with its newline. The caller holds the lock until its end."""
        rows = self._database.execute(
            "SELECT value FROM results WHERE batch = ? AND is_answer = ? ORDER BY line", (batch_id, kind == "output")
        )
        return (row[0] + b"\n" for row in rows)

    def _drop_old_results(self) -> None:
        """Remove results of ended batches, which may have stayed because the disk was full. If it
        still cannot be written to, nothing is removed or raised."""
        names = ", ".join(f"'{each['id']}'" for each in self.active())
        with suppress(StorageError), self._transaction():
            self._database.execute(f"DELETE FROM results WHERE batch NOT IN ({names})")

    def _known(self, text: str) -> dict[str, Any]:
        """Return the object in the JSON of a row, or its newer state that is not written yet."""
        value: dict[str, Any] = json.loads(text)
        return self._unwritten.get(value["id"], value)

    def _update(self, batch: Mapping[str, Any]) -> None:
        self._database.execute("UPDATE batches SET value = ? WHERE id = ?", (json.dumps(batch), batch["id"]))

    def _move(self, batch_id: str, status: str, of: Iterable[str], known: Mapping[str, Any]) -> dict[str, Any]:
        (text,) = self._database.execute("SELECT value FROM batches WHERE id = ?", (batch_id,)).fetchone()
        batch = self._known(text)
        if batch["status"] in of:
            batch |= {"status": status, f"{status}_at": int(time.time()), **known}
            self._update(batch)
        return batch

    def _put(self, table: str, value: Mapping[str, Any]) -> None:
        self._database.execute(f"INSERT INTO {table} (id, value) VALUES (?, ?)", (value["id"], json.dumps(value)))

    def _shown(self, table: str, value: dict[str, Any]) -> dict[str, Any]:
        """Return `value`, an object of `table`; a batch that has not ended gets its current counts,
        in place. The caller must not hold the lock."""
        if table == "batches" and value["status"] in ACTIVE:
            with self._lock:
                value["request_counts"] = self._counts(value["id"])
        return value

    def _counts(self, batch_id: str) -> dict[str, int]:
        (text,) = self._database.execute("SELECT value FROM batches WHERE id = ?", (batch_id,)).fetchone()
        rows = self._database.execute("SELECT is_answer FROM results WHERE batch = ?", (batch_id,)).fetchall()
        completed = sum(row[0] for row in rows)
        counts = {"completed": completed, "failed": len(rows) - completed}
        return {**json.loads(text)["request_counts"], **counts}


def _storage_error(error: OSError | sqlite3.Error) -> StorageError:
    if isinstance(error, OSError):
        reason, is_full = error.strerror or str(error), error.errno in NO_SPACE
    else:
        reason, is_full = str(error), vars(error).get("sqlite_errorcode") == sqlite3.SQLITE_FULL
    return StorageError(f"the folder of batches (batch_folder) cannot be written to: {reason}", is_full=is_full)
