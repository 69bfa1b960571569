"""A trace span for each request, sent to a collector by OTLP over HTTP, as JSON, from a thread of
its own.

The format is OpenTelemetry protocol 1.x; attribute names follow its semantic conventions.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import secrets
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from sglcore.core.errors import ConfigError
from sglcore.serving.replicas.metrics.server_metrics import RequestClock

MOST_WAITING, MOST_AT_ONCE = 4096, 512
"""Maximum number of spans that wait for the collector, and of spans in one message."""
SEND_SECONDS, COLLECT_SECONDS, LAST_SECONDS = 5.0, 1.0, 2.0
"""Seconds that the collector may take for a message, seconds for which spans are collected for one
message, and seconds of each of the two waits of `close`."""
_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SERVER, _ERROR = 2, 2
FIRST_TOKEN = "first token"
"""The name of the event of the first token in a span."""

log = logging.getLogger("sglcore.serving")


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of the caller, from the header `traceparent` (W3C Trace Context): ids of 32 and 16
    hexadecimal digits, and whether the caller records the trace."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @staticmethod
    def of(header: bytes | None) -> Parent | None:
        """Return the caller's span in a header's value; None if it is missing or invalid."""
        found = _PARENT.fullmatch(header or b"")
        if found is None or not found[1].strip(b"0") or not found[2].strip(b"0"):
            return None
        return Parent(found[1].decode(), found[2].decode(), bool(int(found[3], 16) & 1))


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has ended. `route`: the path of its route, with names of parameters; `path`:
    as it was requested; `status` 0: no answer began; `seconds`: the time it took; `clocks`: one for
    each prompt that was sent to an engine."""

    method: str
    route: str
    path: str
    request_id: str
    status: int
    seconds: float
    clocks: Sequence[RequestClock]


class Spans(Protocol):
    """Takes the span of each request: `Traces`, or `opentelemetry_spans.ProviderSpans`."""

    @property
    def lost(self) -> int:
        """Number of spans that could not be sent."""
        ...

    def record(self, answered: Answered, traceparent: bytes | None) -> None:
        """Take the span of a request that has just ended; `traceparent` is its header, if any. Does
        not wait."""
        ...

    def close(self) -> None:
        """Send what remains; called once."""
        ...


class Traces:
    """Sends spans of requests to a collector, on a thread of its own. `record` never waits: spans
    that could not be sent are counted in `lost`."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: the collector's URL (an empty path means /v1/traces); `model`: the model name
        in spans.

        Raises ConfigError if the endpoint is no URL of HTTP.
        """
        self._url = _url(endpoint)
        self._model = model
        self.lost = 0
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._is_told = False
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)
        self._thread.start()

    def record(self, answered: Answered, traceparent: bytes | None) -> None:
        """Queue the span of a request that has just ended, unless the caller's trace (header
        `traceparent`) is not sampled.

        Does not wait: if the queue is full, the span is lost and counted.
        """
        parent = Parent.of(traceparent)
        if parent is not None and not parent.is_sampled:
            return
        try:
            self._queue.put_nowait(_span(answered, parent, self._model, time.time_ns()))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Send the remaining spans and end the thread. Waits at most LAST_SECONDS for a place in
        the queue, and as long again for the thread. Call it once."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=LAST_SECONDS)
            self._thread.join(LAST_SECONDS)

    def _send_all(self) -> None:
        goes_on = True
        while goes_on:
            first = self._queue.get()
            spans, end = [first], time.monotonic() + COLLECT_SECONDS
            while spans[-1] is not None and len(spans) < MOST_AT_ONCE:
                try:
                    spans.append(self._queue.get(timeout=max(end - time.monotonic(), 0.0)))
                except queue.Empty:
                    break
            goes_on = spans[-1] is not None
            self._send([span for span in spans if span is not None])

    def _send(self, spans: list[dict[str, Any]]) -> None:
        if not spans:
            return
        resource = {"attributes": _attributes({"service.name": "sglcore"})}
        scoped = {"scope": {"name": "sglcore"}, "spans": spans}
        body = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]}).encode()
        request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SEND_SECONDS):
                self._is_told = False
        except (OSError, ValueError, HTTPException) as error:  # an answer of HTTP/2 is no OSError
            self.lost += len(spans)
            if not self._is_told:
                self._is_told = True
                log.warning("sending traces to the collector at %s failed: %s", self._url, error)


def first_token_of(answered: Answered) -> float | None:
    """Return the seconds from the request to the first token of all its prompts; None: no token."""
    firsts = [clock.first_token_seconds for clock in answered.clocks if clock.first_token_seconds is not None]
    return min(firsts, default=None)


def attributes_of(answered: Answered, model: str) -> dict[str, Any]:
    """Return a span's attributes by their names in OpenTelemetry's semantic conventions. `model`:
    the model's name, for requests with prompts."""
    known: dict[str, Any] = {
        "http.request.method": answered.method,
        "http.route": answered.route,
        "url.path": answered.path,
        "http.response.status_code": answered.status,
        "http.request.header.x-request-id": answered.request_id,
    }
    if answered.clocks:
        known |= {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": sum(clock.prompt_tokens for clock in answered.clocks),
            "gen_ai.usage.output_tokens": sum(clock.tokens for clock in answered.clocks),
            "gen_ai.response.finish_reasons": [clock.outcome or "" for clock in answered.clocks],
        }
    first = first_token_of(answered)
    return known if first is None else {**known, "gen_ai.latency.time_to_first_token": first}


def _span(answered: Answered, parent: Parent | None, model: str, ended: int) -> dict[str, Any]:
    """Return the OTLP span, as a value to encode as JSON, of a request that ended at `ended`, in
    nanoseconds since 1970. Without a `parent` it begins a new trace. `model`: the model's name, for
    requests with prompts."""
    started, first = ended - int(answered.seconds * 1e9), first_token_of(answered)
    span = {
        "traceId": parent.trace_id if parent else secrets.token_hex(16),
        "spanId": secrets.token_hex(8),
        "name": f"{answered.method} {answered.route}",
        "kind": _SERVER,
        "startTimeUnixNano": str(started),
        "endTimeUnixNano": str(ended),
        "attributes": _attributes(attributes_of(answered, model)),
        "events": [] if first is None else [{"name": FIRST_TOKEN, "timeUnixNano": str(started + int(first * 1e9))}],
        "status": {"code": _ERROR} if answered.status >= 500 else {},
    }
    return {**span, "parentSpanId": parent.span_id} if parent else span


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def _url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}", wanted="a URL of OTLP over HTTP, such as http://127.0.0.1:4318"
        )
    return urlunsplit(parts._replace(path=(parts.path.strip("/") and parts.path) or "/v1/traces"))
