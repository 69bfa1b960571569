"""AITER's attention over listed rows: what it takes and refuses, and with what reason; it gives
what the reference gives, and a model what transformers gives, eagerly and in graphs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.inputs import kernel_inputs_sparse
from sglcore.conformance.inputs.kernel_inputs import Draw
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import Tuning
from sglcore_hip import package, sparse_aiter
from sglcore_hip.capability import Capability, read_capability
from sglcore_hip.kernels import with_libraries
from tests.checkpoints import Oracle, oracle_logprobs, save
from tests.deepseek_v4 import HEAVY, SLIDING, SPARSE, deepseek_v4
from tests.kernels.guards import mutated
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_model_laws import check_paths

pytestmark = pytest.mark.needs("simulator")

DEVICE = torch.device("cuda:0")
DESKTOP = Capability("RX 7900", "gfx1100", 32, 96)
MODULE = "aiter.ops.triton.attention.pa_decode_sparse"
NEAR, MEAN = 0.2, 0.03
"""Largest and mean difference of a log-probability by bfloat16 over a few layers."""


def attended(
    size: int = 512, dtype: torch.dtype = torch.bfloat16, rows: torch.dtype | None = None, width: int = 640
) -> list[Any]:
    """Return meta arguments of a call of `sparse_mqa` with one list and sinks."""
    q, pool = (torch.empty(1, *sizes, device="meta") for sizes in ((8, size), (size,)))
    lists = torch.empty(1, width, dtype=torch.int32, device="meta")
    sinks = torch.empty(8, device="meta")
    return [q.to(dtype), pool.to(rows or dtype), lists, None, None, sinks, 0.1, size, None]


def two_lists() -> list[Any]:
    """Return the arguments with a second list."""
    q, rows, lists, _, _, *more = attended()
    return [q, rows, lists, rows, lists, *more]


def without_sinks() -> list[Any]:
    """Return the arguments without sinks."""
    return [None if place == 5 else each for place, each in enumerate(attended())]


def table_here() -> KernelTable:
    """Return the table with AITER's entry over the reference."""
    return with_libraries(KernelTable(), read_capability())


