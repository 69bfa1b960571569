"""A device's module of torch, which an extension registers, for those who ask it before the bring-up does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def device_module(extension: str, kind: str, index: int) -> Any | None:
    """`torch.KIND` with the extension imported that registers it; None where that can not be imported, or there is no device
    of this number."""
    try:
        import_module(extension)
    except ImportError:
        return None
    module = torch.get_device_module(kind)
    return module if module.device_count() > index else None
