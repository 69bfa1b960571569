"""The module of a made-up device: only names that torch.accelerator, torch.Stream and torch.Event
can serve."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from sglcore_sim.faces import module


def plant(sim: Any) -> None:
    """Register the module `torch.NAME` for the kind's device type, with what torch.accelerator can
    serve; it has no graph class, so graphs are `torch.accelerator.Graph`."""
    accelerator = torch.accelerator
    made = ModuleType(f"torch.{sim.kind.torch_name}")
    vars(made).update(
        module.torch_names(sim),
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: sim.devices,
        current_device=accelerator.current_device_index,
        set_device=accelerator.set_device_index,
        device=module.Device,
        synchronize=accelerator.synchronize,
        current_stream=accelerator.current_stream,
        set_stream=accelerator.set_stream,
        stream=module.StreamContext,
        Stream=torch.Stream,
        Event=torch.Event,
        mem_get_info=accelerator.get_memory_info,
        empty_cache=accelerator.empty_cache,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    torch._register_device_module(sim.kind.torch_name, made)
    sys.modules[made.__name__] = made
    if torch._C._get_privateuse1_backend_name() == sim.kind.torch_name:
        backend_registration.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
