"""The bring-up imports the extension before the device is used, and checks that it fits torch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglcore.core.errors import DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore_npu.bring_up import BRING_UP, extension


def test_the_extension_is_imported_before_any_step_and_memory_is_asked_after_the_weights() -> None:
    order = [step.provides for step in BRING_UP.steps]
    assert order[0] == "extension"
    assert order.index("model") < order.index("device_memory") < order.index("sizes")


def plant(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    """Plant a fake torch_npu of a version."""
    planted = ModuleType("torch_npu")
    vars(planted).update(__version__=version, npu=SimpleNamespace(config=SimpleNamespace(allow_internal_format=False)))
    monkeypatch.setitem(sys.modules, "torch_npu", planted)
    return planted


def test_the_extension_may_keep_weights_in_blocks_and_is_named_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    planted, ledger = plant(monkeypatch, torch.__version__.partition("+")[0]), DecisionLedger()
    extension(ledger)
    assert planted.npu.config.allow_internal_format is True
    assert [row.topic for row in ledger.rows] == ["extension"]


def test_an_extension_of_another_version_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "2.1.0")
    with pytest.raises(DeviceError, match=r"found torch_npu 2\.1\.0 with torch .* pip install torch_npu=="):
        extension(DecisionLedger())
