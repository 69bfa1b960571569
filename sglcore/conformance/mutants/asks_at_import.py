"""The module of the mutant "asks at import": it queries the device while it is imported, and
ignores the error if there is no device. Only that mutant's declaration names it."""

from __future__ import annotations

import torch

try:
    DEVICE = torch.accelerator.current_device_index()
except RuntimeError:
    DEVICE = None


def kernels() -> None:
    """Do nothing: the name that the mutant's declaration refers to as a kernel table. It is never
    called; importing this module is the defect."""
