"""Attention over sliding windows and compressed blocks: prefix hits, preemption, overlap and graphs
change nothing, whatever happens to pages outside the window and to earlier contents of a request
slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.conformance.session import Drive, open_session
from sglcore.layers import compressed_attention as layers
from sglcore.runtime.attention.sparse.compressed import CompressedPlan, DeepseekV4AttnBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.deepseek_v4_rows import kept_rows
from sglcore.runtime.memory.kv_rows import Place, RowPool
from sglcore.schedule.cache.window_pages import Windows
from tests.checkpoints import Oracle, save
from tests.deepseek_v4 import deepseek_v4
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths
from tests.laws.windows import ForgettingPool

PAGE, CONTEXT, STEP = 16, 160, 24
TOLERANCE = 5e-5


class ForgettingRows(ForgettingPool):
    """Fills window pages with NaN once they are freed."""

    def _forget(self, pages: list[int]) -> None:
        pool: Any = self.cells
        assert isinstance(pool, RowPool)
        with self.streams.running(), torch.inference_mode():
            for layer_id, layer in enumerate(pool.layers):
                for name, kept in layer.items():
                    if kept.place is Place.WINDOW_PAGES:
                        rows = pool.rows(layer_id, name).unflatten(0, (-1, kept.count(pool.page_size)))
                        for page in pages:
                            rows[page].fill_(torch.nan)


class CompressedEngine(TokenEngine):
    """An engine with a scheduler that sees few pages. `freed`: the pool of window pages."""

    def __init__(self, folder: Path, *, pages: int = 12, window_pages: int = 12, **settings: Any) -> None:
        given = {"attention_backend": "compressed", "page_size": PAGE, "max_model_len": CONTEXT, "max_requests": 4}
        given |= {"max_batch_tokens": STEP, "graph_token_buckets": (STEP,), "poison": True}
        super().__init__(folder, **{**given, **settings})
        limits, runner = self.worker.limits, self.worker.runner
        assert pages <= limits.num_pages and window_pages <= limits.num_window_pages
        few = Drive(overlap=True, scramble=3, pages=pages, window_pages=window_pages, prefix_cache=True)
        session = open_session(self.recorder, few)
        self.scheduler, self.loop = session.scheduler, session.loop
        self.windows = self.scheduler.running.memory.windows
        self.freed = ForgettingRows(window_pages, runner.attn_backend.token_to_kv_pool, runner.streams)
        self.windows._pool = self.freed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Oracle]]:
    """A model with blocks of 4 and of 16 tokens, and a sliding window of 16."""
    oracle = deepseek_v4()
    yield save(oracle, tmp_path_factory.mktemp("deepseek-v4")), oracle


def texts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return random_prompts(seed, lengths, 128)


def check(results: list[Result], oracle: Oracle) -> None:
    check_logprobs(results, oracle, TOLERANCE)


def test_pages_of_both_kinds_change_nothing(checkpoint: tuple[Path, Oracle], graph: str) -> None:
    """Chunks and ragged arrivals; prefix hits at the end of a text and at branches; preemption."""
    folder, oracle = checkpoint
    engine = CompressedEngine(folder, graph=graph)
    check(engine.run(texts(1, (5, 60, 17, 34)), 8, score_prompts=True, stagger=2), oracle)
    base = texts(8, (70,))[0]
    others = [base[:37] + tail for tail in texts(9, (3, 1, 40))]
    for prompts in ([base], [base], others, others):
        check(engine.run(prompts, 4), oracle)
    assert engine.scheduler.stats().hit_tokens >= 64 + 3 * 32
    check(engine.run(texts(10, (40, 44, 48, 42)), 30, stagger=1), oracle)
    assert engine.scheduler.stats().retractions > 0 and engine.freed.given > 20
    check_paths(engine, graph)


@pytest.mark.needs("device")
def test_a_window_of_one_token_keeps_what_the_first_block_of_the_next_page_is_made_of(tmp_path: Path) -> None:
    oracle = deepseek_v4(sliding_window=1)
    engine = CompressedEngine(save(oracle, tmp_path), graph="off")
    check(engine.run(texts(6, (9, 20)), 40, score_prompts=True), oracle)
    assert engine.freed.given > 0


@pytest.mark.needs("device")
def test_texts_go_on_from_every_page_of_one_that_goes_on_itself(checkpoint: tuple[Path, Oracle]) -> None:
    """Requests share prefixes while the first runs, and after it has ended, with and without
    further tokens of their own."""
    folder, oracle = checkpoint
    engine, base = CompressedEngine(folder, pages=40, window_pages=26, graph="off"), texts(11, (81,))[0]
    pairs = [base[:end] + tail for end in (16, 32, 48, 64, 80) for tail in texts(end, (2, 19))]
    check(engine.run([base, *pairs], 30, stagger=4), oracle)
    check(engine.run([base, base[:80], base[:64], *pairs[::3]], 6, stagger=2), oracle)
    assert engine.scheduler.stats().hit_tokens > 400


@pytest.mark.needs("device")
def test_a_text_whose_window_is_gone_is_computed_again_from_where_one_is_left(checkpoint: tuple[Path, Oracle]) -> None:
    folder, oracle = checkpoint
    engine, base = CompressedEngine(folder, pages=40, window_pages=5, graph="off"), texts(12, (70,))[0]
    check(engine.run([base], 4), oracle)
    check(engine.run(texts(13, (60, 55)), 4), oracle)
    assert engine.windows.evicted > 0
    before = engine.scheduler.stats()
    check(engine.run([base], 4), oracle)
    after = engine.scheduler.stats()
    assert after.cached_pages >= 4 and after.hit_tokens - before.hit_tokens < 64


@pytest.mark.needs("device")
def test_a_request_enters_a_slot_without_what_another_left_there(checkpoint: tuple[Path, Oracle]) -> None:
    """For blocks that end at page ends: the ring holds values of the request itself only."""
    folder, oracle = checkpoint
    engine = CompressedEngine(folder, pages=10, window_pages=5, graph="off", max_requests=1)
    check(engine.run(texts(15, (47,)), 1), oracle)
    pool: Any = engine.worker.runner.attn_backend.token_to_kv_pool
    rings = [
        pool.rows(layer_id, name)[kept.ring : 2 * kept.ring]
        for layer_id, layer in enumerate(pool.layers)
        for name, kept in layer.items()
        if kept.place is Place.SLOTS
    ]
    assert rings and all(ring[5:].isfinite().any() for ring in rings)
    check(engine.run(texts(16, (5,)), 1), oracle)
    assert all(ring[:5].isfinite().all() and ring[5:].isnan().all() for ring in rings)


class ReachesAll(Windows):
    """Mutant: a prefix hit ignores missing window pages."""

    def reachable(self, path: Any) -> int:
        return len(path)


def by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the state of open 4-token blocks is stored by request slot, so a request that
    continues from a cached page lacks it."""

    def kept(*given: Any, **more: Any) -> Any:
        found = kept_rows(*given, **more)
        return {name: replace(each, place=Place.SLOTS) if each.ring else each for name, each in found.items()}

    monkeypatch.setattr(layers, "kept_rows", kept)