@pytest.mark.parametrize("call", [attended(), attended(dtype=torch.float16), attended(width=2048)])
def test_the_published_sizes_are_taken(call: list[Any]) -> None:
    assert choose(table_here(), KernelTable.sparse_mqa, call) is sparse_aiter.sparse_mqa


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (two_lists(), "one list of one pool, and sinks"),
        (without_sinks(), "one list of one pool, and sinks"),
        (attended(dtype=torch.float32), "one half precision, not in float32"),
        (attended(rows=torch.uint8), "one half precision, not in bfloat16 and uint8"),
        (attended(size=576), "rows of 512 elements that are all values, not 576 with values of 576"),
        (attended(width=2049), "takes 2048 entries, not 2049"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name_and_left_to_the_next(call: list[Any], reason: str) -> None:
    refusals = Refusals()
    assert choose(table_here(), KernelTable.sparse_mqa, call, refusals) is KernelTable.sparse_mqa.reference
    (row,) = refusals.rows()
    assert reason in row.reason and row.requested == "sglcore_hip.sparse_aiter:sparse_mqa" and row.downgrade


def test_without_the_library_the_ledger_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.delitem(sys.modules, "sglcore_hip.sparse_aiter")
    ledger = DecisionLedger(strict=True)
    table = kernels_step(EngineConfig(), package, ledger, DEVICE)
    assert "triton" in table.origin["sparse_mqa"]
    assert "build AITER" in ledger.rows[-1].reason.partition("aiter refused for sparse_mqa: ")[2]


def test_gpus_with_narrow_waves_and_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = with_libraries(KernelTable(), DESKTOP).refused
    assert "waves of 32" in reason
    library = importlib.import_module(MODULE)
    monkeypatch.setattr(library, "pa_decode_sparse", lambda q, unified_kv, kv_indices, kv_indptr: q)
    assert "has no has_invalid: build AITER" in table_here().refused[0]
    monkeypatch.delattr(library, "pa_decode_sparse")
    assert "has no has_invalid: build AITER" in table_here().refused[0]


@pytest.mark.parametrize("heads", [slice(None), slice(1)], ids=["in all heads", "in one"])
@pytest.mark.parametrize("value", [float("nan"), 0.0, 1.0])
def test_a_library_that_gives_other_numbers_is_refused_before_it_is_chosen(
    value: float, heads: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(q: Tensor, *given: Any, has_invalid: bool = True) -> Tensor:
        found = torch.full_like(q, 0.5)
        found[:, heads] = value
        return found

    monkeypatch.setattr(importlib.import_module(MODULE), "pa_decode_sparse", called)
    refusals = Refusals()
    assert choose(table_here(), KernelTable.sparse_mqa, attended(), refusals) is KernelTable.sparse_mqa.reference
    (row,) = refusals.rows()
    assert "its first call failed: RuntimeError: a row and a sink" in row.reason


def test_a_pool_that_the_library_can_not_number_is_an_error_with_a_remedy() -> None:
    rows = torch.empty(1 << 22, 512, dtype=torch.float16, device="meta")
    ints, q = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 512, dtype=torch.float16)
    with pytest.raises(ConfigError, match="--attention-backend compressed"):
        sparse_aiter.sparse_mqa(q, rows, ints, None, None, torch.zeros(1), 1.0, 512, None)


# -- its results
# --------------------------------------------------------------------------------------------------


def long_lists() -> list[Any]:
    """Tokens with many rows, with padding before, between and after rows, and with none."""
    drawn = Draw(7, torch.bfloat16)
    lists = torch.stack([drawn.permutation(700)[:640] for _ in range(4)]).int()
    lists[1, :128], lists[1, 200:], lists[2, ::2], lists[3] = -1, -1, -1, -1
    sinks = torch.tensor([0.5, -2.0, 3.0])
    return [drawn.values(4, 3, 512), drawn.values(700, 512), lists, None, None, sinks, 0.06, 512, None]


def kit_calls(tokens: int) -> list[Sequence[Any]]:
    """Return the kit's calls with one list that the library takes, their rows made 512 wide."""
    made = kernel_inputs_sparse.sparse_mqa(Draw(3, torch.bfloat16), tokens, False)
    return [args for args in made if not sparse_aiter.takes(*args)]


def check(module: ModuleType) -> None:
    """Raise AssertionError if a result differs from the reference."""
    for args in (*kit_calls(3), *kit_calls(0), long_lists()):
        wanted = reference_sparse.sparse_mqa(*args)
        found = module.sparse_mqa(*(arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args)).cpu()
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert relative_error(found, wanted) <= RELATIVE["bfloat16"]


def test_it_gives_what_the_reference_gives() -> None:
    check(sparse_aiter)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("starts, sinks", "starts.clamp(max=width), sinks"),
        ("chosen.reshape(-1), starts", "chosen.T.reshape(-1), starts"),
        ("sinks, scale\n", "sinks + 1, scale\n"),
        ("sinks, scale\n", "sinks, 1.1 * scale\n"),
    ],
)
def test_a_planted_defect_is_caught(old: str, new: str, tmp_path: Path) -> None:
    module = mutated(sparse_aiter, tmp_path, old, new)
    with pytest.raises((AssertionError, IndexError)):
        check(module)


# -- a model
# --------------------------------------------------------------------------------------------------

