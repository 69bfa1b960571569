"""Data-parallel shards replay decode graphs together: with the same text and log-probabilities as
eager steps and as transformers, with idle shards, preemption and cached prefixes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.core.errors import WorkerLost
from sglcore.engine.ranks.watch import Patience
from tests.checkpoints import llama, qwen3_moe, save
from tests.laws.engine import Result, check_logprobs, random_prompts
from tests.parallel import graph_defects
from tests.parallel.engine import RankedEngine
from tests.parallel.graph_defects import soon

pytestmark = pytest.mark.needs("graphs.native")
CONTEXT, SEED = 128, 5
BUCKETS = (1, 3)
"""Two requests of a shard are padded, and an odd bucket is divided among two ranks of a shard."""
FIXED = {"expert_dispatch": "fixed"}


def dense() -> Any:
    return llama(max_position_embeddings=CONTEXT)


def sparse() -> Any:
    return qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT)


FORMS: MappingProxyType[str, tuple[Callable[[], Any], dict[str, Any]]] = MappingProxyType(
    {
        "dense, dp": (dense, {"tp": 2, "dp": 2}),
        "dense, tp x dp": (dense, {"tp": 4, "dp": 2}),
        "experts cut, dp": (sparse, {"tp": 2, "dp": 2}),
        "experts whole at fixed places, tp x dp": (sparse, {"tp": 4, "dp": 2, "ep": 4, **FIXED}),
    }
)


def small(oracle: Any, ranks: int) -> dict[str, Any]:
    """Settings of an engine with pages for little more than one request of full length, if so many
    ranks share a shard's heads."""
    config = oracle.config
    heads = max(config.num_key_value_heads // ranks, 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    memory = (CONTEXT // 4 + 2) * 4 * 2 * config.num_hidden_layers * heads * size * 4
    return {"max_requests": 3, "max_batch_tokens": 24, "graph_buckets": BUCKETS, "kv_cache_memory": memory}


def steps(engine: RankedEngine) -> list[Result]:
    """One request while a shard is idle, arrivals, preemption, and cached prefixes."""
    found = engine.run(random_prompts(7, (4,)), 6)
    found += engine.run(random_prompts(10, (20, 24, 28, 22, 21)), 30, stagger=3)
    found += engine.run([found[1].prompt + tail for tail in random_prompts(6, (3, 1))], 6)
    stats = engine.scheduler.stats()
    assert stats.retractions > 0 and stats.hit_tokens > 0
    return found


@pytest.mark.parametrize("name", FORMS)
def test_replays_are_the_eager_steps(name: str, tmp_path: Path) -> None:
    make, settings = FORMS[name]
    oracle = make()
    folder = save(oracle, tmp_path)
    given = {**small(oracle, settings["tp"] // settings["dp"]), **settings}
    found = []
    for graph in ("native", "off"):
        with RankedEngine(folder, graph=graph, **given) as engine:
            found.append(steps(engine))
            assert engine.paths == ({"eager", "native:1", "native:3"} if graph == "native" else {"eager"})
    assert [each.tokens for each in found[0]] == [each.tokens for each in found[1]]
    for each in found:
        check_logprobs(each, oracle, 1e-4)


NO_TIME = "shard 0 has waited in a step .*, and shard 1 has ended it"
OTHER_CALL = "is at .*, and another rank is not"
OTHER_SIZES = "rank . has the graph sizes .*, and another rank has others"
NOT_CAPTURED = "agreed to replay the graph of 2 rows, and this rank has .*; captured: 1, 3"
OTHER_TEXT = "first divergent token"
CHECKED: dict[str, Any] = {"poison": True}
DEFECTS: list[tuple[Callable[[int], None], dict[str, Any], str]] = [
    (graph_defects.idle_runs_nothing, {}, NO_TIME),
    (graph_defects.idle_runs_eagerly, {**CHECKED, "graph_buckets": (3,)}, OTHER_CALL),
    (graph_defects.another_bucket, CHECKED, OTHER_CALL),
    (graph_defects.own_bucket, CHECKED, OTHER_CALL),
    (graph_defects.own_sizes, {}, OTHER_SIZES),
    (
        graph_defects.captures_nothing,
        {"graph": "auto"},
        "rank . has the captured sizes .*, and another rank has others",
    ),
    (graph_defects.not_captured, {}, NOT_CAPTURED),
    (graph_defects.padding_is_real, {}, OTHER_TEXT),
    (graph_defects.padding_is_returned, {}, "wanted"),
]


@pytest.mark.parametrize(("defect", "settings", "said"), DEFECTS)
def test_a_shard_that_departs_from_what_was_agreed_is_caught(
    defect: Callable[[int], None], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """By an error or by other log-probabilities, and never by waiting for ever. With `poison` ranks
    compare each collective before they run it."""
    oracle = dense()
    given = {"graph": "native", "tp": 2, "dp": 2, **small(oracle, 1), **settings}
    patience = Patience(silence=60.0, shard=0.5)
    folder, caught = save(oracle, tmp_path), (AssertionError, ValueError, WorkerLost)
    with pytest.raises(caught, match=said), RankedEngine(folder, partial(soon, defect), patience, **given) as engine:
        check_logprobs(steps(engine), oracle, 1e-4)


def test_in_shadow_mode_every_replay_is_compared_on_all_ranks_together(tmp_path: Path) -> None:
    oracle = sparse()
    given = {"graph": "native", "tp": 2, "dp": 2, "shadow": 1, **small(oracle, 1)}
    with RankedEngine(save(oracle, tmp_path), **given) as engine:
        check_logprobs(steps(engine), oracle, 1e-4)
        assert "native:3" in engine.paths


def test_steps_that_would_split_in_halves_replay_whole(tmp_path: Path) -> None:
    """Steps with prompts still run as two micro-batches, eagerly."""
    oracle = sparse()
    given = {"graph": "native", "tp": 2, "dp": 2, "two_batch_overlap": "on", **small(oracle, 1)}
    with RankedEngine(save(oracle, tmp_path), **given) as engine:
        check_logprobs(steps(engine), oracle, 1e-4)
        assert {"native:3", "eager:halves"} <= engine.paths
        row = next(row for row in engine.started.ledger.rows if row.topic == "two-batch overlap of graphs")
    assert row.effective == "off" and "data-parallel shards split a step where each has rows" in row.reason


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"ep": 2}, "rows go to their experts over gloo in numbers that the host waits for"),
        ({"graph": "compiled"}, "sums of ranks over gloo run between kernels, and no compiled graph can contain them"),
    ],
)
def test_what_no_graph_can_hold_runs_eagerly_with_its_reason(
    ranks: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with RankedEngine(save(sparse(), tmp_path), tp=2, dp=2, **ranks) as engine:
        rows = {row.topic: row for row in engine.started.ledger.rows}
        engine.run(random_prompts(SEED, (3, 4)), 3)
        assert engine.paths == {"eager"}
    assert rows["graph"].effective == "eager"
    assert reason in " ".join(row.reason for row in rows.values())
