"""A model on several ranks gives transformers' log-probabilities, whichever parts are divided,
replicated or padded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import WorkerLost
from tests.checkpoints import glm4_moe, llama, mistral, qwen2, qwen3, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

CONTEXT = 128
SEED = 5


def noted(make: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    return lambda: make(max_position_embeddings=CONTEXT, **changes)


def biased(**changes: Any) -> Any:
    return llama(attention_bias=True, mlp_bias=True, **changes)


MODELS: MappingProxyType[str, tuple[Callable[[], Any], int]] = MappingProxyType(
    {
        "llama: biases, heads of keys are divided, the vocabulary is uneven": (noted(biased), 2),
        "qwen3: norms of heads, a tied output layer, heads of keys are held twice": (
            noted(qwen3, tie_word_embeddings=True),
            4,
        ),
        "glm4: experts, some shared": (noted(glm4_moe), 2),
        "mistral: windows": (noted(mistral, sliding_window=6), 2),
    }
)


def check(engine: RankedEngine, oracle: Any, tolerance: float = 1e-4) -> None:
    """Chunks, arrivals while others run, prefix cache hits, and requests preempted for lack of
    pages."""
    prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
    check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, tolerance)
    check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 6), oracle, tolerance)
    assert engine.scheduler.stats().hit_tokens > 20
    assert engine.worker.limits.vocab_size == 97


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    make, width = MODELS[name]
    oracle = make()
    chunk = int(np.random.default_rng(SEED).integers(6, 12))
    with RankedEngine(save(oracle, tmp_path), tp=width, max_batch_tokens=chunk) as engine:
        check(engine, oracle)
        kind = next(row.effective for row in engine.started.ledger.rows if row.topic == "graph")
        assert {path.partition(":")[0] for path in engine.paths} == {"eager", kind}


def test_in_float64_nothing_is_left_of_the_difference(tmp_path: Path) -> None:
    """In float64, rounding does not hide a part that is read twice or not at all."""
    oracle = llama(max_position_embeddings=CONTEXT).double()
    settings = {"dtype": "float64", "kernels": "reference", "attention_backend": "reference", "tp": 4}
    with RankedEngine(save(oracle, tmp_path), defects.in_double, **settings) as engine:
        check(engine, oracle, 1e-6)  # log-probabilities cross in float32


def test_requests_that_were_retracted_go_on_as_they_began(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    pages = CONTEXT // 4 + 2
    memory = pages * 4 * 2 * 2 * 12 * 4  # one head of keys and one of values per rank, two layers
    with RankedEngine(save(oracle, tmp_path), kv_cache_memory=memory, max_requests=4) as engine:
        assert engine.worker.limits.num_pages == pages
        results = engine.run(random_prompts(10, (20, 24, 28, 22)), 30, stagger=1)
        assert engine.scheduler.stats().retractions > 0
    check_logprobs(results, oracle, 1e-4)


def test_drawn_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    """Noise is keyed by seed and position, so the division of the model does not change the
    tokens."""
    folder = save(qwen2(max_position_embeddings=CONTEXT), tmp_path)
    drawn = {"temperature": 0.8, "seed": 7, "top_p": 0.9}
    prompts = random_prompts(3, (4, 9))
    with RankedEngine(folder) as engine:
        found = [result.tokens for result in engine.run(prompts, 12, **drawn)]
    alone = TokenEngine(folder, graph="off").run(prompts, 12, **drawn)
    assert found == [result.tokens for result in alone]


def test_one_rank_decides_where_their_logits_differ(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), defects.noisy_logits) as engine:
        check_logprobs(engine.run(random_prompts(SEED, (5, 17)), 8), oracle, 1e-4)


@pytest.mark.parametrize(
    ("defect", "make", "width"),
    [
        (defects.shifted_vocabulary, llama, 2),
        (defects.heads_in_turn, llama, 4),
        (defects.bias_on_every_rank, biased, 2),
        (defects.padding_columns, llama, 2),
        (defects.noisy_draws, llama, 2),
    ],
)
def test_a_defect_of_what_is_divided_is_caught(
    defect: Callable[[int], None], make: Callable[..., Any], width: int, tmp_path: Path
) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    caught = AssertionError, IndexError  # the oracle has no token after the vocabulary
    with RankedEngine(save(oracle, tmp_path), defect, tp=width) as engine, pytest.raises(caught):
        check_logprobs(engine.run(random_prompts(SEED, (5, 17)), 8), oracle, 1e-4)


def test_all_ranks_have_the_pages_of_the_one_with_the_least_memory(tmp_path: Path) -> None:
    settings = {"kv_cache_memory": None, "max_requests": 64}
    folder = save(llama(max_position_embeddings=CONTEXT), tmp_path)
    with RankedEngine(folder, defects.less_memory, **settings) as engine:
        pages, page = engine.worker.limits.num_pages, 4 * 2 * 2 * 12 * 4
        assert pages == (1 << 20) // 2 // 2 // page  # shared by two ranks; half of it is used
    with pytest.raises(WorkerLost, match="num_pages=.*rank 1 has .*num_pages="):
        RankedEngine(folder, defects.own_memory, **settings)


def test_ranks_that_are_not_at_the_same_operation_are_told(tmp_path: Path) -> None:
    folder = save(llama(max_position_embeddings=CONTEXT), tmp_path)
    with (
        RankedEngine(folder, defects.another_order, poison=True, graph="off") as engine,
        pytest.raises(WorkerLost) as caught,
    ):
        engine.run(random_prompts(SEED, (5,)), 2)
    assert "all_reduce" in str(caught.value) or "all_gather" in str(caught.value)
