"""Prefill in slices of layers with hisparse: a slice brings in the entries of its layers, decode
steps between slices those that they lack, and no text changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.runtime.hisparse import hisparse_staging
from sglcore.runtime.hisparse.hisparse_staging import StagingRooms
from sglcore.worker.swap_counts import SwapCounts
from tests.checkpoints import save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import INDEXER, deepseek_v32, glm_moe_dsa
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts

CONTEXT, TOLERANCE = 160, 5e-5
MODELS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "compressed": (deepseek_v4, "compressed", 8),
    "latent": (deepseek_v32, "latent", INDEXER["index_topk"]),
    "shared": (glm_moe_dsa, "latent", INDEXER["index_topk"]),
}


class Case:
    """A checkpoint with its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.backend, self.top_k = MODELS[name]
        self.oracle = make(max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)

    def engine(self, **settings: Any) -> TokenEngine:
        hisparse = json.dumps({"device_buffer_size": self.top_k, "host_to_device_ratio": 100})
        given = {"attention_backend": self.backend, "hisparse": hisparse, "page_size": 16, "max_model_len": CONTEXT}
        given |= {"max_batch_tokens": 48, "poison": True, "prompt_slices": "20", "graph": "off"}
        return TokenEngine(self.folder, scramble_pages=3, **{**given, **settings})

    def check(self, **settings: Any) -> SwapCounts:
        """Long prompts come while others decode."""
        engine = self.engine(**settings)
        prompts = random_prompts(1, (9, 100, 17, 90, 34))
        check_logprobs(engine.run(prompts, 20, stagger=3), self.oracle, TOLERANCE)
        is_sliced = settings.get("prompt_slices") != "off"
        assert any(path.startswith("layers") for path in engine.paths) is is_sliced, engine.paths
        return engine.watched.swaps


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("slices"))


@pytest.mark.needs("host_rows", "host")
def test_slices_change_no_text(case: Case) -> None:
    case.check()


@pytest.mark.needs("host_rows", "streams")
@pytest.mark.parametrize("lane", ["priority", "interleave"])
def test_slices_beside_decode_steps_change_no_text(lane: str, tmp_path: Path) -> None:
    """On a stream of their own, with copies of both on further streams."""
    Case("shared", tmp_path).check(prompt_lane=lane)


@pytest.mark.needs("host_rows", "host")
def test_what_slices_tell_is_what_whole_prompts_tell(case: Case) -> None:
    """The prompts' entries are stored once. Chunks may differ, so other entries are loaded."""
    sliced, whole = case.check(), case.check(prompt_slices="off")
    assert (sliced.rows, sliced.stored) == (whole.rows, whole.stored)
    assert sliced.loaded > 0


def forgets_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the older rows of a layer are not brought in where another slice begins with it."""
    start = StagingRooms._start

    def started(self: StagingRooms, stream: Any, staged: Any, turn: int) -> None:
        if turn % 2 == 0:
            start(self, stream, staged, turn)

    monkeypatch.setattr(StagingRooms, "_start", started)


def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a slice does not wait for the copies of its rows."""
    monkeypatch.setattr(hisparse_staging, "wait_for", lambda reading, copying: None)


@pytest.mark.needs("host_rows", "streams", "simulator")
def test_a_slice_that_does_not_wait_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_at_once(monkeypatch)
    with sys.modules["sglcore_sim"].current().expect("race"):
        Case("shared", tmp_path).check(prompt_lane="priority")


@pytest.mark.needs("host_rows", "streams", "simulator")
def test_rows_that_no_slice_brings_in_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_the_next_layer(monkeypatch)
    with pytest.raises(AssertionError):
        Case("latent", tmp_path).check(prompt_lane="priority")
