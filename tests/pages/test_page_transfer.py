"""Prompts prefilled by one engine and decoded by another give the same tokens as on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import llama, save
from tests.laws.engine import random_prompts
from tests.pages.pair import Pair, Single, Text, check_same, pages_of

pytestmark = pytest.mark.needs("device")
LENGTHS = (5, 4, 8, 13, 1, 30)
"""Prompt lengths: within a page, at its end, several pages, one token, and several chunks if chunks
are short."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Single]:
    engine = Single(folder, prefix_cache=False)
    yield engine
    engine.engine.close()


def run_both(pair: Pair, alone: Single, prompts: list[list[int]], **sampling: Any) -> dict[str, Text]:
    """Run the same requests on the pair and on one engine, compare, and return the pair's
    results."""
    for engine in (pair.decode, alone):
        for place, prompt in enumerate(prompts):
            engine.add(f"r{place}", prompt, **sampling)
    found = pair.run()
    check_same(found, alone.run())
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_one_engine(folder: Path, alone: Single, overlap: bool) -> None:
    with Pair(folder, overlap=overlap) as pair:
        run_both(pair, alone, random_prompts(1, LENGTHS))


def test_one_token_of_a_prompt_is_computed_where_it_is_decoded(folder: Path, alone: Single) -> None:
    with Pair(folder) as pair:
        run_both(pair, alone, random_prompts(1, LENGTHS))
        assert pair.decode.engine.scheduler.stats().computed_prompt_tokens == len(LENGTHS)
        assert pair.prompt.engine.scheduler.stats().computed_prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize("asked", [8, 16])
def test_prompts_in_chunks(folder: Path, alone: Single, asked: int) -> None:
    with Pair(folder, prompt={"max_batch_tokens": asked}) as pair:
        run_both(pair, alone, random_prompts(2, (40, 3, 21, 100)))


def test_prefixes_that_both_sides_know(folder: Path, alone: Single) -> None:
    prefix = random_prompts(3, (22,))[0]
    first, second, third = (prefix + each for each in random_prompts(4, (3, 9, 2)))
    with Pair(folder) as pair:
        run_both(pair, alone, [first])
        before = pair.decode.memory.hit_tokens
        found = run_both(pair, alone, [second, third])
        assert pair.decode.memory.hit_tokens - before == 40
        assert found["r0/0"].cached == found["r1/0"].cached == 20
        pair.decode.engine.scheduler.flush_prefix_cache()
        before = pair.decode.memory.hit_tokens
        found = run_both(pair, alone, [second])
        assert pair.decode.memory.hit_tokens == before
        assert found["r0/0"].cached == 28
        pair.prompt.engine.scheduler.flush_prefix_cache()
        assert run_both(pair, alone, [second])["r0/0"].cached == 28


SAMPLED: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0, "seed": 7},
    "several": {"temperature": 1.0, "seed": 8, "n": 3},
    "penalised": {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "scored": {"prompt_logprobs": 1},
    "one token": {"max_tokens": 1},
    "late stops": {"min_tokens": 5, "stop_token_ids": tuple(range(40)), "temperature": 1.0, "seed": 3},
    "early stops": {"stop_token_ids": tuple(range(97))},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_however_tokens_are_drawn(name: str, folder: Path, alone: Single) -> None:
    with Pair(folder) as pair:
        run_both(pair, alone, random_prompts(5, (6, 12, 17)), **SAMPLED[name])


def test_requests_that_give_way_compute_their_prompts_again(folder: Path, alone: Single) -> None:
    with Pair(folder, max_model_len=64, kv_cache_memory=pages_of(alone, 18)) as pair:
        run_both(pair, alone, random_prompts(6, (20, 17, 25, 9, 30)), max_tokens=30)
        assert pair.decode.engine.scheduler.stats().retractions


def test_one_engine_serves_its_own_clients_and_others(folder: Path, alone: Single) -> None:
    prompts = random_prompts(7, (9, 14))
    with Pair(folder) as pair:
        for engine in (pair.prompt, pair.decode, alone):
            for place, prompt in enumerate(prompts):
                engine.add(f"r{place}", prompt)
        wanted = alone.run()
        check_same(pair.run(), wanted)
        check_same(pair.prompt.texts, wanted)
