"""Requests with and without grammars in one batch: neither changes the other, for any batch,
schedule or graph; broken engines are caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore.conformance.inputs.hashed_grammar import HashedMatcher, follows
from sglcore.runtime.sample_step import SampleStep
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.checkpoints import llama, save
from tests.laws.engine import Result, TokenEngine, random_prompts

VOCAB = 97
LENGTHS = (1, 5, 30, 17, 9, 22)
GRAMMARS = (11, None, 12, 13, None, 14)
TOKENS = 14
CONTEXT = 64
PAGE_BYTES = 4 * 2 * 2 * 2 * 12 * 4
"""Bytes of four KV slots in two layers: keys and values of two heads of 12 float32 values."""
SAMPLING = {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("grammar"))


def run(engine: TokenEngine, **how: Any) -> list[Result]:
    """Run the law's requests, all sampled."""
    return engine.run(random_prompts(31, LENGTHS), TOKENS, grammars=GRAMMARS, changing=(12,), **SAMPLING, **how)


def alone(engine: TokenEngine) -> list[list[int]]:
    """Return each request's tokens when it runs alone."""
    prompts = random_prompts(31, LENGTHS)
    runs = [
        engine.run([prompt], TOKENS, grammars=[seed], changing=(12,), **SAMPLING)
        for prompt, seed in zip(prompts, GRAMMARS, strict=True)
    ]
    return [result.tokens for (result,) in runs]


def check(results: Sequence[Result], wanted: Sequence[list[int]]) -> None:
    """The tokens are those of each request alone, and match their grammars."""
    for result, tokens, seed in zip(results, wanted, GRAMMARS, strict=True):
        assert result.tokens == tokens
        assert seed is None or follows(seed, VOCAB, result.tokens)


def small(folder: Path, **settings: Any) -> TokenEngine:
    """Make an engine so small that prompts are chunked, rows come and go, and requests are
    preempted."""
    pages = CONTEXT // 4 + 2
    defaults = {"max_batch_tokens": 12, "graph_token_buckets": (12,), "kv_cache_memory": pages * PAGE_BYTES}
    return TokenEngine(folder, **{**defaults, **settings})


GRAPHS = [
    pytest.param("off", marks=pytest.mark.needs("device")),
    pytest.param("full", marks=pytest.mark.needs("graphs.full")),
]
"""Only whole decode graphs sample differently from eager steps: they leave their logits in the
graph's memory."""


@pytest.mark.parametrize("graph", GRAPHS)
def test_nobody_notices_who_is_beside_him(checkpoint: Path, graph: str) -> None:
    engine = TokenEngine(checkpoint, graph=graph, poison=True)
    wanted = alone(engine)
    check(run(engine), wanted)
    check(run(engine, stagger=2), wanted)
    prompts, free = random_prompts(31, LENGTHS), [place for place, seed in enumerate(GRAMMARS) if seed is None]
    unbound = engine.run([prompts[place] for place in free], TOKENS, **SAMPLING)
    assert [result.tokens for result in unbound] == [wanted[place] for place in free]
    assert ("eager" in engine.paths) if graph == "off" else any(path.startswith("full") for path in engine.paths)


@pytest.mark.needs("device")
def test_chunks_overlap_prefix_hits_and_retraction_change_nothing(checkpoint: Path) -> None:
    wanted = alone(TokenEngine(checkpoint, prefix_cache=False))
    for overlap in (True, False):
        engine = small(checkpoint, graph="off", overlap=overlap, max_requests=4)
        check(run(engine, stagger=1), wanted)
        check(run(engine), wanted)
        stats = engine.scheduler.stats()
        assert stats.retractions > 0 and stats.hit_tokens > 0, stats


@pytest.mark.needs("device")
def test_a_grammar_goes_together_with_penalties_cut_offs_bias_and_scores(checkpoint: Path) -> None:
    sampling = {"repetition_penalty": 1.4, "top_k": 9, "top_p": 0.9, "logit_bias": {5: 9.0}, "logprobs": 3}
    engine = TokenEngine(checkpoint)
    prompts = random_prompts(31, LENGTHS)
    mixed = engine.run(prompts, TOKENS, grammars=GRAMMARS, temperature=1.0, seed=5, score_prompts=True, **sampling)
    for prompt, seed, result in zip(prompts, GRAMMARS, mixed, strict=True):
        (single,) = engine.run([prompt], TOKENS, grammars=[seed], temperature=1.0, seed=5, **sampling)
        assert result.tokens == single.tokens and (seed is None or follows(seed, VOCAB, result.tokens))


class PlansAhead(Scheduler):
    """Mutant: plans the next step before the tokens are there."""

    @property
    def awaits_tokens(self) -> bool:
        return False


class ForgetsWhenRetracted(RunningRequests):
    """Mutant: a grammar starts again after preemption."""

    def _retract(self, victim: Any) -> None:
        super()._retract(victim)
        seed = GRAMMARS[int(victim.rid[1:]) - 1]
        victim.matcher = None if seed is None else HashedMatcher(seed, VOCAB)


class LeavesOutWhereRowsStay(SampleStep):
    """Mutant: sends masks only with a new composition, though they change in every step."""

    def inputs(self, batch: ScheduleBatch, rows: Any) -> Any:
        if self.known.host.number == batch.composition:
            batch.masks = None
        return super().inputs(batch, rows)


class OnTheRowBeside(SampleStep):
    """Mutant: applies each mask to the next constrained row."""

    def inputs(self, batch: ScheduleBatch, rows: Any) -> Any:
        if batch.mask_rows is not None:
            batch.mask_rows = np.roll(batch.mask_rows, 1)
        return super().inputs(batch, rows)


def become(read: Callable[[TokenEngine], Any], kind: type) -> Callable[[TokenEngine], None]:
    """Return a function that changes the class of one object of an engine."""

    def plant(engine: TokenEngine) -> None:
        read(engine).__class__ = kind

    return plant


MUTANTS = {
    "plans ahead": become(lambda engine: engine.scheduler, PlansAhead),
    "forgets when retracted": become(lambda engine: engine.scheduler.running, ForgetsWhenRetracted),
    "masks with a new composition only": become(lambda engine: engine.worker.sampling, LeavesOutWhereRowsStay),
    "on the row beside": become(lambda engine: engine.worker.sampling, OnTheRowBeside),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_laws_catch(name: str, checkpoint: Path) -> None:
    wanted = alone(TokenEngine(checkpoint))
    engine = small(checkpoint, overlap=True, max_requests=4)
    MUTANTS[name](engine)
    with pytest.raises(AssertionError):
        check(run(engine, stagger=1), wanted)
