"""Data parallel shards, with experts cut or whole: the log-probabilities are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.start import start
from tests.checkpoints import gemma3, llama, mistral, qwen2, qwen3_moe, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine, configured

CONTEXT = 128
SEED = 5
DENSE: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {"dp": {"tp": 2, "dp": 2}, "tp x dp": {"tp": 4, "dp": 2}}
)
SPARSE: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tp, experts on 2": {"tp": 2, "ep": 2},
        "dp on 2": {"tp": 2, "dp": 2},
        "dp, experts on 2": {"tp": 2, "dp": 2, "ep": 2},
        "tp on 4": {"tp": 4},
        "tp, experts on 4": {"tp": 4, "ep": 4},
        "dp on 4": {"tp": 4, "dp": 4},
        "dp, experts on 4": {"tp": 4, "dp": 4, "ep": 4},
        "tp x dp on 4": {"tp": 4, "dp": 2},
        "tp x dp, experts on 4": {"tp": 4, "dp": 2, "ep": 4},
        "tp x dp, experts twice on 2 of 4": {"tp": 4, "dp": 2, "ep": 2},
        "tp x dp, experts at fixed places": {"tp": 4, "dp": 2, "ep": 4, "expert_dispatch": "fixed"},
    }
)


def sparse(**changes: Any) -> Any:
    return qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = sparse()
    return model, save(model, tmp_path_factory.mktemp("sparse"))


def check(engine: RankedEngine, oracle: Any, tolerance: float = 1e-4) -> None:
    """Chunks, arrivals while others run and while a shard is idle, prefix cache hits, and a single
    request."""
    prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
    check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, tolerance)
    check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 6), oracle, tolerance)
    check_logprobs(engine.run(random_prompts(7, (4,)), 3), oracle, tolerance)
    assert engine.scheduler.stats().hit_tokens > 20


@pytest.mark.parametrize("name", SPARSE)
def test_experts_and_shards_give_the_logprobs_of_transformers(name: str, saved: tuple[Any, Path]) -> None:
    oracle, folder = saved
    chunk = int(np.random.default_rng(SEED).integers(6, 12))
    with RankedEngine(folder, **SPARSE[name], max_batch_tokens=chunk) as engine:
        check(engine, oracle)


@pytest.mark.parametrize("name", DENSE)
def test_dense_blocks_run_on_the_rows_of_all_shards(name: str, tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT, attention_bias=True, mlp_bias=True)
    with RankedEngine(save(oracle, tmp_path), **DENSE[name], max_batch_tokens=9) as engine:
        check(engine, oracle)
        used = [each.stats().steps for each in cast(Any, engine.scheduler).each]
        assert all(used) and len(set(used)) > 1, "no shard was idle while another ran"


@pytest.mark.parametrize(
    "make", [lambda **sizes: mistral(sliding_window=6, **sizes), gemma3], ids=["mistral", "gemma3"]
)
def test_layers_with_windows_are_idle_too(make: Callable[..., Any], tmp_path: Path) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), tp=2, dp=2, max_batch_tokens=9) as engine:
        check(engine, oracle, 2e-4)


@pytest.mark.parametrize("settings", [{"tp": 4, "dp": 2, "ep": 4}, {"tp": 4, "dp": 2}], ids=str)
def test_in_float64_nothing_is_left_of_the_difference(settings: dict[str, int], tmp_path: Path) -> None:
    oracle = sparse().double()
    exact: dict[str, Any] = {"dtype": "float64", "kernels": "reference", "attention_backend": "reference", **settings}
    with RankedEngine(save(oracle, tmp_path), defects.in_double, **exact) as engine:
        check(engine, oracle, 1e-6)  # log-probabilities cross in float32


def test_drawn_tokens_do_not_depend_on_shards(tmp_path: Path) -> None:
    """Noise is keyed by seed and position, so a request's shard does not change its tokens."""
    folder = save(qwen2(max_position_embeddings=CONTEXT), tmp_path)
    drawn = {"temperature": 0.8, "seed": 7, "top_p": 0.9}
    prompts = random_prompts(3, (4, 9, 6))
    with RankedEngine(folder, tp=2, dp=2) as engine:
        found = [result.tokens for result in engine.run(prompts, 12, **drawn)]
    alone = TokenEngine(folder, graph="off").run(prompts, 12, **drawn)
    assert found == [result.tokens for result in alone]


