"""Metrics: Prometheus reads what engines and requests report."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.engine_stats import past_only
from sglcore.serving.replicas.metrics.server_metrics import CLOCKS, Histogram, Metrics, RequestClock, kv_usage
from sglcore.serving.replicas.metrics.vllm_metrics import VllmFamilies
from tests.serving.conftest import Server

LISTED = ("paths", "drafts")
STATS = EngineStats(
    waiting=3,
    running=5,
    num_pages=100,
    free_pages=40,
    cached_pages=30,
    unused_cached_pages=10,
    num_snapshots=8,
    free_snapshots=3,
    cached_snapshots=4,
    evicted_snapshots=6,
    snapshot_hits=9,
    num_window_pages=16,
    free_window_pages=6,
    cached_window_pages=7,
    evicted_window_pages=12,
    kv_bytes=4000,
    window_bytes=500,
    state_bytes=600,
    snapshot_bytes=800,
    host_bytes=900,
    hit_tokens=70,
    looked_up_tokens=90,
    retractions=2,
    steps=11,
    prompt_tokens=1000,
    computed_prompt_tokens=930,
    generation_tokens=456,
    host_seconds=0.25,
    host_steps=11,
    step_seconds=1.5,
    paths={"eager": 4, "full": 7},
    stale_rows=4,
    invalid_rows=1,
    swap_rows=1000,
    swap_hits=960,
    swap_waits=21,
    loaded_bytes=5120,
    stored_bytes=2048,
    drafts={(4, 0, 3, 0): 2, (4, 0, 3, 3): 1, (5, 2, 3, 1): 4, (5, 2, 0, 0): 3},
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, read by an independent parser."""
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"sglcore_{name}", tuple(sorted(labels.items()))]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny", "1.2.3", lambda: [("0", "ready", STATS), ("1", "starting", None)])


_VALUES: dict[str, Any] = {
    name: 101 + 7 * place for place, name in enumerate(EngineStats.__struct_fields__) if name not in LISTED
}
NUMBERS = EngineStats(**_VALUES, paths={"eager": 4})
"""Numbers of which no two are the same."""

OWN_NAMES = {
    "num_requests_waiting": "waiting",
    "num_requests_running": "running",
    "num_grammars_compiling": "compiling",
    "kv_cache_pages": "num_pages",
    "prefix_cache_pages": "cached_pages",
    "state_snapshots": "num_snapshots",
    "prefix_cache_snapshots": "cached_snapshots",
    "state_snapshot_hits_total": "snapshot_hits",
    "state_snapshots_evicted_total": "evicted_snapshots",
    "window_pages": "num_window_pages",
    "window_pages_free": "free_window_pages",
    "prefix_cache_window_pages": "cached_window_pages",
    "window_pages_evicted_total": "evicted_window_pages",
    "kv_cache_bytes": "kv_bytes",
    "window_bytes": "window_bytes",
    "state_bytes": "state_bytes",
    "state_snapshot_bytes": "snapshot_bytes",
    "host_cache_bytes": "host_bytes",
    "prefix_cache_queries_tokens_total": "looked_up_tokens",
    "prefix_cache_hits_tokens_total": "hit_tokens",
    "prompt_tokens_total": "prompt_tokens",
    "prompt_tokens_computed_total": "computed_prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "retractions_total": "retractions",
    "failed_steps_total": "failed_steps",
    "step_host_seconds_sum": "host_seconds",
    "step_host_seconds_count": "host_steps",
    "step_seconds_total": "step_seconds",
    "stale_rows_total": "stale_rows",
    "invalid_rows_total": "invalid_rows",
    "hisparse_rows_total": "swap_rows",
    "hisparse_hits_total": "swap_hits",
    "hisparse_waits_total": "swap_waits",
    "hisparse_load_bytes_total": "loaded_bytes",
    "hisparse_store_bytes_total": "stored_bytes",
}
"""Names on the page -> fields of the numbers."""


def of_engine(numbers: EngineStats) -> dict[str, float]:
    """What the page shows of one engine by names that have no further label."""
    page = samples(Metrics("tiny", "1", lambda: [("0", "ready", numbers)]))
    where = (("model", "tiny"), ("replica", "0"))
    return {name.removeprefix("sglcore_"): value for (name, labels), value in page.items() if labels == where}


def test_each_number_of_an_engine_stands_under_its_own_name() -> None:
    used = 1 - (NUMBERS.free_pages + NUMBERS.unused_cached_pages) / NUMBERS.num_pages
    found = of_engine(NUMBERS)
    assert found.pop("kv_cache_usage_ratio") == pytest.approx(used)
    assert found.pop("state_snapshots_in_use") == NUMBERS.num_snapshots - NUMBERS.free_snapshots
    assert found == {name: getattr(NUMBERS, field) for name, field in OWN_NAMES.items()}


