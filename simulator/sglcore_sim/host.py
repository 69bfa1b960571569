"""Guards for reads of memory that torch answers without asking the device: a read of pinned memory
during a copy to it is a fault, and so is a numpy array over device memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from sglcore_sim.faults import FaultLog

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")


def guard(read: Callable[..., Any], core: ModuleType) -> Callable[..., Any]:
    @wraps(read)
    def guarded(tensor: torch.Tensor, *args: Any) -> Any:
        if type(tensor) is torch.Tensor:
            core.require_landed(tensor)
        return read(tensor, *args)

    return guarded


def refuse(read: Callable[..., Any], device_type: str, core: ModuleType, log: FaultLog) -> Callable[..., Any]:
    @wraps(read)
    def refused(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is torch.Tensor and tensor.device.type == device_type and not kwargs.get("force"):
            text = f"{core.site()} requests a numpy array over memory of {tensor.device}; copy it to the host first"
            raise log.make("host_access", text)
        return read(tensor, *args, **kwargs)

    return refused


def plant(core: ModuleType, device_type: str, log: FaultLog) -> None:
    """Patch torch.Tensor: the methods that return a tensor's numbers to Python raise a fault while
    a copy to its pinned memory is under way, and numpy arrays over device memory raise host_access.
    Numpy views of pinned memory are not guarded; they show poison."""
    for name in ("numpy", "__array__"):
        setattr(
            torch.Tensor, name, refuse(getattr(torch.Tensor, name), device_type, core, log)
        )  # foreign: the only way to detect it
    for name in READS:
        setattr(
            torch.Tensor, name, guard(getattr(torch.Tensor, name), core)
        )  # foreign: the only way to detect a host read
