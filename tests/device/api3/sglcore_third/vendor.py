"""The vendor's module of torch, by its own names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def device_module() -> Any:
    """`torch.third`, which exists once torch_third is imported. Raises what that import raises."""
    import_module("torch_third")
    return torch.get_device_module("third")
