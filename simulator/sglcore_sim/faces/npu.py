"""torch_npu: modules, classes and functions with the signatures of torch_npu 2.13.0's Python
sources (from its wheel).

`sglcore_sim.vendors.torch_npu` registers the operators. Names that are absent here are not
simulated; names that torch_npu lacks are never added. `NPUGraph.update` and `auto_dispatch_capture`
are refused.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils import backend_registration

from sglcore_sim import vendors
from sglcore_sim.faces import extension, module
from sglcore_sim.faces.npu_tasks import Tasks


class Stream(extension.Stream):
    tasks: ClassVar[Tasks]
    npu_stream = module.StreamBinding.address

    def synchronize(self):
        self.tasks.refuse("the host waits for a stream")
        super().synchronize()


class Event(extension.Event):
    tasks: ClassVar[Tasks]

    def synchronize(self):
        self.tasks.refuse("the host waits for an event")
        super().synchronize()


class ExternalEvent(module.EventBinding):
    tasks: ClassVar[Tasks]

    def __new__(cls):
        made = super().__new__(cls)
        made.is_set = False
        return made

    def record(self, stream=None):
        if self.is_set:
            raise self.tasks.recorded_twice()
        super().record(torch.accelerator.current_stream() if stream is None else stream)
        self.is_set = True
        self.tasks.recorded()

    def wait(self, stream=None):
        if self.tasks.capturing is None:
            raise RuntimeError("an ExternalEvent outside a capture is not simulated")
        self.tasks.capturing.waits.append(self)

    def reset(self, stream=None):
        if self.tasks.capturing is None:
            self.is_set = False
        else:
            self.tasks.capturing.resets.append(self)


class NPUGraph(module.GraphBinding):
    tasks: ClassVar[Tasks]

    def __init__(self):
        super().__init__()
        self.auto_dispatch_capture = False
        self.waits, self.resets = [], []

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.begin(pool, capture_error_mode)
        self.waits.clear()
        self.resets.clear()
        self.tasks.capturing = self

    def capture_end(self):
        self.tasks.abandon()
        super().capture_end()

    def replay(self):
        self.tasks.replay(self, self.run)

    def run(self):
        stream = torch.accelerator.current_stream()
        for event in self.waits:
            torch.Event.wait(event, stream)
        super().replay()
        for event in self.resets:
            event.is_set = False

    def update(self, cpu_update_input):
        raise RuntimeError(
            "The current graph configuration does not support update: auto_dispatch_capture is not simulated"
        )


class graph(extension.Capturing):
    def __init__(
        self, npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode: str = "global"
    ):
        if auto_dispatch_capture:
            raise NotImplementedError("auto_dispatch_capture is not simulated: use graph_task_group_begin")
        super().__init__(npu_graph, pool, stream, capture_error_mode)


def graphs(sim: Any, tasks: Tasks) -> dict[str, Any]:
    """Return, by name, the graph classes, and the functions for task groups (captured calls that
    the host rewrites), over `tasks`."""

    def graph_task_group_begin(stream):
        tasks.begin_group(stream)

    def graph_task_group_end(stream):
        return tasks.end_group(stream)

    def graph_task_update_begin(stream, handle):
        tasks.begin_update(stream, handle)

    def graph_task_update_end(stream):
        tasks.end_update(stream)

    classes = {"NPUGraph": module.bound(NPUGraph, native=sim.core, tasks=tasks), "graph": graph}
    of_tasks = (graph_task_group_begin, graph_task_group_end, graph_task_update_begin, graph_task_update_end)
    return {**classes, **extension.answers(sim), **module.named(*of_tasks)}


def set_device(device):
    torch.accelerator.set_device_index(module.index_of(device))


def is_initialized():
    return True


def init():
    return None


def get_device_capability(device=None):
    warnings.warn("an NPU has no compute capability", stacklevel=2)


def devices(sim: Any, tasks: Tasks) -> dict[str, Any]:
    """Return, by name, the functions about devices and their properties, for this simulator."""
    properties = module.properties_of(sim, sim.kind.properties)

    def synchronize(device=None):
        tasks.refuse("the host waits for the device")
        torch.accelerator.synchronize(module.index_of(device))

    def get_device_name(device_name=None):
        return get_device_properties(device_name).name

    def get_device_properties(device_name=None):
        if not 0 <= module.index_of(device_name) < sim.devices:
            raise AssertionError("Invalid device id")
        return properties

    def is_bf16_supported(including_emulation: bool = False):
        return not properties.name.startswith("Ascend310P")

    functions = (synchronize, set_device, is_initialized, init, get_device_name, get_device_properties)
    functions += (get_device_capability, is_bf16_supported)
    options = SimpleNamespace(allow_internal_format=False)
    return {"device": module.Device, "config": options, **module.named(*functions)}


def plant(sim: Any) -> None:
    """Make `import torch_npu` in this process return the simulated module with the registered
    operators, and register `torch.npu`. The operators must be registered first."""
    tasks = Tasks(sim)
    event = module.bound(Event, tasks=tasks)
    npu = ModuleType("torch_npu.npu")
    vars(npu).update(
        **module.torch_names(sim),
        **extension.CALLS,
        **extension.MEMORY,
        **extension.streams(module.bound(Stream, tasks=tasks, event_class=event)),
        **graphs(sim, tasks),
        **devices(sim, tasks),
        ExternalEvent=module.bound(ExternalEvent, tasks=tasks),
    )
    package = ModuleType("torch_npu")
    package.__spec__ = ModuleSpec("torch_npu", None, is_package=True)
    vars(package).update(npu=npu, __version__=torch.__version__.partition("+")[0], __path__=[])
    sys.modules.update({"torch_npu": package, "torch_npu.npu": npu})
    torch._register_device_module("npu", npu)
    sys.modules["torch.npu"] = npu
    backend_registration.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
    operators = {name: getattr(torch.ops.npu, name) for name in vendors.operators("npu")}
    vars(package).update(operators)
    sim.watch(lambda: tasks.refuse("the work ends"), tasks.forget)
