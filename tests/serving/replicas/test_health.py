"""The state that probes read: what changes it, what clients are told in each, and its times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sglcore.serving.replicas.ipc import Failed, Phase
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.server_errors import ENDS, GOES_ON, RESTARTS, ShuttingDown
from tests.serving.staged_replicas import staged, until


def make(state: str) -> Health:
    """A health in this state."""
    health = Health()
    if state in ("ready", "silent", "restarting", "draining"):
        health.become_ready()
    if state in ("silent", "restarting"):
        health.begin(state, reason="no beat" if state == "silent" else "")
    if state in ("draining", "draining at once"):
        health.drain()
    if state == "dead":
        health.die("the engine ended")
    return health


@pytest.mark.parametrize(
    ("state", "live", "ready", "started", "takes_requests", "remedy"),
    [
        ("starting", True, False, False, False, RESTARTS),
        ("ready", True, True, True, True, GOES_ON),
        ("silent", True, False, True, True, RESTARTS),
        ("restarting", True, False, True, True, RESTARTS),
        ("draining", True, False, True, False, ENDS),
        ("draining at once", True, False, False, False, ENDS),
        ("dead", False, False, False, False, ENDS),
    ],
)
def test_each_state_has_its_answers_to_probes_and_clients(
    state: str, live: bool, ready: bool, started: bool, takes_requests: bool, remedy: str
) -> None:
    health = make(state)
    assert (health.live, health.ready, health.started) == (live, ready, started)
    assert (health.takes_requests, health.remedy) == (takes_requests, remedy)


def loads(health: Health) -> None:
    health.begin("weights", 1, 2, reason="late")


@pytest.mark.parametrize("change", [loads, Health.become_ready, Health.drain])
@pytest.mark.parametrize("state", ["draining", "draining at once", "dead"])
def test_a_server_that_ends_stays_in_that_state(state: str, change: Callable[[Health], None]) -> None:
    health = make(state)
    before, started = health.snapshot(), health.started
    change(health)
    after = health.snapshot()
    for found in (before, after):
        del found["elapsed_s"]
    assert after == before and health.started == started


def test_a_server_that_drains_can_still_die() -> None:
    health = make("draining")
    health.die("the engine ended")
    assert (health.phase, health.reason) == ("dead", "the engine ended")


def test_a_refusal_names_the_phase_and_the_reason_if_there_is_one() -> None:
    health = Health()
    health.begin("weights")
    assert "(phase: weights)" in str(health.refusal())
    health.begin("unable", reason="no prefill engine")
    assert "(phase: unable: no prefill engine)" in str(health.refusal())
    health.begin("weights")
    assert "no prefill engine" not in str(health.refusal()), "the reason was that of another phase"
    assert not isinstance(health.refusal(), ShuttingDown)
    for state, words in (("draining", "told to stop"), ("dead", "no engine left: the engine ended")):
        error = make(state).refusal()
        assert isinstance(error, ShuttingDown) and words in str(error)


def test_a_probe_shows_the_progress_and_the_time_until_the_first_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("sglcore.serving.replicas.metrics.health.time.monotonic", lambda: now[0])
    health = Health()
    now[0] += 1.23456
    health.begin("weights", 3, 8)
    assert health.snapshot() == {"phase": "weights", "done": 3, "total": 8, "elapsed_s": 1.235}
    now[0] += 1.0
    health.become_ready()
    for _ in range(2):
        now[0] += 10.0
        assert health.snapshot() == {"phase": "ready", "done": 1, "total": 1, "elapsed_s": 2.235}
        health.begin("silent", reason="no beat")
        about = {"phase": "silent", "done": 0, "total": 0, "elapsed_s": 2.235, "reason": "no beat"}
        assert health.snapshot() == about
        health.become_ready()


def test_a_replacement_that_starts_is_no_phase_of_a_server_that_answers() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            first, _ = [await stage.ready_engine() for _ in range(2)]
            first.die()
            replacement = await stage.launched()
            await until(lambda: first.spec.replica in stage.supervisor.replicas)
            replacement.say(Phase("weights", 1, 2))
            replacement.say(Failed("after the phase", 1))
            await until(lambda: bool(stage.supervisor.replicas[first.spec.replica]._error))
            assert stage.supervisor.health.phase == "ready"

    asyncio.run(play())
