"""The simulated third accelerator. It may change with the simulator, whose interface has no number; nothing else here may."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import torch

from sglcore_sim.faces import generic, in_tree, module
from sglcore_sim.kinds import Kind, pci

KIND = Kind(
    name="third",
    torch_name="third",
    arch="three",
    properties=MappingProxyType({"name": "Third 100", "multi_processor_count": 24, "warp_size": 16}),
    face="sglcore_third.simulated:plant",
    capabilities=frozenset(),
    files=MappingProxyType(
        {
            "dev/third_{i}": "",
            "usr/lib/libthird.so.1": "",
            "site-packages/torch_third/__init__.py": "",
            **pci(0xA913, 0x0100, 0x120000),
        }
    ),
)


def plant(sim: Any) -> None:
    """What `import torch_third` registers: torch's neutral names, the chip's properties, and graphs."""

    class Graph(in_tree.GraphBinding):
        def __init__(self, keep_graph: bool = False) -> None:
            self.core = sim.core.Graph()

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            self.begin(pool)

    generic.plant(sim)
    made = torch.get_device_module("third")
    vars(made).update(
        get_device_properties=lambda device=None: module.properties_of(sim, sim.kind.properties),
        THIRDGraph=Graph,
        graph_pool_handle=sim.core.new_pool,
    )
    sys.modules["torch_third"] = made
