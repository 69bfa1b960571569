"""Broken engines, each caught by a law of test_model_laws: a law that nothing can break proves
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.reference import ReferenceAttention, ReferencePlan, SingleRows
from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.memory.pools import ReqToTokenPool
from sglcore.runtime.token_table import TokenTable
from sglcore.schedule.request import Request
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.checkpoints import gemma3, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = gemma3(max_position_embeddings=96, sliding_window=20)
    yield save(oracle, tmp_path_factory.mktemp("mutants")), oracle


class OneKeyTooFew(ReferenceAttention):
    """Mutant: decode does not see the token that it has just stored."""

    def _single_rows(self, batch: ForwardBatch, count: int) -> SingleRows:
        rows = super()._single_rows(batch, count)
        rows.seq_lens = (rows.seq_lens - 1).clamp(min=1)
        rows.longest = max(rows.longest - 1, 1)
        return rows


class WindowOffByOne(ReferenceAttention):
    """Mutant: the sliding window is one token too wide."""

    def _make_gather(self, part: SingleRows, window: int | None) -> tuple[Tensor, Tensor]:
        return super()._make_gather(part, None if window is None else window + 1)


class NoPrefix(ReferenceAttention):
    """Mutant: a chunk sees its own tokens only."""

    def _long_row(self, batch: ForwardBatch, row: int, start: int, end: int, seq_len: int) -> Any:
        made = super()._long_row(batch, row, start, end, seq_len)
        for mask in made.masks.values():
            if mask is not None:
                mask[:, : seq_len - (end - start)] = False
        return made


class ForgetsEarlierPages(ReqToTokenPool):
    """Mutant: writes page-table changes from the first entry on."""

    def changes(self, batch: ScheduleBatch) -> Any:
        batch.page_counts = np.zeros_like(batch.page_counts)
        return super().changes(batch)


class NextSlotsToken(TokenTable):
    """Mutant: reads the last token from the neighbouring request slot."""

    def resolve_decode(self, input_ids: Tensor, slots: Tensor) -> None:
        super().resolve_decode(input_ids, slots.clamp(min=2) - 1)


def broken(kind: type[ReferenceAttention], old: AttentionBackend[Any]) -> ReferenceAttention:
    """Make a broken backend over the same pools."""
    return kind(old.shape, old.req_to_token_pool, old.token_to_kv_pool, old.kernels)


def replace_attention(kind: type[ReferenceAttention]) -> Callable[[TokenEngine], None]:
    """Return a function that replaces an engine's backend by a broken one over the same pools."""

    def plant(engine: TokenEngine) -> None:
        runner = engine.worker.runner
        old = runner.attn_backend
        if not isinstance(old, WindowedAttention) or old.full is None:
            runner.attn_backend = broken(kind, old)
            return
        made = runner.attn_backend = copy(old)
        made.window, made.full = broken(kind, old.window), broken(kind, old.full)

    return plant


def replace_class(read: Callable[[TokenEngine], Any], kind: type) -> Callable[[TokenEngine], None]:
    """Return a function that changes the class of one object of an engine."""

    def plant(engine: TokenEngine) -> None:
        read(engine).__class__ = kind

    return plant


def shift_cells(engine: TokenEngine) -> None:
    """Mutant: stores a token in the KV slot before its own, except at the start of a page."""
    runner = engine.worker.runner
    for registry in (runner.decode_registry, runner.prefill_registry):
        buffer = registry.input_buffer("out_cache_loc")
        real = buffer.post_fill
        assert real is not None

        def post_fill(view: Tensor, batch: ForwardBatch, ctx: Any, real: Any = real) -> None:
            real(view, batch, ctx)
            view.sub_((view % 4 > 0).to(view.dtype))

        buffer.post_fill = post_fill


MUTANTS: MappingProxyType[str, Callable[[TokenEngine], None]] = MappingProxyType(
    {
        "decode misses its own token": replace_attention(OneKeyTooFew),
        "window off by one": replace_attention(WindowOffByOne),
        "chunks forget their prefix": replace_attention(NoPrefix),
        "page differences overwrite": replace_class(
            lambda engine: engine.worker.runner.attn_backend.req_to_token_pool, ForgetsEarlierPages
        ),
        "cells shifted": shift_cells,
        "token of another slot": replace_class(lambda engine: engine.worker.runner.token_table, NextSlotsToken),
    }
)


def run_laws(engine: TokenEngine, oracle: Any) -> None:
    """Run chunks, ragged arrivals and overlapped decode, and check all log-probabilities."""
    results = engine.run(random_prompts(21, (5, 30, 17, 9)), 24, stagger=2, score_prompts=True)
    check_logprobs(results, oracle)


