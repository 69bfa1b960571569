"""The `torch._C._xpu_*` names that a CPU build lacks, so that torch.xpu's own Python code runs
unmodified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglcore_sim.faces import in_tree, module


class StreamBinding(in_tree.StreamBinding):
    """Stands in for `torch._C._XpuStreamBase`: a stream of the simulated GPU."""

    sycl_queue = in_tree.StreamBinding.address

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest) priority, (1, -1) as on hardware; a smaller number is a higher
        priority."""
        return (1, -1)


class EventBinding(module.EventBinding):
    """Stands in for `torch._C._XpuEventBase`: an event of the simulated GPU."""

    sycl_event = module.EventBinding.address


class GraphBinding(in_tree.GraphBinding):
    """Stands in for `torch._C._XPUGraph`, a graph of the simulated GPU: its capture takes no error
    mode."""

    def capture_begin(self, pool: tuple[int, int] | None = None) -> None:
        self.begin(pool)


def plant(sim: Any) -> None:
    """Make torch in this process look like a build for Intel GPUs: adds the missing names, which
    run on the simulator `sim`. There is no way back."""
    xpu: Any = torch.xpu
    values = {
        **in_tree.bindings(sim, "xpu"),
        "_XpuStreamBase": StreamBinding,
        "_XpuEventBase": EventBinding,
        "_XPUGraph": module.bound(GraphBinding, native=sim.core),
        "_xpu_graph_pool_handle": sim.core.new_pool,
        "_xpu_getMemoryInfo": torch.accelerator.get_memory_info,
    }
    torch.version.xpu = "20250302"  # foreign: torch reads its build from here
    in_tree.plant(xpu, values, "streams", "graphs")
    in_tree.plant_storages("xpu")
    # Its parts look up a table of this build that has no row for the device type.
    sim.core.run_whole("scaled_dot_product_attention")
    table = SimpleNamespace(**{**sim.kind.properties, "total_memory": sim.memory})
    xpu._get_device_properties = lambda device: table  # foreign: set by the C initialisation on hardware
