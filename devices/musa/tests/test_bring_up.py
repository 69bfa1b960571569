"""The bring-up imports the extension before the device is used, and checks that it fits torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from sglcore.core.errors import DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.step.sizing import size_text
from sglcore_musa.bring_up import BRING_UP, device_memory, extension


def test_the_extension_is_imported_before_any_step_and_memory_is_asked_after_the_weights() -> None:
    order = [step.provides for step in BRING_UP.steps]
    assert order[0] == "extension"
    assert order.index("model") < order.index("device_memory") < order.index("sizes")


def plant(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """Plant a fake module of a version."""
    planted = ModuleType(name)
    vars(planted)["__version__"] = version
    monkeypatch.setitem(sys.modules, name, planted)


def test_the_extension_is_named_in_the_ledger_and_a_shim_only_if_this_process_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, "torch_musa", torch.__version__.partition("+")[0])
    ledger = DecisionLedger()
    extension(ledger)
    assert [row.topic for row in ledger.rows] == ["extension"]
    plant(monkeypatch, "torchada", "0.1.103")
    extension(ledger)
    assert [row.topic for row in ledger.rows] == ["extension", "extension", "shim"]
    assert "0.1.103" in ledger.rows[-1].reason


def test_an_extension_of_another_version_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "torch_musa", "2.1.0")
    with pytest.raises(DeviceError, match=r"found torch_musa 2\.1\.0 with torch "):
        extension(DecisionLedger())


TAKEN = 96 << 20


@pytest.mark.needs("device")
def test_what_the_gpu_has_in_all_is_told_from_what_is_free() -> None:
    """Some memory is in use, so that total and free differ."""
    device = torch.device("musa:0")
    before, weights = device_memory(device, None), torch.zeros(TAKEN, dtype=torch.uint8, device=device)
    found = device_memory(device, weights)
    assert found.total == before.total and found.available <= found.total - TAKEN
    assert TAKEN <= before.available - found.available < TAKEN + (32 << 20)
    assert found.total == torch.musa.get_device_properties(0).total_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert found.evidence.startswith(f"{size_text(found.available)} of {size_text(found.total)} free")
    del weights