def test_the_laws_hold_for_the_real_engine(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    run_laws(TokenEngine(folder, max_batch_tokens=8), oracle)


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_laws_catch(name: str, checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    engine = TokenEngine(folder, max_batch_tokens=8)
    MUTANTS[name](engine)
    with pytest.raises((AssertionError, IndexError)):
        run_laws(engine, oracle)


def page_bytes(oracle: Any) -> int:
    """Return the bytes of a page of four tokens in float32; the context of 96 needs 24 pages."""
    config = oracle.config
    return 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


class AssumesNeighbours(ReqToTokenPool):
    """Mutant: assumes that a request's pages have consecutive numbers."""

    def write(self, entries: Tensor, pages: Tensor) -> None:
        super().write(entries, pages)
        for slot in (entries // self.max_pages).unique().tolist():
            following = int(self.page_table[slot, 0]) + torch.arange(self.max_pages, dtype=torch.int32)
            self.page_table[slot] = following % 27


def test_pages_taken_to_be_neighbours_are_caught_by_page_order(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    engine = TokenEngine(folder, scramble_pages=4, kv_cache_memory=26 * page_bytes(oracle))
    replace_class(lambda e: e.worker.runner.attn_backend.req_to_token_pool, AssumesNeighbours)(engine)
    with pytest.raises((AssertionError, IndexError)):
        check_logprobs(engine.run(random_prompts(4, (30, 17, 9, 25)), 10), oracle)


def test_cached_pages_that_were_overwritten_are_caught_by_prefix_hits(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    engine = TokenEngine(folder)
    prompt = random_prompts(8, (33,))
    check_logprobs(engine.run(prompt, 4), oracle)
    for keys, values in (engine.worker.runner.attn_backend.token_to_kv_pool.kv(layer) for layer in range(2)):
        keys[4:].neg_()
        values[4:].mul_(0.5)
    with pytest.raises(AssertionError):
        check_logprobs(engine.run(prompt, 4), oracle)


def test_a_recompute_that_forgets_outputs_is_caught_by_retraction(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = checkpoint
    tokens = Request.tokens

    def forgetful(self: Request, start: int, end: int) -> Any:
        found = tokens(self, start, end).copy()
        found[max(len(self.prompt_ids) - start, 0) :] = 3
        return found

    settings = {"kv_cache_memory": 26 * page_bytes(oracle), "max_requests": 4}
    prompts = random_prompts(10, (20, 24, 28, 22))
    honest = TokenEngine(folder, **settings)
    check_logprobs(honest.run(prompts, 30, stagger=1), oracle)
    assert honest.scheduler.stats().retractions > 0
    monkeypatch.setattr(Request, "tokens", forgetful)
    with pytest.raises(AssertionError):
        check_logprobs(TokenEngine(folder, **settings).run(prompts, 30, stagger=1), oracle)


@pytest.mark.parametrize("poison", [False, True])
def test_a_field_that_is_staged_once_is_seen_only_under_poison(checkpoint: tuple[Path, Any], poison: bool) -> None:
    folder, oracle = checkpoint
    engine = TokenEngine(folder, poison=poison)
    registry = engine.worker.runner.decode_registry
    slots: Any = registry.input_buffer("req_pool_indices").host
    stage_all, steps = registry.stage_all, list[Any]()

    def lazy(batch: Any) -> Any:
        before = slots.copy()
        found = stage_all(batch)
        if steps:
            slots[:] = before
        steps.append(batch)
        return found

    registry.stage_all = lazy  # pyright: ignore[reportAttributeAccessIssue]
    prompts = random_prompts(6, (5,))
    if not poison:
        check_logprobs(engine.run(prompts, 6), oracle)
        return
    with pytest.raises((AssertionError, IndexError)):
        check_logprobs(engine.run(prompts, 6), oracle)


class Replayed:
    """A step that runs again on the static buffers."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self._step = step

    def replay(self, update: object | None) -> Tensor:
        return self._step()


class Replays:
    """A graph mechanism that captures nothing and calls the step again."""

    kind = "replayed"

    def capture(self, step: Callable[[], Tensor]) -> Replayed:
        return Replayed(step)

    def close(self) -> None:
        pass


class NeverRefreshed(ReferenceAttention):
    """Mutant: a captured plan is never refreshed."""

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        if plan.singles is None:
            super().refresh(plan, batch)


@pytest.mark.parametrize("kind", [ReferenceAttention, NeverRefreshed])
def test_a_plan_that_is_not_refreshed_is_caught_by_graphs(
    checkpoint: tuple[Path, Any], kind: type[ReferenceAttention]
) -> None:
    folder, oracle = checkpoint
    engine = TokenEngine(folder)
    replace_attention(kind)(engine)
    runner = engine.worker.runner
    context = ForwardContext(runner.attn_backend, None, runner.model.attention_layers)
    with torch.inference_mode():
        runner.graphs = GraphRunner(Replays(), runner.decode_registry, context, lambda batch: runner.model(batch), (4,))
    prompts = random_prompts(12, (4, 9, 2))
    if kind is ReferenceAttention:
        check_logprobs(engine.run(prompts, 10), oracle)
        assert "replayed:4" in engine.paths
        return
    with pytest.raises(AssertionError):
        check_logprobs(engine.run(prompts, 10), oracle)


def test_a_sampler_keyed_by_row_is_caught_by_arrivals(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint

    def tokens(stagger: int, broken: bool) -> list[list[int]]:
        engine = TokenEngine(folder, max_batch_tokens=8)
        if broken:
            sampling = engine.worker.sampling
            state_for = sampling.state

            def by_row(*args: Any) -> Any:
                state = state_for(*args)
                rows = torch.arange(len(state.positions), dtype=torch.int32)
                return type(state)(**{**_fields(state), "positions": state.positions + 1000 * rows})

            sampling.state = by_row  # pyright: ignore[reportAttributeAccessIssue]
        results = engine.run(random_prompts(5, (4, 9, 6)), 12, temperature=1.0, seed=3, stagger=stagger)
        return [result.tokens for result in results]

    assert tokens(0, broken=False) == tokens(9, broken=False)
    assert tokens(0, broken=True) != tokens(9, broken=True)


def _fields(state: Any) -> dict[str, Any]:
    import dataclasses

    return {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}
