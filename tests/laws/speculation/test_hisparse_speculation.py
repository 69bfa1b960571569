"""Draft tokens with hisparse: a step that verifies several tokens of a request swaps in what each
of them chose, entries of rejected tokens are forgotten, and no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.hisparse.hisparse_caches import SlotCaches
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.worker.swap_counts import SwapCounts
from tests.checkpoints import save
from tests.deepseek_v4 import deepseek_v4, with_published_names
from tests.drafts import next_token
from tests.latent import INDEXER, deepseek_v32, glm_moe_dsa
from tests.laws.engine import TokenEngine
from tests.laws.speculation.test_speculative_rows import COMPRESSED, LATENT, Case

TOKENS = 4


def _compressed(folder: Path) -> None:
    with_published_names(deepseek_v4(), folder)


def _latent(folder: Path) -> None:
    next_token(deepseek_v32(), folder, deepseek_v32, first_k_dense_replace=0)


MODELS: Mapping[str, tuple[Callable[[Path], object], Mapping[str, Any], int, int]] = MappingProxyType(
    {
        "compressed": (_compressed, COMPRESSED, 128, 8),
        "latent": (_latent, {**LATENT, "page_size": 16}, 97, INDEXER["index_topk"]),
        "shared": (lambda folder: save(glm_moe_dsa(), folder), {**LATENT, "page_size": 16}, 97, INDEXER["index_topk"]),
    }
)
"""What saves the model, engine settings, the size of the vocabulary, and entries that a token
reads."""


class Swapping(Case):
    """A case with the results of an engine with all entries on the device."""

    def __init__(self, name: str, folder: Path) -> None:
        make, settings, vocabulary, self.top_k = MODELS[name]
        make(folder)
        super().__init__(folder, settings, vocabulary)

    def swap(self, drafter: str, tokens: int = TOKENS, times: int = 1, **settings: Any) -> TokenEngine:
        """Check the texts with as few entries on the device as a step can read."""
        rows = (1 + tokens) * self.top_k
        asked = {"hisparse": json.dumps({"device_buffer_size": rows, "host_to_device_ratio": 100}), **settings}
        return self.verify(drafter, tokens, times, **asked)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swapping]:
    made = Swapping(request.param, tmp_path_factory.mktemp("hisparse"))
    yield made
    made.close()


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("drafter", ["oracle", "adversary", "guessing", "ngram"])
def test_no_drafter_changes_a_text(case: Swapping, drafter: str) -> None:
    case.swap(drafter, overlap=True)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("name", ["compressed", "latent"])
def test_a_draft_of_the_checkpoint_keeps_its_own_entries_on_the_device(name: str, tmp_path: Path) -> None:
    case = Swapping(name, tmp_path)
    case.swap("mtp", overlap=True)
    case.close()


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_their_number_changes_none(case: Swapping, tokens: int) -> None:
    case.swap("guessing", tokens)


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("off", marks=pytest.mark.needs("host_rows", "streams")),
        *(pytest.param(kind, marks=pytest.mark.needs("host_rows", f"graphs.{kind}")) for kind in ("full", "breakable")),
    ],
)
@pytest.mark.parametrize("name", ["compressed", "shared"])
def test_graphs_of_verified_rows_change_none(name: str, graph: str, tmp_path: Path) -> None:
    """A graph is replayed for any number of draft tokens."""
    case = Swapping(name, tmp_path)
    engine = case.swap("guessing", graph=graph, overlap=True)
    assert graph == "off" or {path for path in engine.paths if path != "eager"}, engine.paths
    case.close()


@pytest.mark.needs("host_rows", "host")
def test_requests_that_give_way_change_none(case: Swapping) -> None:
    """Preempted requests come back to other slots."""
    engine = case.swap("guessing", overlap=True, max_requests=3)
    assert engine.worker.limits.max_requests == 3


class Seen:
    """Counts what the caches of an eager engine do, in their own calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen = self.missed = self.loaded = 0
        swap_in_passes, load = SlotCaches.swap_in_passes, HiSparseCoordinator.load

        def swapped(caches: SlotCaches, layer_id: int, chosen: Tensor, passes: Tensor, is_second: bool) -> Any:
            rows, copies = swap_in_passes(caches, layer_id, chosen, passes, is_second)
            self.chosen += int((chosen[passes.amax(0) > 0] >= 0).sum())
            self.missed += sum(int(each.counts.sum()) for each in copies)
            return rows, copies

        def loaded(hisparse: HiSparseCoordinator, layer_id: int, loads: Any) -> Tensor:
            row = hisparse.shape.kept.row.nbytes
            self.loaded += sum(int(each.counts.sum()) for each in loads.all) * row
            return load(hisparse, layer_id, loads)

        monkeypatch.setattr(SlotCaches, "swap_in_passes", swapped)
        monkeypatch.setattr(HiSparseCoordinator, "load", loaded)

    def check(self, told: SwapCounts) -> None:
        assert (told.rows, told.rows - told.hits) == (self.chosen, self.missed)
        assert 0 < self.loaded < told.loaded


@pytest.mark.needs("host_rows", "host")
def test_what_is_told_is_what_happened(case: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that only the device knows. What is loaded includes prompts."""
    seen = Seen(monkeypatch)
    seen.check(case.swap("guessing").recorder.swaps)


@pytest.mark.needs("host_rows", "host")
def test_fewer_entries_than_a_step_reads_are_refused(case: Swapping) -> None:
    rows = (1 + TOKENS) * case.top_k
    asked = json.dumps({"device_buffer_size": rows - 1})
    with pytest.raises(ConfigError, match=f"wanted at least {rows}: 5 tokens, which a step verifies, read {rows}"):
        case.engine(speculative="ngram", draft_tokens=TOKENS, hisparse=asked)
    made = case.engine(speculative="ngram", draft_tokens=TOKENS, hisparse="on").worker.runner.attn_backend.hisparse
    assert isinstance(made, HiSparseCoordinator) and made.shape.buffer_rows == rows


@pytest.mark.needs("host_rows", "host")
def test_what_is_budgeted_is_what_is_allocated(case: Swapping) -> None:
    engine = case.engine(speculative="ngram", draft_tokens=TOKENS, hisparse="on")
    hisparse, slots = engine.worker.runner.attn_backend.hisparse, engine.worker.limits.max_requests + 1
    assert isinstance(hisparse, HiSparseCoordinator)
    assert hisparse.num_bytes == slots * hisparse.shape.slot_bytes + hisparse.shape.room_bytes


def keeps_rejected_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: an entry of a rejected draft token is taken for that of the token in its place."""
    monkeypatch.setattr(SlotCaches, "_forget", lambda self, tokens: None)


def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: all rows of a request swap in at once, as if they were of different requests."""
    begin = SlotCaches.begin

    def begun(self: SlotCaches, tokens: Any, is_second: bool) -> Tensor:
        passes = begin(self, tokens, is_second)
        return torch.cat((tokens.slots.unsqueeze(0), passes[1:] * 0))

    monkeypatch.setattr(SlotCaches, "begin", begun)


def too_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a cache holds what one token reads, so that one row takes what another reads."""
    monkeypatch.setattr(HiSparseConfig, "buffer_rows", lambda self, top_k, most=1: top_k)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("defect", [keeps_rejected_entries, one_pass, too_few_places], ids=lambda each: each.__name__)
def test_a_defect_is_caught(
    case: Swapping, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        for drafter in ("guessing", "adversary"):
            case.swap(drafter)
