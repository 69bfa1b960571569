"""The core's Triton kernels run if a Triton for this GPU is installed, otherwise the reference,
with a reason in the ledger."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.kernels.table import KernelTable
from sglcore_musa import kernels
from sglcore_musa.bring_up import kernel_choices


def plant(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
    """Plant a fake triton that compiles for some targets and does not interpret."""
    triton, found = ModuleType("triton"), ModuleType("triton.backends")
    runtime = SimpleNamespace(interpret=False)
    vars(triton).update(__version__="3.9.0", knobs=SimpleNamespace(runtime=runtime), backends=found)
    vars(found)["backends"] = dict.fromkeys(backends)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.backends", found)


def test_interpreted_kernels_run_here_and_give_what_the_reference_gives() -> None:
    assert kernels.triton_gap() == ""
    x, weight = torch.randn(5, 48), torch.randn(48)
    found = kernels.kernels().rms_norm(x.to("musa:0"), weight.to("musa:0"), 1e-5).cpu()
    torch.testing.assert_close(found, KernelTable().rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_a_triton_for_other_devices_leaves_the_reference_and_the_ledger_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, "amd", "nvidia")
    ledger = DecisionLedger()
    kernel_choices(kernels.kernels(), ledger)
    assert kernels.kernels().origin == KernelTable().origin
    assert "compiles for amd, nvidia" in ledger.rows[-1].reason and ledger.rows[-1].effective == "reference"


def test_a_triton_of_the_vendor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "mthreads")
    assert kernels.triton_gap() == ""


def test_without_triton_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton" in kernels.triton_gap()
