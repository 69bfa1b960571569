"""torch_npu: its modules, classes and functions under the signatures of torch_npu 2.13.0's own Python sources (its wheel).

Operators are registered by `sglcore_sim.vendors.torch_npu`. Names that are absent here are not simulated; a name that
torch_npu lacks is never added. `NPUGraph.update` and `auto_dispatch_capture` are refused.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration

from sglcore_sim import vendors
from sglcore_sim.faces import module
from sglcore_sim.faces.npu_tasks import Tasks

MODES = ("global", "thread_local", "relaxed")


class Face:
    """The functions and classes of `torch.npu` over one simulator."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.tasks = Tasks(sim)
        self.names = {**module.torch_names(sim), **streams(self), **graphs(self), **devices(self), **memory(self)}


def streams(face: Face) -> dict[str, Any]:
    """Streams, events, and what makes them current."""
    tasks = face.tasks

    class Stream(module.StreamBinding):
        def __new__(cls, device=None, priority=0, **kwargs):
            with module.Device(device):
                return super().__new__(cls, priority=priority, **kwargs)

        def wait_event(self, event):
            event.wait(self)

        def wait_stream(self, stream):
            self.wait_event(stream.record_event())

        def record_event(self, event=None):
            made = Event() if event is None else event
            made.record(self)
            return made

        def query(self):
            return super().query()

        def synchronize(self):
            tasks.refuse("the host waits for a stream")
            super().synchronize()

        @property
        def npu_stream(self):
            return self.native_handle or 0  # pyright: ignore[reportAttributeAccessIssue]

        def __eq__(self, other):
            return super().__eq__(other) if isinstance(other, Stream) else False

        def __hash__(self):
            return hash((self.stream_id, self.device))

    class Event(module.EventBinding):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
            return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

        def record(self, stream=None):
            super().record(current_stream() if stream is None else stream)

        def wait(self, stream=None):
            super().wait(current_stream() if stream is None else stream)

        def query(self):
            return super().query()

        def elapsed_time(self, end_event):
            return super().elapsed_time(end_event)

        def synchronize(self):
            tasks.refuse("the host waits for an event")
            super().synchronize()

    class ExternalEvent(module.EventBinding):
        def __new__(cls):
            made = super().__new__(cls)
            made.is_set = False
            return made

        def record(self, stream=None):
            if self.is_set:
                raise tasks.recorded_twice()
            super().record(current_stream() if stream is None else stream)
            self.is_set = True
            tasks.recorded()

        def wait(self, stream=None):
            if tasks.capturing is None:
                raise RuntimeError("an ExternalEvent outside a capture is not simulated")
            tasks.capturing.waits.append(self)

        def reset(self, stream=None):
            if tasks.capturing is None:
                self.is_set = False
            else:
                tasks.capturing.resets.append(self)

    def current_stream(device=None):
        found = torch.accelerator.current_stream(module.index_of(device))
        return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    def default_stream(device=None):
        kind = torch.accelerator.current_stream().device_type
        return Stream(stream_id=0, device_index=module.index_of(device), device_type=kind)

    def set_stream(stream):
        if stream is not None:
            torch.accelerator.set_stream(stream)

    def stream(stream):
        return module.StreamContext(stream)

    return {
        "Stream": Stream,
        "Event": Event,
        "ExternalEvent": ExternalEvent,
        "StreamContext": module.StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": stream,
    }


def graphs(face: Face) -> dict[str, Any]:
    """Graphs, and groups of captured calls that the host rewrites."""
    core, tasks = face.sim.core, face.tasks

    class NPUGraph:
        def __new__(cls):
            return super().__new__(cls)

        def __init__(self):
            self._native = core.Graph()
            self.auto_dispatch_capture = False
            self.waits, self.resets = [], []

        def capture_begin(self, pool=None, capture_error_mode="global"):
            if capture_error_mode not in MODES:
                raise RuntimeError(f"found capture error mode {capture_error_mode!r}, wanted one of {', '.join(MODES)}")
            self.waits.clear()
            self.resets.clear()
            self._native.begin(tuple(pool) if pool else (0, 0))
            tasks.capturing = self

        def capture_end(self):
            tasks.abandon()
            self._native.end()

        def replay(self):
            tasks.replay(self, self.run)

        def run(self):
            stream = torch.accelerator.current_stream()
            for event in self.waits:
                torch.Event.wait(event, stream)
            self._native.replay()
            for event in self.resets:
                event.is_set = False

        def reset(self):
            self._native.reset()

        def pool(self):
            return self._native.pool()

        def update(self, cpu_update_input):
            raise RuntimeError(
                "The current graph configuration does not support update: auto_dispatch_capture is not simulated"
            )

        def debug_dump(self, debug_path):
            with open(debug_path, "w") as file:
                file.write(self._native.describe())

    class graph:
        default_capture_stream = None

        def __init__(
            self, npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode: str = "global"
        ):
            if auto_dispatch_capture:
                raise NotImplementedError("auto_dispatch_capture is not simulated: use graph_task_group_begin")
            if stream is None and graph.default_capture_stream is None:
                graph.default_capture_stream = face.names["Stream"]()
            self.pool = () if pool is None else (pool,)
            self.capture_stream = graph.default_capture_stream if stream is None else stream
            self.stream_ctx = module.StreamContext(self.capture_stream)
            self.npu_graph = npu_graph
            self.capture_error_mode = capture_error_mode

        def __enter__(self):
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            self.stream_ctx.__enter__()
            self.npu_graph.capture_begin(*self.pool, capture_error_mode=self.capture_error_mode)

        def __exit__(self, exc_type, exc_value, traceback):
            try:
                self.npu_graph.capture_end()
            finally:
                self.stream_ctx.__exit__(exc_type, exc_value, traceback)

    def graph_pool_handle():
        return core.new_pool()

    def is_current_stream_capturing():
        return core.is_capturing()

    def graph_task_group_begin(stream):
        tasks.begin_group(stream)

    def graph_task_group_end(stream):
        return tasks.end_group(stream)

    def graph_task_update_begin(stream, handle):
        tasks.begin_update(stream, handle)

    def graph_task_update_end(stream):
        tasks.end_update(stream)

    functions = (graph_pool_handle, is_current_stream_capturing, graph_task_group_begin, graph_task_group_end)
    functions += (graph_task_update_begin, graph_task_update_end)
    return {"NPUGraph": NPUGraph, "graph": graph, **{function.__name__: function for function in functions}}


