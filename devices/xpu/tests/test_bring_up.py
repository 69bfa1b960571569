"""The bring-up reads a GPU's capability before it makes kernels and models, and works with a driver
that does not report free memory."""

from __future__ import annotations

import pytest
import torch

from sglcore.runtime.memory import accelerator
from sglcore.step.sizing import MemoryBudget
from sglcore_xpu.bring_up import BRING_UP, device_memory
from sglcore_xpu.facts import facts


def test_the_gpu_is_described_before_anything_is_made_for_it_and_memory_is_asked_after_the_weights() -> None:
    order = [step.provides for step in BRING_UP.steps]
    assert order.index("capability") < order.index("kernels") < order.index("model")
    assert order.index("model") < order.index("device_memory") < order.index("sizes")


def test_memory_is_what_the_driver_says_or_else_what_this_process_has_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = device_memory(facts(), None)
    assert told.available <= told.total and "free" in told.evidence

    def refuse(device: object = None) -> tuple[int, int]:
        raise RuntimeError("The device does not support querying the available free memory.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    taken = torch.empty(1 << 20, dtype=torch.uint8, device=facts().tensor_device)
    guessed = device_memory(facts(), None)
    assert isinstance(guessed, MemoryBudget) and guessed.total == told.total
    assert told.total - guessed.available >= taken.nbytes and "does not report" in guessed.evidence
    assert guessed.default_share == accelerator.DEFAULT_SHARE
