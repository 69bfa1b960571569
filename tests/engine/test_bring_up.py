"""What a start gives to a device's bring-up, and what it makes of the workers that come of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import StrictError
from sglcore.core.ledger import DecisionLedger
from sglcore.engine import start as start_module
from sglcore.engine.start import bring_up, embedded_model, no_progress, start
from tests.engine.test_start import LIMITS, Recorded


def test_a_bring_up_is_given_the_draft_model_that_was_fetched_and_its_seconds_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[EngineConfig] = []

    def bring_up(config: EngineConfig, *more: Any) -> Any:
        given.append(config)
        return {"worker": SimpleNamespace(limits=LIMITS)}, {"load": 2.0}

    monkeypatch.setattr(start_module, "Hub", Recorded)
    monkeypatch.setattr(Recorded, "asked", [])
    monkeypatch.setattr(start_module, "bring_up", bring_up)
    clock = iter([100.0, 107.0])
    monkeypatch.setattr(start_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    started = start(EngineConfig(device="cpu", draft_model="o/d"))
    assert [Path(each.draft_model or "").name for each in given] == ["d"] and Recorded.asked[0][0] == "o/d"
    assert started.seconds == {"load": 2.0, "total": 7.0} and started.check() is None


def test_the_worker_that_a_trial_keeps_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = SimpleNamespace(limits=replace(LIMITS, draft_tokens=3))
    built = {"worker": SimpleNamespace(limits=LIMITS), "trial": "trial"}
    monkeypatch.setattr(start_module, "bring_up", lambda *given: (built, {}))
    monkeypatch.setattr(start_module, "keep_faster", lambda trial, ledger: kept if trial == "trial" else None)
    assert start(EngineConfig(device="cpu")).worker is kept


def test_a_strict_start_takes_no_lesser_choice_than_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(limits=replace(LIMITS, can_overlap=False), close=lambda: None)
    monkeypatch.setattr(start_module, "bring_up", lambda *given: ({"worker": worker}, {}))
    config = EngineConfig(device="cpu", overlap=True)
    assert not start(config).overlap
    with pytest.raises(StrictError, match="overlap: found off"):
        start(replace(config, strict=True))


def test_the_ledger_names_the_model_that_was_requested_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(limits=LIMITS)
    monkeypatch.setattr(start_module, "bring_up", lambda *given: ({"worker": worker}, {}))
    monkeypatch.setenv("HOME", str(embedded_model().parent))
    for model, told in ((None, ("none named", "embedded")), ("~/demo", ("~/demo", str(embedded_model())))):
        started = start(EngineConfig(device="cpu", model=model))
        (row,) = [row for row in started.ledger.rows if row.topic == "model"]
        assert (row.requested, row.effective) == told and started.model_path == embedded_model()


def test_facts_are_those_of_the_device_of_the_chosen_number(monkeypatch: pytest.MonkeyPatch) -> None:
    choice: Any = SimpleNamespace(package=SimpleNamespace(facts="a:b", name="x"), chosen=SimpleNamespace(index=3))
    monkeypatch.setattr(start_module, "resolve", lambda reference, name: lambda index: (reference, name, index))
    assert start_module.facts_of(choice) == ("a:b", "x", 3)


@pytest.mark.parametrize("place", [None, "a place"])
def test_a_bring_up_is_given_its_place_only_where_there_are_several_ranks(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Order:
        def run(self, given: dict[str, Any], report: Any) -> dict[str, Any]:
            asked.append(given)
            report("load", 2.0)
            return {"worker": 1}

    monkeypatch.setattr(start_module, "resolve", lambda reference, name: Order())
    monkeypatch.setattr(start_module, "facts_of", lambda choice: "facts")
    choice: Any = SimpleNamespace(package=SimpleNamespace(bring_up="a:b", name="x"))
    ledger, config = DecisionLedger(), EngineConfig()
    assert bring_up(config, embedded_model(), choice, ledger, no_progress, place) == ({"worker": 1}, {"load": 2.0})
    known = {
        "config": config,
        "package": choice.package,
        "facts": "facts",
        "ledger": ledger,
        "progress": no_progress,
        "model_path": embedded_model(),
    }
    assert asked == [known if place is None else {**known, "place": place}]
