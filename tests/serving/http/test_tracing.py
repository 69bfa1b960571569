"""Spans of requests as a collector on loopback receives them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.serving.http.middleware.exchanges import Exchanges
from sglcore.serving.http.tracing import Answered, Parent, Traces, _span, _url
from sglcore.serving.replicas.metrics.server_metrics import Metrics

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A collector that keeps everything sent to it. `statuses` are those of its next answers, 200
    after them; each answer waits for `release`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.paths: list[str] = []
        self.statuses: list[int] = []
        self.arrived, self.release = threading.Event(), threading.Event()
        self.release.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                (resource,) = body["resourceSpans"]
                assert resource["resource"]["attributes"][0]["value"] == {"stringValue": "sglcore"}
                spans = resource["scopeSpans"][0]["spans"]
                collector.spans += spans
                collector.sizes.append(len(spans))
                collector.paths.append(self.path)
                collector.arrived.set()
                collector.release.wait()
                self.send_response(collector.statuses.pop(0) if collector.statuses else 200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def ask(traces: Traces, path: str = "/v1/completions", status: int = 200, **headers: str) -> None:
    """Run one request with a prompt of five tokens and an answer of three, through the outermost
    middleware."""
    metrics = Metrics("demo", "0", lambda: [])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = SimpleNamespace(path=path)
        clock = metrics.clock()
        clock.on_first_tokens(1)
        clock.on_tokens(2, 0.01)
        clock.on_prompt(5, 0)
        clock.on_end("length")
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def nothing(*given: Any) -> Any:
        return {}

    pairs = [(name.replace("request_id", "x-request-id").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs, "client": None}
    wrapped = Exchanges(app, metrics, SimpleNamespace(isEnabledFor=lambda level: False), traces)  # pyright: ignore
    asyncio.run(wrapped(scope, nothing, nothing))


def test_a_request_is_a_span_of_its_callers_trace(collector: Collector) -> None:
    traces = Traces(collector.url, "demo")
    ask(traces, traceparent=f"00-{TRACE}-{SPAN}-01", request_id="mine")
    ask(traces, traceparent=f"00-{TRACE}-{SPAN}-00")
    ask(traces, path="/readyz")
    ask(traces, status=500, traceparent="nonsense")
    ask(traces, status=429)
    traces.close()
    first, second, third = collector.spans
    assert (first["traceId"], first["parentSpanId"]) == (TRACE, SPAN) and set(collector.paths) == {"/v1/traces"}
    assert second["traceId"] != TRACE and "parentSpanId" not in second and len(second["traceId"]) == 32
    assert (first["name"], first["kind"], first["status"]) == ("POST /v1/completions", 2, {})
    assert second["status"] == {"code": 2} and third["status"] == {}
    known = {each["key"]: each["value"] for each in first["attributes"]}
    assert known["gen_ai.usage.input_tokens"] == {"intValue": "5"}
    assert known["gen_ai.usage.output_tokens"] == {"intValue": "3"}
    assert known["gen_ai.response.finish_reasons"] == {"arrayValue": {"values": [{"stringValue": "length"}]}}
    assert known["http.request.header.x-request-id"] == {"stringValue": "mine"}
    (event,) = first["events"]
    assert int(first["startTimeUnixNano"]) <= int(event["timeUnixNano"]) <= int(first["endTimeUnixNano"])
    assert traces.lost == 0


def test_a_collector_that_is_not_there_costs_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    traces = Traces("http://127.0.0.1:9", "demo")
    ask(traces)
    ask(traces)
    traces.close()
    assert traces.lost == 2 and caplog.text.count("sending traces to the collector") == 1


def test_a_span_begins_with_its_request_and_tells_the_first_of_all_first_tokens() -> None:
    metrics, first, second = Metrics("demo", "0", lambda: []), 0.125, 0.25
    clocks = [metrics.clock() for _ in range(3)]
    clocks[0].first_token_seconds, clocks[1].first_token_seconds = second, first
    for clock, reason in zip(clocks, ("stop", "length", "abort"), strict=True):
        clock.on_prompt(5, 2)
        clock.on_end(reason)
    clocks[0].tokens, clocks[1].tokens = 7, 4
    answered = Answered("POST", "/v1/models/{name}", "/v1/models/a", "mine", 404, 0.5, clocks)
    span = _span(answered, None, "demo", 2_000_000_000)
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("1500000000", "2000000000")
    assert span["events"] == [{"name": "first token", "timeUnixNano": "1625000000"}]
    assert span["name"] == "POST /v1/models/{name}"
    assert {each["key"]: each["value"] for each in span["attributes"]} == {
        "http.request.method": {"stringValue": "POST"},
        "http.route": {"stringValue": "/v1/models/{name}"},
        "url.path": {"stringValue": "/v1/models/a"},
        "http.response.status_code": {"intValue": "404"},
        "http.request.header.x-request-id": {"stringValue": "mine"},
        "gen_ai.request.model": {"stringValue": "demo"},
        "gen_ai.usage.input_tokens": {"intValue": "15"},
        "gen_ai.usage.output_tokens": {"intValue": "11"},
        "gen_ai.response.finish_reasons": {
            "arrayValue": {"values": [{"stringValue": reason} for reason in ("stop", "length", "abort")]}
        },
        "gen_ai.latency.time_to_first_token": {"doubleValue": first},
    }


def test_a_prompt_that_has_not_ended_has_a_place_among_the_reasons() -> None:
    metrics = Metrics("demo", "0", lambda: [])
    clocks = [metrics.clock() for _ in range(3)]
    clocks[1].on_end("stop")
    span = _span(Answered("POST", "/a", "/a", "", 200, 0.5, clocks), None, "demo", 2_000_000_000)
    known = {each["key"]: each["value"] for each in span["attributes"]}
    reasons = [{"stringValue": reason} for reason in ("", "stop", "")]
    assert known["gen_ai.response.finish_reasons"] == {"arrayValue": {"values": reasons}}
    assert known["http.request.header.x-request-id"] == {"stringValue": ""} and span["events"] == []


def test_the_end_of_the_server_may_come_among_spans_that_are_collected(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglcore.serving.http.tracing.COLLECT_SECONDS", 60.0)
    traces = Traces(collector.url, "demo")
    for _ in range(3):
        ask(traces)
    traces.close()
    assert collector.sizes == [3] and not traces._thread.is_alive()


def test_a_full_queue_holds_up_the_end_of_the_server_for_a_moment_alone(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MOST_AT_ONCE", 1), ("MOST_WAITING", 1), ("LAST_SECONDS", 0.05)):
        monkeypatch.setattr(f"sglcore.serving.http.tracing.{name}", value)
    collector.release.clear()
    traces = Traces(collector.url, "demo")
    ask(traces)
    collector.arrived.wait()
    ask(traces)
    ending = threading.Thread(target=traces.close, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive() and traces.lost == 0


def test_a_request_without_a_prompt_has_no_words_of_models_and_no_first_token() -> None:
    span = _span(Answered("GET", "/v1/models", "/v1/models", "mine", 200, 0.5, ()), None, "demo", 2_000_000_000)
    assert span["events"] == [] and not [each for each in span["attributes"] if each["key"].startswith("gen_ai")]


def test_spans_go_together_up_to_a_number(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.serving.http.tracing.MOST_AT_ONCE", 3)
    monkeypatch.setattr("sglcore.serving.http.tracing.COLLECT_SECONDS", 60.0)
    traces = Traces(collector.url, "demo")
    for _ in range(7):
        ask(traces)
    traces.close()
    assert collector.sizes == [3, 3, 1] and traces.lost == 0


def test_a_collector_that_fails_is_told_of_once_until_it_has_taken_a_message(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglcore.serving.http.tracing.MOST_AT_ONCE", 1)
    collector.statuses = [503, 503, 200, 503, 503]
    traces = Traces(collector.url, "demo")
    for _ in range(5):
        ask(traces)
    traces.close()
    assert traces.lost == 4 and caplog.text.count("sending traces to the collector") == 2


@pytest.mark.parametrize("answer", [b"\0\0\x12\4\0\0\0\0\0", b"HTTP/1.1 many OK\r\n\r\n", b""])
def test_a_collector_that_does_not_answer_by_http_1_costs_its_spans_and_is_asked_again(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that was given the port of gRPC."""
    monkeypatch.setattr("sglcore.serving.http.tracing.MOST_AT_ONCE", 1)
    heard: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link:
                    heard.append(link.recv(1 << 16))
                    link.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector = threading.Thread(target=serve, daemon=True)
        collector.start()
        traces = Traces(f"http://127.0.0.1:{listener.getsockname()[1]}", "demo")
        ask(traces)
        ask(traces)
        traces.close()
        listener.shutdown(socket.SHUT_RDWR)
        collector.join(60)
    assert len(heard) == traces.lost == 2 and caplog.text.count("sending traces to the collector") == 1


