"""A planted defect: a module that asks the device while it is imported, and says nothing where
there is none. Nothing but its mutant names it."""

from __future__ import annotations

import torch

try:
    DEVICE = torch.accelerator.current_device_index()
except RuntimeError:
    DEVICE = None


def kernels() -> None:
    """Is never called."""
