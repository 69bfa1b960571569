"""The extension's own module of torch, by its own name."""

from __future__ import annotations

from typing import Any

import torch


def npu() -> Any:
    """`torch.npu`, which exists once torch_npu is imported."""
    return torch.get_device_module("npu")
