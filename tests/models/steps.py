"""Helpers by which tests of models load and run them."""

from __future__ import annotations

from typing import Any

import torch

from sglcore.checkpoint.model_config import read_config
from sglcore.models.single_steps import CONTEXT, FACTS, PAGE, SLOTS, Steps
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable

__all__ = ["CONTEXT", "FACTS", "PAGE", "SLOTS", "Steps", "load"]


def load(folder, dtype: torch.dtype = torch.float32, kernels: KernelTable | None = None, **options) -> Any:
    """Load a checkpoint folder onto the CPU."""
    kernels = kernels or KernelTable()
    return load_model(folder, read_config(folder), kernels=kernels, device="cpu", dtype=dtype, **options)
