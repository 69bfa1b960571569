"""A process in which torch sees no device: imports a package's declarations there.

It also calls `facts`, and reports code of the package that queries a device.

Run as a program by the law `imports_touch_no_device`, in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from sglcore.device.import_references import modules, resolve

ASKS = (
    *("_lazy_init", "init", "synchronize", "current_device", "current_device_index", "current_device_idx"),
    *("set_device", "set_device_index", "set_device_idx", "can_device_access_peer", "get_device_name"),
    *("get_device_properties", "get_device_capability", "current_stream", "default_stream", "set_stream"),
    *("get_stream_from_external", "current_blas_handle", "current_solver_handle", "graph_pool_handle"),
    *("is_current_stream_capturing", "empty_cache", "empty_host_cache", "ipc_collect", "caching_allocator_alloc"),
    *("mem_get_info", "get_memory_info", "memory_allocated", "memory_reserved", "memory_stats"),
    *("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("get_per_process_memory_fraction", "set_per_process_memory_fraction", "get_rng_state", "initial_seed"),
    *("get_sync_debug_mode", "set_sync_debug_mode"),
)
"""Functions of torch's device modules that only a device can answer. A test finds them by calling
them where there is none."""


def hide_devices(told: Callable[[str], None], owners: frozenset[str]) -> None:
    """Make every device module of torch in this process report that there is no device. Calls that
    need one raise RuntimeError; those that come from code of `owners` (top-level modules) are first
    reported to `told`, as one line of text. There is no way back."""
    import torch

    for name, module in vars(torch).items():
        if not isinstance(module, ModuleType) or "device_count" not in vars(module) or module is torch.cpu:
            continue
        vars(module)["is_available"] = lambda *_, **__: False
        vars(module)["device_count"] = lambda *_, **__: 0
        for function in vars(module).keys() & set(ASKS):
            vars(module)[function] = _asked(f"torch.{name}.{function}", told, owners)


def _asked(function: str, told: Callable[[str], None], owners: frozenset[str]) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        asker = sys._getframe(1)
        module = asker.f_globals["__name__"]
        if module.partition(".")[0] in owners:
            told(f"{module}, line {asker.f_lineno}, calls {function}")
        raise RuntimeError(f"{function}: there is no device")

    return refuse


def main(given: dict[str, Any]) -> list[str]:
    """Import the modules of `given["refs"]` and call the facts function of `given["facts"]`; return
    a line for each query of a device by code of the package or the core. `given["hide"]`: call
    `hide_devices` first; without it nothing is reported. A module with a library that is not
    installed is ignored; other errors are raised."""
    asked: list[str] = []
    if given["hide"]:
        owners = frozenset({"sglcore", *(each.partition(".")[0] for ref in given["refs"] for each in modules(ref))})
        hide_devices(asked.append, owners)
    for module in (each for ref in given["refs"] for each in modules(ref)):
        try:
            import_module(module)
        except ImportError:
            continue
    resolve(given["facts"])(0)
    return asked


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    sys.path[:] = arguments["path"]
    print(json.dumps(main(arguments)))
