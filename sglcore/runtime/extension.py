"""`device_module` returns the torch module of a device that a vendor's extension registers, such as
`torch.acme` of torch_acme, before bring-up imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def device_module(extension: str, kind: str, index: int) -> Any | None:
    """Import the extension and return `torch.KIND`.

    Returns None if the extension cannot be imported, or if there is no device with this index.
    """
    try:
        import_module(extension)
    except ImportError:
        return None
    module = torch.get_device_module(kind)
    return module if module.device_count() > index else None
