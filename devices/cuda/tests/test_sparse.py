"""DeepSeek's attention with the libraries: supported and refused calls, ledger rows of missing
libraries, and equality with the reference, also in graphs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
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
from sglcore.conformance.inputs.kernel_taking import code_of
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.hisparse_entries import REACHING
from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import Tuning, triton_kernels
from sglcore_cuda import package, sparse_flashinfer, sparse_flashmla
from sglcore_cuda.capability import Capability, read_capability
from sglcore_cuda.kernels import with_libraries
from tests.checkpoints import Oracle, oracle_logprobs, save
from tests.deepseek_v4 import deepseek_v4
from tests.kernels.guards import mutated
from tests.latent import deepseek_v32
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_model_laws import check_paths

pytestmark = pytest.mark.needs("simulator")

DEVICE = torch.device("cuda:0")
HOPPER, BLACKWELL = Capability("H100", (9, 0), 132), Capability("B200", (10, 0), 148)
ADA, LATER = Capability("L4", (8, 9), 58), Capability("RTX 5090", (12, 0), 170)
MODULES = {"sparse_mqa": sparse_flashmla, "index_top_k": sparse_flashinfer}
NEAR, MEAN = 0.2, 0.03
"""Largest and mean difference of a log-probability by bfloat16 over a few layers."""


def attended(heads: int = 64, size: int = 576, values: int = 512, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Return meta arguments of a call of `sparse_mqa`."""
    q, rows = torch.empty(1, heads, size, dtype=dtype, device="meta"), torch.empty(9, size, dtype=dtype, device="meta")
    return [q, rows, torch.empty(1, 7, dtype=torch.int32, device="meta"), None, None, None, 0.1, values, None]


def chosen(rows_per_page: int = 64, k: int = 2048) -> list[Any]:
    """Return meta arguments of a call of `index_top_k`."""
    ints, table = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((1,), (2, 8)))
    return [torch.empty(1, 64, device="meta"), ints, table, ints, rows_per_page, k]


def encoded() -> list[Any]:
    """Return a call of `sparse_mqa` with entries in 8 bits."""
    q, rows, *others = attended()
    return [q, rows.to(torch.uint8), *others]


TAKEN = (attended(), attended(heads=128, size=512), chosen(), chosen(rows_per_page=1, k=1))
REFUSED = (
    (attended(dtype=torch.float16), "bfloat16, not in float16"),
    (encoded(), "bfloat16, not in bfloat16 and uint8"),
    (attended(heads=16), "64 or 128 heads, not 16"),
    (attended(size=320), "rows of 512 or 576 elements"),
    (attended(values=576), "not 576 with values of 576"),
    (chosen(rows_per_page=48), "pages of 1, 2, 4, ... rows, not of 48"),
    (chosen(k=4096), "2048 rows at most, not 4096"),
)


def table_here() -> KernelTable:
    """Return the table with the libraries' entries over the reference."""
    return with_libraries(KernelTable(), read_capability())


def entry_of(call: Sequence[Any]) -> Any:
    return KernelTable.sparse_mqa if len(call) > 6 else KernelTable.index_top_k


@pytest.mark.parametrize("call", TAKEN)
def test_the_published_sizes_are_taken(call: list[Any]) -> None:
    entry = entry_of(call)
    found = choose(table_here(), entry, call)
    assert code_of(found) is code_of(getattr(MODULES[entry.name], entry.name))


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_what_they_do_not_take_is_refused_by_name_and_left_to_the_next(call: list[Any], reason: str) -> None:
    entry, refusals = entry_of(call), Refusals()
    assert choose(table_here(), entry, call, refusals) is entry.reference
    (row,) = refusals.rows()
    assert reason in row.reason and row.requested.startswith("sglcore_cuda.sparse_flash")
    assert row.topic == f"kernel {entry.name}" and row.downgrade


@pytest.mark.parametrize(("library", "remedy"), [("flash_mla", "sgl-flash-mla"), ("flashinfer", "cuda[flashinfer]")])
def test_without_a_library_the_ledger_says_so(monkeypatch: pytest.MonkeyPatch, library: str, remedy: str) -> None:
    entry = {"flash_mla": "sparse_mqa", "flashinfer": "index_top_k"}[library]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, MODULES[entry].__name__)
    ledger = DecisionLedger(strict=True)
    table = kernels_step(EngineConfig(), package, ledger, DEVICE)
    assert "triton" in table.origin[entry]
    said = ledger.rows[-1].reason.partition(f"{library} refused for {entry}: ")[2]
    assert "pip install" in said and remedy in said


@pytest.mark.parametrize(("capability", "said"), [(ADA, "capability 8.9"), (LATER, "capability 12.0")])
def test_other_gpus_are_refused_by_their_capability(capability: Capability, said: str) -> None:
    """Older GPUs, and newer ones for which the libraries have no kernels."""
    table = with_libraries(KernelTable(), capability)
    assert not table.replaced
    assert len(table.refused) == 2 and all(f"{capability.name}, compute {said}" in reason for reason in table.refused)
    assert table.replace(greedy=None).refused == table.refused


