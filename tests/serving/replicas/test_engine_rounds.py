"""Rounds of an engine's loop over a scripted channel: when it waits, and what its counters begin
with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace as replace_request

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import WorkerLost
from sglcore.core.ledger import DecisionLedger
from sglcore.engine.metered_worker import Meter
from sglcore.engine.start import embedded_model
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.engine_process import REPLY_EVERY, PhaseReplies, _grammars
from sglcore.serving.replicas.engine_service import IDLE_MS, EngineService
from sglcore.serving.replicas.ipc import (
    Done,
    Embed,
    Embedded,
    EngineOutputs,
    EngineReply,
    EngineRequest,
    EngineStats,
    GenerateRequest,
    Pause,
    Phase,
    Refused,
    Shutdown,
    pack_ids,
    pack_params,
)
from tests.serving.replicas.test_engine_service import LIMITS, Counting, Encoder


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


class Strict(Encoder):
    """An encoder that keeps the segments of its prompts, and whose steps fail while `is_broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def submit(self, batch: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("planned")
        return super().submit(batch)


def kinds(script: Script, *wanted: type[Any]) -> list[Any]:
    """The replies of these kinds."""
    return [each for each in script.sent if isinstance(each, wanted)]


def test_an_embedding_that_can_not_be_made_is_refused_or_failed_by_its_name() -> None:
    long = Embed("long", pack_ids([1] * 65))
    script = Script(long, Embed("fine", pack_ids([1, 2])))
    assert made(script, Encoder()).run() == 0
    (refused,), (vector,) = kinds(script, Refused), kinds(script, Embedded)
    assert refused.request_id == "long" and "65" in refused.error
    assert (vector.request_id, vector.error, len(vector.vector)) == ("fine", "", 2 * 4)
    assert (script.numbers.requests, script.numbers.prompt_tokens) == (1, 2)
    device, failed = Strict(), Script(Embed("lost", pack_ids([1, 2])))
    device.is_broken = True
    assert made(failed, device).run() == 0
    (lost,) = kinds(failed, Embedded)
    assert (lost.request_id, lost.vector) == ("lost", b"") and "planned" in lost.error
    assert failed.numbers.failed_steps == 1


def test_segments_go_with_their_prompt_and_without_them_there_are_none() -> None:
    given: list[Any] = []

    class Noting(TokenEngine):
        def embed(self, rid: str, prompt: Any, segments: Any = None) -> Any:
            given.append(None if segments is None else list(segments))
            return super().embed(rid, prompt, segments)

    script = Script(Embed("a", pack_ids([1, 2, 3]), pack_ids([0, 0, 1])), Embed("b", pack_ids([1, 2])))
    assert made(script, Encoder(), Noting).run() == 0
    assert given == [[0, 0, 1], None]


def test_progress_is_followed_for_those_who_ask_for_it() -> None:
    script = Script(*(replace_request(asked(name, 2), progress=name == "a") for name in "ab"))
    assert made(script, Counting()).run() == 0
    outputs = [output for each in kinds(script, EngineOutputs) for output in each.items]
    assert {output.request_id for output in outputs if output.is_progress} == {"a"}


def test_the_counters_before_a_pause_are_told_before_it_and_a_step_that_fails_then_ends_its_requests() -> None:
    class Failing(TokenEngine):
        def drain(self) -> list[EngineOutput]:
            if script.waits[-1] == 0 and not failures:
                failures.append("planned")
                raise RuntimeError("planned")
            return super().drain()

    failures: list[str] = []
    script = Script(asked("a", 9), Pause("p", True), Pause("q", False))
    service = made(script, Counting(), Failing)
    assert service.run() == 0
    place = next(number for number, each in enumerate(script.sent) if isinstance(each, Done))
    assert isinstance(script.sent[place - 1], EngineStats), "what is told of a pause is what was before it"
    assert [each.request_id for each in kinds(script, Done)] == ["p", "q"]
    assert (failures, service.stats().failed_steps) == (["planned"], 1)


@pytest.mark.parametrize("lost_in", ["step", "drain", "check"])
def test_a_worker_that_is_lost_ends_the_loop_at_once(lost_in: str) -> None:
    class Losing(TokenEngine):
        def step(self) -> list[EngineOutput]:
            if lost_in == "step":
                raise WorkerLost("planned")
            return super().step()

        def drain(self) -> list[EngineOutput]:
            if lost_in == "drain":
                raise WorkerLost("planned")
            return super().drain()

    def check() -> None:
        if lost_in == "check":
            raise WorkerLost("planned")

    requests = [Pause("p", True)] if lost_in == "drain" else [] if lost_in == "check" else [asked("a", 3)]
    service = made(Script(*requests), Counting(), Losing)
    service._check = check
    with pytest.raises(WorkerLost, match="planned"):
        service.run()


def test_each_round_is_counted_whether_it_has_work_or_not() -> None:
    rounds: list[int] = []
    script = Script(asked("a", 3))
    service = made(script, Counting())
    service._on_round = lambda: rounds.append(len(script.waits))
    assert service.run() == 0
    assert rounds == list(range(len(script.waits)))
