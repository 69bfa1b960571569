"""CUDA needs no face: the shipped code of torch.cuda runs, over the bindings that a CPU build
lacks."""

from __future__ import annotations

from typing import Any

from sglcore_sim import cuda_bindings


def plant(sim: Any) -> None:
    """A torch that was built for CUDA."""
    cuda_bindings.plant(sim, cuda="12.8")