def test_a_library_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("flashinfer")
    monkeypatch.setattr(sparse_flashinfer, "flashinfer", older)
    assert "has no dsa_graph_safe" in with_libraries(KernelTable(), HOPPER).refused[0]
    vars(older)["top_k_page_table_transform"] = lambda input, row_to_batch, tie_break, dsa_graph_safe: None
    assert "has no out_raw_indices, page_size: pip" in with_libraries(KernelTable(), HOPPER).refused[0]
    monkeypatch.setattr(importlib.import_module("flash_mla"), "has_legacy", lambda: False)
    assert "without its kernels for rows of 576" in with_libraries(KernelTable(), HOPPER).refused[0]


@pytest.mark.parametrize(
    ("capability", "size", "is_legacy"),
    [(HOPPER, 576, True), (HOPPER, 512, True), (BLACKWELL, 576, True), (BLACKWELL, 512, False)],
)
def test_the_newer_kernels_serve_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch, capability: Capability, size: int, is_legacy: bool
) -> None:
    asked: list[bool] = []

    def called(q: Tensor, *given: Any, use_legacy: bool, **more: Any) -> tuple[Tensor, None, Tensor]:
        asked.append(use_legacy)
        return q, None, q

    monkeypatch.setattr(importlib.import_module("flash_mla"), "flash_mla_sparse_fwd", called)
    q, rows, lists = torch.empty(1, 64, size), torch.empty(2, size), torch.zeros(1, 3, dtype=torch.int32)
    sparse_flashmla.entry(capability).function(q, rows, lists, None, None, None, 1.0, 512, None)
    assert asked == [is_legacy]


def test_rows_are_chosen_by_what_a_graph_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's other modes read lengths on the host, or resolve ties arbitrarily."""
    asked: dict[str, Any] = {}

    def called(scores: Tensor, table: Tensor, lens: Tensor, k: int, *, out_raw_indices: Tensor, **given: Any) -> Tensor:
        asked.update(given)
        return out_raw_indices.zero_()

    monkeypatch.setattr(sparse_flashinfer.flashinfer, "top_k_page_table_transform", called)
    ints = torch.zeros(1, dtype=torch.int32)
    sparse_flashinfer.index_top_k(torch.zeros(1, 64), ints, ints.unsqueeze(0), ints, 64, 3)
    assert asked == {"dsa_graph_safe": True, "tie_break": 1, "page_size": 64, "row_to_batch": ints}


def check(module: ModuleType, entry: str, tokens: int) -> None:
    """Run the kit's calls that the module supports, and one special case. Raises AssertionError if
    a result differs from the reference."""
    function: Callable[..., Tensor] = module.entry(read_capability()).function
    inputs = getattr(kernel_inputs_sparse, entry)(Draw(3, torch.bfloat16), tokens, False)
    made = [args for args in inputs if not module.takes(*args)]
    assert made
    for args in (*made, *((long_lists(),) if entry == "sparse_mqa" else (equal_scores(),))):
        wanted = getattr(reference_sparse, entry)(*args)
        found = function(*(arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args)).cpu()
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        if wanted.is_floating_point():
            assert relative_error(found, wanted) <= RELATIVE["bfloat16"]
        else:
            assert torch.equal(found, wanted)


def long_lists() -> list[Any]:
    """Tokens with both lists, with one of them, and with none; a list has more entries than a step
    of the kernels; no sinks."""
    drawn, given = Draw(7, torch.bfloat16), []
    for width, sizes in ((130, (130, 3, 0, 0)), (9, (5, 0, 9, 0))):
        lists = torch.stack([drawn.permutation(200)[:width] for _ in sizes]).int()
        given += [
            drawn.values(200, 512),
            lists.masked_fill(torch.arange(width) >= torch.tensor(sizes)[:, None], -1),
        ]
    return [drawn.values(4, 64, 512), *given, None, 0.06, 512, None]


def equal_scores() -> list[Any]:
    """Return a call with more equal scores at the threshold than are needed."""
    lens, slots = (torch.tensor(values, dtype=torch.int32) for values in ((70, 9, 0), (1, 0, 1)))
    logits = torch.randint(-2, 3, (3, 70), generator=torch.Generator().manual_seed(3)).float()
    logits[torch.arange(70) >= lens[:, None]] = -torch.inf
    return [logits, lens, torch.randperm(18).int().view(2, 9), slots, 8, 20]


@pytest.mark.parametrize("entry", MODULES)
@pytest.mark.parametrize("tokens", [0, 3])
def test_they_give_what_the_reference_gives(entry: str, tokens: int) -> None:
    check(MODULES[entry], entry, tokens)


