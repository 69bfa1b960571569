"""The bring-up reads a GPU's capability before it makes kernels and models."""

from __future__ import annotations

from sglcore_cuda.bring_up import BRING_UP


def test_the_gpu_is_described_before_anything_is_made_for_it_and_memory_is_asked_after_the_weights() -> None:
    order = [step.provides for step in BRING_UP.steps]
    assert order.index("capability") < order.index("kernels") < order.index("model")
    assert order.index("model") < order.index("device_memory") < order.index("sizes")
