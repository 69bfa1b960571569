"""Spans by OpenTelemetry's API, for the tracer provider that a process was given."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry.trace")

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http.opentelemetry_spans import ProviderSpans, provider_name, spans_of
from sglcore.serving.http.tracing import Answered, Traces
from sglcore.serving.replicas.metrics.server_metrics import Metrics

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Kept(trace.NonRecordingSpan):
    """A span that keeps what it is told."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name, self.given = name, given
        self.events: list[tuple[str, int | None]] = []
        self.code, self.ended = StatusCode.UNSET, 0

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self.events.append((name, timestamp))

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.code = status.status_code if isinstance(status, Status) else status

    def end(self, end_time: int | None = None) -> None:
        self.ended = end_time or 0


class Tracer(trace.Tracer):
    """Keeps all spans."""

    def __init__(self) -> None:
        self.spans: list[Kept] = []

    def start_span(self, name: str, *given: Any, **named: Any) -> trace.Span:
        self.spans.append(Kept(name, named))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, *given: Any, **named: Any) -> Iterator[trace.Span]:  # pyright: ignore
        raise AssertionError("a request's span is never current: requests share a thread")
        yield


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    monkeypatch.setattr(trace, "get_tracer", lambda name: made)
    return made


def answered(status: int = 200, firsts: tuple[float, ...] = (0.25, 0.125)) -> Answered:
    metrics = Metrics("demo", "0", lambda: [])
    clocks = [metrics.clock() for _ in range(2)]
    for clock, first in zip(clocks, firsts, strict=False):
        clock.first_token_seconds = first
        clock.on_prompt(5, 0)
        clock.on_end("length")
    return Answered("POST", "/v1/models/{name}", "/v1/models/a", "mine", status, 0.5, clocks)


def test_a_span_has_the_requests_times_attributes_and_parent(tracer: Tracer) -> None:
    ProviderSpans("demo").record(answered(), f"00-{TRACE}-{SPAN}-01".encode())
    (span,) = tracer.spans
    assert (span.name, span.given["kind"], span.code) == ("POST /v1/models/{name}", SpanKind.SERVER, StatusCode.UNSET)
    parent = trace.get_current_span(span.given["context"]).get_span_context()
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}", parent.is_remote) == (TRACE, SPAN, True)
    started = span.given["start_time"]
    assert span.ended - started == 500_000_000
    assert span.events == [("first token", started + 125_000_000)]
    told = span.given["attributes"]
    assert (told["http.route"], told["gen_ai.usage.input_tokens"], told["gen_ai.request.model"]) == (
        "/v1/models/{name}",
        10,
        "demo",
    )
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]


@pytest.mark.parametrize("header", [None, b"nonsense", b"00-\xff-1-01"])
def test_a_request_without_a_valid_parent_begins_a_trace(tracer: Tracer, header: bytes | None) -> None:
    ProviderSpans("demo").record(answered(), header)
    (span,) = tracer.spans
    assert not trace.get_current_span(span.given["context"]).get_span_context().is_valid


@pytest.mark.parametrize(
    ("status", "code"), [(499, StatusCode.UNSET), (500, StatusCode.ERROR), (503, StatusCode.ERROR)]
)
def test_only_a_servers_error_is_one(tracer: Tracer, status: int, code: StatusCode) -> None:
    ProviderSpans("demo").record(answered(status, ()), None)
    (span,) = tracer.spans
    assert span.code is code and span.events == []


SET = """
from opentelemetry import trace
class Provider(trace.TracerProvider):
    def get_tracer(self, *given, **named): return trace.NoOpTracer()
trace.set_tracer_provider({0})
from sglcore.serving.http.opentelemetry_spans import provider_name
print(repr(provider_name()))
"""


@pytest.mark.parametrize(("made", "name"), [("Provider()", "'Provider'"), ("trace.NoOpTracerProvider()", "''")])
def test_a_provider_that_was_set_is_found(made: str, name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SET.format(made)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == name, ran.stderr


def test_nothing_is_imported_to_find_that_there_is_none() -> None:
    program = (
        "import sys\nfrom sglcore.serving.http.opentelemetry_spans import provider_name\n"
        "print(repr(provider_name()), 'opentelemetry' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "'' False", ran.stderr


def test_a_given_collector_comes_before_the_provider_and_without_either_there_are_no_spans(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert provider_name() == "" and spans_of(ServerConfig(), "demo") is None
    monkeypatch.setattr("sglcore.serving.http.opentelemetry_spans.provider_name", lambda: "Provider")
    with caplog.at_level(logging.INFO, "sglcore.serving"):
        assert isinstance(spans_of(ServerConfig(), "demo"), ProviderSpans)
    assert "spans of requests go to OpenTelemetry's Provider" in caplog.text
    made = spans_of(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9"), "demo")
    assert isinstance(made, Traces)
    made.close()
