"""torch_musa: modules, classes and functions under the signatures of its public sources (MooreThreads/torch_musa, core/).

There is no package of it to hold this against: the signatures were copied by hand. For `mem_get_info`,
`reset_peak_memory_stats` and the graph classes there was no source; they have the signatures of torch.cuda, unchecked.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from sglcore_sim.faces import module

MODES = ("global", "thread_local", "relaxed")


def streams() -> dict[str, Any]:
    """Streams, events, and what makes them current."""

    class Stream(module.StreamBinding):
        def __new__(cls, device=None, priority=0, **kwargs):
            with module.Device(device):
                return super().__new__(cls, priority=priority, **kwargs)

        def wait_event(self, event):
            event.wait(self)

        def record_event(self, event=None):
            made = Event() if event is None else event
            made.record(self)
            return made

        def wait_stream(self, stream):
            self.wait_event(stream.record_event())

        def query(self):
            return super().query()

        def synchronize(self):
            super().synchronize()

        @property
        def musa_stream(self):
            return self.native_handle or 0  # pyright: ignore[reportAttributeAccessIssue]

        def __eq__(self, o):
            return super().__eq__(o) if isinstance(o, Stream) else False

        def __hash__(self):
            return hash((self.musa_stream, self.device))

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
            super().synchronize()

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

    functions = (current_stream, default_stream, set_stream, stream)
    classes = {"Stream": Stream, "Event": Event, "StreamContext": module.StreamContext}
    return {**classes, **{function.__name__: function for function in functions}}


def graphs(core: ModuleType, stream_class: Any) -> dict[str, Any]:
    """Graphs, under the names that torch.cuda has for them."""

    class MUSAGraph:
        def __init__(self):
            self._native = core.Graph()

        def capture_begin(self, pool=None, capture_error_mode="global"):
            if capture_error_mode not in MODES:
                raise RuntimeError(f"found capture error mode {capture_error_mode!r}, wanted one of {', '.join(MODES)}")
            self._native.begin(tuple(pool) if pool else (0, 0))

        def capture_end(self):
            self._native.end()

        def replay(self):
            self._native.replay()

        def reset(self):
            self._native.reset()

        def pool(self):
            return self._native.pool()

        def enable_debug_mode(self):
            return None

        def debug_dump(self, debug_path):
            with open(debug_path, "w") as file:
                file.write(self._native.describe())

    class graph:
        default_capture_stream = None

        def __init__(self, musa_graph, pool=None, stream=None, capture_error_mode: str = "global"):
            if stream is None and graph.default_capture_stream is None:
                graph.default_capture_stream = stream_class()
            self.pool = () if pool is None else (pool,)
            self.capture_stream = graph.default_capture_stream if stream is None else stream
            self.stream_ctx = module.StreamContext(self.capture_stream)
            self.musa_graph = musa_graph
            self.capture_error_mode = capture_error_mode

        def __enter__(self):
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            self.stream_ctx.__enter__()
            self.musa_graph.capture_begin(*self.pool, capture_error_mode=self.capture_error_mode)

        def __exit__(self, exc_type, exc_value, traceback):
            try:
                self.musa_graph.capture_end()
            finally:
                self.stream_ctx.__exit__(exc_type, exc_value, traceback)

    def graph_pool_handle():
        return core.new_pool()

    def is_current_stream_capturing():
        return core.is_capturing()

    functions = (graph_pool_handle, is_current_stream_capturing)
    return {"MUSAGraph": MUSAGraph, "graph": graph, **{function.__name__: function for function in functions}}


def devices(sim: Any) -> dict[str, Any]:
    """Devices, their properties and their memory."""
    accelerator = torch.accelerator
    properties = module.properties_of(sim, sim.kind.properties)

    def set_device(device):
        if module.index_of(device) >= 0:
            accelerator.set_device_index(module.index_of(device))

    def get_device_name(device=None):
        return get_device_properties(device).name

    def get_device_capability(device=None):
        found = get_device_properties(device)
        return found.major, found.minor

    def get_device_properties(device):
        if not 0 <= module.index_of(device) < sim.devices:
            raise AssertionError("Invalid device id")
        return properties

    def can_device_access_peer(device, peer_device):
        return module.index_of(device) != module.index_of(peer_device)

    def current_device():
        return accelerator.current_device_index()

    def is_available():
        return True

    def synchronize(device=None):
        accelerator.synchronize(module.index_of(device))

    def device_count():
        return sim.devices

    functions = (set_device, get_device_name, get_device_capability, get_device_properties, can_device_access_peer)
    functions += (current_device, is_available, synchronize, device_count)
    return {"device": module.Device, **{function.__name__: function for function in functions}}


def memory() -> dict[str, Any]:
    """The allocator's numbers."""
    accelerator = torch.accelerator

    def empty_cache():
        accelerator.empty_cache()

    def memory_stats(device=None):
        return accelerator.memory_stats(module.index_of(device))

    def memory_allocated(device=None):
        return accelerator.memory_allocated(module.index_of(device))

    def max_memory_allocated(device=None):
        return accelerator.max_memory_allocated(module.index_of(device))

    def memory_reserved(device=None):
        return accelerator.memory_reserved(module.index_of(device))

    def max_memory_reserved(device=None):
        return accelerator.max_memory_reserved(module.index_of(device))

    def reset_peak_memory_stats(device=None):
        accelerator.reset_peak_memory_stats(module.index_of(device))

    def mem_get_info(device=None):
        return accelerator.get_memory_info(module.index_of(device))

    functions = (empty_cache, memory_stats, memory_allocated, max_memory_allocated, memory_reserved)
    functions += (max_memory_reserved, reset_peak_memory_stats, mem_get_info)
    return {function.__name__: function for function in functions}


def seeds() -> dict[str, Any]:
    """Random state."""

    def manual_seed(seed):
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(seed):
        torch.default_generator.manual_seed(seed)

    return {"manual_seed": manual_seed, "manual_seed_all": manual_seed_all}


def plant(sim: Any) -> None:
    """Make `import torch_musa` give the face, register `torch.musa`, and plant the libraries of the chip."""
    made = streams()
    names = {
        **module.torch_names(sim),
        **made,
        **graphs(sim.core, made["Stream"]),
        **devices(sim),
        **memory(),
        **seeds(),
    }
    package = ModuleType("torch_musa")
    package.__spec__ = ModuleSpec("torch_musa", None, is_package=True)
    vars(package).update(names, __version__=torch.__version__.partition("+")[0], __path__=[])
    sys.modules["torch_musa"] = package
    torch._register_device_module("musa", package)
    sys.modules["torch.musa"] = package
    backend_registration.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
