"""`musa()` returns torch's module for the device, which the extension torch_musa registers."""

from __future__ import annotations

from typing import Any

import torch


def musa() -> Any:
    """Return torch's module for the device, `torch.musa`. Raises RuntimeError before torch_musa is
    imported."""
    return torch.get_device_module("musa")
