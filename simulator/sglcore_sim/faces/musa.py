"""torch_musa: modules, classes and functions with the signatures of its public sources
(MooreThreads/torch_musa, core/).

The signatures were copied by hand, because there is no package to compare with. For `mem_get_info`,
`reset_peak_memory_stats` and the graph classes there was no source; they have torch.cuda's
signatures, unchecked.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from sglcore_sim.faces import extension, module


class Stream(extension.Stream):
    musa_stream = module.StreamBinding.address


class MUSAGraph(module.GraphBinding):
    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.begin(pool, capture_error_mode)

    def enable_debug_mode(self):
        return None


class graph(extension.Capturing):
    def __init__(self, musa_graph, pool=None, stream=None, capture_error_mode: str = "global"):
        super().__init__(musa_graph, pool, stream, capture_error_mode)


def set_device(device):
    if module.index_of(device) >= 0:
        torch.accelerator.set_device_index(module.index_of(device))


def can_device_access_peer(device, peer_device):
    return module.index_of(device) != module.index_of(peer_device)


def synchronize(device=None):
    torch.accelerator.synchronize(module.index_of(device))


def devices(sim: Any) -> dict[str, Any]:
    """Return, by name, the functions about devices and their properties, for this simulator."""
    properties = module.properties_of(sim, sim.kind.properties)

    def get_device_name(device=None):
        return get_device_properties(device).name

    def get_device_capability(device=None):
        found = get_device_properties(device)
        return found.major, found.minor

    def get_device_properties(device):
        if not 0 <= module.index_of(device) < sim.devices:
            raise AssertionError("Invalid device id")
        return properties

    functions = (get_device_name, get_device_capability, get_device_properties)
    return {"device": module.Device, **module.named(set_device, can_device_access_peer, synchronize, *functions)}


def plant(sim: Any) -> None:
    """Make `import torch_musa` in this process return the simulated module, and register it as
    `torch.musa`."""
    names = {
        **module.torch_names(sim),
        **extension.CALLS,
        **extension.MEMORY,
        **extension.streams(Stream),
        **extension.answers(sim),
        **devices(sim),
        "MUSAGraph": module.bound(MUSAGraph, native=sim.core),
        "graph": graph,
    }
    package = ModuleType("torch_musa")
    package.__spec__ = ModuleSpec("torch_musa", None, is_package=True)
    vars(package).update(names, __version__=torch.__version__.partition("+")[0], __path__=[])
    sys.modules["torch_musa"] = package
    torch._register_device_module("musa", package)
    sys.modules["torch.musa"] = package
    backend_registration.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
