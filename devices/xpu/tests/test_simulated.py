"""The simulated Intel GPU: torch.xpu's own code runs on it, and it has no property that torch.xpu
does not document."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.needs("simulator")


def test_torch_xpu_runs_its_own_code(sim: Any) -> None:
    xpu = torch.xpu
    assert xpu.is_available() and xpu.device_count() == sim.devices
    assert xpu.Stream.__module__ == "torch.xpu.streams" and torch.version.xpu
    stream, event = xpu.Stream(), xpu.Event(enable_timing=True)
    with xpu.stream(stream):
        assert xpu.current_stream() == stream
        assert torch.accelerator.current_stream().stream_id == stream.stream_id
        event.record()
    stream.wait_stream(xpu.current_stream())
    event.wait(xpu.current_stream())
    assert isinstance(stream, torch.Stream) and stream.sycl_queue
    with xpu.device(1):
        assert torch.ones(1, device="xpu").device == torch.device("xpu", 1)
    assert xpu.mem_get_info()[1] == xpu.get_device_properties(0).total_memory == sim.memory
    assert xpu.max_memory_allocated() >= xpu.memory_allocated()
    assert xpu.get_device_capability()["has_fp16"] and torch.ones(2).xpu().is_xpu


def test_a_graph_of_torch_xpu_captures_on_a_stream_of_its_own(sim: Any) -> None:
    x, graph = torch.ones(3, device="xpu"), torch.xpu.XPUGraph()
    with torch.xpu.graph(graph):
        assert torch.xpu.is_current_stream_capturing()
        y = x * 2
    graph.replay()
    assert y.tolist() == [2.0] * 3
    with sim.expect("sync_in_capture"), torch.xpu.graph(torch.xpu.XPUGraph()):
        x.sum().item()


def test_a_capture_takes_no_error_mode_below_torchs_own_class_either(sim: Any) -> None:
    with pytest.raises(TypeError, match="capture_error_mode"):
        torch._C._XPUGraph.capture_begin(torch.xpu.XPUGraph(), capture_error_mode="relaxed")  # pyright: ignore[reportCallIssue]


def test_every_field_of_the_properties_is_one_that_torch_documents(sim: Any) -> None:
    documented = torch.xpu.get_device_properties.__doc__ or ""
    assert all(f"``{name}``" in documented for name in sim.kind.properties)
