"""KV rows in 8 bits: attention equals attention over values rounded in the same way, and is near
transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.layers.latent_attention import LatentAttention
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ, RowCodec
from sglcore.runtime.memory.kv_rows import FP8
from tests.checkpoints import Oracle, oracle_logprobs, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import deepseek_v3, deepseek_v32
from tests.laws.engine import Result, TokenEngine, random_prompts
from tests.laws.test_model_laws import check_paths

CONTEXT = 160
SAME, NEAR, MEAN = 1e-3, 0.6, 0.1
"""SAME: a row with other last bits may round differently. NEAR, MEAN: the largest and the mean
effect of rounding on log-probabilities."""
ALL: Mapping[str, Any] = MappingProxyType({"num_experts_per_tok": 8, "index_topk": CONTEXT})
"""Every expert and every row is chosen, so that rounding changes no choice."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A model with all experts chosen. `exact`: the number of elements stored in bfloat16 instead
    of float8, by the row's size."""

    make: Callable[..., Oracle]
    changes: Mapping[str, Any]
    exact: Mapping[int, int]
    page_size: int = 4
    backend: str = "latent"


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "deepseek-v3": Kind(deepseek_v3, {"n_group": 1, "num_experts_per_tok": 8}, {48: 16}),
        "deepseek-v3.2": Kind(deepseek_v32, {"n_group": 1, **ALL}, {48: 16, 32: 0}),
        "deepseek-v4": Kind(deepseek_v4, ALL, {32: 8, 16: 0}, page_size=16, backend="compressed"),
    }
)


class Case:
    """A saved checkpoint, its oracle, and engines over it."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.oracle = kind, kind.make(**kind.changes)
        self.folder = save(self.oracle, folder)

    def engine(self, **settings: Any) -> TokenEngine:
        """Make an engine with 8-bit rows and poisoned unused rows."""
        given = {
            "attention_backend": self.kind.backend,
            "page_size": self.kind.page_size,
            "max_model_len": CONTEXT,
            "max_requests": 4,
            "poison": True,
        }
        given |= {"max_batch_tokens": 24, "graph_token_buckets": (24,), "kv_cache_dtype": FP8}
        return TokenEngine(self.folder, scramble_pages=3, **{**given, **settings})

    def rounding(self) -> TokenEngine:
        """Make an engine with unencoded rows, rounded to 8-bit precision as they are stored."""
        engine = self.engine(kv_cache_dtype="auto", graph="off")
        runner: Any = engine.worker.runner
        stores = {name: self._rounded(getattr(runner.attn_backend.kernels, name)) for name in STORES}
        runner.attn_backend.kernels = runner.attn_backend.kernels.replace(**stores)
        for layer in runner.model.attention_layers:
            if isinstance(layer, LatentAttention):
                layer._store = self._rounded(layer._store)
                if layer.indexer is not None:
                    layer.indexer._store = self._rounded(layer.indexer._store)
        return engine

    def _rounded(self, store: Callable[..., None]) -> Callable[..., None]:
        def stored(*given: Any) -> None:
            store(*given)
            *_, rows, places, _ = given
            codec = RowCodec(rows.shape[1], self.kind.exact[rows.shape[1]])
            rows[places] = codec.decode(codec.encode(rows[places])).to(rows.dtype)

        return stored

    def check(self, found: list[Result], wanted: list[Result]) -> None:
        """Raise AssertionError if log-probabilities differ from the rounded ones, or are not near
        transformers'."""
        for one, other in zip(found, wanted, strict=True):
            ids, scores = one.prompt + one.tokens, [*one.prompt_logprobs, *one.logprobs]
            assert one.tokens == other.tokens
            np.testing.assert_allclose(scores, [*other.prompt_logprobs, *other.logprobs], atol=SAME, rtol=0)
            places = range(len(ids) - len(scores) - 1, len(ids) - 1)
            error = np.abs(np.array(scores) - oracle_logprobs(self.oracle, ids)[places, ids[-len(scores) :]].numpy())
            assert error.max() < NEAR and error.mean() < MEAN


OTHER = {E4M3FN: E4M3FNUZ, E4M3FNUZ: E4M3FN}
STORES = ("norm_rope_store", "index_key_store")


@pytest.fixture(scope="module", params=list(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(KINDS[request.param], tmp_path_factory.mktemp(request.param))


def runs(engine: TokenEngine) -> list[Result]:
    """Run chunks and ragged arrivals; then texts that continue from cached pages."""
    found = engine.run(random_prompts(1, (60, 17, 34, 5)), 6, score_prompts=True, stagger=2)
    base = random_prompts(8, (70,))[0]
    for prompts in ([base], [base], [base[:37] + tail for tail in random_prompts(9, (3, 1, 30))]):
        found += engine.run(prompts, 4)
    assert engine.scheduler.stats().hit_tokens > 100
    return found


def test_rows_in_eight_bits_are_numbers_that_were_rounded(case: Case, graph: str) -> None:
    engine = case.engine(graph=graph)
    case.check(runs(engine), runs(case.rounding()))
    check_paths(engine, graph)
    pool: Any = engine.worker.runner.attn_backend.token_to_kv_pool
    sizes = {kept.codec.size for layer in pool.layers for kept in layer.values() if kept.codec is not None}
    assert sizes == set(case.kind.exact)


def reads_other_scales(engine: TokenEngine) -> None:
    """Mutant: reads scales as if groups had 16 elements."""
    backend: Any = engine.worker.runner.attn_backend

    def wrapped(entry: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: entry(*given[:-1], replace(given[-1], group=16))

    entries = {name: wrapped(getattr(backend.kernels, name)) for name in ("sparse_mqa", "paged_mqa")}
    backend.kernels = backend.kernels.replace(**entries)


def reads_other_floats(engine: TokenEngine) -> None:
    """Mutant: reads the other float8 type, which has another exponent bias."""
    backend: Any = engine.worker.runner.attn_backend

    def wrapped(entry: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: entry(*given[:-1], replace(given[-1], float8=OTHER[given[-1].float8]))

    entries = {name: wrapped(getattr(backend.kernels, name)) for name in ("sparse_mqa", "paged_mqa", "index_logits")}
    backend.kernels = backend.kernels.replace(**entries)


def rounds_places(engine: TokenEngine) -> None:
    """Mutant: stores the rotary elements in eight bits too."""
    pool: Any = engine.worker.runner.attn_backend.token_to_kv_pool
    pool.layers = [
        {
            name: kept if kept.codec is None else replace(kept, codec=replace(kept.codec, exact=0))
            for name, kept in each.items()
        }
        for each in pool.layers
    ]


# Kernels that support one layout can not read rows in another; the reference reads all.
DEFECTS = [
    pytest.param(defect, kernels, id=defect.__name__)
    for defect, kernels in (
        (reads_other_scales, {}),
        (reads_other_floats, {"kernels": "reference"}),
        (rounds_places, {}),
    )
]


@pytest.mark.needs("device")
@pytest.mark.parametrize(("defect", "kernels"), DEFECTS)
@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v4"], indirect=True)
def test_a_defect_is_caught(case: Case, defect: Callable[[TokenEngine], None], kernels: dict[str, str]) -> None:
    engine = case.engine(graph="off", **kernels)
    defect(engine)
    # Rows of another width raise if they are written as a whole.
    with pytest.raises((AssertionError, RuntimeError)):
        case.check(runs(engine), runs(case.rounding()))
