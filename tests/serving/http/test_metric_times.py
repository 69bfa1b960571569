"""Times and states on the page of metrics: each time counts from the arrival of its prompt, also
after a restart, and every replica has its own rows."""

from __future__ import annotations

import pytest

from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.server_metrics import CLOCKS, STATES, Metrics, RequestClock
from tests.serving.replicas.test_metrics import STATS, sample, samples


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by `time.perf_counter()`."""
    found = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: found[0])
    return found


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_prompt_is_timed_from_its_arrival_once_whatever_engines_it_had(now: list[float], restarts: int) -> None:
    metrics = Metrics("tiny", "1", list)
    clock = metrics.clock()
    assert clock.first_token_at is None
    now[0] += 0.25
    for _ in range(1 + restarts):
        clock.on_first_tokens(3)
        now[0] += 0.5
        if clock.tokens < 3 * (1 + restarts):
            clock.on_restart()
    clock.on_first_tokens(1)
    now[0] += 1.0
    for reason in ("length", "abort"):
        clock.on_end(reason)
    whole = 0.25 + 0.5 * (1 + restarts) + 1.0
    assert (clock.first_token_seconds, clock.first_token_at, clock.outcome) == (0.25, 1000.25, "length")
    for name, wanted in (("time_to_first_token_seconds", 0.25), ("request_seconds", whole)):
        assert (sample(metrics, f"{name}_count", model="tiny"), sample(metrics, f"{name}_sum", model="tiny")) == (
            1,
            wanted,
        )


def test_tokens_that_come_together_share_the_time_since_those_before() -> None:
    metrics = Metrics("tiny", "1", list)
    clock = metrics.clock()
    clock.on_tokens(4, 0.4)
    clock.on_tokens(1, 3.0)
    assert sample(metrics, "inter_token_seconds_bucket", model="tiny", le="0.1") == 4
    assert sample(metrics, "inter_token_seconds_count", model="tiny") == 5
    assert sample(metrics, "inter_token_seconds_sum", model="tiny") == pytest.approx(3.4)


def test_a_clock_belongs_to_the_request_that_is_answered_and_else_to_none() -> None:
    metrics, clocks = Metrics("tiny", "1", list), list[RequestClock]()
    metrics.clock()
    token = CLOCKS.set(clocks)
    made = [metrics.clock() for _ in range(2)]
    CLOCKS.reset(token)
    metrics.clock()
    assert clocks == made


def test_each_replica_has_a_row_for_each_state_and_one_of_them_is_true() -> None:
    metrics = Metrics("tiny", "1", lambda: [("0", "ready", None), ("7", "draining", None), ("8", "new", None)])
    rows = {labels: value for (name, labels), value in samples(metrics).items() if name == "sglcore_replica_state"}
    for replica, state in (("0", "ready"), ("7", "draining"), ("8", "new")):
        own = {dict(labels)["state"]: value for labels, value in rows.items() if ("replica", replica) in labels}
        assert own == {each: float(each == state) for each in (*STATES, *([state] if state == "new" else []))}


def test_replicas_without_draft_tokens_have_no_rows_of_them_beside_one_that_has() -> None:
    plain = EngineStats(running=3)
    metrics = Metrics("tiny", "1", lambda: [("0", "ready", plain), ("1", "ready", STATS), ("2", "ready", None)])
    found = samples(metrics)
    assert {dict(labels)["replica"] for name, labels in found if "draft" in name} == {"1"}
    running = {dict(labels)["replica"]: value for (name, labels), value in found.items() if "requests_running" in name}
    assert running == {"0": 3, "1": 5}
