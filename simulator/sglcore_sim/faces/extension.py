"""The parts of torch.cuda's interface that the extensions of two vendors (torch_npu, torch_musa)
copied, with the same signatures: streams, events, the context of a capture, and calls about
devices, memory and seeds. Functions without a docstring do what their names say."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from sglcore_sim.faces import module

accelerator = torch.accelerator


class Event(module.EventBinding):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream=None):
        super().record(accelerator.current_stream() if stream is None else stream)

    def wait(self, stream=None):
        super().wait(accelerator.current_stream() if stream is None else stream)

    def query(self):
        return super().query()

    def elapsed_time(self, end_event):
        return super().elapsed_time(end_event)

    def synchronize(self):
        super().synchronize()


class Stream(module.StreamBinding):
    event_class: ClassVar[type[Event]] = Event

    def __new__(cls, device=None, priority=0, **kwargs):
        with module.Device(device):
            return super().__new__(cls, priority=priority, **kwargs)

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        made = self.event_class() if event is None else event
        made.record(self)
        return made

    def query(self):
        return super().query()

    def synchronize(self):
        super().synchronize()

    def __eq__(self, other):
        return super().__eq__(other) if isinstance(other, Stream) else False

    def __hash__(self):
        return hash((self.stream_id, self.device))


class Capturing:
    """A context in which the graph `made` captures the given stream, which is current inside; None:
    a stream that all such contexts share. The host waits for the device first, and frees the memory
    that its allocator keeps unused."""

    default_capture_stream = None

    def __init__(self, made, pool, stream, capture_error_mode):
        if stream is None and Capturing.default_capture_stream is None:
            Capturing.default_capture_stream = torch.Stream()
        self.made, self.given = made, {"pool": pool, "capture_error_mode": capture_error_mode}
        self.stream_ctx = module.StreamContext(Capturing.default_capture_stream if stream is None else stream)

    def __enter__(self):
        accelerator.synchronize()
        accelerator.empty_cache()
        self.stream_ctx.__enter__()
        self.made.capture_begin(**self.given)

    def __exit__(self, exc_type, exc_value, traceback):
        try:
            self.made.capture_end()
        finally:
            self.stream_ctx.__exit__(exc_type, exc_value, traceback)


def streams(stream_class: Any) -> dict[str, Any]:
    """Return, by name, this stream class, its event class, the stream context, and the functions
    that get and set the current stream."""

    def current_stream(device=None):
        found = accelerator.current_stream(module.index_of(device))
        return stream_class(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    def default_stream(device=None):
        kind = accelerator.current_stream().device_type
        return stream_class(stream_id=0, device_index=module.index_of(device), device_type=kind)

    classes = {"Stream": stream_class, "Event": stream_class.event_class, "StreamContext": module.StreamContext}
    return {**classes, **module.named(current_stream, default_stream, set_stream, stream)}


def set_stream(stream):
    if stream is not None:
        accelerator.set_stream(stream)


def stream(stream):
    return module.StreamContext(stream)


def answers(sim: Any) -> dict[str, Any]:
    """Return, by name, the functions that ask the simulator: `graph_pool_handle`,
    `is_current_stream_capturing` and `device_count`."""

    def graph_pool_handle():
        return sim.core.new_pool()

    def is_current_stream_capturing():
        return sim.core.is_capturing()

    def device_count():
        return sim.devices

    return module.named(graph_pool_handle, is_current_stream_capturing, device_count)


def current_device():
    return accelerator.current_device_index()


def is_available():
    return True


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


def manual_seed(seed):
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed):
    torch.default_generator.manual_seed(seed)


CALLS = module.named(current_device, is_available, manual_seed, manual_seed_all)
MEMORY = module.named(
    mem_get_info,
    empty_cache,
    memory_allocated,
    max_memory_allocated,
    memory_reserved,
    max_memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
)
