"""Prefill in slices of layers with hisparse: a slice brings in the entries of its layers, decode
steps between slices those that they lack, and no text changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.runtime.hisparse import hisparse_staging
from sglcore.runtime.hisparse.hisparse_staging import StagingRooms
from sglcore.worker.swap_counts import SwapCounts
from tests.laws.attention.test_hisparse_laws import MODELS, Case
from tests.laws.engine import TOKEN_BUCKETS, random_prompts


class Sliced(Case):
    """A case with only the entries on the device that a token reads."""

    def run(self, **settings: Any) -> SwapCounts:
        """Long prompts come while others decode."""
        given = {"max_requests": 6, "graph_token_buckets": TOKEN_BUCKETS, "max_batch_tokens": 48}
        given |= {"prompt_slices": "20", "graph": "off"}
        engine = self.engine(self.top_k, **{**given, **settings})
        self.check(engine.run(random_prompts(1, (9, 100, 17, 90, 34)), 20, stagger=3))
        is_sliced = settings.get("prompt_slices") != "off"
        assert any(path.startswith("layers") for path in engine.paths) is is_sliced, engine.paths
        return engine.recorder.swaps


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sliced]:
    yield Sliced(request.param, tmp_path_factory.mktemp("slices"))


@pytest.mark.needs("host_rows", "host")
def test_slices_change_no_text(case: Sliced) -> None:
    case.run()


@pytest.mark.needs("host_rows", "streams")
@pytest.mark.parametrize("lane", ["priority", "interleave"])
def test_slices_beside_decode_steps_change_no_text(lane: str, tmp_path: Path) -> None:
    """On a stream of their own, with copies of both on further streams."""
    Sliced("shared", tmp_path).run(prompt_lane=lane)


@pytest.mark.needs("host_rows", "host")
def test_what_slices_tell_is_what_whole_prompts_tell(case: Sliced) -> None:
    """The prompts' entries are stored once. Chunks may differ, so other entries are loaded."""
    sliced, whole = case.run(), case.run(prompt_slices="off")
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
        Sliced("shared", tmp_path).run(prompt_lane="priority")


@pytest.mark.needs("host_rows", "streams", "simulator")
def test_rows_that_no_slice_brings_in_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_the_next_layer(monkeypatch)
    with pytest.raises(AssertionError):
        Sliced("latent", tmp_path).run(prompt_lane="priority")
