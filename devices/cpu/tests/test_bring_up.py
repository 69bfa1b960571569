"""The processor's bring-up: the order is the reviewed text, its needs hold, and a wrong order fails before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.device.bring_up import BringUp
from sglcore.device.errors import BringUpError
from sglcore.runtime.bring_up import STANDARD
from sglcore_cpu.bring_up import BRING_UP

GIVEN = ("config", "package", "facts", "ledger", "progress", "model_path")


def test_the_order_is_the_text_in_the_package() -> None:
    reviewed = Path(__file__).parents[1] / "bring_up.txt"
    assert BRING_UP.text() == reviewed.read_text(encoding="utf-8")


def test_its_needs_are_met_by_what_an_engine_gives() -> None:
    BRING_UP.check(GIVEN)


def test_the_standard_order_names_what_a_device_must_add() -> None:
    with pytest.raises(BringUpError, match="device_memory"):
        STANDARD.check(GIVEN)


def test_attention_before_hisparse_fails_on_a_laptop_naming_the_need() -> None:
    steps = list(BRING_UP.steps)
    hisparse = next(step for step in steps if step.provides == "hisparse")
    steps.remove(hisparse)
    steps.insert(next(i for i, step in enumerate(steps) if step.provides == "attention") + 1, hisparse)
    with pytest.raises(BringUpError, match="'attention' needs 'hisparse', which a later step provides"):
        BringUp(steps).check(GIVEN)
