"""Bindings for a device type of torch's own that this build lacks: the names in `torch._C` that
torch's Python code uses for every such type. A kind's face adds the names of its vendor, then
reloads torch's modules.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch

from sglcore_sim.faces import module


class StreamBinding(module.StreamBinding):
    """The base of torch's own stream classes, as `torch._C` has it."""

    @property
    def priority(self) -> int:
        """The priority, 0 for all simulated streams, whatever was requested."""
        return 0


class GraphBinding(module.GraphBinding):
    """The base of torch's own graph classes, as `torch._C` has it. `keep_graph`, `instantiate`,
    `register_generator_state` and `enable_debug_mode` have no effect; `debug_dump` writes the
    graph's nodes to a file."""

    def __new__(cls, keep_graph: bool = False) -> Any:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()

    def instantiate(self) -> None: ...

    def register_generator_state(self, generator: torch.Generator) -> None: ...

    def enable_debug_mode(self) -> None: ...


def memory_stats(native: ModuleType, device: int) -> dict[str, Any]:
    """Return memory statistics of a device in torch's nested format, as `native` (the simulator's
    core) counts them; numbers that it does not track are 0."""
    numbers = native.memory(device)

    def stat(current: int, peak: int) -> dict[str, dict[str, int]]:
        values = {"current": current, "peak": peak, "allocated": current, "freed": 0}
        zero = dict.fromkeys(values, 0)
        return {"all": values, "small_pool": zero, "large_pool": zero}

    allocated = stat(numbers["allocated"], numbers["peak"])
    unknown = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes")
    return {
        **{name: stat(0, 0) for name in unknown},
        "oversize_allocations": stat(0, 0)["all"],
        "oversize_segments": stat(0, 0)["all"],
        "allocated_bytes": allocated,
        "active_bytes": allocated,
        "requested_bytes": allocated,
        "reserved_bytes": stat(numbers["reserved"], numbers["reserved_peak"]),
        "num_ooms": numbers["ooms"],
        "num_alloc_retries": 0,
    }


def bindings(sim: Any, prefix: str) -> dict[str, Any]:
    """Return the names that `torch._C` has for every device type of torch's own, with the
    simulator's functions. `prefix`: the type's prefix, such as "cuda": names begin with `_cuda_`.
    Adds nothing itself."""
    native, devices = sim.core, range(sim.devices)

    @cache
    def device_type() -> int:
        return torch.accelerator.current_stream().device_type

    def exchange(device: int) -> int:
        before = native.current_device()
        if device >= 0:
            native.set_device(device)
        return before

    def maybe_exchange(device: int) -> int:
        return exchange(device)  # a function of its own: torch's compiler keeps a handler for each

    def index_of(device: int) -> int:
        return native.current_device() if device < 0 else device

    def current_stream(device: int) -> tuple[int, int, int]:
        return (native.current_stream(index_of(device)), index_of(device), device_type())

    def default_stream(device: int) -> tuple[int, int, int]:
        return (0, index_of(device), device_type())

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        native.set_device(device_index)
        native.set_stream(device_index, stream_id)

    named = {
        "init": lambda: None,
        "isInBadFork": lambda: False,
        "getDeviceCount": lambda: len(devices),
        "getDevice": native.current_device,
        "setDevice": native.set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": maybe_exchange,
        "getCurrentStream": current_stream,
        "getDefaultStream": default_stream,
        "getCurrentRawStream": native.current_stream,
        "setStream": set_stream,
        "isCurrentStreamCapturing": native.is_capturing,
        "synchronize": lambda device=-1: native.synchronize(index_of(device)),
        "getArchFlags": lambda: sim.kind.arch,
        "emptyCache": lambda: [native.empty_cache(index) for index in devices] and None,
        "memoryStats": lambda device: memory_stats(native, device),
        "resetPeakMemoryStats": native.reset_peak,
        "resetAccumulatedMemoryStats": lambda device: None,
        "getMemoryFraction": lambda device: 1.0,
        "canDeviceAccessPeer": lambda one, other: True,
    }
    return {f"_{prefix}_{name}": value for name, value in named.items()} | {f"_has_{prefix}": True}


def plant(package: Any, values: dict[str, Any], *modules: str) -> None:
    """Add the values to `torch._C` by name, and reload these modules of `package` (such as
    torch.cuda). Then update the names that the package re-exports from them, its functions that
    change the device, and its default generators."""
    for name, value in values.items():
        setattr(torch._C, name, value)  # foreign: names of a build for the device
    for name in modules:
        module = sys.modules[f"{package.__name__}.{name}"]
        before = dict(vars(module))
        after = vars(importlib.reload(module))
        for public, value in tuple(vars(package).items()):
            if public in before and before[public] is value:
                setattr(package, public, after[public])  # foreign: names that the package re-exports
    prefix = package.__name__.rpartition(".")[2]
    package._exchange_device = values[f"_{prefix}_exchangeDevice"]  # foreign: bound once, at import
    package._maybe_exchange_device = values[f"_{prefix}_maybeExchangeDevice"]  # foreign: bound once, at import
    count = range(values[f"_{prefix}_getDeviceCount"]())
    package.default_generators = tuple(
        torch.Generator() for _ in count
    )  # foreign: set by the C initialisation on hardware


def plant_storages(device_type: str) -> None:
    """Patch torch so that `torch.UntypedStorage(bytes, device=...)` works for a device type of
    torch's own that this build lacks. Other devices are served as before."""
    original = torch.UntypedStorage.__new__

    def construct(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != device_type:
            return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)  # type: ignore[call-arg]
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = construct  # foreign: its C code knows the devices of its build only