def test_of_an_engine_that_has_ended_what_it_counted_stays_and_what_it_holds_is_nothing() -> None:
    before, after = of_engine(NUMBERS), of_engine(past_only(NUMBERS))
    counted = {name for name in before if name.endswith(("_total", "_sum", "_count"))}
    assert after == {name: value if name in counted else 0 for name, value in before.items()}
    assert past_only(STATS).drafts == STATS.drafts and past_only(STATS).paths == STATS.paths


def test_accepted_draft_tokens_are_counted_by_step(metrics: Metrics) -> None:
    about = {"model": "tiny", "replica": "0"}
    assert sample(metrics, "accepted_draft_tokens_sum", **about) == 7
    assert sample(metrics, "accepted_draft_tokens_count", **about) == 10


def test_a_servers_own_numbers_are_on_the_page(metrics: Metrics) -> None:
    metrics.in_flight = 2
    metrics.connections, metrics.engine_deaths = lambda: 3, lambda: 4
    metrics.lost_log_records, metrics.lost_spans = lambda: 5, lambda: 6
    for _ in range(7):
        metrics.refused("overloaded")
    for _ in range(8):
        metrics.responded("POST", "/v1/completions", 429)
    metrics.unknown_fields["/v1/completions",] += 9
    assert sample(metrics, "http_requests_in_flight") == 2
    assert sample(metrics, "http_connections") == 3
    assert sample(metrics, "engine_deaths_total") == 4
    assert sample(metrics, "log_records_lost_total") == 5
    assert sample(metrics, "spans_lost_total") == 6
    assert sample(metrics, "http_refusals_total", code="overloaded") == 7
    assert sample(metrics, "http_responses_total", method="POST", endpoint="/v1/completions", status="429") == 8
    assert sample(metrics, "unknown_fields_total", endpoint="/v1/completions") == 9
    assert sample(metrics, "build_info", version="1.2.3") == 1


def test_steps_are_told_by_what_ran_them(metrics: Metrics) -> None:
    found = {path: sample(metrics, "steps_total", model="tiny", replica="0", path=path) for path in STATS.paths}
    assert found == STATS.paths


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("accepted_draft_tokens_bucket", "le", {"0.0": 5, "1.0": 9, "2.0": 9, "3.0": 10, "+Inf": 10}),
        ("draft_tokens_total", "place", {"1": 7, "2": 7, "3": 7}),
        ("draft_tokens_accepted_total", "place", {"1": 5, "2": 1, "3": 1}),
        ("draft_tokens_wasted_total", "place", {"1": 2, "2": 6, "3": 6}),
        ("draft_steps_by_context_total", "context", {"15": 3, "31": 7}),
        ("draft_proposed_by_cached_total", "cached", {"0": 9, "0.5": 12}),
        ("draft_accepted_by_tokens_total", "tokens", {"0": 0, "3": 7}),
    ],
)
def test_what_came_of_proposals_is_told_by_what_it_depends_on(
    metrics: Metrics, name: str, label: str, values: dict[str, float]
) -> None:
    found = {each: sample(metrics, name, model="tiny", replica="0", **{label: each}) for each in values}
    assert found == values


def test_nothing_is_told_of_proposals_where_there_are_none() -> None:
    plain = Metrics("tiny", "1", lambda: [("0", "ready", EngineStats())])
    assert not [name for name, _ in samples(plain) if "draft" in name]


def test_every_replica_has_one_state_and_no_numbers_before_its_first_report(metrics: Metrics) -> None:
    states = {
        (dict(labels)["replica"], dict(labels)["state"])
        for (name, labels), value in samples(metrics).items()
        if name == "sglcore_replica_state" and value == 1
    }
    assert states == {("0", "ready"), ("1", "starting")}
    assert not [labels for name, labels in samples(metrics) if "running" in name and ("replica", "1") in labels]


def test_a_clock_times_the_first_of_all_samples_and_counts_every_token_and_one_end(metrics: Metrics) -> None:
    clock = metrics.clock()
    clock.on_first_tokens(1)
    clock.on_first_tokens(1)
    clock.on_tokens(4, 0.04)
    clock.on_tokens(0, 9.0)
    clock.on_end("stop")
    clock.on_end("abort")
    assert sample(metrics, "time_to_first_token_seconds_count", model="tiny") == 1
    assert sample(metrics, "inter_token_seconds_count", model="tiny") == 4
    assert sample(metrics, "inter_token_seconds_sum", model="tiny") == pytest.approx(0.04)
    assert sample(metrics, "inter_token_seconds_bucket", model="tiny", le="0.01") == 4
    assert sample(metrics, "inter_token_seconds_bucket", model="tiny", le="0.005") == 0
    assert sample(metrics, "request_seconds_count", model="tiny") == 1
    assert sample(metrics, "requests_total", model="tiny", reason="stop") == 1
    assert "abort" not in metrics.page().decode()
    assert clock.tokens == 6
    clock.on_restart()
    assert clock.tokens == 0


