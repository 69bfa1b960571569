"""The simulated acme accelerator that `--sim=acme` gives where sglcore-sim is installed; nothing of
the device imports this."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import torch

from sglcore_sim.faces import generic, in_tree, module
from sglcore_sim.kinds import Kind, pci

KIND = Kind(
    name="acme",
    torch_name="acme",
    arch="ac1",
    properties=MappingProxyType({"name": "Acme 100", "clusters": 24, "simd_width": 16}),
    face="sglcore_acme.simulated:plant",
    capabilities=frozenset(),  # graphs of its own alone
    files=MappingProxyType(
        {
            "dev/acme{i}": "",
            "usr/lib/libacme.so.1": "",
            "site-packages/torch_acme/__init__.py": "",
            **pci(0xACE5, 0x0100, 0x120000),
        }
    ),
)


def plant(sim: Any) -> None:
    """What `import torch_acme` registers: torch's neutral names, the chip's properties, and
    graphs."""

    class Graph(in_tree.GraphBinding):
        def __init__(self, keep_graph: bool = False) -> None:
            self.core = sim.core.Graph()

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            self.begin(pool)

    generic.plant(sim)
    made = torch.get_device_module("acme")
    vars(made).update(
        get_device_properties=lambda device=None: module.properties_of(sim, sim.kind.properties),
        ACMEGraph=Graph,
        graph_pool_handle=sim.core.new_pool,
    )
    sys.modules["torch_acme"] = made
