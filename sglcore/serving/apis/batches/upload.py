"""Reads a form with a file, as browsers and OpenAI's clients send it (multipart/form-data, RFC
7578)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser

from sglcore.serving.replicas.server_errors import InvalidRequest

ENCODED = ("base64", "quoted-printable")
"""Content transfer encodings, used by old clients, that are decoded."""


def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], tuple[str, bytes | memoryview]]:
    """Return the fields of a form by name, as text, and the file name ("file" if it has none) and
    content of its part `file`. The content may be a view of `body`. Raises InvalidRequest if there
    is no file, and if the body is not a form of that type (status 415) or lacks its last
    boundary."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidRequest("the body is not a form", wanted="multipart/form-data", status=415, param="file")
    boundary = _head(f"content-type: {content_type}".encode("latin-1", "replace")).get_boundary()
    if not boundary:
        raise InvalidRequest("the form has no boundary", wanted="multipart/form-data; boundary=...", param="file")
    fields: dict[str, str] = {}
    file: tuple[str, bytes | memoryview] | None = None
    for begin, end in _parts(body, boundary.encode("latin-1", "replace")):
        head, content = _part(body, begin, end)
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            continue
        if name == "file" and file is None:
            file = (head.get_filename() or "file", content)
        else:
            fields[name] = bytes(content).decode("utf-8", "replace")
    if file is None:
        raise InvalidRequest("the form has no file", wanted="a part named file", param="file")
    return fields, file


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and the end (exclusive) of each part in `body`, its header included. Raises
    InvalidRequest after these if the last boundary is missing."""
    line = re.compile(rb"(?:\r\n|\A)--" + re.escape(boundary) + rb"(--)?[ \t]*(?=\r\n|\Z)")
    mark, place, begin = b"--" + boundary, 0, None
    while (place := body.find(mark, place)) >= 0:
        found = line.match(body, max(place - 2, 0))
        place += len(mark)
        if found is None:
            continue
        if begin is not None:
            yield begin, found.start()
        if found[1]:
            return
        begin = found.end() + 2
    raise InvalidRequest("the form has no end", wanted="its last boundary", param="file")


def _part(body: bytes, begin: int, end: int) -> tuple[EmailMessage, bytes | memoryview]:
    """Return the header and the content of the part `body[begin:end]`. The content is a view of
    `body`, or decoded bytes if the header names an old transfer encoding; both are empty for a part
    without the empty line after its header."""
    split = body.find(b"\r\n\r\n", begin, end)
    if split < 0:
        return _head(b""), b""
    head, content = _head(body[begin:split]), memoryview(body)[split + 4 : end]
    if str(head.get("content-transfer-encoding", "")).lower() not in ENCODED:
        return head, content
    decoded = _head(body[begin : split + 4] + content).get_payload(decode=True)
    return head, decoded if isinstance(decoded, bytes) else b""


def _head(text: bytes) -> EmailMessage:
    return BytesParser(policy=policy.HTTP).parsebytes(text)
