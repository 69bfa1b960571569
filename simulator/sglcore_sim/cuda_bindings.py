"""The `torch._C._cuda_*` names that a CPU build lacks, so that the shipped Python of torch.cuda
runs unmodified."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.cuda import green_contexts

from sglcore_sim.faces import in_tree, module

PropertyTable = dict[str, Any]


class StreamBinding(in_tree.StreamBinding):
    """Stands in for `torch._C._CudaStreamBase`: a stream of the simulated device with CUDA's
    attribute names. Raises RuntimeError for an external stream."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
    ) -> Any:
        if stream_ptr:
            raise RuntimeError("external streams are not simulated")
        return super().__new__(cls, priority, stream_id, device_index, device_type)

    cuda_stream = in_tree.StreamBinding.address

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest) priority, (0, -5) as on hardware; a smaller number is a higher
        priority."""
        return (0, -5)


class EventBinding(module.EventBinding):
    """Stands in for `torch._C._CudaEventBase`: an event of the simulated device with CUDA's
    attribute names. Raises RuntimeError for an external event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        if external:
            raise RuntimeError("external events are not simulated")
        return super().__new__(cls, enable_timing, blocking, interprocess)

    cuda_event = module.EventBinding.address


class GraphBinding(in_tree.GraphBinding):
    """Stands in for `torch._C._CUDAGraph`: a graph of the simulated device; access to the raw graph
    raises RuntimeError."""

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self.begin(pool, capture_error_mode)

    def raw_cuda_graph(self) -> int:
        raise RuntimeError("raw graphs are not simulated")

    raw_cuda_graph_exec = raw_cuda_graph


class GreenContextBinding:
    """Stands in for `torch._C._CUDAGreenContext`: some multiprocessors of the device, rounded up to
    a multiple of 8. `create` raises RuntimeError for no number, for less than 1 or more than there
    are, and for workqueue arguments.
    """

    sim: ClassVar[Any]

    def __init__(self, device_id: int, num_sms: int) -> None:
        self._device, self._units = device_id, num_sms

    @classmethod
    def create(
        cls,
        device_id: int | None = None,
        num_sms: int | None = None,
        workqueue_scope: str | None = None,
        workqueue_concurrency_limit: int | None = None,
    ) -> Any:
        if workqueue_scope is not None or workqueue_concurrency_limit is not None:
            raise RuntimeError("workqueues are not simulated")
        there = cls.sim.kind.properties["multi_processor_count"]
        if num_sms is None or not 0 < num_sms <= there:
            raise RuntimeError(f"Invalid number of SMs requested for green context: {num_sms} (device has {there} SMs)")
        device = cls.sim.core.current_device() if device_id is None else device_id
        return cls(device, min(there, -(-num_sms // 8) * 8))

    def Stream(self) -> Any:
        """Return a new stream at each call; `sim.parts` has its number of multiprocessors, by
        device and stream id. It is not slower than others."""
        made = torch.cuda.Stream(self._device)
        self.sim.parts[made.device_index, made.stream_id] = self._units
        return made

    def set_context(self) -> None:
        raise RuntimeError("a current green context is not simulated")

    pop_context = set_context


def bindings(sim: Any) -> dict[str, Any]:
    """Return the names to add to `torch._C`, each with its function, class or value for this
    simulator. Adds nothing itself."""
    mode = SimpleNamespace(value=0)
    return {
        **in_tree.bindings(sim, "cuda"),
        "_CudaStreamBase": StreamBinding,
        "_CudaEventBase": EventBinding,
        "_CUDAGraph": module.bound(GraphBinding, native=sim.core),
        "_graph_pool_handle": sim.core.new_pool,
        "_cuda_ipc_collect": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_get_sync_debug_mode": lambda: mode.value,
        "_cuda_set_sync_debug_mode": lambda value: setattr(mode, "value", value),
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getCompiledVersion": lambda: 0,
        "_nccl_version": lambda: (2 << 32) | (28 << 16) | 9,
        "_nccl_version_suffix": lambda: b"",
    }


def runtime_library(native: ModuleType) -> SimpleNamespace:
    """Return an object with the functions of `torch.cuda.cudart()` that torch itself calls;
    `native` is the simulator's core, which tells the memory."""

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
    """Return `table` (properties by name) as an object with the attributes of
    `torch.cuda.get_device_properties`, with defaults for missing ones."""
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


def plant(sim: Any, hip: str | None = None, cuda: str | None = None) -> None:
    """Add the bindings to torch in this process and reload torch's own streams and graphs over
    them. `hip`, `cuda`: the version that torch then claims to be built for; None: not built for
    it."""
    torch.version.cuda = cuda  # foreign: torch reads its build from here
    torch.version.hip = hip  # foreign: torch reads its build from here
    torch_cuda: Any = torch.cuda
    in_tree.plant(torch_cuda, bindings(sim), "streams", "graphs")
    if cuda is not None:
        torch_c: Any = torch._C
        torch_c._CUDAGreenContext = module.bound(GreenContextBinding, sim=sim)  # foreign: in builds for CUDA alone
        importlib.reload(green_contexts)
    in_tree.plant_storages("cuda")
    torch_cuda._cudart = runtime_library(sim.core)  # foreign: the runtime library that a CPU build lacks
    table = device_properties({**sim.kind.properties, "total_memory": sim.memory})
    torch_cuda._get_device_properties = lambda device: table  # foreign: set by the C initialisation on hardware
