"""A library that lacks a name or fails is a refused candidate, and the start goes on."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.core.errors import ConfigError
from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cuda import package
from sglcore_cuda.capability import read_capability
from sglcore_cuda.kernels import with_libraries
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import Failing, Library, attention_of, break_name, cases, spoken

pytestmark = pytest.mark.needs("simulator")

DENSE = (
    Library("flashinfer", ("sglcore_cuda.attention_flashinfer",)),
    Library("flash_attn_interface", ("sglcore_cuda.attention_flash",)),
)
SPARSE = (
    Library("flash_mla", ("sglcore_cuda.sparse_flashmla",)),
    Library("flashinfer", ("sglcore_cuda.sparse_flashinfer",)),
)
BACKENDS = {"flashinfer": "flashinfer", "flash_attn_interface": "flash_attention"}


@pytest.mark.parametrize(("library", "name", "how"), cases(DENSE))
def test_a_start_goes_on_without_any_name_of_a_library(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str, model: Path
) -> None:
    if library.name != "flashinfer":
        # It is chosen after the first, which must be away for it to be asked.
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        monkeypatch.delitem(sys.modules, "sglcore_cuda.attention_flashinfer", raising=False)
    break_name(monkeypatch, library, name, how)
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4
    assert attention_of(told) != BACKENDS[library.name]
    assert f"{BACKENDS[library.name]} refused: its first call failed: " in told


WRAPPERS = (
    *(("BatchDecodeWithPagedKVCacheWrapper", name) for name in ("plan", "run", "reset_workspace_buffer")),
    *(("BatchPrefillWithPagedKVCacheWrapper", name) for name in ("plan", "run")),
)


@pytest.mark.parametrize(("kind", "method"), WRAPPERS)
def test_a_wrapper_that_fails_in_a_method_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, method: str, model: Path
) -> None:
    flashinfer = importlib.import_module("flashinfer")
    made = vars(flashinfer)[kind]

    def broken(*given: Any, **named: Any) -> Any:
        wrapper = made(*given, **named)
        monkeypatch.setattr(wrapper, method, Failing())
        return wrapper

    monkeypatch.setattr(flashinfer, kind, broken)
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4 and "flashinfer refused: its first call failed: RuntimeError: no kernel image" in told


def test_an_explicit_choice_that_fails_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    break_name(monkeypatch, DENSE[0], "BatchDecodeWithPagedKVCacheWrapper", "failing")
    with pytest.raises(ConfigError, match="flashinfer refused: its first call failed: RuntimeError: no kernel image"):
        spoken(model, package.name, attention_backend="flashinfer")


CALLS = {
    "sparse_mqa": (
        torch.empty(1, 64, 576, dtype=torch.bfloat16, device="meta"),
        torch.empty(9, 576, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, 7, dtype=torch.int32, device="meta"),
        None,
        None,
        None,
        0.1,
        512,
        None,
    ),
    "index_top_k": (
        torch.empty(1, 64, device="meta"),
        torch.empty(1, dtype=torch.int32, device="meta"),
        torch.empty(2, 8, dtype=torch.int32, device="meta"),
        torch.empty(1, dtype=torch.int32, device="meta"),
        64,
        2048,
    ),
}
ENTRIES = {"flash_mla": "sparse_mqa", "flashinfer": "index_top_k"}
SPARSE_NAMES = (*cases(SPARSE), *(pytest.param(SPARSE[1], "top_k_page_table_transform", how) for how in ("missing",)))


def chosen(library: Library) -> tuple[Any, Any, str]:
    """Return the function chosen for the library's entry, the entry, and what was said."""
    entry: Any = getattr(KernelTable, ENTRIES[library.name])
    table, refusals = with_libraries(KernelTable(), read_capability()), Refusals()
    found = choose(table, entry, CALLS[entry.name], refusals)
    return found, entry, "\n".join((*table.refused, *(row.reason for row in refusals.rows() if row.downgrade)))


@pytest.mark.parametrize("library", SPARSE, ids=lambda each: each.name)
def test_a_library_that_works_is_chosen(library: Library) -> None:
    found, entry, said = chosen(library)
    assert found is not entry.reference and not said


@pytest.mark.parametrize(("library", "name", "how"), SPARSE_NAMES)
def test_an_entry_goes_to_the_next_candidate_without_any_name_of_a_library(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str
) -> None:
    break_name(monkeypatch, library, name, how)
    found, entry, said = chosen(library)
    assert found is entry.reference and said


def test_deepseeks_own_build_with_one_set_of_kernels_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither `use_legacy` nor `has_legacy`."""
    flash_mla = importlib.import_module("flash_mla")
    both, asked = flash_mla.flash_mla_sparse_fwd, list[dict[str, Any]]()

    def flash_mla_sparse_fwd(
        q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, attn_sink: Any = None, topk_length: Any = None
    ) -> Any:
        asked.append({"heads": q.shape[1], "topk_length": topk_length})
        return both(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy=True)

    break_name(monkeypatch, SPARSE[0], "has_legacy", "missing")
    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", flash_mla_sparse_fwd)
    found, entry, said = chosen(SPARSE[0])
    assert found is not entry.reference and not said and [each["heads"] for each in asked] == [64]
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 64, 576, generator=generator).to(torch.bfloat16)
    rows = torch.randn(9, 576, generator=generator).to(torch.bfloat16)
    lists = torch.tensor([[0, 3, 8, -1], [1, 2, -1, -1]], dtype=torch.int32)
    call = (q, rows, lists, None, None, None, 0.04, 512, None)
    device = [each.to("cuda") if isinstance(each, torch.Tensor) else each for each in call]
    torch.testing.assert_close(found(*device).cpu(), entry.reference(*call), atol=2e-2, rtol=2e-2)


def test_a_trial_is_made_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_mla = importlib.import_module("flash_mla")
    both, count = flash_mla.flash_mla_sparse_fwd, list[int]()

    def counting(*given: Any, **named: Any) -> Any:
        count.append(given[0].shape[1])
        return both(*given, **named)

    counting.__signature__ = inspect.signature(both)  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", counting)
    table = with_libraries(KernelTable(), read_capability())
    call = CALLS["sparse_mqa"]
    wider = (torch.empty(1, 128, 576, dtype=torch.bfloat16, device="meta"), *call[1:])
    for each in (call, call, wider, call):
        choose(table, KernelTable.sparse_mqa, each)
    assert count == [64, 128]
