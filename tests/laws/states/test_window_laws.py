"""Sliding-window layers keep only the last tokens: chunks, prefix hits, preemption, overlap and
graphs change nothing, whatever happens to pages outside the window."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import start
from sglcore.runtime.memory.pools import WindowTable
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.schedule.cache.window_pages import Windows
from tests.checkpoints import gemma2, gemma3, gpt_oss, mistral, save
from tests.laws import test_model_laws
from tests.laws.engine import check_logprobs, environ, random_prompts
from tests.laws.test_model_laws import check_paths
from tests.laws.windows import WindowEngine

CONTEXT = 96
ARCHITECTURES: MappingProxyType[str, tuple[Callable[..., Any], dict[str, Any]]] = MappingProxyType(
    {
        "gemma2": (gemma2, {}),
        "gemma3": (gemma3, {}),
        "gemma3-transformers": (gemma3, {"model_impl": "transformers"}),
        "gpt-oss": (gpt_oss, {}),
        "mistral": (lambda **sizes: mistral(sliding_window=6, **sizes), {}),
    }
)
"""Models with windows of six tokens in some or all layers, and their settings."""


class Case(test_model_laws.Case):
    """A saved checkpoint, its oracle and its settings, with few pages of the kind that runs short
    first."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.settings = ARCHITECTURES[name]
        self.oracle = make(max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)
        self.keeps_all = name != "mistral"

    def engine(self, **settings: Any) -> WindowEngine:
        """Make an engine over the checkpoint."""
        memory = (CONTEXT // 4 + 2 if self.keeps_all else 8) * self.page_bytes(4)
        settings = {"kv_memory": "split", **settings}
        return WindowEngine(self.folder, kv_cache_memory=memory, max_requests=4, **self.settings, **settings)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


def test_windows_that_keep_the_last_tokens_change_nothing(case: Case, graph: str) -> None:
    """Chunks and ragged arrivals; prefix hits at the end of a text and at branches; preemption."""
    engine = case.engine(graph=graph, poison=True)
    check_logprobs(engine.run(random_prompts(1, (5, 30, 17, 9)), 12, score_prompts=True, stagger=2), case.oracle)
    base = random_prompts(8, (33,))[0]
    others = [base[:21] + tail for tail in random_prompts(9, (3, 1, 6))]
    for prompts in ([base], [base], others, others):
        check_logprobs(engine.run(prompts, 4), case.oracle)
    assert engine.scheduler.stats().hit_tokens >= 32 + 3 * 20
    check_logprobs(engine.run(random_prompts(10, (20, 24, 28, 22)), 30, stagger=1), case.oracle)
    # A request takes no more window pages while it grows: it waits for them, once.
    assert (engine.scheduler.stats().retractions > 0) == case.keeps_all
    assert engine.freed.given > 60
    check_paths(engine, graph)


@pytest.mark.needs("device")
def test_windows_without_a_prefix_cache_and_one_step_at_a_time(case: Case) -> None:
    engine = case.engine(graph="off", overlap=False, prefix_cache=False, page_size=3)
    check_logprobs(engine.run(random_prompts(2, (5, 30, 17, 9)), 16, score_prompts=True, stagger=2), case.oracle)
    assert engine.freed.given > 40


@pytest.mark.needs("device")
@pytest.mark.parametrize(("step", "pools"), [(8, 2), (90, 1)])
def test_the_ledger_says_what_windows_are_kept_in(tmp_path: Path, step: int, pools: int) -> None:
    folder = save(gemma3(max_position_embeddings=CONTEXT), tmp_path)
    given = {"model": str(folder), "device": os.environ["LANE_DEVICE"], "dtype": "float32", "graph": "off"}
    given |= {"max_batch_tokens": step, "max_requests": 2, "page_size": 4, "kv_memory": "split"}
    started = start(resolve_config(given, environ()))
    limits, rows = started.worker.limits, started.ledger.rows
    (windows,) = (row for row in rows if row.topic == "window cache")
    whom = [row.reason.partition(";")[0].removeprefix("first that serves ") for row in rows if row.topic == "attention"]
    if pools == 1:
        assert limits.window == limits.num_window_pages == 0
        assert windows.effective == "none" and whom == ["the model"]
        return
    assert (limits.window, limits.num_window_pages) == (6, 2 * 2 * 4 + 2)
    assert windows.effective.startswith("18 pages of 4 tokens")
    assert sorted(whom) == ["layers that keep all tokens", "layers that keep windows"]
    assert isinstance(started.worker, TpModelWorker)
    runner = started.worker.runner
    cells, layers = [part.token_to_kv_pool for part in runner.attn_backend.parts], runner.model.attention_layers
    assert [pool.num_cells for pool in cells] == [4 * (limits.num_pages + 1), 4 * (18 + 1)]
    held = [[sum(part.numel() for part in pool.kv(layer.layer_id)) > 0 for layer in layers] for pool in cells]
    windowed = [layer.sliding_window is not None for layer in layers]
    assert held == [[not each for each in windowed], windowed]


class FreesEarly(Windows):
    """Mutant: frees a page that the window still sees."""

    def first_seen(self, pages: int) -> int:
        return super().first_seen(pages + 1)


class KeepsDead(WindowTable):
    """Mutant: the device keeps the old page list of a reused request slot, and writes only later
    pages."""

    def write(self, entries: Tensor, pages: Tensor) -> None:
        held = self.page_table.view(-1)[entries]
        super().write(entries, torch.where(held > 0, held, pages))


def frees_early(engine: WindowEngine) -> None:
    """Plant the defect on the host."""
    engine.scheduler.running.memory.windows.__class__ = FreesEarly


def keeps_dead(engine: WindowEngine) -> None:
    """Plant the defect on the device."""
    assert engine.worker.runner.extensions.window_table is not None
    engine.worker.runner.extensions.window_table.__class__ = KeepsDead


@pytest.mark.needs("device")
@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
@pytest.mark.parametrize("defect", [frees_early, keeps_dead])
def test_a_page_that_is_gone_is_seen(case: Case, defect: Callable[[WindowEngine], None]) -> None:
    engine = case.engine(graph="off", prefix_cache=False)
    defect(engine)
    with pytest.raises(AssertionError):
        check_logprobs(engine.run(random_prompts(1, (5, 30)), 12), case.oracle)
