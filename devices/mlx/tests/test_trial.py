"""`--speculative auto` measures a worker with speculation and one without, over the same weights
and KV cache, and keeps the faster one. Both write the same text."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from devices.mlx.tests.parity import TokenEngine
from sglcore.engine import speed_trial
from sglcore.engine.start import embedded_model

SETTINGS: Mapping[str, Any] = MappingProxyType({"page_size": 16, "kv_cache_memory": 8 << 20})
PROMPTS = [[1, 300, 400], [1, 500, 600, 700]]


def texts(engine: TokenEngine) -> list[list[int]]:
    return [result.tokens for result in engine.session(stagger=1).run(PROMPTS, 24, temperature=1.0)]


@pytest.mark.parametrize(("margin", "tokens"), [(0.0, 4), (1e9, 0)])
def test_the_faster_worker_is_kept_and_writes_what_is_written_without(
    margin: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_trial, "MARGIN", margin)
    monkeypatch.setattr(speed_trial, "ROUNDS", 1)
    with TokenEngine(embedded_model(), **SETTINGS) as engine:
        wanted = texts(engine)
    with TokenEngine(embedded_model(), speculative="auto", **SETTINGS) as engine:
        gc.collect()  # the other worker ends here, and not the thread of both
        (row,) = (row for row in engine.started.ledger.rows if row.topic == "speculative")
        assert "measured now" in row.reason and (row.effective == "off") is (tokens == 0)
        assert engine.worker.limits.draft_tokens == tokens
        assert texts(engine) == wanted
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "sglcore-mlx"]


def test_what_only_the_draft_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_trial, "MARGIN", 1e9)
    monkeypatch.setattr(speed_trial, "ROUNDS", 1)
    with TokenEngine(embedded_model(), speculative="auto", **SETTINGS) as engine:
        worker: Any = engine.worker
        state = worker._stepper._state
        assert state.cells and not state.draft_cells and state.drafts is None and state.history is None
