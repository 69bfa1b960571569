"""/v1/files and /v1/batches (OpenAI's API): requests without urgency in one file, and their answers
in another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from sglcore.serving.apis.answer import WITH_BODY, Answer, as_json, documented
from sglcore.serving.apis.batches.batch_store import BatchStore
from sglcore.serving.apis.batches.runner import BatchRunner
from sglcore.serving.apis.batches.upload import read_form
from sglcore.serving.apis.shared_body import Body
from sglcore.serving.replicas.server_errors import InvalidRequest

WINDOW_SECONDS = 24 * 3600
"""Seconds after its creation at which a batch that has not ended expires."""
_GET = (400, 404)
Limit = Annotated[int, Query(ge=1, le=10000)]
Order = Annotated[Literal["asc", "desc"], Query()]


class BatchBody(Body):
    """A request to run the requests in the stored file `input_file_id`, all for one endpoint. The
    file's lines are checked later: faults are in the batch's `errors`. `metadata` is only
    stored."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class FileObject(Answer):
    """A stored file; `bytes` is the size of its content, `created_at` is in seconds since 1970;
    `purpose` is "batch" for an uploaded file, "batch_output" for results; `status` is always
    "processed"."""

    id: str
    object: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str


class Deleted(Answer):
    """The answer to the deletion of a file; `deleted` is always true: a file that cannot be deleted
    gives an error."""

    id: str
    object: str
    deleted: bool


def add_routes(router: APIRouter, runner: BatchRunner | None, most: int) -> None:
    """Add all endpoints to the router. Without a runner they answer 404 and say how to enable
    batches. `most`: maximum bytes of a file."""

    def opened() -> BatchRunner:
        if runner is None:
            raise InvalidRequest(
                "this server keeps no files",
                remedy="start it with --batch-folder FOLDER",
                code="no_batch_folder",
                status=404,
            )
        return runner

    _add_files(router, lambda: opened().store, most)
    _add_batches(router, opened)


def _add_files(router: APIRouter, opened: Callable[[], BatchStore], most: int) -> None:
    @router.post(
        "/v1/files",
        tags=["batches"],
        responses=documented(FileObject, statuses=(400, 404, 413, 415, 507)),
        openapi_extra=_form(),
    )
    async def upload(request: Request) -> Response:
        """Store a file of requests."""
        store, body = opened(), await request.body()
        fields, (name, content) = await asyncio.to_thread(read_form, request.headers.get("content-type", ""), body)
        purpose = fields.pop("purpose", "")
        if purpose != "batch":
            raise InvalidRequest(f"found the purpose {purpose[:60]!r}", wanted="batch", param="purpose")
        _check_size(len(content), most)
        return as_json(await asyncio.to_thread(store.add_file, content, name, purpose), sorted(fields))

    @router.get("/v1/files", tags=["batches"], responses=documented(statuses=_GET))
    async def files(
        purpose: str | None = None, limit: Limit = 10000, order: Order = "desc", after: str | None = None
    ) -> Response:
        """List the stored files, a page at a time."""
        ascending = order == "asc"
        page = await asyncio.to_thread(
            opened().page, "files", limit, after, ascending=ascending, purpose=purpose or None
        )
        return as_json(page)

    @router.get("/v1/files/{file_id}", tags=["batches"], responses=documented(FileObject, statuses=_GET))
    async def file(file_id: str) -> Response:
        """Return the description of a file."""
        return as_json(await asyncio.to_thread(opened().get, "files", file_id, "file_id"))

    @router.delete("/v1/files/{file_id}", tags=["batches"], responses=documented(Deleted, statuses=(*_GET, 507)))
    async def delete(file_id: str) -> Response:
        """Delete a file that no unfinished batch reads."""
        await asyncio.to_thread(opened().delete_file, file_id)
        return as_json({"id": file_id, "object": "file", "deleted": True})

    @router.get(
        "/v1/files/{file_id}/content",
        tags=["batches"],
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
            404: documented(statuses=(404,))[404],
        },
    )
    async def content(file_id: str) -> Response:
        """Return the content of a file."""
        path = await asyncio.to_thread(opened().content, file_id)
        return FileResponse(path, media_type="application/octet-stream")


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise InvalidRequest(
            f"the file has {size} bytes",
            wanted=f"{most} at most",
            remedy="make several files, or start the server with a greater --max-batch-file-bytes",
            param="file",
            code="request_too_large",
            status=413,
        )


def _add_batches(router: APIRouter, opened: Callable[[], BatchRunner]) -> None:
    @router.post("/v1/batches", tags=["batches"], responses=documented(statuses=(*WITH_BODY, 507)))
    async def create(body: BatchBody) -> Response:
        """Create a batch of the requests in a stored file; does not wait until they are run."""
        runner, store = opened(), opened().store
        await asyncio.to_thread(store.content, body.input_file_id, "input_file_id")
        batch = _batch(body)
        await asyncio.to_thread(store.add_batch, batch)
        runner.tell()
        return as_json(batch)

    @router.get("/v1/batches", tags=["batches"], responses=documented(statuses=_GET))
    async def batches(limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None) -> Response:
        """List all batches, newest first, a page at a time."""
        return as_json(await asyncio.to_thread(opened().store.page, "batches", limit, after))

    @router.get("/v1/batches/{batch_id}", tags=["batches"], responses=documented(statuses=_GET))
    async def batch(batch_id: str) -> Response:
        """Return a batch with its current counts."""
        return as_json(await asyncio.to_thread(opened().store.get, "batches", batch_id, "batch_id"))

    @router.post("/v1/batches/{batch_id}/cancel", tags=["batches"], responses=documented(statuses=(*_GET, 507)))
    async def cancel(batch_id: str) -> Response:
        """Cancel a batch; its results so far are kept."""
        runner, store, waiting = opened(), opened().store, ("validating", "in_progress", "cancelling")
        await asyncio.to_thread(store.get, "batches", batch_id, "batch_id")
        found = await asyncio.to_thread(store.move, batch_id, "cancelling", of=waiting)
        if found["status"] != "cancelling":
            raise InvalidRequest(f"the batch is {found['status']}", wanted="one that runs", param="batch_id")
        runner.tell()
        return as_json(await asyncio.to_thread(store.get, "batches", batch_id, "batch_id"))


def _batch(body: BatchBody) -> dict[str, Any]:
    now = int(time.time())
    ends = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": f"batch_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        **{f"{end}_at": None for end in ends},
        "expires_at": now + WINDOW_SECONDS,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }


def _form() -> dict[str, Any]:
    """Return the OpenAPI description of the form by which a file is uploaded, for the endpoint's
    `openapi_extra`."""
    properties = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    schema = {"type": "object", "required": ["file", "purpose"], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
