"""Spans of requests for the tracer provider that this process was given by OpenTelemetry's SDK or
an agent, such as `opentelemetry-instrument sglcore serve`."""

from __future__ import annotations

import logging
import sys
import time

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http.tracing import FIRST_TOKEN, Answered, Spans, Traces, attributes_of, first_token_of

log = logging.getLogger("sglcore.serving")


class ProviderSpans:
    """Records spans by OpenTelemetry's API. The provider samples and exports them, with its own
    queue and counters."""

    lost = 0
    """0: the provider counts what it loses."""

    def __init__(self, model: str) -> None:
        """`model`: the model name in spans. Needs the package `opentelemetry-api`."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._model = trace.get_tracer("sglcore"), model
        self._callers = TraceContextTextMapPropagator()
        self._kind, self._failed = trace.SpanKind.SERVER, trace.StatusCode.ERROR

    def record(self, answered: Answered, traceparent: bytes | None) -> None:
        """Record the span of a request that has just ended, as a child of the caller's span (header
        `traceparent`), if any. Does not wait, unless the provider's span processor does.
        """
        ended = time.time_ns()
        started, first = ended - int(answered.seconds * 1e9), first_token_of(answered)
        headers = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
        span = self._tracer.start_span(
            f"{answered.method} {answered.route}",
            context=self._callers.extract(headers),
            kind=self._kind,
            attributes=attributes_of(answered, self._model),
            start_time=started,
        )
        if first is not None:
            span.add_event(FIRST_TOKEN, timestamp=started + int(first * 1e9))
        if answered.status >= 500:
            span.set_status(self._failed)
        span.end(end_time=ended)

    def close(self) -> None:
        """Do nothing: the provider belongs to who made it, and sends the rest at the process's
        end."""


def provider_name() -> str:
    """Return the type of this process's tracer provider; empty if no one has set one.

    Imports nothing: the code that sets a provider has imported the API.
    """
    if (trace := sys.modules.get("opentelemetry.trace")) is None:
        return ""
    provider = trace.get_tracer_provider()
    is_set = not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
    return type(provider).__qualname__ if is_set else ""


def spans_of(server: ServerConfig, model: str) -> Spans | None:
    """Return what takes the spans of requests: the collector of the settings, or else the tracer
    provider that this process was given; None: neither. `model`: the model name in spans. Raises
    ConfigError for an endpoint that is no URL of HTTP."""
    if server.otlp_traces_endpoint is not None:
        return Traces(server.otlp_traces_endpoint, model)
    if not (provider := provider_name()):
        return None
    log.info("spans of requests go to OpenTelemetry's %s of this process", provider)
    return ProviderSpans(model)
