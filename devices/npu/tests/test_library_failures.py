"""An operator of torch_npu that fails is a refused candidate, and the start goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore_npu import package
from sglcore_npu.attention_fused import OPERATOR
from sglcore_npu.kernels import OPERATORS, kernels
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import Failing, attention_of, spoken

pytestmark = pytest.mark.needs("simulator")

CHOSEN = ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_scatter_pa_kv_cache")
"""Operators that the embedded model's layers choose."""


def fails(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    monkeypatch.setattr(torch.ops.npu, operator, Failing())


def test_the_operators_of_the_embedded_model_are_used(model: Path) -> None:
    tokens, told = spoken(model, package.name, kernels="auto")
    assert len(tokens) == 4 and "first call failed" not in told and attention_of(told) == "fused"


@pytest.mark.parametrize("operator", CHOSEN)
def test_an_operator_that_fails_leaves_its_entry_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, operator: str, model: Path
) -> None:
    fails(monkeypatch, operator)
    tokens, told = spoken(model, package.name, kernels="auto")
    assert len(tokens) == 4
    entry = OPERATORS[operator].function.__name__
    (row,) = (line for line in told.splitlines() if line.startswith(f"kernel {entry}: "))
    assert "its first call failed: RuntimeError: no kernel image" in row


def test_weights_stay_plain_where_their_conversion_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "npu_format_cast")
    table = kernels()
    assert table.pack_linear is KernelTable().pack_linear
    (told,) = table.refused
    assert told.startswith("npu_format_cast refused for pack_linear: RuntimeError: no kernel image")


def test_sparse_attention_goes_to_the_reference_where_the_operator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "npu_sparse_flash_attention")
    refusals = Refusals()
    q, rows = (torch.empty(2, *size, 576, dtype=torch.float16, device="meta") for size in ((16,), ()))
    lists = torch.empty(2, 7, dtype=torch.int32, device="meta")
    call = (q, rows, lists, None, None, None, 0.1, 512, None)
    assert choose(kernels(), KernelTable.sparse_mqa, call, refusals) is KernelTable().sparse_mqa
    (row,) = refusals.rows()
    assert "its first call failed: RuntimeError: no kernel image" in row.reason


def test_steps_that_verify_overlap(model: Path) -> None:
    _, told = spoken(model, package.name, kernels="auto", speculative="ngram", draft_tokens=2)
    (row,) = (line for line in told.splitlines() if line.startswith("overlap: "))
    assert attention_of(told) == "fused" and row.startswith("overlap: on")


def test_attention_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    fails(monkeypatch, OPERATOR)
    tokens, told = spoken(model, package.name, kernels="auto")
    assert len(tokens) == 4
    assert attention_of(told) != "fused" and "fused refused: its first call failed: " in told


WORKSPACE = f"_{OPERATOR}_get_max_workspace"
"""An operator that only a capture calls."""


class Missing:
    """Stands in for an operator that this torch_npu lacks."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise AttributeError(f"'_OpNamespace' 'npu' object has no attribute '{WORKSPACE}'")


def test_steps_run_eagerly_where_a_capture_lacks_an_operator(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(torch.ops.npu, WORKSPACE, Missing())
    tokens, told = spoken(model, package.name, kernels="auto")
    assert len(tokens) == 4 and attention_of(told) == "fused"
    assert "graph: off: a step could not be captured: AttributeError: '_OpNamespace' 'npu' object has no" in told
    with pytest.raises(AttributeError, match="object has no attribute"):
        spoken(model, package.name, kernels="auto", graph="full")


def test_a_capture_that_fails_in_the_driver_ends_the_start(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    fails(monkeypatch, WORKSPACE)
    with pytest.raises(RuntimeError, match="no kernel image"):
        spoken(model, package.name, kernels="auto")