def test_requests_that_were_retracted_go_on_as_they_began(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    pages = CONTEXT // 4 + 2
    memory = pages * 4 * 2 * 2 * 2 * 12 * 4  # both heads of keys and of values, two layers
    settings: dict[str, Any] = {"kv_cache_memory": memory, "max_requests": 8, "tp": 2, "dp": 2}
    with RankedEngine(save(oracle, tmp_path), **settings) as engine:
        assert engine.worker.limits.num_pages == pages
        results = engine.run(random_prompts(10, (20, 24, 28, 22, 21, 23, 27, 25)), 30, stagger=1)
        assert engine.scheduler.stats().retractions > 0
        engine.scheduler.audit()
    check_logprobs(results, oracle, 1e-4)


def test_grammars_of_one_shard_do_not_hold_up_another(tmp_path: Path) -> None:
    folder = save(llama(max_position_embeddings=CONTEXT), tmp_path)
    prompts = random_prompts(3, (4, 9, 6))
    with RankedEngine(folder, tp=2, dp=2) as engine:
        found = engine.run(prompts, 8, grammars=(1, None, 2))
    alone = TokenEngine(folder, graph="off").run(prompts, 8, grammars=(1, None, 2))
    assert [result.tokens for result in found] == [result.tokens for result in alone]


@pytest.mark.parametrize(
    ("defect", "settings"),
    [
        (defects.noisy_draws, {"tp": 4, "dp": 2}),
        (defects.wrong_shard, {"tp": 4, "dp": 2}),
        (defects.shifted_vocabulary, {"tp": 4, "dp": 2}),
        (defects.sums_of_all, {"tp": 4, "dp": 2}),
    ],
)
def test_a_defect_among_shards_is_caught(
    defect: Callable[[int], None], settings: dict[str, Any], tmp_path: Path
) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    caught = AssertionError, IndexError, WorkerLost
    with RankedEngine(save(oracle, tmp_path), defect, **settings) as engine, pytest.raises(caught):
        check_logprobs(engine.run(random_prompts(SEED, (5, 17, 9)), 8), oracle, 1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": 2, "dp": 3}, "dp is 3 and tp is 2; wanted one of 1, 2"),
        ({"tp": 2, "ep": 4}, "ep is 4 and tp is 2; wanted one of 1, 2"),
        ({"tp": 1, "dp": 2}, "dp is 2 and tp is 1; wanted one of 1"),
        ({"tp": 2, "ep": 2}, "ep is 2, and this model has no experts"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_process(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = save(llama(max_position_embeddings=CONTEXT), tmp_path)

    def never(spec: RankSpec) -> Any:
        raise AssertionError("a process was started")

    with pytest.raises(ConfigError) as caught:
        start(configured(folder, **settings), ranks=RankOptions(never))
    assert said in str(caught.value)


def test_the_ledger_says_what_is_shared_and_how(saved: tuple[Any, Path]) -> None:
    with RankedEngine(saved[1], tp=2, dp=2, ep=2) as engine:
        rows = {row.topic: row.effective for row in engine.started.ledger.rows}
    assert rows["shards of requests"] == "2" and rows["expert ranks"] == "distributed among 2"
    assert rows["expert dispatch"] == "ragged" and rows["graph"] == "eager"


def test_an_unknown_dispatcher_is_refused_with_those_that_there_are(saved: tuple[Any, Path]) -> None:
    with pytest.raises(ConfigError, match="expert_dispatch is 'other'; wanted auto or one of ragged, fixed"):
        RankedEngine(saved[1], tp=2, ep=2, expert_dispatch="other")