DEFECTS = (
    ("sparse_mqa", "value=-1", "value=1"),
    ("sparse_mqa", "attend(more_rows, more_chosen, None)", "attend(more_rows, more_chosen, sinks)"),
    ("sparse_mqa", "total = torch.logaddexp(total, sinks)", "pass"),
    ("sparse_mqa", "sums == torch.inf, -torch.inf", "sums == torch.inf, 0"),
    ("sparse_mqa", "total.masked_fill(total == -torch.inf, 0)", "total"),
    ("sparse_mqa", "one[0].mul_(shares[0])", "one[0].mul_(shares[1])"),
    ("sparse_mqa", "            scale,\n", "            1.1 * scale,\n"),
    ("sparse_mqa", "(lists >= 0).sum", "(lists > 9).sum"),
    ("index_top_k", "SMALLER_PLACE = 1", "SMALLER_PLACE = 2"),
    ("index_top_k", "places < 0, last", "places < 0, -1"),
    ("index_top_k", "row_to_batch=token_slots", "row_to_batch=torch.zeros_like(token_slots)"),
    ("index_top_k", "found.gather(1, places", "found.gather(1, found"),
)


@pytest.mark.parametrize(("entry", "old", "new"), DEFECTS)
def test_a_planted_defect_is_caught(entry: str, old: str, new: str, tmp_path: Path) -> None:
    module = mutated(MODULES[entry], tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(module, entry, 3)


def test_lists_that_are_no_whole_steps_are_refused_by_the_library(tmp_path: Path) -> None:
    module = mutated(sparse_flashmla, tmp_path, "STEP = 128", "STEP = 64")
    with pytest.raises(RuntimeError, match="lists of whole 128s"):
        check(module, "sparse_mqa", 3)


CONTEXT, PAGE = 160, 32
LATENT = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}
COMPRESSED = {
    "num_attention_heads": 64,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_topk": CONTEXT // 4,
    "num_experts_per_tok": 8,
}
MODELS = {
    "deepseek-v3.2": (
        deepseek_v32,
        {**LATENT, "index_topk": CONTEXT, "n_group": 1, "num_experts_per_tok": 8},
        "latent",
    ),
    "deepseek-v4": (deepseek_v4, COMPRESSED, "compressed"),
}
"""Models with published heads and entry sizes; all entries and experts are selected, so that
rounding changes no selection."""

HOST = f'{{"device_buffer_size": {CONTEXT}, "host_to_device_ratio": 8}}'
"""hisparse; the device buffer holds all entries that a token reads."""


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path, str]:
    make, changes, backend = MODELS[request.param]
    oracle = make(max_position_embeddings=4 * CONTEXT, **changes)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param)), backend


def errors(
    model: tuple[Oracle, Path, str], monkeypatch: pytest.MonkeyPatch, graph: str, hisparse: str | None = None
) -> np.ndarray:
    """Return the differences of log-probabilities of ragged, chunked requests to transformers in
    float32. Entries come from the libraries, otherwise from the reference; only entries that reach
    host memory come from Triton."""
    reaching = () if hisparse is None else REACHING

    def behind(tuning: Tuning) -> KernelTable:
        own = triton_kernels(tuning)
        return KernelTable().replace(**{name: getattr(own, name) for name in reaching if name in own.replaced})

    monkeypatch.setattr("sglcore.runtime.kernels.triton.triton_kernels", behind)
    oracle, folder, backend = model
    given: dict[str, Any] = {"dtype": "bfloat16", "kernels": "triton", "attention_backend": backend, "graph": graph}
    given |= {"hisparse": hisparse, "max_model_len": CONTEXT, "page_size": PAGE, "max_requests": 4, "poison": True}
    given |= {"max_batch_tokens": 24, "graph_token_buckets": (24,), "kv_cache_memory": 64 << 20}
    engine = TokenEngine(folder, scramble_pages=3, **given)
    try:
        table = engine.worker.runner.attn_backend.kernels
        assert {table.origin[name].partition(":")[0] for name in MODULES} == {
            each.__name__ for each in MODULES.values()
        }
        results = engine.run(random_prompts(1, (30, 5, 70)), 4, score_prompts=True, stagger=2)
        check_paths(engine, graph)
    finally:
        engine.worker.close()
    found = []
    for result in results:
        ids, scores = result.prompt + result.tokens, [*result.prompt_logprobs, *result.logprobs]
        wanted = oracle_logprobs(oracle, ids)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        found.append(np.abs(np.array(scores) - wanted))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("graph", "hisparse"),
    [("off", None), ("full", None), ("breakable", None), ("full", HOST)],
    ids=["off", "full", "breakable", "full-host"],
)
def test_models_have_transformers_numbers_through_the_libraries(
    model: tuple[Oracle, Path, str], monkeypatch: pytest.MonkeyPatch, graph: str, hisparse: str | None
) -> None:
    error = errors(model, monkeypatch, graph, hisparse)
    assert error.max() < NEAR and error.mean() < MEAN


def test_a_library_that_forgets_rows_is_caught_by_a_model(
    model: tuple[Oracle, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops the first two entries of each list."""
    library = importlib.import_module("flash_mla")
    known = library.flash_mla_sparse_fwd

    def forgetting(q: Tensor, kv: Tensor, indices: Tensor, *given: Any, **more: Any) -> Any:
        indices = indices.clone()
        indices[..., :2] = -1
        return known(q, kv, indices, *given, **more)

    monkeypatch.setattr(library, "flash_mla_sparse_fwd", forgetting)
    error = errors(model, monkeypatch, "off")
    assert error.max() > NEAR and error.mean() > MEAN
