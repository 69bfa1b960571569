"""For every architecture: chunks, batches, pages, prefix hits, preemption, overlap and graphs do
not change a number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.conformance.catalogue import laws_up_to
from sglcore.conformance.harness import Harness
from sglcore.conformance.kit_run import Kit, Trial, catches
from sglcore.conformance.mutant import Mutant, become
from sglcore.conformance.mutants import mutants_kept, mutants_worker
from sglcore.conformance.mutants.mutants_attention import forgets_sinks, forgets_softcap
from sglcore.conformance.oracle import Oracle
from sglcore.conformance.session import Session
from sglcore.conformance.target import Target, find_target
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.worker.model_worker import Limits
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
from tests.laws.engine import (
    BUCKETS,
    SMALL,
    TOKEN_BUCKETS,
    TokenEngine,
    TransformersOracle,
    check_logprobs,
    on_this_device,
    random_prompts,
)

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

    def kit(self, graph: str, **settings: Any) -> ModelKit:
        """Return the kit with this model; the caller closes it."""
        given = {"graph": graph, "graph_buckets": BUCKETS, "graph_token_buckets": TOKEN_BUCKETS}
        target = find_target(os.environ["LANE_DEVICE"])
        return ModelKit(target, self, {**SMALL, **on_this_device(), **given, **settings})

    def hold(self, name: str, graph: str, **settings: Any) -> Limits:
        """Hold a law of the kit with this model; return the worker's limits."""
        with closing(self.kit(graph, **settings)) as kit:
            (law,) = laws_up_to("C2", (name,))
            law.check(Trial(kit, law, "model"))
            harness = kit.harness("model")
            check_paths(harness, graph)
            return harness.limits

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one KV page in float32."""
        config = self.oracle.config
        head_dim = config.hidden_size // config.num_attention_heads
        head_dim = config.to_dict().get("head_dim") or head_dim
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        layers = sum(kind in ("full_attention", "sliding_attention", "hybrid") for kind in kinds)
        return page_size * layers * 2 * config.num_key_value_heads * head_dim * 4


class ModelKit(Kit):
    """The kit with the model and the oracle of a case in place of its own."""

    def __init__(self, target: Target, case: Case, settings: Mapping[str, Any]) -> None:
        super().__init__(target, case.folder, settings)
        self.case = case

    def broken_by(self, mutant: Mutant) -> Kit:
        return ModelKit(self.target.broken_by(mutant), self.case, self.settings)

    def checkpoint(self, model: str, head_dim: int) -> Path:
        return self.case.folder

    def oracle(self, model: str, head_dim: int) -> Oracle:
        return TransformersOracle(self.case.oracle)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


def check_64_greedy_steps(engine: TokenEngine, case: Case) -> None:
    """The tokens equal transformers' own greedy search, and so do their log-probabilities."""
    results = engine.run(case.prompts, 64)
    check_logprobs(results, case.oracle)
    assert [result.tokens for result in results] == case.continuations


def check_paths(engine: Session | Harness, graph: str) -> None:
    """Decode steps were replayed if graphs were requested, and so were prompts if the graph kind
    captures prompts."""
    kinds = {path.partition(":")[0] for path in engine.recorder.paths}
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
    case.hold("overlap_is_sequential", graph, max_batch_tokens=16, graph_token_buckets=(16,))


def test_any_page_order_and_size_changes_nothing(case: Case, graph: str) -> None:
    for page_size, seed in ((1, 4), (3, 5), (8, 6)) if graph == "off" else ((3, 5),):
        settings = {"graph": graph, "page_size": page_size, "graph_token_buckets": (64,)}
        engine = TokenEngine(case.folder, scramble_pages=seed, **settings)
        check_logprobs(engine.run(random_prompts(seed, LENGTHS), 10), case.oracle)
        check_paths(engine, graph)


def test_prefix_hits_change_nothing(case: Case, graph: str) -> None:
    case.hold("prefix_hits", graph)


def test_retraction_and_recompute_change_nothing(case: Case, graph: str) -> None:
    pages = CONTEXT // 4 + 2
    given = {"graph_token_buckets": (32,), "max_requests": 4, "kv_cache_memory": pages * case.page_bytes(4)}
    assert case.hold("retraction", graph, **given).num_pages == pages


@pytest.mark.parametrize(
    ("case", "name", "mutant"),
    [
        ("llama", "overlap_is_sequential", mutants_worker.REUSES_RESULTS),
        ("llama", "prefix_hits", mutants_worker.LOSES_SHARED_PAGES),
        ("qwen3-next", "prefix_hits", mutants_kept.LATE_SNAPSHOTS),
        ("llama", "retraction", mutants_worker.FORGETS_OUTPUTS),
    ],
    indirect=["case"],
)
def test_laws_of_the_kit_catch_its_mutants_with_this_oracle(case: Case, name: str, mutant: Mutant) -> None:
    (law,) = laws_up_to("C2", (name,))
    with closing(case.kit("off")) as kit:
        is_caught, text = catches(kit, law, mutant)
    assert is_caught, text


def test_stale_buffers_are_never_read(case: Case, graph: str) -> None:
    engine = TokenEngine(case.folder, graph=graph, poison=True, max_batch_tokens=12, graph_token_buckets=(12,))
    check_logprobs(engine.run(random_prompts(11, LENGTHS), 10, stagger=2, score_prompts=True), case.oracle)
    check_paths(engine, graph)


@pytest.mark.parametrize("case", COMPILED, indirect=True)
@pytest.mark.needs("graphs.compiled")
def test_compiled_decode_changes_nothing(case: Case) -> None:
    """64 greedy steps; then chunks, arrivals, prefix hits and preemption in one engine with
    replayed decode steps."""
    # With a pool for window pages of their own the second run hits what the first has left.
    memory = {"kv_cache_memory": (CONTEXT // 4 + 6) * case.page_bytes(4), "kv_memory": "split"}
    engine = TokenEngine(case.folder, graph="compiled", graph_buckets=(4,), poison=True, max_batch_tokens=24, **memory)
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
