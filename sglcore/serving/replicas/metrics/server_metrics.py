"""The server's counters, and their form for Prometheus: engines report their own counters, requests
are timed here.

Everything runs on the frontend's event loop, so nothing needs a lock; a scrape reads the newest
numbers and waits for nothing.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.draft_metrics import draft_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "ready", "silent", "unable", "draining", "dead")
_FIRST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WHOLE = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_RATE_WINDOW, _LONGEST_RETRY = 128, 60
_OF_REPLICA = ("model", "replica")


Replicas = Callable[[], Iterable[tuple[str, str, EngineStats | None]]]
"""Returns number (as text), state and newest counters of each replica; None before its first
reply."""


class Histogram:
    """Counts of values by bucket, and their sum. `observe` takes one binary search, so that it can
    be called for each token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: the upper ends of the buckets, inclusive and ascending; the last bucket has
        none."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times: in the bucket with the lowest upper end that is not below
        it."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulated counts by upper end ("+Inf" for the last bucket), in the form of
        prometheus_client, and the sum of the values."""
        total = 0
        cumulated: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            cumulated.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        return cumulated, self._sum


class RequestClock:
    """Times and counts of one prompt. Every call is cheap; a second `on_end` has no effect.
    `outcome`: None until `on_end`; `first_token_seconds`: from the arrival to the first token
    (None: there is none yet); `prompt_tokens` and `cached_tokens`: 0 until `on_prompt`; `tokens`:
    output tokens of all samples so far."""

    __slots__ = ("_metrics", "_started", "cached_tokens", "first_token_seconds", "outcome", "prompt_tokens", "tokens")

    def __init__(self, metrics: Metrics, now: float) -> None:
        """`now`: the time of the prompt's arrival, by `time.perf_counter`."""
        self._metrics = metrics
        self._started = now
        self.outcome: str | None = None
        self.first_token_seconds: float | None = None
        self.prompt_tokens = self.cached_tokens = self.tokens = 0

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token, by `time.perf_counter`; None: there is none yet."""
        return None if self.first_token_seconds is None else self._started + self.first_token_seconds

    def on_prompt(self, tokens: int, cached: int) -> None:
        """Record that the prompt has `tokens` tokens, `cached` of them from the prefix cache.
        Called when the prompt ends."""
        self.prompt_tokens, self.cached_tokens = tokens, cached

    def on_first_tokens(self, count: int) -> None:
        """Record the first `count` tokens of a sample, which arrive now; only for the first sample
        of the prompt is the time counted."""
        self.tokens += count
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self._started
            self._metrics.first_token.observe(self.first_token_seconds)

    def on_tokens(self, count: int, seconds: float) -> None:
        """Record `count` further tokens of one sample, which arrived together, `seconds` after the
        tokens before; each counts with an equal part of that time."""
        if count > 0:
            self.tokens += count
            self._metrics.between_tokens.observe(seconds / count, count)

    def on_restart(self) -> None:
        """Record a restart: the tokens so far are dropped from `tokens`, and will be generated
        again. The time of the first token stays."""
        self.tokens = 0

    def on_end(self, reason: str) -> None:
        """Record the end of the request, and count it in the metrics. `reason`: its finish reason,
        or the name of the class of the error that ended it."""
        if self.outcome is None:
            self.outcome = reason
            self._metrics.request_ended(reason, time.perf_counter() - self._started)


CLOCKS: ContextVar[list[RequestClock] | None] = ContextVar("sglcore_clocks", default=None)
"""The list to which the clocks of all prompts are appended that are started in this task or in
tasks that it starts; None: no list."""

CALLER: ContextVar[str] = ContextVar("sglcore_caller", default="")
"""The id of the HTTP request that this task answers (x-request-id); empty: none."""


class Metrics:
    """All counters of one server. `page` returns the text for Prometheus. Its counters, and its
    callables such as `connections`, are set by other parts of the server."""

    def __init__(self, model: str, version: str, replicas: Replicas) -> None:
        """`model`: the label `model` of the series; `version`: the server's; `replicas()`: number,
        state and newest counters of each engine, called at each scrape."""
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_BETWEEN)
        self.whole = Histogram(_WHOLE)
        self.outcomes: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.unknown_fields: Counter[tuple[str]] = Counter()
        """Counts by endpoint, not by name: clients choose the names, and each would be a permanent
        series."""
        self.in_flight = 0
        self.connections: Callable[[], int] = int
        self.lost_log_records: Callable[[], int] = int
        self.lost_spans: Callable[[], int] = int
        self.engine_deaths: Callable[[], int] = int
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self, model, version, replicas))

    def add(self, families: Collector) -> None:
        """Add further metric families to the page. `families`: a collector of prometheus_client,
        called at each scrape."""
        self._registry.register(families)

    def clock(self) -> RequestClock:
        """Return a new clock for a prompt that arrives now; it is also appended to the list in
        CLOCKS, if there is one."""
        clock = RequestClock(self, time.perf_counter())
        clocks = CLOCKS.get()
        if clocks is not None:
            clocks.append(clock)
        return clock

    def request_ended(self, reason: str, seconds: float) -> None:
        """Count the outcome of a prompt, `reason`, and its time in seconds. Also used for the rate
        in `retry_after`."""
        self.outcomes[reason] += 1
        self.whole.observe(seconds)
        self._ends.append(time.monotonic())

    def refused(self, code: str) -> None:
        """Count a request that middleware refused, by the error's code."""
        self.refusals[code] += 1

    def responded(self, method: str, endpoint: str, status: int) -> None:
        """Count an answer by method, route and HTTP status (0: no answer began). `endpoint`: the
        path of its route, so that there are few series."""
        self.responses[method, endpoint, status] += 1

    def retry_after(self, waiting: int) -> int:
        """Return the seconds after which `waiting` requests will have ended, at the rate of the
        last 128; from 1 to 60. 1 if fewer than two have ended."""
        ends = self._ends
        if len(ends) < 2:
            return 1
        seconds = time.monotonic() - ends[0]
        return min(max(1, math.ceil(max(waiting, 1) * seconds / len(ends))), _LONGEST_RETRY)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Families(Collector):
    """The collector of prometheus_client that reads the counters of a `Metrics` and of the replicas
    at each scrape."""

    def __init__(self, metrics: Metrics, model: str, version: str, replicas: Replicas) -> None:
        self._metrics, self._model, self._version, self._replicas = metrics, model, version, replicas

    def collect(self) -> Iterator[Metric]:
        replicas = list(self._replicas())
        yield from self._of_server()
        yield from self._of_requests()
        yield self._states(replicas)
        yield from self._of_engines([(name, numbers) for name, _, numbers in replicas if numbers is not None])

    def _of_server(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield InfoMetricFamily("sglcore_build", "The server's version.", {"version": self._version})
        for name, text, value in (
            ("http_requests_in_flight", "Requests that are being answered.", metrics.in_flight),
            ("http_connections", "Open connections.", metrics.connections()),
        ):
            yield _family(GaugeMetricFamily, name, text, (), [((), value)])
        for name, text, labels, values in (
            ("log_records_lost", "Log lines that could not be written.", (), {(): metrics.lost_log_records()}),
            ("spans_lost", "Spans that could not be sent to the collector of traces.", (), {(): metrics.lost_spans()}),
            ("engine_deaths", "Engine processes that ended unexpectedly.", (), {(): metrics.engine_deaths()}),
            ("unknown_fields", "Unknown fields of requests.", ("endpoint",), metrics.unknown_fields),
            ("http_responses", "Answers.", ("method", "endpoint", "status"), metrics.responses),
            (
                "http_refusals",
                "Requests that middleware turned away.",
                ("code",),
                {(code,): count for code, count in metrics.refusals.items()},
            ),
        ):
            yield _family(CounterMetricFamily, name, text, labels, sorted(values.items()))

    def _of_requests(self) -> Iterator[Metric]:
        metrics, model = self._metrics, [self._model]
        outcomes = (((self._model, reason), count) for reason, count in sorted(metrics.outcomes.items()))
        yield _family(CounterMetricFamily, "requests", "Requests that ended.", ("model", "reason"), outcomes)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", metrics.first_token),
            ("inter_token_seconds", "From a token to the next of the same sample.", metrics.between_tokens),
            ("request_seconds", "From a request's arrival to its end.", metrics.whole),
        ):
            family = HistogramMetricFamily(f"sglcore_{name}", text, labels=["model"])
            family.add_metric(model, *histogram.buckets())
            yield family

    def _states(self, replicas: list[tuple[str, str, EngineStats | None]]) -> Metric:
        values = (
            ((self._model, name, each), each == state)
            for name, state, _ in replicas
            for each in dict.fromkeys((*STATES, state))
        )
        text = "1 for the state that a replica is in."
        return _family(GaugeMetricFamily, "replica_state", text, (*_OF_REPLICA, "state"), values)

    def _of_engines(self, engines: list[tuple[str, EngineStats]]) -> Iterator[Metric]:
        where = [((self._model, replica), numbers) for replica, numbers in engines]
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in rows:
                yield _family(kind, name, text, _OF_REPLICA, ((labels, read(numbers)) for labels, numbers in where))
        paths = (((*labels, path), count) for labels, numbers in where for path, count in sorted(numbers.paths.items()))
        yield _family(CounterMetricFamily, "steps", "Steps, by what ran them.", (*_OF_REPLICA, "path"), paths)
        host = SummaryMetricFamily("sglcore_step_host_seconds", "The host's own work for a step.", labels=_OF_REPLICA)
        for labels, numbers in where:
            host.add_metric(labels, numbers.host_steps, numbers.host_seconds)
        yield host
        yield from draft_families(self._model, engines)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[tuple[str | int, ...], float]],
) -> Metric:
    """Return a metric family named `sglcore_` and `name`, with these values, each after the values
    of its `labels`. `text`: its help."""
    family = kind(f"sglcore_{name}", text, labels=labels)
    for where, value in values:
        family.add_metric(list(map(str, where)), value)
    return family


