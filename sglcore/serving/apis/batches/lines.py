"""Reads the input file of a batch: one line of JSON for each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

MOST_FAULTS = 50
"""Maximum number of faults of a file that are reported; the lines after that are not read."""
LONGEST_LINE = 8 << 20
"""Default maximum bytes of a line; a server passes its own limit of a request."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input file: the number of its line (from 1), its custom id, and its body
    as JSON."""

    number: int
    custom_id: str
    body: bytes


class _Written(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def read_lines(
    content: Iterable[bytes], endpoint: str, longest: int = LONGEST_LINE
) -> tuple[list[Line], list[dict[str, Any]]]:
    """Return the requests in a file's lines, and the file's faults in OpenAI's form: at most
    MOST_FAULTS, and lines after these are not read. Each line must be a POST for `endpoint` with
    its own custom id, without a stream, and have at most `longest` bytes; empty lines are skipped.
    A file without requests is a fault. If there is a fault, no request may be run, although the
    list has some."""
    lines: list[Line] = []
    faults: list[dict[str, Any]] = []
    names: set[str] = set()
    decoder = msgspec.json.Decoder(_Written)
    for number, text in enumerate(content, 1):
        if not text.strip() or len(faults) == MOST_FAULTS:
            continue
        if len(text) > longest:
            found = f"this line has {len(text)} bytes; at most {longest} are allowed (max_request_bytes)"
            faults.append(_fault("request_too_large", found, None, number))
            continue
        try:
            written = decoder.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            faults.append(_fault("invalid_json_line", f"this line is not a request: {error}", None, number))
            continue
        fault = _wrong(written, endpoint, names)
        names.add(written.custom_id)
        if fault is not None:
            faults.append(_fault(*fault, number))
        lines.append(Line(number, written.custom_id, msgspec.json.encode(written.body)))
    if not lines and not faults:
        faults.append(_fault("empty_file", "the file has no requests", None, None))
    return lines, faults


def _wrong(written: _Written, endpoint: str, names: set[str]) -> tuple[str, str, str] | None:
    """Return the code, message and field of the fault of one line; None if it is valid. `names`:
    custom ids of earlier lines. The request's own body is not checked, except that it does not
    stream."""
    if written.custom_id in names:
        return "duplicate_custom_id", f"custom_id {written.custom_id[:60]!r} is on an earlier line", "custom_id"
    if written.method != "POST":
        return "invalid_method", f"found the method {written.method[:60]!r}; wanted POST", "method"
    if written.url != endpoint:
        return "mismatched_endpoint", f"found the url {written.url[:60]!r}; the batch is for {endpoint}", "url"
    if written.body.get("stream"):
        return "invalid_request", "a batch has no streams; leave stream out", "body.stream"
    return None


def _fault(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
