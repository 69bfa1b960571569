"""Two-batch overlap with hisparse: both micro-batches of a decode step swap in what they lack, and
steps with prompts run whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime.hisparse.hisparse_caches import SlotCaches
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator, SecondHalf
from sglcore.worker.swap_counts import SwapCounts
from tests.laws.attention.test_hisparse_laws import MODELS, Case
from tests.laws.engine import TOKEN_BUCKETS, TokenEngine, random_prompts


class Halved(Case):
    """A case with five times the entries on the device that a token reads."""

    def run(self, **settings: Any) -> TokenEngine:
        """Ragged arrivals, while others decode."""
        given = {"max_requests": 6, "graph_token_buckets": TOKEN_BUCKETS, "two_batch_overlap": "on", "graph": "off"}
        engine = self.engine(5 * self.top_k, **{**given, **settings})
        self.check(engine.run(random_prompts(5, (40, 55, 30, 17, 60)), 10, stagger=2))
        return engine


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halved]:
    yield Halved(request.param, tmp_path_factory.mktemp("halves"))


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("more", [{}, {"speculative": "ngram", "draft_tokens": 3}], ids=["plain", "ngram"])
def test_halves_change_no_text(case: Halved, more: dict[str, Any]) -> None:
    assert "eager:halves" in case.run(**more).paths


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("off", marks=pytest.mark.needs("host_rows", "streams")),
        pytest.param("full", marks=pytest.mark.needs("host_rows", "graphs.full")),
    ],
)
def test_halves_with_copies_of_their_own_change_no_text(graph: str, tmp_path: Path) -> None:
    paths = Halved("shared", tmp_path).run(graph=graph).paths
    assert "eager:halves" in paths if graph == "off" else any(path.startswith("full:") for path in paths)


@pytest.mark.needs("host_rows", "host")
def test_halves_tell_what_whole_steps_tell(case: Halved) -> None:
    halves, whole = case.run(), case.run(two_batch_overlap="off")
    assert halves.recorder.swaps == whole.recorder.swaps != SwapCounts()


@pytest.mark.needs("host_rows", "host")
def test_a_prompt_in_a_second_half_is_an_error(case: Halved) -> None:
    engine = case.run()
    halves: Any = engine.worker.runner.halves
    first, second = (backend.hisparse for backend in halves.backends)
    assert isinstance(first, HiSparseCoordinator) and isinstance(second, SecondHalf) and second.whole is first
    prompt: Any = SimpleNamespace(extend_seq_lens=3, num_tokens=3)
    with pytest.raises(ValueError, match="wanted prompts whole"):
        second.plan(prompt)


def counts_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the second micro-batch writes its counts over those of the first."""
    rows_of = SlotCaches.rows_of
    monkeypatch.setattr(SlotCaches, "rows_of", lambda self, count, is_second: rows_of(self, count, False))


@pytest.mark.needs("host_rows", "host")
def test_counts_that_overwrite_each_other_are_caught(case: Halved, monkeypatch: pytest.MonkeyPatch) -> None:
    counts_in_one_place(monkeypatch)
    with pytest.raises(AssertionError):
        test_halves_tell_what_whole_steps_tell(case)


def takes_rows_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the second micro-batch reads the slots of other requests."""
    swap_in = SlotCaches.swap_in

    def swapped(self: SlotCaches, layer_id: int, chosen: Tensor, slots: Tensor, is_second: bool) -> Any:
        return swap_in(self, layer_id, chosen, slots.roll(1) if is_second else slots, is_second)

    monkeypatch.setattr(SlotCaches, "swap_in", swapped)


@pytest.mark.needs("host_rows", "host")
def test_a_half_that_reads_other_slots_is_caught(case: Halved, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_rows_of_the_first(monkeypatch)
    with pytest.raises(AssertionError):
        case.run()