def kv_usage(numbers: EngineStats) -> float:
    """Return the share of KV pages, from 0 to 1, that requests hold; 0 without pages. Cached pages
    that no request uses count as free."""
    held = numbers.num_pages - numbers.free_pages - numbers.unused_cached_pages
    return held / numbers.num_pages if numbers.num_pages else 0.0


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_waiting", "Requests that wait for a place in a step.", lambda n: n.waiting),
    ("num_requests_running", "Requests that take part in steps.", lambda n: n.running),
    ("num_grammars_compiling", "Requests that wait for their grammar.", lambda n: n.compiling),
    ("kv_cache_usage_ratio", "The part of the KV pages that requests hold.", kv_usage),
    ("kv_cache_pages", "Pages of the KV cache.", lambda n: n.num_pages),
    ("prefix_cache_pages", "Pages that the prefix cache keeps.", lambda n: n.cached_pages),
    ("state_snapshots", "Places for copies of requests' states.", lambda n: n.num_snapshots),
    (
        "state_snapshots_in_use",
        "Places that requests or the prefix cache hold.",
        lambda n: n.num_snapshots - n.free_snapshots,
    ),
    ("prefix_cache_snapshots", "Copies of states that the prefix cache keeps.", lambda n: n.cached_snapshots),
    ("window_pages", "Pages of the KV cache of layers with a window.", lambda n: n.num_window_pages),
    ("window_pages_free", "Such pages that are free.", lambda n: n.free_window_pages),
    ("prefix_cache_window_pages", "Such pages that the prefix cache keeps.", lambda n: n.cached_window_pages),
    ("kv_cache_bytes", "Memory of the pages, on each device.", lambda n: n.kv_bytes),
    ("window_bytes", "Memory of the pages of layers with a window.", lambda n: n.window_bytes),
    ("state_bytes", "Memory of the states of requests.", lambda n: n.state_bytes),
    ("state_snapshot_bytes", "Memory of the copies of states.", lambda n: n.snapshot_bytes),
    ("host_cache_bytes", "Host memory of the KV cache with hisparse.", lambda n: n.host_bytes),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache.", lambda n: n.looked_up_tokens),
    ("prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache.", lambda n: n.hit_tokens),
    ("state_snapshot_hits", "Requests that began with a cached copy of a state.", lambda n: n.snapshot_hits),
    ("state_snapshots_evicted", "Cached copies of states given up for others.", lambda n: n.evicted_snapshots),
    (
        "window_pages_evicted",
        "Cached pages of layers with a window given up for others.",
        lambda n: n.evicted_window_pages,
    ),
    ("prompt_tokens", "Tokens of prompts.", lambda n: n.prompt_tokens),
    ("prompt_tokens_computed", "Prompt tokens that were computed.", lambda n: n.computed_prompt_tokens),
    ("generation_tokens", "Tokens drawn.", lambda n: n.generation_tokens),
    ("retractions", "Requests preempted because no pages were left.", lambda n: n.retractions),
    ("failed_steps", "Steps that ended with an error.", lambda n: n.failed_steps),
    ("stale_rows", "Rows of steps that were computed for a request that had ended.", lambda n: n.stale_rows),
    ("invalid_rows", "Rows of steps with logits that were not finite.", lambda n: n.invalid_rows),
    ("step_seconds", "Time in which a step was under way.", lambda n: n.step_seconds),
    ("hisparse_rows", "KV entries in host memory that decode steps selected.", lambda n: n.swap_rows),
    ("hisparse_hits", "Selected KV entries that were on the device already.", lambda n: n.swap_hits),
    ("hisparse_waits", "Steps that waited for KV entries from host memory.", lambda n: n.swap_waits),
    ("hisparse_load_bytes", "Bytes of KV entries copied from host memory to the device.", lambda n: n.loaded_bytes),
    ("hisparse_store_bytes", "Bytes of KV entries that the device wrote to host memory.", lambda n: n.stored_bytes),
)
