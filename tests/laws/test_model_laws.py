"""For every architecture: chunks, batches, pages, prefix hits, preemption, overlap and graphs do
not change a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.conformance.mutant import become
from sglcore.conformance.mutants.mutants_attention import forgets_sinks, forgets_softcap
from sglcore.runtime.attention.reference import ReferenceAttention
from tests.checkpoints import (
    LLAMA3,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    granite_hybrid,
    lfm2_moe,
    llama,
    mistral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    rope,
    save,
)
from tests.laws.engine import TokenEngine, check_greedy, check_logprobs, random_prompts

CONTEXT = 128
ARCHITECTURES: MappingProxyType[str, Callable[[], Any]] = MappingProxyType(
    {
        "llama": lambda: llama(max_position_embeddings=CONTEXT),
        "llama3-rope": lambda: llama(max_position_embeddings=CONTEXT, **rope("llama3", **LLAMA3)),
        "mistral-window": lambda: mistral(max_position_embeddings=CONTEXT, sliding_window=6),
        "qwen2": lambda: qwen2(max_position_embeddings=CONTEXT),
        "qwen3": lambda: qwen3(max_position_embeddings=CONTEXT, tie_word_embeddings=True),
        "qwen3-moe": lambda: qwen3_moe(max_position_embeddings=CONTEXT),
        "gemma3": lambda: gemma3(max_position_embeddings=CONTEXT),
        "glm4-moe": lambda: glm4_moe(max_position_embeddings=CONTEXT),
        "gpt-oss": lambda: gpt_oss(max_position_embeddings=CONTEXT),
        "exaone4-transformers": lambda: exaone4(max_position_embeddings=CONTEXT),
        "granite-hybrid": lambda: granite_hybrid(max_position_embeddings=CONTEXT),
        "lfm2-moe": lambda: lfm2_moe(max_position_embeddings=CONTEXT),
        "nemotron-h": lambda: nemotron_h(max_position_embeddings=CONTEXT),
        "qwen3-next": lambda: qwen3_next(max_position_embeddings=CONTEXT),
        "falcon-h1-transformers": lambda: falcon_h1(max_position_embeddings=CONTEXT),
    }
)
COMPILED = ("llama", "qwen2", "qwen3-moe", "exaone4-transformers")
"""Compiling takes ten seconds for each; the other models compute by the same operations, or hide
attention from the compiler."""
LENGTHS = (1, 5, 30, 17, 9)


class Case:
    """A saved checkpoint and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = ARCHITECTURES[name]()
        self.folder = save(self.oracle, folder)
        self.prompts = random_prompts(1, (7, 23))

    @cached_property
    def continuations(self) -> list[list[int]]:
        """The 64 tokens that the oracle generates after each of `prompts`."""
        greedy = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            found = [self.oracle.generate(torch.tensor([prompt]), **greedy) for prompt in self.prompts]
        return [out[0, len(prompt) :].tolist() for out, prompt in zip(found, self.prompts, strict=True)]

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one KV page in float32."""
        config = self.oracle.config
        head_dim = config.hidden_size // config.num_attention_heads
        head_dim = config.to_dict().get("head_dim") or head_dim
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        layers = sum(kind in ("full_attention", "sliding_attention", "hybrid") for kind in kinds)
        return page_size * layers * 2 * config.num_key_value_heads * head_dim * 4


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


def check_64_greedy_steps(engine: TokenEngine, case: Case) -> None:
    """The tokens equal transformers' own greedy search, and so do their log-probabilities."""
    results = engine.run(case.prompts, 64)
    check_greedy(results, case.oracle)
    check_logprobs(results, case.oracle)
    assert [result.tokens for result in results] == case.continuations


