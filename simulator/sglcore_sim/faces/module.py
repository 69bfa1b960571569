"""Parts of every face: streams, events, graphs, and calls that torch.accelerator can serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

AMP = (torch.float16, torch.bfloat16)
MODES = ("global", "thread_local", "relaxed")
"""Capture error modes: which calls of other threads make a capture fail."""


class StreamBinding(torch.Stream):
    """The base of a vendor's Python stream class, as its C extension provides it. Making one with
    ids refers to an existing stream; without ids it makes a new stream on the current device."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0) -> Any:
        if stream_id or device_index or device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, priority=priority)

    @property
    def address(self) -> int:
        """The native handle for a launch, which each vendor's class has under another name; 0 for
        the default stream."""
        return self.native_handle or 0  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        """Hash the stream's ids, because objects of the same stream are equal."""
        return hash((self.stream_id, self.device_index))


class EventBinding(torch.Event):
    """The base of a vendor's Python event class, as its C extension provides it. Raises
    RuntimeError for an interprocess event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        if interprocess:
            raise RuntimeError("interprocess events are not simulated")
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking)

    @property
    def address(self) -> int:
        """The native handle, which each vendor's class has under another name; 0 until the event is
        recorded."""
        return self.event_id or 0


class GraphBinding:
    """A vendor's Python graph class over a graph of the `native` core, which `bound` sets; the
    vendor's `capture_begin` calls `begin`. Other methods do what their names say."""

    native: ClassVar[ModuleType]
    core: Any

    def __init__(self) -> None:
        self.core = self.native.Graph()

    def begin(self, pool: tuple[int, int] | None, capture_error_mode: str = MODES[0]) -> None:
        """Start to capture the current stream; the graph's memory comes from `pool`, or from a new
        pool if that is None. Raises RuntimeError for an unknown error mode; the mode has no other
        effect."""
        if capture_error_mode not in MODES:
            raise RuntimeError(f"found capture error mode {capture_error_mode!r}, wanted one of {', '.join(MODES)}")
        self.core.begin(tuple(pool) if pool else (0, 0))

    def capture_end(self) -> None:
        self.core.end()

    def replay(self) -> None:
        self.core.replay()

    def reset(self) -> None:
        self.core.reset()

    def pool(self) -> tuple[int, int]:
        return self.core.pool()

    def debug_dump(self, debug_path: str) -> None:
        with open(debug_path, "w") as file:
            file.write(self.core.describe())


class Device:
    """A context in which another device is current; the previous one is current again afterwards.
    None, a device without an index or a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device, -1)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch.accelerator.current_device_index()
        if self.idx >= 0:
            torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *args: object) -> bool:
        torch.accelerator.set_device_index(self.prev_idx)
        return False


class StreamContext:
    """A context in which a stream, and its device, is current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *args: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*args)


def index_of(device: Any, default: int | None = None) -> int:
    """Return the index of a device in any form that torch accepts. A device without an index, or
    None, gives `default`; the current device if that is None."""
    given = torch.device(device) if isinstance(device, str) else device
    index = given.index if isinstance(given, torch.device) else given
    if index is not None:
        return int(index)
    return torch.accelerator.current_device_index() if default is None else default


def bound(cls: type, **fields: Any) -> Any:
    """Return a subclass of `cls`, of the same name, with these class attributes, such as the
    simulator's core."""
    return type(cls)(cls.__name__, (cls,), fields)


def named(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Return the functions by their `__name__`."""
    return {function.__name__: function for function in functions}


def properties_of(sim: Any, fields: Mapping[str, Any]) -> SimpleNamespace:
    """Return the vendor's device properties as an object: the chip's (`fields`, by name), with the
    simulated memory size as `total_memory`."""
    return SimpleNamespace(**{**fields, "total_memory": sim.memory})


def torch_names(sim: Any) -> dict[str, Any]:
    """Return, by name, the functions that torch itself requires of a device's module. Those of the
    random state get and set that of the CPU's generator, whatever the device."""
    return {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda queued, **kwargs: queued(),
        "get_amp_supported_dtype": lambda: list(AMP),
        "get_rng_state": lambda device=sim.kind.torch_name: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=sim.kind.torch_name: torch.set_rng_state(new_state),
    }
