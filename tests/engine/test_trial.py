"""A start measures whether draft tokens make it faster, and uses none if they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore import LLM
from sglcore.cli.serve import _fetched
from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.core.ledger import DecisionLedger
from sglcore.engine import speed_trial
from sglcore.engine.speed_trial import MARGIN, ROUNDS, STRIDE, TOKENS, keep_faster
from sglcore.engine.start import start
from sglcore.sampling.params import SamplingParams
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.engine.test_ended_requests import ConstantWorker
from tests.schedule.fake_worker import make_limits

PROMPTS = ("Once upon a time", "The little dog")
PARAMS = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)


def made(left: list[str]) -> Any:
    """A trial with two workers given as names."""
    given = {"bold": "bold", "plain": "plain", "summary": "mtp, 4 tokens a step; as without"}
    return SimpleNamespace(**given, leave=lambda: left.append("left"))


@pytest.mark.parametrize(
    ("times", "kept"), [(MARGIN + 0.01, "bold"), (MARGIN - 0.01, "plain"), (0.5, "plain"), (3.0, "bold")]
)
def test_the_faster_worker_is_kept_and_the_ledger_says_why(
    times: float, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left, ledger = [], [], DecisionLedger()

    def seconds_of(worker: Any, given: Any, seed: int) -> float:
        asked.append((worker, seed))
        # The first run is slow, and each seed takes another time, for both workers.
        return (9.0 if seed == 0 and worker == "bold" else 1.0) * (times if worker == "plain" else 1.0) * (1 + seed)

    monkeypatch.setattr(speed_trial, "seconds_of", seconds_of)
    assert keep_faster(made(left), ledger) == kept
    assert asked == [(worker, seed) for seed in range(ROUNDS + 1) for worker in ("bold", "plain")]
    assert left == ([] if kept == "bold" else ["left"])
    (row,) = ledger.rows
    assert (row.topic, row.requested) == ("speculative", "auto") and f"{times:.2f} times" in row.reason
    assert row.effective == ("off" if kept == "plain" else "mtp, 4 tokens a step; as without")


def test_no_round_begins_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = iter(range(0, 99, 3)), list[int]()
    monkeypatch.setattr(speed_trial.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(speed_trial, "seconds_of", lambda worker, given, seed: asked.append(seed) or 1.0)
    keep_faster(made([]), DecisionLedger())
    assert asked == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], Limits]:
    with LLM(dtype="float32", threads=1) as llm:
        texts = [each.outputs[0].token_ids for each in llm.generate(list(PROMPTS), PARAMS)]
        return texts, llm.engine.scheduler.limits


@pytest.mark.parametrize(("margin", "drafts"), [(0.0, 4), (1e9, 0)])
def test_whichever_is_kept_writes_the_same_text(
    margin: float, drafts: int, plain: tuple[list[list[int]], Limits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_trial, "MARGIN", margin)
    with LLM(speculative="auto", dtype="float32", threads=1) as llm:
        assert llm.engine.scheduler.limits.draft_tokens == drafts
        found = [each.outputs[0].token_ids for each in llm.generate(list(PROMPTS), PARAMS)]
        assert found == plain[0]
        # A page also holds the draft's KV slots during the trial.
        limits = replace(llm.engine.scheduler.limits, kv_bytes=plain[1].kv_bytes, num_pages=plain[1].num_pages)
        assert (limits == plain[1]) == (not drafts)
        assert bool(llm.engine.scheduler.drafts) == bool(drafts)
        llm.engine.scheduler.audit()


def test_a_start_that_nobody_told_proposes_nothing_and_names_the_draft() -> None:
    started = start(resolve_config({"threads": 1}, {}))
    started.worker.close()
    (row,) = [row for row in started.ledger.rows if row.topic == "speculative"]
    assert row.effective == "off" and "(eagle3): --speculative auto" in row.reason
    assert started.worker.limits.draft_tokens == 0


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, "auto"), ({"speculative": "off"}, "off"), ({"draft_model": "x"}, None)]
)
def test_a_server_tries_the_draft_beside_its_model(given: dict[str, Any], wanted: str | None, tmp_path: Path) -> None:
    assert _fetched(EngineConfig(**given), quiet=True).speculative == wanted
    assert _fetched(EngineConfig(model=str(tmp_path)), quiet=True).speculative is None


class Timed(ConstantWorker):
    """A worker of which each step takes one second, and that keeps its steps."""

    def __init__(self, limits: Limits, clock: list[float]) -> None:
        super().__init__(limits)
        self.clock, self.steps = clock, list[tuple[int, ScheduleBatch, bytes]]()
        self.in_flight = self.most_in_flight = 0

    def submit(self, batch: ScheduleBatch) -> Ticket:
        self.clock[0] += 1.0
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        words = b"" if batch.sampling is None else batch.sampling.seed_words.tobytes()  # pyright: ignore
        self.steps.append((batch.composition, batch, words))
        return super().submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        self.in_flight -= 1
        return super().collect(ticket)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("context", "tokens"), [(1000, TOKENS), (25, 10)])
def test_a_text_is_timed_from_the_end_of_its_prompt_to_its_own(
    context: int, tokens: int, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt takes four steps, and the last of them gives the first token."""
    clock = [0.0]
    monkeypatch.setattr(speed_trial, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    limits = make_limits(
        vocab_size=2147, max_model_len=context, num_pages=300, max_batch_tokens=4, runs_ahead=runs_ahead
    )
    worker = Timed(limits, clock)
    given: Any = SimpleNamespace(prompt=np.arange(15, dtype=np.int32))
    seconds = speed_trial.seconds_of(worker, given, seed=0)
    assert seconds == tokens - 1 - runs_ahead and len(worker.steps) == 4 + tokens - 1
    assert worker.most_in_flight == 1 + runs_ahead


def test_each_text_of_a_trial_has_a_seed_and_composition_numbers_of_its_own() -> None:
    """A worker may keep what it knows of a composition, and the scheduler after the trial begins at
    0."""
    given: Any = SimpleNamespace(prompt=np.arange(15, dtype=np.int32))
    words, numbers = list[bytes](), list[set[int]]()
    for seed in (0, 1, ROUNDS, 0):
        worker = Timed(make_limits(vocab_size=2147, max_model_len=25, max_batch_tokens=4), [0.0])
        speed_trial.seconds_of(worker, given, seed)
        words.append(worker.steps[0][2])
        numbers.append({composition for composition, *_ in worker.steps})
        assert all(-(seed + 1) * STRIDE <= number < -seed * STRIDE for number in numbers[-1])
    assert words[0] == words[3] and len(set(words)) == 3
    assert numbers[0] == numbers[3] and not numbers[0] & numbers[1] and not numbers[1] & numbers[2]


def test_a_worker_that_is_exactly_so_many_times_as_fast_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_trial, "seconds_of", lambda worker, given, seed: MARGIN if worker == "plain" else 1.0)
    assert keep_faster(made([]), DecisionLedger()) == "bold"


def test_the_middle_of_the_rounds_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round that something else on the machine has slowed down or sped up does not."""
    for rates, kept in (((9.0, 1.0, 1.1), "plain"), ((0.1, 1.3, 1.4), "bold")):
        plain = iter((1.0, *rates))
        monkeypatch.setattr(
            speed_trial, "seconds_of", lambda worker, given, seed, plain=plain: next(plain) if worker == "plain" else 1
        )
        assert keep_faster(made([]), DecisionLedger()) == kept
