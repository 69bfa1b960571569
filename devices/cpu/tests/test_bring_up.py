"""The processor's bring-up: what the standard order lacks, and a wrong order, fail before any work."""

from __future__ import annotations

import pytest

from sglcore.conformance.target import GIVEN
from sglcore.device.bring_up import BringUp
from sglcore.device.errors import BringUpError
from sglcore.runtime.bring_up import STANDARD
from sglcore_cpu.bring_up import BRING_UP


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