def devices(face: Face) -> dict[str, Any]:
    """Devices and their properties."""
    sim, accelerator = face.sim, torch.accelerator
    properties = module.properties_of(sim, sim.kind.properties)

    def checked(device):
        index = module.index_of(device)
        if not 0 <= index < sim.devices:
            raise AssertionError("Invalid device id")
        return index

    def synchronize(device=None):
        face.tasks.refuse("the host waits for the device")
        accelerator.synchronize(module.index_of(device))

    def set_device(device):
        accelerator.set_device_index(module.index_of(device))

    def current_device():
        return accelerator.current_device_index()

    def device_count():
        return sim.devices

    def is_available():
        return True

    def is_initialized():
        return True

    def init():
        return None

    def get_device_name(device_name=None):
        checked(device_name)
        return properties.name

    def get_device_properties(device_name=None):
        checked(device_name)
        return properties

    def get_device_capability(device=None):
        warnings.warn("an NPU has no compute capability", stacklevel=2)

    def manual_seed(seed):
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(seed):
        torch.default_generator.manual_seed(seed)

    def is_bf16_supported(including_emulation: bool = False):
        return not properties.name.startswith("Ascend310P")

    functions = (
        synchronize,
        set_device,
        current_device,
        device_count,
        is_available,
        is_initialized,
        init,
        get_device_name,
    )
    functions += (get_device_properties, get_device_capability, manual_seed, manual_seed_all, is_bf16_supported)
    options = SimpleNamespace(allow_internal_format=False)
    return {"device": module.Device, "config": options, **{function.__name__: function for function in functions}}


def memory(face: Face) -> dict[str, Any]:
    """The allocator's numbers."""
    accelerator = torch.accelerator

    def mem_get_info(device=None):
        return accelerator.get_memory_info(module.index_of(device))

    def empty_cache():
        accelerator.empty_cache()

    def memory_allocated(device=None):
        return accelerator.memory_allocated(module.index_of(device))

    def max_memory_allocated(device=None):
        return accelerator.max_memory_allocated(module.index_of(device))

    def memory_reserved(device=None):
        return accelerator.memory_reserved(module.index_of(device))

    def max_memory_reserved(device=None):
        return accelerator.max_memory_reserved(module.index_of(device))

    def memory_stats(device=None):
        return accelerator.memory_stats(module.index_of(device))

    def reset_peak_memory_stats(device=None):
        accelerator.reset_peak_memory_stats(module.index_of(device))

    functions = (mem_get_info, empty_cache, memory_allocated, max_memory_allocated, memory_reserved)
    functions += (max_memory_reserved, memory_stats, reset_peak_memory_stats)
    return {function.__name__: function for function in functions}


def plant(sim: Any) -> None:
    """Make `import torch_npu` give the face, register `torch.npu`, and register the operators."""
    face = Face(sim)
    npu = ModuleType("torch_npu.npu")
    vars(npu).update(face.names)
    package = ModuleType("torch_npu")
    package.__spec__ = ModuleSpec("torch_npu", None, is_package=True)
    vars(package).update(npu=npu, __version__=torch.__version__.partition("+")[0], __path__=[])
    sys.modules.update({"torch_npu": package, "torch_npu.npu": npu})
    torch._register_device_module("npu", npu)
    sys.modules["torch.npu"] = npu
    backend_registration.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
    operators = {name: getattr(torch.ops.npu, name) for name in vendors.operators("npu")}
    vars(package).update(operators)
    sim.watch(lambda: face.tasks.refuse("the work ends"), face.tasks.forget)
