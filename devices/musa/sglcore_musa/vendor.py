"""The extension's own module of torch, by its own name."""

from __future__ import annotations

from typing import Any

import torch


def musa() -> Any:
    """`torch.musa`, which exists once torch_musa is imported."""
    return torch.get_device_module("musa")