def test_a_value_on_a_bound_is_in_its_bucket_and_one_beyond_all_is_in_the_last() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == ([("1.0", 1.0), ("2.0", 3.0), ("+Inf", 4.0)], 11.5)


def test_two_servers_in_one_process_count_apart(metrics: Metrics) -> None:
    other = Metrics("tiny", "1", list)
    other.clock().on_end("stop")
    assert "sglcore_requests_total{" not in metrics.page().decode()


def test_a_model_without_pages_uses_none() -> None:
    assert kv_usage(EngineStats()) == 0.0


def test_labels_survive_any_name_of_a_model() -> None:
    name = 'a"b\\c\nd'
    metrics = Metrics(name, "1", lambda: [("0", "ready", STATS)])
    assert sample(metrics, "num_requests_running", model=name, replica="0") == 5


def test_retry_after_is_how_long_those_who_wait_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sglcore.serving.replicas.metrics.server_metrics.time.monotonic", lambda: now[0])
    metrics = Metrics("tiny", "1", list)
    assert metrics.retry_after(1000) == 1, "nothing has been observed yet"
    for _ in range(10):
        metrics.request_ended("stop", 0.1)
        now[0] += 0.5
    assert [metrics.retry_after(waiting) for waiting in (0, 1, 2, 3, 20, 10_000)] == [1, 1, 1, 2, 10, 60]


def test_retry_after_comes_from_the_newest_ends_and_from_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sglcore.serving.replicas.metrics.server_metrics.time.monotonic", lambda: now[0])
    metrics = Metrics("tiny", "1", list)
    for seconds in (9.0, *[100.0] * 4, *[0.5] * 64, *[1.5] * 64):
        metrics.request_ended("stop", 0.1)
        now[0] += seconds
        if seconds == 9.0:
            assert metrics.retry_after(5) == 1, "one end is no rate"
    assert metrics.retry_after(10) == 10, "those before the newest 128 took longer"


def test_a_prompts_clock_is_noted_in_the_request_that_brought_it(metrics: Metrics) -> None:
    async def task() -> None:
        metrics.clock().on_prompt(7, 4)

    async def request() -> list[RequestClock]:
        clocks: list[RequestClock] = []
        CLOCKS.set(clocks)
        await asyncio.create_task(task())
        return clocks

    assert [(clock.prompt_tokens, clock.cached_tokens) for clock in asyncio.run(request())] == [(7, 4)]
    assert CLOCKS.get() is None


def test_the_same_numbers_stand_under_the_names_of_vllm_where_that_is_asked_for(metrics: Metrics) -> None:
    assert not any(name.startswith("vllm:") for name, _ in samples(metrics))
    metrics.add(VllmFamilies(metrics, "tiny", lambda: [("0", "ready", STATS), ("1", "starting", None)]))
    clock = metrics.clock()
    clock.on_first_tokens(1)
    clock.on_end("stop")
    metrics.clock().on_end("EngineDied")
    found = samples(metrics)
    engine, model = (("engine", "0"), ("model_name", "tiny")), (("model_name", "tiny"),)
    assert {
        name: value for (name, labels), value in found.items() if name.startswith("vllm:") and labels == engine
    } == {
        "vllm:num_requests_running": 5,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prompt_tokens_total": 1000,
        "vllm:generation_tokens_total": 456,
        "vllm:prefix_cache_queries_total": 90,
        "vllm:prefix_cache_hits_total": 70,
        "vllm:num_preemptions_total": 2,
        "vllm:kv_offload_load_bytes_total": 5120,
        "vllm:kv_offload_store_bytes_total": 2048,
    }
    ended = {labels: value for (name, labels), value in found.items() if name == "vllm:request_success_total"}
    assert ended == {(("finished_reason", "stop"), *model): 1}
    assert found["vllm:time_to_first_token_seconds_count", model] == 1
    assert found["vllm:e2e_request_latency_seconds_count", model] == 2


def test_connections_and_requests_in_flight_are_those_of_now(server: Server) -> None:
    """One connection is this request's and one is kept open by another client; the only request in
    flight is this one."""

    def asked(client: httpx.Client) -> tuple[float, float]:
        page = client.get("/metrics").raise_for_status().text
        families = {each.name: each.value for family in text_string_to_metric_families(page) for each in family.samples}
        return families["sglcore_http_connections"], families["sglcore_http_requests_in_flight"]

    with httpx.Client(base_url=server.url) as asking:
        before, flying = asked(asking)
        with httpx.Client(base_url=server.url) as kept:
            assert asked(kept)[0] == before + 1
            assert (asked(asking), flying) == ((before + 1, 1), 1)
