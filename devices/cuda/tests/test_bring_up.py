"""The bring-up: the order is the reviewed text, and its needs are met by what an engine gives."""

from __future__ import annotations

from pathlib import Path

from sglcore_cuda.bring_up import BRING_UP

GIVEN = ("config", "package", "facts", "ledger", "progress", "model_path")


def test_the_order_is_the_text_in_the_package() -> None:
    reviewed = Path(__file__).parents[1] / "bring_up.txt"
    assert BRING_UP.text() == reviewed.read_text(encoding="utf-8")


def test_its_needs_are_met_by_what_an_engine_gives() -> None:
    BRING_UP.check(GIVEN)


def test_the_gpu_is_described_before_anything_is_made_for_it_and_memory_is_asked_after_the_weights() -> None:
    order = [step.provides for step in BRING_UP.steps]
    assert order.index("capability") < order.index("kernels") < order.index("load_weights")
    assert order.index("load_weights") < order.index("device_memory") < order.index("size_memory")
