"""The `torch._C._xpu_*` names that a CPU build lacks, so that the shipped Python of torch.xpu runs unmodified."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglcore_sim.faces import in_tree, module


class StreamBinding(module.StreamBinding):
    """`torch._C._XpuStreamBase`."""

    @property
    def sycl_queue(self) -> int:
        """The address that a native launch would take; 0 for the default stream."""
        return self.native_handle or 0  # type: ignore[attr-defined]

    @property
    def priority(self) -> int:
        """All simulated streams have one priority."""
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as on hardware."""
        return (1, -1)


class EventBinding(torch.Event):
    """`torch._C._XpuEventBase`."""

    def __new__(cls, enable_timing: bool = False) -> EventBinding:
        """An event of the current device."""
        return super().__new__(cls, device="xpu", enable_timing=enable_timing)

    @property
    def sycl_event(self) -> int:
        """The event's address; 0 until it is recorded."""
        return self.event_id or 0


def graph_binding(native: ModuleType) -> type:
    """`torch._C._XPUGraph` over the native graph: its capture takes no error mode."""

    class Graph(in_tree.GraphBinding):
        def __init__(self, keep_graph: bool = False) -> None:
            self.core = native.Graph()

        def capture_begin(self, pool: tuple[int, int] | None = None) -> None:
            self.begin(pool)

    return Graph


def plant(sim: Any) -> None:
    """A torch that was built for Intel GPUs."""
    xpu: Any = torch.xpu
    values = {
        **in_tree.bindings(sim, "xpu"),
        "_XpuStreamBase": StreamBinding,
        "_XpuEventBase": EventBinding,
        "_XPUGraph": graph_binding(sim.core),
        "_xpu_graph_pool_handle": sim.core.new_pool,
        "_xpu_getMemoryInfo": torch.accelerator.get_memory_info,
    }
    torch.version.xpu = "20250302"  # foreign: torch reads its build from here
    in_tree.plant(xpu, values, "streams", "graphs")
    in_tree.plant_storages("xpu")
    # Its parts ask a table of this build that has no row for the device type.
    sim.core.run_whole("scaled_dot_product_attention")
    table = SimpleNamespace(**{**sim.kind.properties, "total_memory": sim.memory})
    xpu._get_device_properties = lambda device: table  # foreign: set by the C initialisation on hardware
