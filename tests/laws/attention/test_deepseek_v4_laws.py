"""DeepSeek-V4 in an engine with its scheduler, compared with transformers: lengths, chunks,
arrivals, pages, greedy search, and names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import Oracle, oracle_logprobs, save
from tests.deepseek_v4 import HEAVY, SPARSE, deepseek_v4, with_module_names, with_published_names
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths

TOLERANCE = 5e-5
Plant = tuple[Any, str, Any]
"""An object, its attribute, and the defective value."""
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 31, 33, 95)
LONG = (127, 128, 129, 255, 256, 257, 300)
WRITERS: dict[str, Callable[[Oracle, Path], Path]] = {
    "published": with_published_names,
    "modules": with_module_names,
    "saved": save,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Oracle]]:
    """Blocks of 4 and 16 tokens, so that short texts have several, and an activation limit that is
    often reached."""
    oracle = deepseek_v4(swiglu_limit=0.3)
    yield save(oracle, tmp_path_factory.mktemp("deepseek-v4")), oracle


def opened(folder: Path, **settings: Any) -> TokenEngine:
    """Make an engine with unused rows poisoned."""
    return TokenEngine(
        folder, **{"attention_backend": "compressed", "page_size": 32, "max_model_len": 160, "poison": True, **settings}
    )


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    return random_prompts(seed, lengths, 128)


def same(found: list[Result], wanted: list[Result]) -> bool:
    """Whether the tokens are the same."""
    return [each.tokens for each in found] == [each.tokens for each in wanted]


def test_texts_of_many_lengths_together_have_transformers_numbers(checkpoint) -> None:
    folder, oracle = checkpoint
    engine = opened(folder, graph="off", max_batch_tokens=512, scramble_pages=1)
    check_logprobs(engine.run(prompts(1, LENGTHS), 6, score_prompts=True), oracle, TOLERANCE)


def test_texts_in_pieces_beside_others_have_transformers_numbers(checkpoint, graph: str) -> None:
    folder, oracle = checkpoint
    engine = opened(folder, graph=graph, max_batch_tokens=7, graph_token_buckets=(7,), scramble_pages=2)
    found = engine.run(prompts(2, (1, 16, 33, 70, 5)), 6, score_prompts=True, stagger=1)
    check_logprobs(found, oracle, TOLERANCE)
    check_paths(engine, graph)


def test_greedy_tokens_are_those_of_transformers_beside_others_and_alone(checkpoint) -> None:
    folder, oracle = checkpoint
    engine, texts = opened(folder, graph="off"), prompts(3, (5, 16, 37, 70))
    found = engine.run(texts, 80)
    check_logprobs(found, oracle, TOLERANCE)
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


@pytest.mark.parametrize("changes", [{"index_topk": 3}, {"hc_mult": 2, "hc_sinkhorn_iters": 3, "rms_norm_eps": 0.01}])
def test_other_numbers_have_transformers_numbers(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = deepseek_v4(**changes)
    check_logprobs(opened(save(oracle, tmp_path)).run(prompts(6, (9, 70)), 6, score_prompts=True), oracle, TOLERANCE)


def test_in_bfloat16_the_numbers_are_near(checkpoint) -> None:
    """Where rounding changes the chosen blocks or experts, differences are large, but such tokens
    are few."""
    folder, oracle = checkpoint
    for result in opened(folder, graph="off", dtype="bfloat16").run(prompts(9, (45, 20)), 6, score_prompts=True):
        ids = result.prompt + result.tokens
        wanted = oracle_logprobs(oracle, ids)[range(len(ids) - 1), ids[1:]]
        assert (torch.tensor([*result.prompt_logprobs, *result.logprobs]) - wanted).abs().mean() < 0.15


def test_names_of_each_kind_give_the_same_numbers(checkpoint, tmp_path: Path) -> None:
    _, oracle = checkpoint
    found = []
    for name, write in WRITERS.items():
        results = opened(write(oracle, tmp_path / name)).run(prompts(7, (50,)), 4, score_prompts=True)
        found.append([(each.tokens, each.logprobs, each.prompt_logprobs) for each in results])
        check_logprobs(results, oracle, TOLERANCE)
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def unshared(checkpoint) -> TokenEngine:
    """One engine for all defects, without prefix cache between their requests."""
    return opened(checkpoint[0], graph="off", prefix_cache=False)


def wrong_direction(layer: Any) -> Plant:
    """Mutant: mixes streams by the transposed matrix, which is not symmetric."""
    right = layer.attn_hc._post
    return layer.attn_hc, "_post", lambda x, h, post, comb: right(x, h, post, comb.transpose(1, 2))


def neighbours_experts(layer: Any) -> Plant:
    """Mutant: looks up the experts of the neighbouring token."""
    right = layer.mlp.experts._route
    return layer.mlp.experts, "_route", lambda hidden, ids: right(hidden, ids.roll(1))


def no_limit(layer: Any) -> Plant:
    """Mutant: the shared expert has no activation limit."""
    return layer.mlp.shared, "_limit", 1e9


def weighing_bias(layer: Any) -> Plant:
    """Mutant: the router's bias is zero."""
    return layer.mlp.experts._route, "operands", (torch.zeros(8),)


def other_rope(layer: Any) -> Plant:
    """Mutant: applies the rotary of window-only layers to queries and window keys."""
    attention = layer.self_attn.attention
    return attention, "_cos_sin", attention._cos_sin.flip(0)


def swapped_groups(layer: Any) -> Plant:
    """Mutant: projects each group of heads with the other group's weight."""
    grouped = layer.self_attn.attention.projections.output.layers[0]
    return grouped, "weight", grouped.weight.flip(0)


def no_sinks(layer: Any) -> Plant:
    """Mutant: attention without sinks."""
    return layer.self_attn.attention, "sinks", None


def raw_keys(layer: Any) -> Plant:
    """Mutant: the norm of the window's keys has no weight."""
    return layer.self_attn.attention, "kv_norm", torch.ones(32)


@pytest.mark.parametrize(
    ("defect", "layer"),
    [
        (wrong_direction, 2),
        (neighbours_experts, 1),
        (no_limit, 3),
        (weighing_bias, 2),
        (other_rope, 2),
        (swapped_groups, 1),
        (no_sinks, 4),
        (raw_keys, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_law_catches(checkpoint, unshared: TokenEngine, monkeypatch, defect: Any, layer: int) -> None:
    model: Any = unshared.worker.runner.model
    monkeypatch.setattr(*defect(model.layers[layer]))
    found = unshared.run(prompts(8, (45,)), 2, score_prompts=True)
    with pytest.raises(AssertionError, match="first divergent token"):
        check_logprobs(found, checkpoint[1], TOLERANCE)


def test_without_a_defect_the_same_holds(checkpoint, unshared: TokenEngine) -> None:
    check_logprobs(unshared.run(prompts(8, (45,)), 2, score_prompts=True), checkpoint[1], TOLERANCE)
