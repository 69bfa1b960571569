"""Access to the extension's torch module."""

from __future__ import annotations

from typing import Any

import torch


def musa() -> Any:
    """Return `torch.musa`, which exists after torch_musa is imported."""
    return torch.get_device_module("musa")