CONTEXT, PAGE = 96, 32
SIZES: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 512, "num_hidden_layers": 3, "index_topk": CONTEXT // 4}
SIZES |= {"layer_types": (SLIDING, HEAVY, SPARSE), "mlp_layer_types": ("hash_moe", "moe", "moe")}
SIZES |= {"num_experts_per_tok": 8, "index_head_dim": 128}
"""All blocks and experts are chosen, so that rounding changes no choice."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    oracle = deepseek_v4(max_position_embeddings=4 * CONTEXT, **SIZES)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return oracle, save(oracle, tmp_path_factory.mktemp("deepseek-v4"))


def errors(
    model: tuple[Oracle, Path], monkeypatch: pytest.MonkeyPatch, graph: str, taken: bool = True, **more: Any
) -> np.ndarray:
    """Return the differences of log-probabilities of ragged, chunked requests, and of their prefix
    hits, to transformers in float32. Attention over lists is AITER's if `taken`; the other entries
    are the reference."""
    monkeypatch.setattr("sglcore.runtime.kernels.triton.triton_kernels", behind)
    oracle, folder = model
    given: dict[str, Any] = {"dtype": "bfloat16", "kernels": "triton", "attention_backend": "hip_radix", "graph": graph}
    given |= {"max_model_len": CONTEXT, "page_size": PAGE, "max_requests": 4, "poison": True}
    given |= {"max_batch_tokens": 24, "graph_token_buckets": (24,), "kv_cache_memory": 64 << 20, **more}
    engine = TokenEngine(folder, scramble_pages=3, **given)
    try:
        origin = engine.worker.runner.attn_backend.kernels.origin["sparse_mqa"]
        assert (origin == "sglcore_hip.sparse_aiter:sparse_mqa") == taken
        texts = random_prompts(1, (30, 5, 70), 128)
        results = engine.run(texts, 3, score_prompts=True, stagger=2)
        results += engine.run([text[:33] + [7, 8] for text in texts[2:]], 3)
        assert engine.scheduler.stats().hit_tokens == PAGE
        check_paths(engine, graph)
    finally:
        engine.worker.close()
    found = []
    for result in results:
        ids, scores = result.prompt + result.tokens, [*result.prompt_logprobs, *result.logprobs]
        wanted = oracle_logprobs(oracle, ids)[torch.arange(len(ids) - 1), ids[1:]].numpy()[-len(scores) :]
        found.append(np.abs(np.array(scores) - wanted))
    return np.concatenate(found)


def behind(tuning: Tuning) -> KernelTable:
    """Return the table behind AITER's entry: the reference, which is fast to simulate."""
    return KernelTable()


@pytest.mark.parametrize("graph", ["off", "full", "breakable", "piecewise"])
def test_a_model_has_transformers_numbers_through_the_library(
    model: tuple[Oracle, Path], monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    error = errors(model, monkeypatch, graph)
    assert error.max() < NEAR and error.mean() < MEAN


@pytest.mark.parametrize("how", ["missing", "failing"])
def test_a_model_has_transformers_numbers_without_the_library(
    model: tuple[Oracle, Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    library = importlib.import_module(MODULE)
    if how == "missing":
        monkeypatch.delattr(library, "pa_decode_sparse")
    else:
        monkeypatch.setattr(library, "pa_decode_sparse", lambda *given, has_invalid=True: given[8])
    error = errors(model, monkeypatch, "off", taken=False)
    assert error.max() < NEAR and error.mean() < MEAN


def test_a_library_that_forgets_rows_is_caught_by_a_model(
    model: tuple[Oracle, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops the first rows of each list, except of the trial's."""
    library = importlib.import_module(MODULE)
    known = library.pa_decode_sparse

    def forgetting(q: Tensor, kv: Tensor, listed: Tensor, *given: Any, has_invalid: bool = True) -> Tensor:
        if len(kv) > 1:
            listed = listed.clone()
            listed.view(len(q), -1)[:, :2] = -1
        return known(q, kv, listed, *given)

    monkeypatch.setattr(library, "pa_decode_sparse", forgetting)
    error = errors(model, monkeypatch, "off")
    assert error.max() > NEAR and error.mean() > MEAN
