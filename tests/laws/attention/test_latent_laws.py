"""Latent attention, dense and with an indexer that selects rows: chunks, pages, prefix hits,
preemption, overlap and graphs change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.sparse.latent import DeepseekSparseAttnBackend, LatentPlan
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.forward_batch import ForwardBatch
from tests.checkpoints import save
from tests.latent import INDEXER, SIZES, deepseek_v3, deepseek_v32
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths

CONTEXT = 96
TOLERANCE = 5e-5
CASES: MappingProxyType[str, tuple[Callable[..., Any], int]] = MappingProxyType(
    {
        "deepseek-v3": (deepseek_v3, 0),
        "deepseek-v3.2": (deepseek_v32, INDEXER["index_head_dim"]),
    }
)
"""The function that makes the model, and the elements per token in addition to its latent row."""


class Case:
    """A saved checkpoint, its oracle, and engines over it with few pages."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.beside = CASES[name]
        self.oracle = make(max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)

    def engine(self, **settings: Any) -> TokenEngine:
        """Make an engine with a KV pool that is poisoned where nothing was written."""
        row = SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"] + self.beside
        pages = CONTEXT // 4 + 2
        memory = pages * 4 * SIZES["num_hidden_layers"] * row * 4
        given = {"max_requests": 4, "max_model_len": CONTEXT, "kv_cache_memory": memory, "poison": True, **settings}
        engine = TokenEngine(self.folder, scramble_pages=3, attention_backend="latent", **given)
        assert engine.worker.limits.num_pages * settings.get("page_size", 4) == pages * 4
        return engine

    def check(self, results: list[Result]) -> None:
        """Compare with transformers."""
        check_logprobs(results, self.oracle, TOLERANCE)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


def test_rows_by_pages_change_nothing(case: Case, graph: str) -> None:
    """Chunks and ragged arrivals; prefix hits at the end of a text and at branches; preemption."""
    engine = case.engine(graph=graph, max_batch_tokens=24, graph_token_buckets=(24,))
    case.check(engine.run(random_prompts(1, (5, 40, 17, 9)), 8, score_prompts=True, stagger=2))
    base = random_prompts(8, (33,))[0]
    others = [base[:21] + tail for tail in random_prompts(9, (3, 1, 6))]
    for prompts in ([base], [base], others):
        case.check(engine.run(prompts, 4))
    assert engine.scheduler.stats().hit_tokens >= 32 + 3 * 20
    case.check(engine.run(random_prompts(10, (20, 24, 28, 22)), 20, stagger=1))
    assert engine.scheduler.stats().retractions > 0
    check_paths(engine, graph)


@pytest.mark.needs("device")
def test_tokens_are_those_of_transformers_alone_and_beside_others(case: Case) -> None:
    """Four requests together without overlap, and with another page size."""
    engine, prompts = case.engine(graph="off", overlap=False, page_size=8), random_prompts(4, (7, 23, 18, 31))
    found = engine.run(prompts, 24)
    case.check(found)
    for prompt, result in zip(prompts, found, strict=True):
        with torch.no_grad():
            wanted = case.oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert result.tokens == wanted[0, len(prompt) :].tolist()


class SeesOneLess(DeepseekSparseAttnBackend):
    """Mutant: tokens do not see themselves."""

    def plan(self, batch: ForwardBatch) -> LatentPlan:
        plan = super().plan(batch)
        return replace(plan, tokens=replace(plan.tokens, lens=plan.tokens.lens - 1))


class SeesTheFirst(DeepseekSparseAttnBackend):
    """Mutant: selects the first rows for all scores of the indexer."""

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        super().choose(torch.zeros_like(q), weights, layer, batch)


class ForgetsRows(DeepseekSparseAttnBackend):
    """Mutant: reuses the rows selected for the layer before."""

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        plan = self.planned(batch)[1]
        if plan.chosen is None:
            super().choose(q, weights, layer, batch)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("case", "defect"),
    [("deepseek-v3", SeesOneLess), ("deepseek-v3.2", SeesTheFirst), ("deepseek-v3.2", ForgetsRows)],
    indirect=["case"],
)
def test_a_defect_is_caught(case: Case, defect: type[DeepseekSparseAttnBackend]) -> None:
    engine = case.engine(graph="off")
    engine.worker.runner.attn_backend.__class__ = defect
    with pytest.raises(AssertionError):
        case.check(engine.run(random_prompts(1, (40,)), 2, score_prompts=True))


@pytest.mark.needs("device")
def test_an_indexer_that_may_choose_all_changes_nothing(tmp_path: Path) -> None:
    """Without the indexer, V3.2's weights are those of a V3 model."""
    oracle = deepseek_v32(index_topk=CONTEXT, max_position_embeddings=CONTEXT)
    plain = deepseek_v3(max_position_embeddings=CONTEXT)
    plain.load_state_dict(oracle.state_dict(), strict=False)
    engine = TokenEngine(save(oracle, tmp_path), graph="off", attention_backend="latent", max_batch_tokens=16)
    check_logprobs(engine.run(random_prompts(1, (40, 9)), 8, score_prompts=True), plain, TOLERANCE)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', and .* wanted auto or fp8"),
        ({"task": "embed"}, "keeps rows of its own, and an embedding runs without"),
        ({"attention_backend": "gathered"}, "keys and values laid out rows|it lacks latent|is not offered"),
    ],
)
@pytest.mark.parametrize("case", ["deepseek-v3"], indirect=True)
def test_what_does_not_go_with_rows_is_refused(case: Case, asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TokenEngine(case.folder, graph="off", **asked)
