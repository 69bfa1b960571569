"""DeepSeek-V4 by the engine and its scheduler against transformers: lengths, chunks, arrivals, pages, greedy search, and names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import Oracle, save
from tests.deepseek_v4 import HEAVY, SPARSE, deepseek_v4, with_module_names, with_published_names
from tests.laws.engine import Result, TokenEngine, check_greedy, check_logprobs, random_prompts

TOLERANCE = 5e-5
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 31, 33, 95)
LONG = (127, 128, 129, 255, 256, 257, 300)
WRITERS: dict[str, Callable[[Oracle, Path], Path]] = {
    "published": with_published_names,
    "modules": with_module_names,
    "saved": save,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Oracle]]:
    """Blocks of 4 and 16 tokens, so that short texts have several."""
    oracle = deepseek_v4()
    yield save(oracle, tmp_path_factory.mktemp("deepseek-v4")), oracle


def opened(folder: Path, **settings: Any) -> TokenEngine:
    """An engine whose unused rows are no numbers."""
    return TokenEngine(
        folder, **{"attention_backend": "compressed", "page_size": 32, "max_model_len": 160, "poison": True, **settings}
    )


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return random_prompts(seed, lengths, 128)


def same(found: list[Result], wanted: list[Result]) -> bool:
    """The same tokens."""
    return [each.tokens for each in found] == [each.tokens for each in wanted]


def test_texts_of_many_lengths_together_and_in_pieces_have_transformers_numbers(checkpoint) -> None:
    folder, oracle = checkpoint
    for pieces, seed in ((512, 1), (7, 2)):
        engine = opened(folder, graph="off", max_batch_tokens=pieces, scramble_pages=seed)
        found = engine.run(prompts(seed, LENGTHS), 6, score_prompts=True, stagger=seed - 1)
        check_logprobs(found, oracle, TOLERANCE)


def test_greedy_tokens_are_those_of_transformers_beside_others_and_alone(checkpoint) -> None:
    folder, oracle = checkpoint
    engine, texts = opened(folder, graph="off"), prompts(3, (5, 16, 37, 70))
    found = engine.run(texts, 80)
    check_logprobs(found, oracle, TOLERANCE)
    check_greedy(found, oracle)
    given = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert found[0].tokens == oracle.generate(torch.tensor(texts[:1]), **given)[0, 5:].tolist()
    assert same(engine.run(texts[3:], 80), found[3:])


def test_the_order_of_requests_changes_nothing(checkpoint) -> None:
    folder, oracle = checkpoint
    texts = prompts(4, (40, 3, 90, 17))
    found = [opened(folder, scramble_pages=seed).run(texts[::step], 12) for seed, step in ((5, 1), (6, -1))]
    assert same(found[0], found[1][::-1])
    check_logprobs(found[0], oracle, TOLERANCE)


@pytest.mark.parametrize("pieces", [512, 64])
def test_published_ratios_have_transformers_numbers(tmp_path: Path, pieces: int) -> None:
    oracle = deepseek_v4(compress_rates={SPARSE: 4, HEAVY: 128})
    engine = opened(save(oracle, tmp_path), page_size=128, max_model_len=320, max_batch_tokens=pieces)
    check_logprobs(engine.run(prompts(5, LONG), 3, score_prompts=True), oracle, TOLERANCE)


@pytest.mark.parametrize("changes", [{"swiglu_limit": 0.3}, {"index_topk": 3}, {"hc_mult": 2, "hc_sinkhorn_iters": 3}])
def test_other_numbers_have_transformers_numbers(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = deepseek_v4(**changes)
    check_logprobs(opened(save(oracle, tmp_path)).run(prompts(6, (9, 70)), 6, score_prompts=True), oracle, TOLERANCE)


def test_names_of_each_kind_give_the_same_numbers(checkpoint, tmp_path: Path) -> None:
    _, oracle = checkpoint
    found = []
    for name, write in WRITERS.items():
        results = opened(write(oracle, tmp_path / name)).run(prompts(7, (50,)), 4, score_prompts=True)
        found.append([(each.tokens, each.logprobs, each.prompt_logprobs) for each in results])
        check_logprobs(results, oracle, TOLERANCE)
    assert found[0] == found[1] == found[2]