def to_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: missing window pages do not limit a prefix hit."""
    monkeypatch.setattr(Windows, "reachable", ReachesAll.reachable)


def frees_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: frees a page that the window still sees."""
    seen = Windows.first_seen
    monkeypatch.setattr(Windows, "first_seen", lambda windows, pages: seen(windows, pages + 1))


def sees_a_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: leaves out the oldest token of each window."""
    fill = DeepseekV4AttnBackend._fill_lists

    def filled(backend: DeepseekV4AttnBackend, plan: CompressedPlan, batch: ForwardBatch) -> None:
        fill(backend, plan, batch)
        plan.window.copy_(torch.nn.functional.pad(plan.window[:, 1:], (0, 1), value=-1))

    monkeypatch.setattr(DeepseekV4AttnBackend, "_fill_lists", filled)


def forgets_the_open_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a step's tokens are not kept for the block that a later step completes."""
    complete = DeepseekV4AttnBackend._complete

    def completed(backend: DeepseekV4AttnBackend, plan: CompressedPlan, batch: ForwardBatch) -> None:
        complete(backend, plan, batch)
        for each in plan.completed.values():
            each.writes.zero_()

    monkeypatch.setattr(DeepseekV4AttnBackend, "_complete", completed)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    "defect",
    [by_slot, to_tombstones, frees_early, sees_a_token_less, forgets_the_open_block],
    ids=lambda each: each.__name__,
)
def test_a_defect_is_caught(
    checkpoint: tuple[Path, Oracle], defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = checkpoint
    defect(monkeypatch)
    engine, base = CompressedEngine(folder, pages=40, window_pages=5, graph="off"), texts(12, (70,))[0]
    with pytest.raises(AssertionError):
        for prompts in ([base], texts(13, (60, 55)), [base], [base[:48] + tail for tail in texts(14, (3, 9))]):
            check(engine.run(prompts, 4), oracle)


class SlotRings:
    """Mutant: stores each request slot's last tokens in a ring, where a new request finds the
    tokens of the slot's earlier request."""

    def __init__(self, slots: int, window: int, device: torch.device) -> None:
        self.rows = torch.zeros(slots, window, dtype=torch.int64, device=device)
        self._outside = torch.full((slots,), CONTEXT, device=device)

    def fill(self, plan: CompressedPlan, positions: torch.Tensor) -> None:
        """Replace window rows from before this step by those of the slot's ring, then store this
        step's rows."""
        slots, at, width = plan.tokens.slots.long(), positions.long(), self.rows.shape[1]
        first = self._outside.scatter_reduce(0, slots, at, "amin")[slots]
        last = (-self._outside).scatter_reduce(0, slots, at, "amax")[slots]
        places = torch.arange(width, device=at.device) + (at - width + 1).clamp(min=0).unsqueeze(1)
        found = self.rows[slots.unsqueeze(1), places % width].to(plan.window.dtype)
        plan.window.copy_(torch.where((places < first.unsqueeze(1)) & (plan.window >= 0), found, plan.window))
        kept = at > last - width
        self.rows[slots[kept], at[kept] % width] = plan.window_out[kept].long()


@pytest.mark.needs("device")
def test_rings_by_slot_give_the_same_until_a_prefix_is_hit(
    checkpoint: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prefix hit every row of a window is the request's own; after a hit the first
    windows contain rows of other requests."""
    folder, oracle = checkpoint
    fill, rings = DeepseekV4AttnBackend._fill_lists, list[SlotRings]()

    def filled(backend: DeepseekV4AttnBackend, plan: CompressedPlan, batch: ForwardBatch) -> None:
        fill(backend, plan, batch)
        if not rings:  # on the stream of the steps
            table = backend.req_to_token_pool.page_table
            rings.append(SlotRings(table.shape[0], plan.window.shape[1], table.device))
        rings[0].fill(plan, batch.positions)

    monkeypatch.setattr(DeepseekV4AttnBackend, "_fill_lists", filled)
    engine, base = CompressedEngine(folder, pages=40, window_pages=26, graph="off"), texts(12, (70,))[0]
    check(engine.run([base, *texts(13, (60, 55))], 20, stagger=2), oracle)
    assert not engine.scheduler.stats().hit_tokens
    with pytest.raises(AssertionError):
        check(engine.run([base], 4), oracle)
    assert engine.scheduler.stats().hit_tokens == 64
