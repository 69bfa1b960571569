"""Rounds of an engine's loop over a scripted channel: when it waits, and what its counters begin
with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.device.ledger import DecisionLedger
from sglcore.engine.metered_worker import Meter
from sglcore.engine.start import embedded_model
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.engine_process import REPLY_EVERY, PhaseReplies, _grammars
from sglcore.serving.replicas.engine_service import IDLE_MS, EngineService
from sglcore.serving.replicas.ipc import (
    Embed,
    EngineReply,
    EngineRequest,
    EngineStats,
    GenerateRequest,
    Phase,
    Shutdown,
    pack_ids,
    pack_params,
)
from tests.serving.test_engine_service import LIMITS, Counting, Encoder


class Script:
    """A channel that brings one request in each round, and the order to end once nothing is left to
    do."""

    def __init__(self, *requests: EngineRequest) -> None:
        self._requests = list(requests)
        self.is_busy: Callable[[], bool] = bool
        self.sent: list[EngineReply] = []
        self.waits: list[int] = []

    def receive(self, timeout_ms: int) -> list[EngineRequest]:
        self.waits.append(timeout_ms)
        if self._requests:
            return [self._requests.pop(0)]
        return [] if self.is_busy() else [Shutdown()]

    def send(self, reply: EngineReply) -> None:
        self.sent.append(reply)

    @property
    def numbers(self) -> EngineStats:
        """The counters that were sent last."""
        return next(each for each in reversed(self.sent) if isinstance(each, EngineStats))


class Waiting(TokenEngine):
    """An engine that says in `waits`, one after another, whether it only waits; no more after
    them."""

    waits: tuple[bool, ...] = ()

    @property
    def only_waits(self) -> bool:
        found, *rest = (*self.waits, False)
        self.waits = tuple(rest)
        return found


def made(script: Script, device: Counting, kind: type[TokenEngine] = TokenEngine) -> EngineService:
    meter = Meter(device)
    engine = kind(meter, frozenset(), overlap=True, open_grammars=lambda: None)
    script.is_busy = lambda: engine.has_work
    return EngineService(engine, meter, cast(Any, script))


def asked(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(name, pack_ids([1, 2, 3]), pack_params(SamplingParams(max_tokens=tokens)), 0)


def test_an_engine_waits_for_requests_only_while_it_has_nothing_to_do_and_tells_its_counters_then() -> None:
    script = Script(asked("a", 4), asked("b", 2))
    assert made(script, Counting()).run() == 0
    assert script.waits[0] == script.waits[-1] == IDLE_MS and set(script.waits[1:-1]) == {0}
    numbers = script.numbers
    assert (numbers.requests, numbers.prompt_tokens, numbers.generation_tokens, numbers.running) == (2, 6, 6, 0)


def test_embeddings_are_requests_with_tokens_and_generate_none() -> None:
    script = Script(*(Embed(name, pack_ids([1, 2])) for name in "abc"))
    assert made(script, Encoder()).run() == 0
    numbers = script.numbers
    assert (numbers.requests, numbers.prompt_tokens, numbers.generation_tokens) == (3, 6, 0)


def test_counters_leave_out_what_the_device_did_before_the_loop() -> None:
    script = Script(asked("a", 4))
    service = made(script, Counting())
    service._meter.wait_seconds += 1000.0
    service.engine.scheduler.drafts[1, 0, 2, 1] += 3
    assert service.run() == 0
    numbers = service.stats()
    assert numbers.drafts == {} and 0 < numbers.host_seconds <= numbers.step_seconds < 1000.0


@pytest.mark.parametrize(
    ("waits", "left_out"), [((), 0), ((True, True), 1), ((True, False), 0), ((True, True, True, True), 2)]
)
def test_a_round_that_waited_before_and_after_is_no_step(waits: tuple[bool, ...], left_out: int) -> None:
    steps = []
    for scripted in ((), waits):
        service = made(Script(asked("a", 6)), Counting(), Waiting)
        assert isinstance(service.engine, Waiting)
        service.engine.waits = scripted
        assert service.run() == 0
        steps.append(service.stats().host_steps)
    assert steps[0] - steps[1] == left_out


def test_the_first_and_last_part_of_each_phase_are_told_and_of_the_others_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [50.0]
    monkeypatch.setattr("sglcore.serving.replicas.engine_process.time.monotonic", lambda: now[0])
    script, told = Script(), list[tuple[str, int]]()
    progress = PhaseReplies(cast(Any, script))
    for pause, phase, done in (
        (0.0, "weights", 0),
        (0.5, "weights", 1),
        (0.6, "weights", 2),
        (0.5, "weights", 3),
        (0.1, "weights", 4),
        (0.0, "kv cache", 0),
        (0.1, "kv cache", 1),
        (0.0, "kv cache", 4),
    ):
        now[0] += pause * REPLY_EVERY
        progress(phase, done, 4)
    for each in script.sent:
        assert isinstance(each, Phase) and each.total == 4
        told.append((each.name, each.done))
    assert told == [("weights", 0), ("weights", 2), ("weights", 4), ("kv cache", 0), ("kv cache", 4)]


def test_a_model_that_generates_nothing_opens_no_grammars_and_notes_no_decision_on_them() -> None:
    worker: Any = SimpleNamespace(limits=replace(LIMITS, generates=False))
    started: Any = SimpleNamespace(worker=worker, model_path=embedded_model(), ledger=DecisionLedger())
    assert _grammars(EngineConfig(), started, frozenset()) is None and started.ledger.as_json() == []
    worker.limits = replace(LIMITS, vocab_size=2147)
    assert _grammars(EngineConfig(), started, frozenset({2})) is not None
    assert [each["topic"] for each in started.ledger.as_json()] == ["grammar"]