def check_paths(engine: TokenEngine, graph: str) -> None:
    """Decode steps were replayed if graphs were requested, and so were prompts if the graph kind
    captures prompts."""
    kinds = {path.partition(":")[0] for path in engine.paths}
    if graph == "off":
        assert kinds == {"eager"}
    elif graph == "native":
        assert "native" in kinds
    else:
        assert {"full", graph} <= kinds


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_of_64_steps_are_those_of_transformers(case: Case, graph: str, overlap: bool) -> None:
    engine = TokenEngine(case.folder, graph=graph, overlap=overlap, scramble_pages=3)
    check_64_greedy_steps(engine, case)
    check_paths(engine, graph)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_chunks_and_ragged_arrivals_change_nothing(case: Case, graph: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk, stagger = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    print(f"seed {seed}: chunks of {chunk}, an arrival every {stagger} steps")
    engine = TokenEngine(case.folder, graph=graph, max_batch_tokens=chunk, graph_token_buckets=(chunk,))
    results = engine.run(random_prompts(seed, LENGTHS), 12, score_prompts=True, stagger=stagger)
    check_logprobs(results, case.oracle)
    check_paths(engine, graph)


def test_overlap_changes_nothing(case: Case, graph: str) -> None:
    prompts = random_prompts(3, LENGTHS)
    settings = {"graph": graph, "max_batch_tokens": 16, "graph_token_buckets": (16,)}
    runs = []
    for overlap in (True, False):
        engine = TokenEngine(case.folder, overlap=overlap, **settings)
        runs.append(engine.run(prompts, 16, temperature=0.9, seed=7, stagger=2))
        check_paths(engine, graph)
    assert [result.tokens for result in runs[0]] == [result.tokens for result in runs[1]]
    for results in runs:
        check_logprobs(results, case.oracle)


def test_any_page_order_and_size_changes_nothing(case: Case, graph: str) -> None:
    for page_size, seed in ((1, 4), (3, 5), (8, 6)) if graph == "off" else ((3, 5),):
        settings = {"graph": graph, "page_size": page_size, "graph_token_buckets": (64,)}
        engine = TokenEngine(case.folder, scramble_pages=seed, **settings)
        check_logprobs(engine.run(random_prompts(seed, LENGTHS), 10), case.oracle)
        check_paths(engine, graph)


def test_prefix_hits_change_nothing(case: Case, graph: str) -> None:
    engine = TokenEngine(case.folder, graph=graph)
    base = random_prompts(8, (33,))[0]
    check_logprobs(engine.run([base], 4), case.oracle)
    others = [base[:21] + tail for tail in random_prompts(9, (3, 1, 6))]
    check_logprobs(engine.run([base, *others], 8), case.oracle)
    if engine.worker.limits.keeps_state:  # a branch saves its state for the next
        check_logprobs(engine.run(others, 8), case.oracle)
        assert engine.scheduler.stats().snapshot_hits >= 4
    assert engine.scheduler.stats().hit_tokens >= 32 + 3 * 20
    check_paths(engine, graph)


def test_retraction_and_recompute_change_nothing(case: Case, graph: str) -> None:
    pages = CONTEXT // 4 + 2
    settings = {"graph": graph, "graph_token_buckets": (32,), "max_requests": 4}
    engine = TokenEngine(case.folder, kv_cache_memory=pages * case.page_bytes(4), **settings)
    assert engine.worker.limits.num_pages == pages
    results = engine.run(random_prompts(10, (20, 24, 28, 22)), 30, stagger=1)
    assert engine.scheduler.stats().retractions > 0
    check_logprobs(results, case.oracle)
    check_paths(engine, graph)


def test_stale_buffers_are_never_read(case: Case, graph: str) -> None:
    engine = TokenEngine(case.folder, graph=graph, poison=True, max_batch_tokens=12, graph_token_buckets=(12,))
    check_logprobs(engine.run(random_prompts(11, LENGTHS), 10, stagger=2, score_prompts=True), case.oracle)
    check_paths(engine, graph)


@pytest.mark.parametrize("case", COMPILED, indirect=True)
@pytest.mark.needs("graphs.compiled")
def test_compiled_decode_changes_nothing(case: Case) -> None:
    """64 greedy steps; then chunks, arrivals, prefix hits and preemption in one engine with
    replayed decode steps."""
    pages = CONTEXT // 4 + 6
    memory = pages * case.page_bytes(4)
    engine = TokenEngine(
        case.folder, graph="compiled", graph_buckets=(4,), poison=True, kv_cache_memory=memory, max_batch_tokens=24
    )
    check_64_greedy_steps(engine, case)
    prompts = random_prompts(12, (20, 24, 28, 22, 3))
    for _ in range(2):
        check_logprobs(engine.run(prompts, 30, stagger=1), case.oracle)
    stats = engine.scheduler.stats()
    assert stats.hit_tokens > 0
    # A model with sliding windows only runs short of no pages: full pages cost it no memory.
    assert stats.retractions > 0 or engine.worker.limits.num_window_pages
    assert engine.paths == {"eager", "compiled:4"}


@pytest.mark.needs("graphs.native")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_softcaps_and_sinks_run_by_the_preferred_attention_in_recorded_steps(
    make: Callable[..., Any], implementation: str, tmp_path: Path
) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    engine = TokenEngine(save(oracle, tmp_path), graph="native", model_impl=implementation)
    assert not isinstance(engine.worker.runner.attn_backend, ReferenceAttention)
    check_logprobs(engine.run(random_prompts(4, LENGTHS), 8, score_prompts=True, stagger=2), oracle)
    check_paths(engine, "native")


@pytest.mark.parametrize(("make", "defect"), [(gemma2, forgets_softcap), (gpt_oss, forgets_sinks)])
def test_attention_that_forgets_them_is_caught(make: Callable[..., Any], defect: Any, tmp_path: Path) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    engine = TokenEngine(save(oracle, tmp_path), graph="off")
    become(engine.worker.runner.attn_backend, defect)
    with pytest.raises(AssertionError):
        check_logprobs(engine.run(random_prompts(4, LENGTHS), 2, score_prompts=True), oracle)
