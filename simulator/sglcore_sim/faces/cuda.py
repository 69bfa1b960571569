"""CUDA needs no face of its own: the shipped Python code of torch.cuda runs over the bindings that
a CPU build lacks."""

from __future__ import annotations

from typing import Any

from sglcore_sim import cuda_bindings


def plant(sim: Any) -> None:
    """Make torch in this process look like a build for CUDA 12.8, over the simulator `sim`. There
    is no way back."""
    cuda_bindings.plant(sim, cuda="12.8")
