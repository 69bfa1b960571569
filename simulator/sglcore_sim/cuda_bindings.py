"""The `torch._C._cuda_*` names that a CPU build lacks, so that the shipped Python of torch.cuda runs unmodified."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PropertyTable = dict[str, Any]


class StreamBinding(torch.Stream):
    """`torch._C._CudaStreamBase`: a stream of this device type with CUDA's attribute names."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
    ) -> StreamBinding:
        if stream_ptr:
            raise RuntimeError("external streams are not simulated")
        if stream_id or device_index or device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, device=torch.device("cuda", torch.cuda.current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The address that a native launch would take; 0 for the default stream."""
        return self.native_handle or 0  # type: ignore[attr-defined]

    @property
    def priority(self) -> int:
        """All simulated streams have one priority."""
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as on hardware."""
        return (0, -5)


class EventBinding(torch.Event):
    """`torch._C._CudaEventBase`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> EventBinding:
        if interprocess or external:
            raise RuntimeError("interprocess and external events are not simulated")
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    @property
    def cuda_event(self) -> int:
        """The event's address; 0 until it is recorded."""
        return self.event_id or 0


def graph_binding(native: ModuleType) -> type:
    """`torch._C._CUDAGraph` over the native graph."""

    class GraphBinding:
        core: Any

        def __new__(cls, keep_graph: bool = False) -> GraphBinding:
            made = super().__new__(cls)
            made.core = native.Graph()
            return made

        def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
            if capture_error_mode not in ("global", "thread_local", "relaxed"):
                wanted = "global, thread_local or relaxed"
                raise RuntimeError(f"found capture error mode {capture_error_mode!r}, wanted {wanted}")
            self.core.begin(tuple(pool) if pool else (0, 0))

        def capture_end(self) -> None:
            self.core.end()

        def instantiate(self) -> None: ...

        def register_generator_state(self, generator: torch.Generator) -> None: ...

        def replay(self) -> None:
            self.core.replay()

        def reset(self) -> None:
            self.core.reset()

        def pool(self) -> tuple[int, int]:
            return self.core.pool()

        def enable_debug_mode(self) -> None: ...

        def debug_dump(self, debug_path: str) -> None:
            with open(debug_path, "w") as file:
                file.write(self.core.describe())

        def raw_cuda_graph(self) -> int:
            raise RuntimeError("raw graphs are not simulated")

        raw_cuda_graph_exec = raw_cuda_graph

    return GraphBinding


def memory_stats(native: ModuleType, device: int) -> dict[str, Any]:
    """The nested numbers of `torch._C._cuda_memoryStats` that the simulator knows."""
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


def bindings(native: ModuleType, devices: int, arch_flags: str) -> dict[str, Any]:
    """Name to value of everything to add to `torch._C`."""
    cuda_type = 1  # c10::DeviceType::CUDA

    def exchange(device: int) -> int:
        before = native.current_device()
        if device >= 0:
            native.set_device(device)
        return before

    def maybe_exchange(device: int) -> int:
        return exchange(device)

    def current_stream(device: int) -> tuple[int, int, int]:
        index = native.current_device() if device < 0 else device
        return (native.current_stream(index), index, cuda_type)

    def default_stream(device: int) -> tuple[int, int, int]:
        return (0, native.current_device() if device < 0 else device, cuda_type)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        native.set_device(device_index)
        native.set_stream(device_index, stream_id)

    mode = SimpleNamespace(value=0)
    return {
        "_has_cuda": True,
        "_CudaStreamBase": StreamBinding,
        "_CudaEventBase": EventBinding,
        "_CUDAGraph": graph_binding(native),
        "_graph_pool_handle": native.new_pool,
        "_cuda_isCurrentStreamCapturing": native.is_capturing,
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": native.current_device,
        "_cuda_setDevice": native.set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": default_stream,
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: native.synchronize(native.current_device()),
        "_cuda_getArchFlags": lambda: arch_flags,
        "_cuda_emptyCache": lambda: [native.empty_cache(index) for index in range(devices)] and None,
        "_cuda_memoryStats": lambda device: memory_stats(native, device),
        "_cuda_resetPeakMemoryStats": native.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_ipc_collect": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_get_sync_debug_mode": lambda: mode.value,
        "_cuda_set_sync_debug_mode": lambda value: setattr(mode, "value", value),
        "_cuda_getMemoryFraction": lambda device: 1.0,
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_getCurrentRawStream": lambda device: native.current_stream(device),
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getCompiledVersion": lambda: 0,
    }


def runtime_library(native: ModuleType) -> SimpleNamespace:
    """The few functions of `torch.cuda.cudart()` that torch itself calls."""

    def mem_info(device: int) -> tuple[int, int]:
        numbers = native.memory(device)
        return (numbers["capacity"] - numbers["reserved"], numbers["capacity"])

    error = SimpleNamespace(success=0)
    return SimpleNamespace(
        cudaMemGetInfo=mem_info,
        cudaError=error,
        cudaGetErrorString=lambda code: f"simulated error {code}",
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaHostRegister=lambda *args: 0,
        cudaHostUnregister=lambda *args: 0,
    )


def device_properties(table: PropertyTable) -> SimpleNamespace:
    """`torch.cuda.get_device_properties`: the kind's table under torch's names."""
    wanted = {
        "name": "simulated",
        "major": 0,
        "minor": 0,
        "multi_processor_count": 1,
        "total_memory": 0,
        "warp_size": 32,
    }
    known = {**wanted, **table}
    known.setdefault("gcnArchName", known.get("gcn_arch", ""))
    known.setdefault("is_integrated", 0)
    known.setdefault("is_multi_gpu_board", 0)
    known.setdefault("max_threads_per_multi_processor", 2048)
    known.setdefault("regs_per_multiprocessor", 65536)
    known.setdefault("shared_memory_per_block", 48 << 10)
    known.setdefault("shared_memory_per_multiprocessor", 228 << 10)
    known.setdefault("shared_memory_per_block_optin", 227 << 10)
    known.setdefault("L2_cache_size", 50 << 20)
    known.setdefault("uuid", "00000000-0000-0000-0000-000000000000")
    return SimpleNamespace(**known)


def storage_constructor() -> Callable[..., Any]:
    """`torch.UntypedStorage(bytes, device=...)`, which a CPU build refuses for cuda."""
    original = torch.UntypedStorage.__new__

    def construct(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)  # type: ignore[call-arg]
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    return construct


def plant(native: ModuleType, devices: int, properties: PropertyTable, hip: bool, arch_flags: str) -> None:
    """Adds the bindings and runs torch's own streams, graphs and memory modules again over them."""
    for name, value in bindings(native, devices, arch_flags).items():
        setattr(torch._C, name, value)  # foreign: the names that a CUDA build has
    torch.version.cuda = None if hip else "12.8"  # foreign: torch reads its build from here
    torch.version.hip = "6.4.43482" if hip else None  # foreign: torch reads its build from here
    cuda: Any = torch.cuda
    for name in ("streams", "graphs"):
        module = importlib.reload(sys.modules[f"torch.cuda.{name}"])
        for public in (
            "Stream",
            "Event",
            "ExternalStream",
            "CUDAGraph",
            "graph",
            "graph_pool_handle",
            "is_current_stream_capturing",
            "make_graphed_callables",
        ):
            if public in vars(module):
                setattr(cuda, public, getattr(module, public))  # foreign: names that torch.cuda re-exports
    cuda._exchange_device = torch._C._cuda_exchangeDevice  # foreign: bound once, at import
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice  # foreign: bound once, at import
    cuda._cudart = runtime_library(native)  # foreign: the runtime library that a CPU build lacks
    torch.UntypedStorage.__new__ = storage_constructor()  # foreign: its C code knows the devices of its build only
    table = device_properties(properties)
    cuda._get_device_properties = lambda device: table  # foreign: set by the C initialisation on hardware
    cuda.default_generators = tuple(
        torch.Generator() for _ in range(devices)
    )  # foreign: set by the C initialisation on hardware
