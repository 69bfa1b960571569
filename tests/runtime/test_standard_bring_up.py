"""The standard bring-up: an outer order that a reader can hold, with the steps of each optional
feature in a nested order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglcore.conformance.target import GIVEN
from sglcore.core.errors import BringUpError
from sglcore.device.bring_up import BringUp, NestedOrder, Step
from sglcore.device.package import API
from sglcore.runtime.bring_up import STANDARD

CONTRACT = Path(__file__).parents[1] / "device" / f"api{API}" / "contract.txt"
READ_BY_A_START = ("trial",)
"""What `sglcore.engine.start` takes of a bring-up besides the worker."""


def paths(order: BringUp) -> list[str]:
    return [step.path for step in order.steps]


def test_a_package_nests_an_order_of_its_own_in_the_standard_one() -> None:
    def capture(kernels: object) -> str:
        return "capture"

    order = BringUp(STANDARD.steps, nested=(NestedOrder("own graphs", {"kernels": (capture,)}),))
    assert paths(order).index("own graphs/capture") == paths(order).index("hisparse/hisparse_config") + 1


def standard() -> BringUp:
    """Return the standard order with the step that every package adds."""

    def device_memory(model: object) -> int:
        return 0

    return STANDARD.insert(device_memory, before="sizes")


def test_the_standard_bring_up_reads_in_few_lines_and_runs_in_the_order_that_its_number_promised() -> None:
    line = next(line for line in CONTRACT.read_text("utf-8").splitlines() if line.startswith("    names config"))
    promised = line.strip().removeprefix("names ").split(", ")
    now = [*GIVEN, *(step.provides for step in STANDARD.steps)]
    assert [name for name in now if name in promised] == promised
    assert len(STANDARD.text().split("\n\n")[0].splitlines()) <= 14 < len(STANDARD.steps)


def test_the_standard_bring_up_exports_what_other_steps_need_and_nothing_else() -> None:
    steps = standard().steps
    standard().check(GIVEN)
    exports = [step for step in steps if step.is_exported]
    assert len(exports) > 5
    for step in exports:
        own = [replace(other, is_exported=False) if other is step else other for other in steps]
        if step.provides in READ_BY_A_START:
            BringUp(own).check(GIVEN)
        else:
            with pytest.raises(
                BringUpError, match=f"needs '{step.provides}', which '{step.nested_in}' keeps for its own"
            ):
                BringUp(own).check(GIVEN)


def test_every_standard_step_is_found_by_its_name_and_by_its_path() -> None:
    def own() -> None: ...

    for place, step in enumerate(STANDARD.steps):
        for name in (step.provides, step.path, *([step.function] if isinstance(step, Step) else [])):
            edited = STANDARD.replace(name, own)
            assert paths(edited) == paths(STANDARD) and edited.steps[place].line().startswith(f"{step.provides} (own)")
