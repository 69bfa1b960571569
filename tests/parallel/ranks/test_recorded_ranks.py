"""Ranks with recorded decode steps, including sums, give bit for bit the results of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import glm4_moe, llama, qwen3, save
from tests.laws.engine import BUCKETS, Result, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

pytestmark = pytest.mark.needs("graphs.native")
CONTEXT = 128
PAGES = CONTEXT // 4 + 2


def steps(engine: RankedEngine) -> list[Result]:
    """Batches of one to four requests, some padded to a larger bucket; requests preempted for lack
    of pages; and prompts with a cached prefix."""
    found = engine.run(random_prompts(10, (20, 24, 28, 22)), 30, stagger=1)
    assert engine.scheduler.stats().retractions > 0
    known = found[0].prompt
    found += engine.run([known + tail for tail in random_prompts(6, (3, 1))], 6, stagger=3)
    assert engine.scheduler.stats().hit_tokens > 0
    return found


def both(folder: Path, defect: Callable[[int], None], **settings: Any) -> tuple[list[Result], list[Result]]:
    """Results of recorded steps with the defect, and of eager steps without it."""
    found = []
    for graph, planted in (("native", defect), ("off", defects.nothing)):
        given = {"graph": graph, "graph_buckets": BUCKETS, "max_requests": 4, **settings}
        with RankedEngine(folder, planted, **given) as engine:
            found.append(steps(engine))
            paths = {path.partition(":")[0] for path in engine.paths}
            assert paths == ({"native", "eager"} if graph == "native" else {"eager"})
    return found[0], found[1]


@pytest.mark.parametrize("make", [llama, qwen3, glm4_moe])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_are_those_that_would_have_run(make: Callable[..., Any], dtype: str, tmp_path: Path) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    memory = PAGES * 4 * 2 * oracle.config.num_hidden_layers * _cell(oracle.config) * (4 if dtype == "float32" else 2)
    recorded, eager = both(save(oracle, tmp_path), defects.nothing, dtype=dtype, kv_cache_memory=memory)
    assert told(recorded) == told(eager)


def told(results: list[Any]) -> list[Any]:
    """Return the tokens and log-probabilities of results."""
    return [(each.tokens, each.logprobs, each.prompt_logprobs) for each in results]


def _cell(config: Any) -> int:
    """Number of elements of one token's keys, in one layer on one of two ranks."""
    return max(config.num_key_value_heads // 2, 1) * (
        config.head_dim or config.hidden_size // config.num_attention_heads
    )


def test_recorded_steps_compare_what_they_do_where_that_is_asked_for(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    memory = PAGES * 4 * 2 * oracle.config.num_hidden_layers * _cell(oracle.config) * 4
    recorded, eager = both(save(oracle, tmp_path), defects.nothing, kv_cache_memory=memory, poison=True)
    assert told(recorded) == told(eager)


@pytest.mark.parametrize("defect", [defects.sums_not_recorded, defects.sums_too_soon])
def test_a_recording_without_its_sums_in_their_place_is_caught(defect: Callable[[int], None], tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    memory = PAGES * 4 * 2 * oracle.config.num_hidden_layers * _cell(oracle.config) * 4
    recorded, eager = both(save(oracle, tmp_path), defect, kv_cache_memory=memory)
    assert recorded != eager