def test_spans_that_find_no_place_in_the_queue_are_lost_and_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglcore.serving.http.tracing.MOST_AT_ONCE", 1)
    monkeypatch.setattr("sglcore.serving.http.tracing.MOST_WAITING", 2)
    collector.release.clear()
    traces = Traces(collector.url, "demo")
    ask(traces)
    collector.arrived.wait()
    for _ in range(5):
        ask(traces)
    assert traces.lost == 3
    collector.release.set()
    traces.close()
    assert len(collector.spans) == 3 and traces.lost == 3


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "grpc://host:4317", "", "http://", "https:///v1/traces", "http:host"]
)
def test_an_endpoint_that_is_no_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        Traces(url, "demo")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host/", "http://host/v1/traces"),
        ("https://host/own?key=1", "https://host/own?key=1"),
    ],
)
def test_an_endpoint_without_a_path_has_the_usual_one(given: str, wanted: str) -> None:
    assert _url(given) == wanted


def test_a_parent_is_what_the_header_says_or_nobody() -> None:
    for flags, is_sampled in (("00", False), ("01", True), ("02", False), ("03", True), ("fe", False)):
        assert Parent.of(f"00-{TRACE}-{SPAN}-{flags}".encode()) == Parent(TRACE, SPAN, is_sampled)
    assert Parent.of(f"01-{TRACE}-{SPAN}-01-later".encode()) == Parent(TRACE, SPAN, True), "a later version has more"
    wrong = (f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01")
    for each in (None, b"", b"00-xyz", *map(str.encode, wrong)):
        assert Parent.of(each) is None
